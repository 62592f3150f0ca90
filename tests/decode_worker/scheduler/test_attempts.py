"""Attempts of a handoff that cross with cancels, losses and late words: which blocks are asked for, by whom they are
held meanwhile, and what is counted. What one attempt does when nothing crosses it is tried in test_handoffs.py."""

import msgspec
import pytest

from decode_worker.scheduler.events import ConnectPeer, FromPeer, PeerDown, PeerUp
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS
from decode_worker.scheduler.request import RequestState
from engine.messages import (
    BlockOffer,
    Cancel,
    Ended,
    Fault,
    Finish,
    FirstToken,
    Handoff,
    NeedPrefill,
    Offer,
    PeerAddress,
    Place,
    PrefillFailed,
    StartPrefill,
    Stop,
    UsePrefill,
)
from engine.types import BlockId, FinishReason, Incarnation, RequestId
from tests.decode_worker.scheduler.bench import POOL, Fetching, P, record_of
from transfer.handoff.commands import Disconnect, Received, Rows

PROMPT = list(range(10))
OTHER = PeerAddress("prefill-9", "p:9")
GIVES_UP = Fault("UNAVAILABLE", "why")


class Attempts(Fetching):
    """A bench that keeps all commands, and offers and lands what a test says."""

    def __init__(self, **config: object) -> None:
        self.commands: list[object] = []
        super().__init__(**config)

    def _do(self, commands: list[object]) -> None:  # type: ignore[override]
        self.commands += commands
        super()._do(commands)  # type: ignore[arg-type]

    def offer(self, handoff: Handoff, seq: int, *indices: int) -> None:
        tokens = len(self.asked().record.tokens)
        blocks = [BlockOffer(BlockId(at), 1, at, min(4, tokens - 4 * at), 0) for at in indices]
        self.tell(FromPeer(P, Offer(handoff, seq, blocks)))

    def ended(self, handoff: Handoff, seq: int, error: str = "") -> None:
        """A receive has ended."""
        self.tell(Received(handoff, seq, error, 0.5, 1))

    def give_up(self, handoff: Handoff, fault: Fault = GIVES_UP) -> None:
        self.tell(FromPeer(P, PrefillFailed(handoff, fault)))

    def begin(self, prompt: list[int] = PROMPT, **more: object) -> Handoff:
        assert self.place("a", prompt, POOL, **more)  # type: ignore[arg-type]
        return self.asked().handoff

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.scheduler.prefills.handoffs.dropped)


def test_each_block_is_expected_with_its_own_rows_and_tokens() -> None:
    """Guards rows that would land in a block that is cached, or beyond the last token."""
    bench = Attempts()
    handoff = bench.begin()
    bench.offer(handoff, 0, 0)
    bench.offer(handoff, 1, 1)
    bench.ended(handoff, 0)
    bench.ended(handoff, 1, "its bytes are others")
    expected = bench.scheduler.receiver._handoffs[bench.asked().handoff].expected
    blocks = bench.request("a").lease.blocks
    assert {at: (one.rows, one.tokens) for at, one in expected.items()} == {
        1: ((Rows(0, blocks[1], 0, 4),), 4),
        2: ((Rows(0, blocks[2], 0, 2),), 2),
    }
    assert bench.request("a").origin.migration_s == 0.5, "what failed has not migrated"


def test_a_named_token_gets_a_block_of_its_own_to_land_in() -> None:
    """Guards the ninth token of two full blocks: its row lands in the next attempt, in a block that nobody may use."""
    bench = Attempts()
    handoff = bench.begin(PROMPT[:8])
    bench.name_token(handoff)
    bench.offer(handoff, 0, 0)
    bench.ended(handoff, 0, "its bytes are others")
    assert len(bench.asked().record.tokens) == 9 and bench.pool["reserved"] == 3


