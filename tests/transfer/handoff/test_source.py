"""The serving side of handoffs, for a holder that keeps notes. Both schedulers' tests and the simulator try it too."""

import pytest

from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Fault, FirstToken, Handoff, Offer, PrefillFailed, StartPrefill, Stop
from engine.types import Incarnation, RequestId, RequestRecord, SamplingParams, TokenLogprobs
from transfer.handoff.commands import (
    Command,
    Emit,
    FromReader,
    Posted,
    PostSend,
    ReaderLost,
    ReaderUp,
    Sent,
)
from transfer.handoff.source import HandoffSource

READER, ME = Incarnation(7), Incarnation(1)
H = Handoff(RequestId("r"), 1, 0, READER, ME)
TOKENS = list(range(10))  # blocks of four: two whole ones, and two tokens


class Notes:
    """Holds one lease for whatever is asked for."""

    def __init__(self) -> None:
        kv = KVCacheManager(8, 4, "m")
        lease = kv.acquire(b"", TOKENS, match_limit=9, room_tokens=10)
        assert lease is not None
        self.lease: Lease = lease
        self.source: HandoffSource[str] = HandoffSource(kv, "m", self)
        self.heard: list[str] = []
        self.source.handle(ReaderUp(READER, True), 0.0)

    def ask(self, have_tokens: int = 0, handoff: Handoff = H) -> list[Command]:
        record = RequestRecord(
            request=handoff.request,
            tokens=TOKENS,
            prompt_tokens=len(TOKENS),
            max_tokens=8,
            seed=1,
            sampling=SamplingParams(),
        )
        asked = StartPrefill(handoff=handoff, record=record, have_tokens=have_tokens)
        return self.source.handle(FromReader(handoff.decode, asked), 0.0)

    def quarantine(self, *readers: Incarnation) -> None:
        """Each is offered a block, and is lost before it says that it has landed."""
        for reader in readers:
            handoff = Handoff(RequestId(f"r{reader}"), 1, 0, reader, ME)
            self.source.handle(ReaderUp(reader, True), 0.0)
            self.ask(handoff=handoff)
            self.source.offer(handoff, self.lease, 4)
            for event in (Posted(handoff, 0, (1,)), Sent(handoff, 0, "", 0.0), ReaderLost(reader)):
                self.source.handle(event, 0.0)

    def offer(self, known_tokens: int) -> list[int]:
        """Which blocks are offered once so many tokens have their KV."""
        posts = self.source.offer(H, self.lease, known_tokens)
        self.source.check()
        return [b.index for post in posts if isinstance(post, PostSend) for b in post.blocks]

    def start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        self.heard.append("start")
        self.source.open(peer, message, "item")
        return []

    def unwanted(self, item: str) -> None:
        self.heard.append("unwanted")

    def reader_lost(self, item: str, now: float) -> None:
        self.heard.append("reader lost")

    def settled(self, item: str, handoff: Handoff) -> None:
        self.heard.append("settled")


def test_each_block_is_offered_once_and_the_last_one_when_all_is_known() -> None:
    notes = Notes()
    notes.ask()
    assert [notes.offer(known) for known in (3, 5, 7, 9, 10, 10)] == [[], [0], [], [1], [2], []]


def test_what_the_reader_has_is_not_offered() -> None:
    notes = Notes()
    notes.ask(have_tokens=4)
    assert notes.offer(10) == [1, 2]


def test_a_handoff_is_asked_for_twice_and_begun_once() -> None:
    notes = Notes()
    notes.ask()
    assert notes.ask() == [] and notes.heard == ["start"]


def test_the_first_token_names_its_chunks_and_ends_the_offers() -> None:
    notes = Notes()
    notes.ask()
    notes.offer(5)
    notes.offer(10)
    (said,) = notes.source.finish(H, [3], queue_s=0.0, run_s=0.0, cached_tokens=0)
    assert isinstance(said, Emit) and isinstance(said.record, FirstToken)
    assert said.record.chunks == 2 and not notes.source.sender.is_open(H)


def test_the_first_token_says_what_is_known_of_it_and_of_the_prompt() -> None:
    """Guards an answer whose first token alone would have no log probabilities, and the account of what was cached."""
    notes = Notes()
    notes.ask()
    first, score = TokenLogprobs(3, -0.5, ((4, -1.0),)), TokenLogprobs(2, -0.25)
    (said,) = notes.source.finish(H, [first, 5], queue_s=0.5, run_s=0.25, cached_tokens=7, scores=[score])
    assert isinstance(said, Emit) and isinstance(said.record, FirstToken)
    record = said.record
    assert (record.token, record.logprobs, list(record.more), record.prompt_logprobs) == (3, first, [5], [score])
    assert (record.queue_s, record.run_s, record.cached_tokens) == (0.5, 0.25, 7)


