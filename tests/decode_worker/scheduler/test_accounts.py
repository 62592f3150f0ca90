"""What a decode worker's figures say: attempts by how they ended, tokens computed again, slots that hold a token."""

from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp
from engine.messages import (
    BlockOffer,
    Cancel,
    FirstToken,
    Handoff,
    Offer,
    PeerAddress,
    Place,
    StartPrefill,
    UsePrefill,
)
from engine.types import BlockId, FinishReason, Incarnation, RequestRecord
from tests.decode_worker.scheduler.leaving.test_orphans import Bench, R
from transfer.handoff.commands import Emit, Received

PEER, P = PeerAddress("p0", "p0:1"), Incarnation(5)
TOKENS = 6
"""The bench's prompt: two blocks of four."""


class Handing(Bench):
    """A bench whose requests are read from `PEER`."""

    def begin(self) -> Handoff:
        """Place a request and reach its peer; returns the handoff that was asked for."""
        self.place(1, prefill=PEER)
        return self._asked(self.do(PeerUp(P, PEER, "shm", 4)))

    def send(self, handoff: Handoff, error: str = "") -> list[object]:
        """Offer both blocks, which land or fail."""
        blocks = [BlockOffer(BlockId(at), 1, at, (4, 2)[at], 0) for at in (0, 1)]
        self.do(FromPeer(P, Offer(handoff, 0, blocks)))
        return [*self.do(Received(handoff, 0, error, 0.25, 0 if error else 2))]

    def outcomes(self) -> list[tuple[str, str, float, int]]:
        """Return outcome, transport, seconds and blocks of every attempt since the last call."""
        migrated = self.scheduler.prefills.handoffs.take_migrated()
        return [(one.outcome, one.transport, one.seconds, one.blocks) for one in migrated]

    def _asked(self, commands: object) -> Handoff:
        (asked,) = [
            command.record
            for command in commands  # type: ignore[attr-defined]
            if isinstance(command, Emit) and isinstance(command.record, StartPrefill)
        ]
        return asked.handoff


def test_a_prompt_that_landed() -> None:
    bench = Handing()
    bench.send(bench.begin())
    assert bench.outcomes() == [("ok", "shm", 0.25, 2)]


def test_an_attempt_that_failed_is_tried_again_and_counted_once() -> None:
    """Guards against the same failure in two outcomes, and against a second attempt that nobody sees."""
    bench = Handing()
    commands = bench.send(bench.begin(), "its bytes are others")
    assert bench.outcomes() == [("retry", "shm", 0.0, 0)]
    bench.send(bench._asked(commands))
    assert [outcome for outcome, *_ in bench.outcomes()] == ["ok"]


def test_a_lost_prefill_worker_and_none_in_its_place() -> None:
    """Guards against prompt tokens of a request that a loss disturbed being taken for first computations."""
    bench = Handing()
    bench.begin()
    bench.do(PeerDown(PEER, P, "gone"))
    assert bench.outcomes() == [("failed", "shm", 0.0, 0)]
    bench.hear(1, UsePrefill(R, 3, None))
    assert bench.outcomes() == [("fallback", "shm", 0.0, 0)]
    bench.step()
    assert (bench.scheduler.batch.prefilled_tokens, bench.scheduler.batch.recomputed_tokens) == (0, TOKENS)


def test_a_request_that_is_over_before_its_blocks_are_here() -> None:
    bench = Handing()
    bench.begin()
    bench.hear(1, Cancel(R, 3, FinishReason.CANCELLED))
    assert [outcome for outcome, *_ in bench.outcomes()] == ["expired"]


def test_what_came_with_output_is_computed_again() -> None:
    """Guards the other way: a prompt that no prefill worker was left for is computed once, not again."""
    bench = Bench()
    bench.place(1)
    bench.step()
    assert (bench.scheduler.batch.prefilled_tokens, bench.scheduler.batch.recomputed_tokens) == (TOKENS, 0)
    bench = Bench()
    record = RequestRecord(
        request=R, tokens=[1, 2, 3, 4, 5, 6, 70, 71], prompt_tokens=6, max_tokens=8, seed=1
    )
    bench.hear(1, Place(record=record, placement=3, prefill=PeerAddress("", ""), losses=1))
    bench.step()
    assert (bench.scheduler.batch.prefilled_tokens, bench.scheduler.batch.recomputed_tokens) == (0, 8)
    bench.step(3)
    assert bench.scheduler.batch.recomputed_tokens == 8, "its next tokens are new"


def test_one_token_of_output_makes_a_prompt_a_recovered_one() -> None:
    bench = Bench()
    record = RequestRecord(request=R, tokens=[1, 2, 3, 4, 5, 6, 70], prompt_tokens=6, max_tokens=8, seed=1)
    bench.hear(1, Place(record=record, placement=3, prefill=PeerAddress("", ""), losses=1))
    bench.step()
    assert (bench.scheduler.batch.prefilled_tokens, bench.scheduler.batch.recomputed_tokens) == (0, 7)


def test_a_prompt_that_is_computed_here_from_the_start_falls_back_to_nobody() -> None:
    bench = Handing()
    bench.place(1)
    bench.step()
    assert bench.outcomes() == []


def test_the_wait_for_the_first_token_is_told_apart() -> None:
    """Guards the account: what the prefill worker says of its line and its run, and what the migration did not hide."""
    bench = Handing()
    handoff = bench.begin()
    bench.now = 4.0
    bench.do(
        FromPeer(P, FirstToken(handoff=handoff, token=9, chunks=1, queue_s=1.0, run_s=2.5, cached_tokens=0))
    )
    bench.send(handoff)
    (request,) = bench.scheduler._requests.values()
    seconds = request.clock.seconds
    assert (seconds["prefill_queue"], seconds["prefill_run"], seconds["migrate"]) == (1.0, 2.5, 0.5)


def test_slots_that_hold_a_token() -> None:
    """Guards utilization: blocks to be filled count as held, and only what is there as live."""
    bench = Handing()
    assert bench.scheduler.slots == (0, 0)
    handoff = bench.begin()
    assert bench.scheduler.slots == (0, 8)
    bench.send(handoff)
    first = FirstToken(handoff=handoff, token=9, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0)
    bench.do(FromPeer(P, first))
    assert bench.scheduler.slots == (TOKENS, 8)
    bench.step(2)
    assert bench.scheduler.slots == (TOKENS + 2, 8)