def test_a_prefill_worker_is_told_the_time_that_is_left() -> None:
    bench = Attempts()
    handoff = bench.begin()
    assert bench.asked().record.remaining_s is None
    bench = Attempts()
    handoff = bench.begin(remaining_s=30.0)
    assert bench.asked().record.remaining_s == 30.0
    bench.now = 2.0
    bench.offer(handoff, 0, 0)
    bench.ended(handoff, 0, "its bytes are others")
    assert bench.asked().record.remaining_s == 28.0


def test_a_worker_that_has_moved_is_reached_anew() -> None:
    """Guards a request that is sent to another process than the router means, which has taken over the name."""
    bench = Attempts()
    moved = PeerAddress(POOL.name, "p:2")
    assert bench.place("a", PROMPT, moved)
    assert ConnectPeer(moved) in bench.commands and not bench.of(StartPrefill)
    bench.tell(PeerUp(Incarnation(6), moved, "shm", 4))
    assert bench.asked().handoff.prefill == 6


def test_only_those_who_wait_for_a_worker_hear_of_it() -> None:
    bench = Attempts()
    assert bench.place("a", PROMPT, OTHER)
    bench.tell(PeerUp(Incarnation(6), POOL, "shm", 4))
    bench.tell(PeerDown(POOL, None, "gone"))
    assert bench.request("a").state is RequestState.CONNECTING
    assert bench.commands.count(ConnectPeer(OTHER)) == 1 and not bench.of(NeedPrefill)
    assert not any(isinstance(command, Disconnect) for command in bench.commands)


def test_the_end_of_a_former_life_is_not_that_of_the_present_one() -> None:
    """Guards a late word of a lost stream: the worker has been reached again since."""
    bench = Attempts()
    bench.tell(PeerUp(Incarnation(6), POOL, "shm", 4))
    handoff = bench.begin()
    bench.tell(PeerDown(POOL, P, "gone"))
    assert handoff.prefill == 6 and bench.request("a").state is RequestState.HANDOFF
    assert bench.place("b", PROMPT, POOL) and bench.asked().handoff.prefill == 6


@pytest.mark.parametrize("when", ["connecting", "asking", "handoff", "landing"])
def test_a_cancelled_request_lets_its_blocks_go_when_nothing_writes_to_them(when: str) -> None:
    """Guards blocks that are somebody else's while a copy of ours still runs, or stay for ever."""
    bench = Attempts()
    assert bench.place("a", PROMPT, OTHER if when == "connecting" else POOL)
    if when == "asking":
        bench.tell(PeerDown(POOL, P, "gone"))
        assert bench.request("a").state is RequestState.ASKING
    if when == "landing":
        bench.offer(bench.asked().handoff, 0, 0)
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert bench.of(Ended)
    if when == "landing":
        assert bench.pool["reserved"] == 3 and not bench.of(Stop)
        bench.ended(bench.asked().handoff, 0)
    assert bench.pool == {"free": 32} and bench.scheduler.is_idle
    assert len(bench.of(Stop)) == (when in ("handoff", "landing", "asking"))
    bench.tell(PeerUp(Incarnation(6), OTHER, "shm", 4))
    assert len(bench.of(StartPrefill)) == (when != "connecting"), "nobody asks for what has ended"


def test_a_worker_that_is_lost_before_it_names_the_token_of_what_has_landed() -> None:
    """Guards a request that waits for ever: all of its blocks are here, and no token follows."""
    bench = Attempts()
    handoff = bench.begin()
    bench.land(handoff)
    assert bench.request("a").known == 10
    bench.tell(PeerDown(POOL, P, "gone"))
    assert bench.of(NeedPrefill) and bench.request("a").state is RequestState.ASKING
    bench.name_token(handoff)
    assert bench.dropped == {"first token: unknown handoff": 1}
    assert bench.request("a").tokens == PROMPT and not len(bench.scheduler.prefills)


def test_a_worker_that_gives_up_when_all_has_landed() -> None:
    bench = Attempts()
    handoff = bench.begin()
    bench.land(handoff)
    bench.give_up(handoff)
    assert bench.of(NeedPrefill) and not bench.of(Stop) and not len(bench.scheduler.prefills)