def test_a_send_that_fails_is_told_and_no_more_is_computed_for_it() -> None:
    notes = Notes()
    notes.ask()
    notes.offer(5)
    (offered,) = notes.source.handle(Posted(H, 0, (1,)), 0.0)
    assert isinstance(offered, Emit) and isinstance(offered.record, Offer)
    (failed,) = notes.source.handle(Sent(H, 0, "the wire is cut", 0.0), 0.0)
    assert isinstance(failed, Emit) and isinstance(failed.record, PrefillFailed)
    assert notes.heard == ["start", "unwanted"], "settled while its reader may read"
    notes.source.handle(FromReader(READER, Stop(H)), 0.0)
    assert notes.heard[-1] == "settled"


def test_a_lost_reader_may_still_read() -> None:
    """Guards a block that is reused while a frozen reader copies it."""
    notes = Notes()
    notes.ask()
    notes.offer(10)
    for event in (Posted(H, 0, (1, 2, 3)), Sent(H, 0, "", 0.0)):
        notes.source.handle(event, 0.0)
    notes.source.handle(ReaderLost(READER), 1.0)
    assert notes.heard == ["start", "unwanted", "reader lost"]
    notes.source.handle(ReaderUp(READER, True, unfinished=()), 2.0)
    assert notes.heard[-1] == "settled", "its own word that it reads no more"


def test_a_reader_is_silent_after_a_while_and_not_before() -> None:
    """Guards the first step of the ladder: nobody is accused for a cut that mends itself."""
    notes, other = Notes(), Incarnation(8)
    notes.quarantine(READER)
    assert notes.source.silent(5.0, 10.0) == []
    notes.quarantine(other)
    assert notes.source.silent(5.0, 14.0) == []
    assert notes.source.silent(5.0, 15.0) == [READER]
    assert notes.source.silent(5.0, 19.0) == [READER, other]


def test_a_quarantine_that_ended_counts_no_more() -> None:
    """Guards a reader that came back and is lost again much later."""
    notes = Notes()
    notes.quarantine(READER)
    assert notes.source.silent(5.0, 0.0) == []
    notes.source.handle(ReaderUp(READER, True, unfinished=()), 4.0)
    assert notes.source.silent(5.0, 4.0) == []
    notes.quarantine(READER)
    assert notes.source.silent(5.0, 6.0) == []
    assert notes.source.silent(5.0, 11.0) == [READER]


def test_what_fails_before_anything_was_offered_is_settled_at_once() -> None:
    """Guards a lease that is kept for a reader that was told that nothing comes."""
    notes = Notes()
    notes.ask()
    (said,) = notes.source.fail(H, Fault("INTERNAL", "no room"))
    assert isinstance(said, Emit) and isinstance(said.record, PrefillFailed)
    assert notes.heard == ["start", "unwanted", "settled"] and notes.source.items == []


def test_nothing_more_is_computed_for_a_reader_that_stops() -> None:
    notes = Notes()
    notes.ask()
    assert notes.source.handle(FromReader(READER, Stop(H)), 0.0) == []
    assert notes.heard == ["start", "unwanted", "settled"]
    assert notes.source.handle(FromReader(READER, Stop(H)), 0.0) == [], "a second one is dropped"


def test_the_loss_of_one_reader_changes_nothing_for_another() -> None:
    """Guards prompts that are dropped although their reader lives."""
    notes, other = Notes(), Incarnation(8)
    notes.ask()
    notes.offer(5)
    notes.quarantine(other)
    assert notes.heard == ["start", "start", "unwanted", "reader lost"]
    assert notes.offer(10) == [1, 2]


def test_a_lost_reader_says_hello_before_it_is_served_again() -> None:
    """Guards blocks freed by how a reader read before: the hello says whether it reads our memory itself."""
    notes = Notes()
    notes.source.handle(ReaderLost(READER), 0.0)
    with pytest.raises(KeyError):
        notes.ask()
    notes.source.handle(ReaderUp(READER, False), 1.0)
    notes.ask()
    notes.offer(10)
    notes.source.handle(ReaderLost(READER), 2.0)
    assert notes.source.handle(Sent(H, 0, "cut", 0.0), 2.0) == [] and notes.heard[-1] == "settled"