def test_nothing_is_decided_while_a_copy_still_runs() -> None:
    """Guards the fence: another attempt, or another owner, would write to blocks that the last one still writes to."""
    bench = Attempts()
    handoff = bench.begin()
    bench.offer(handoff, 0, 0)
    bench.offer(handoff, 1, 1)
    bench.ended(handoff, 1, "its bytes are others")
    assert bench.request("a").state is RequestState.FENCING
    bench.name_token(handoff)
    bench.give_up(handoff)
    bench.tell(PeerDown(POOL, P, "gone"))
    assert bench.request("a").state is RequestState.FENCING and not bench.of(NeedPrefill)
    assert bench.dropped == {"first token: stopped": 1, "prefill failed: stopped": 1}
    bench.ended(handoff, 0, "")
    assert bench.of(NeedPrefill) and bench.request("a").state is RequestState.ASKING
    assert bench.request("a").have_blocks == 1


@pytest.mark.parametrize(("length", "landed", "have_tokens"), [(8, (0, 1), 4), (9, (0, 1), 8), (10, (0, 2), 4)])
def test_of_what_landed_all_but_the_last_token_is_known(
    length: int, landed: tuple[int, ...], have_tokens: int
) -> None:
    """Guards the token after the last, which is computed from the last: its row is asked for again."""
    bench = Attempts()
    handoff = bench.begin(PROMPT[:length])
    bench.offer(handoff, 0, *landed)
    if length > 8:
        bench.offer(handoff, 1, ({0, 1, 2} - {*landed}).pop())
        bench.ended(handoff, 1, "its bytes are others")
    else:
        bench.give_up(handoff)
    bench.ended(handoff, 0)
    request = bench.request("a")
    assert request.have_blocks * 4 == have_tokens
    assert request.origin.migrated_blocks == have_tokens // 4
    if length > 8:
        assert bench.asked().have_tokens == have_tokens


def test_what_a_request_cost_says_what_came_and_what_was_cached() -> None:
    """Guards the final account: blocks and seconds of all attempts, and the cache hit of the first alone."""
    bench = Attempts()
    handoff = bench.begin(max_tokens=3)
    for attempt, cached_tokens in ((0, 7), (1, 9)):
        handoff = bench.asked().handoff
        first = FirstToken(handoff=handoff, token=9, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=cached_tokens)
        bench.tell(FromPeer(P, first))
        if not attempt:
            bench.offer(handoff, 0, 0)
            bench.offer(handoff, 1, 1)
            bench.ended(handoff, 0)
            bench.ended(handoff, 1, "its bytes are others")
    bench.offer(handoff, 0, 1, 2)
    bench.ended(handoff, 0)
    assert bench.request("a").known == 11
    while bench.step() is not None:
        pass
    ended = bench.last(Ended)
    assert isinstance(ended, Ended)
    stats = ended.stats
    assert (stats.prefill_cached_tokens, stats.migrated_blocks, stats.migration_s) == (7, 3, 1.0)
    assert (stats.migrated_bytes, stats.transport, stats.prefill_worker) == (3, "shm", POOL.name)


@pytest.mark.parametrize("what", ["lands", "fails", "gives up", "lost"])
def test_an_answer_of_one_token_is_over_before_its_blocks_are_here(what: str) -> None:
    """Guards reserved blocks of a request that nobody looks after any more, whatever becomes of its handoff."""
    bench = Attempts()
    handoff = bench.begin(max_tokens=1)
    bench.offer(handoff, 0, 0, 1, 2)
    bench.name_token(handoff)
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.reason is FinishReason.LENGTH
    assert bench.pool["reserved"] == 3 and not bench.of(Stop), "its prompt is worth having"
    if what == "gives up":
        bench.give_up(handoff)
    if what == "lost":
        bench.tell(PeerDown(POOL, P, "gone"))
    assert bench.pool["reserved"] == 3
    bench.ended(handoff, 0, "" if what in ("lands", "gives up") else "its bytes are others")
    assert bench.pool == ({"free": 29, "cached": 3} if what == "lands" else {"free": 32})
    assert bench.scheduler.is_idle and bool(bench.of(Stop)) == (what != "lands")
    outcomes = [one.outcome for one in bench.scheduler.prefills.handoffs.take_migrated()]
    assert outcomes == ["ok" if what == "lands" else "expired"]


def test_a_stop_token_ends_as_well_as_the_last() -> None:
    bench = Attempts()
    handoff = bench.begin(stop_token_ids=[9])
    bench.name_token(handoff)
    ended = bench.last(Ended)
    assert isinstance(ended, Ended) and ended.reason is FinishReason.STOP and not bench.of(Stop)
    bench.land(handoff)
    assert bench.pool == {"free": 29, "cached": 3}


@pytest.mark.parametrize(
    ("code", "reason"), [("OUT_OF_RANGE", None), ("DEADLINE_EXCEEDED", FinishReason.DEADLINE)]
)
def test_what_has_outgrown_a_prefill_worker_is_not_its_callers_fault(code: str, reason: FinishReason | None) -> None:
    """Guards an answer under way: with its output it is a longer prompt than the caller ever sent."""
    bench = Attempts(local_chunk_tokens=1, preemption="recompute")
    handoff = bench.begin()
    bench.land(handoff)
    bench.name_token(handoff)
    bench.scheduler.preemption.preempt([bench.request("a")], 0.0)
    lease = bench.scheduler.kv.acquire(b"", [], match_limit=0, room_tokens=32 * 4)
    assert lease is not None
    bench.scheduler.kv.release(lease)
    bench._do(bench.scheduler.plan(1.0)[1])  # type: ignore[arg-type]
    bench.give_up(bench.asked().handoff, Fault(code, "too long"))
    assert [one.reason for one in bench.of(Ended) if isinstance(one, Ended)] == ([reason] if reason else [])
    assert bool(bench.of(NeedPrefill)) == (reason is None)


def test_a_request_with_output_is_asked_for_as_one_prompt() -> None:
    """Guards recovery: all tokens so far are the prompt, and the next drawn is the one after them."""
    bench = Attempts()
    record = msgspec.structs.replace(record_of("a", [*PROMPT, 50, 51]), prompt_tokens=10)
    bench.router(Place(record=record, placement=1, prefill=POOL))
    asked = bench.asked()
    assert (asked.record.tokens, asked.record.prompt_tokens) == ([*PROMPT, 50, 51], 10)
    bench.land(asked.handoff)
    bench.name_token(asked.handoff, 52)
    assert bench.request("a").output == [50, 51, 52] and bench.request("a").known == 12
    plan = bench.step()
    assert plan is not None
    (row,) = plan.rows
    assert (row.start, row.end, row.draw) == (12, 13, True)


def test_what_a_second_attempt_did_not_bring_is_not_here() -> None:
    """Guards blocks that nobody wrote to: what the first attempt landed is kept once, and nothing is added to it."""
    bench = Attempts()
    handoff = bench.begin(list(range(26)))
    bench.offer(handoff, 0, 0, 1, 2, 3)
    bench.offer(handoff, 1, 4)
    bench.ended(handoff, 0)
    bench.ended(handoff, 1, "its bytes are others")
    assert bench.asked().have_tokens == 16
    again = bench.asked().handoff
    bench.offer(again, 0, 4)
    bench.ended(again, 0, "its bytes are others")
    assert bench.asked().have_tokens == 16 and bench.request("a").origin.migrated_blocks == 4


def test_a_prompt_nobody_waits_for_is_not_waited_for_either() -> None:
    """Guards reserved blocks of an answer that was cancelled after its first token: only one that ended well has a
    prompt worth having."""
    bench = Attempts()
    handoff = bench.begin()
    bench.name_token(handoff)
    bench.router(Cancel(RequestId("a"), 1, FinishReason.CANCELLED))
    assert bench.of(Stop) and bench.pool == {"free": 32} and bench.scheduler.is_idle


def test_an_answer_that_ends_before_anybody_named_its_token_waits_for_nothing() -> None:
    """Guards blocks that wait for a worker which has not begun: a stop string was found in what came before."""
    bench = Attempts()
    bench.begin()
    bench.router(Finish(RequestId("a"), 1, 0))
    assert bench.of(Stop) and bench.pool == {"free": 32} and bench.scheduler.is_idle


def test_an_answer_that_ends_well_while_its_attempt_is_fenced_is_not_fetched_again() -> None:
    """Guards another attempt for a request that is over."""
    bench = Attempts()
    handoff = bench.begin()
    bench.name_token(handoff)
    bench.offer(handoff, 0, 0)
    bench.offer(handoff, 1, 1)
    bench.ended(handoff, 1, "its bytes are others")
    assert bench.request("a").state is RequestState.FENCING
    bench.router(Finish(RequestId("a"), 1, 1))
    assert bench.pool["reserved"] == 3
    bench.ended(handoff, 0)
    assert bench.pool == {"free": 32} and bench.scheduler.is_idle and len(bench.of(StartPrefill)) == 1
    assert [one.outcome for one in bench.scheduler.prefills.handoffs.take_migrated()] == ["expired"]


def test_a_worker_named_for_what_needs_none_any_more() -> None:
    """Guards a prompt that is fetched a second time: all of it is here, or was tried for often enough."""
    bench = Attempts()
    bench.tell(PeerUp(Incarnation(6), OTHER, "shm", 4))
    handoff = bench.begin()
    bench.land(handoff)
    bench.tell(PeerDown(POOL, P, "gone"))
    bench.router(UsePrefill(RequestId("a"), 1, OTHER))
    assert bench.request("a").state is RequestState.LOCAL and bench.request("a").known == 9
    outcomes = [one.outcome for one in bench.scheduler.prefills.handoffs.take_migrated()]
    assert outcomes == ["ok"], "it fell back to nobody"
    tried = Attempts()
    tried.tell(PeerUp(Incarnation(6), OTHER, "shm", 4))
    tried.begin()
    for _ in range(MAX_ATTEMPTS):
        tried.land(tried.asked().handoff, "its bytes are others")
    tried.router(UsePrefill(RequestId("a"), 1, OTHER))
    assert tried.request("a").state is RequestState.LOCAL


@pytest.mark.parametrize("count", [1, 4, 30])
def test_a_run_leaves_room_for_what_later_attempts_name(count: int) -> None:
    """Guards a worker against the blocks that nobody has promised: each attempt names tokens, and is lost."""
    bench = Attempts(growth_tokens=MAX_ATTEMPTS)
    bench.begin(max_tokens=100)
    for number in range(MAX_ATTEMPTS):
        handoff = bench.asked().handoff
        bench.name_token(handoff, 20 + number, more=range(30, 29 + count))
        assert number < len(bench.request("a").output) <= 1 + number + count
        bench.land(handoff, "its bytes are others")
    bench.router(UsePrefill(RequestId("a"), 1, None))
    assert bench.request("a").state is RequestState.LOCAL
    assert bench.step() is not None


def test_of_a_last_block_that_is_here_the_tokens_named_beside_it_are_not() -> None:
    """Guards a row that nobody sent: the seven tokens of a handoff have landed in two blocks when it is given up, and
    the eighth and ninth, named together, would fill the second; the next attempt asks for it again."""
    bench = Attempts()
    bench.tell(PeerUp(Incarnation(6), OTHER, "shm", 4))
    handoff = bench.begin(PROMPT[:7])
    bench.name_token(handoff, 50, more=[51])
    bench.offer(handoff, 0, 0, 1)
    bench.give_up(handoff)
    assert bench.request("a").state is RequestState.FENCING, "a copy is under way"
    bench.ended(handoff, 0)
    assert bench.request("a").state is RequestState.ASKING
    bench.router(UsePrefill(RequestId("a"), 1, OTHER))
    assert bench.asked().record.tokens == [*PROMPT[:7], 50, 51] and bench.asked().have_tokens == 4
