"""Requests that have ended for their clients while their blocks are still on the way. What ends by a lost router is
tried in test_orphans.py, who takes the place of an ended parent in test_forks.py, ends at every moment in tests/sim and
tests/integration/test_swap_ends.py."""

from decode_worker.scheduler.events import FromPeer, PeerUp
from engine.messages import Ended, FirstToken, Handoff, PeerAddress, Place, Stop, Tokens
from engine.types import RequestRecord, TokenLogprobs
from tests.decode_worker.scheduler.bench import Fetching
from tests.decode_worker.scheduler.leaving.test_departures import ME, PROMPT, SOURCE, A, Bench


def test_blocks_of_an_answer_that_has_ended_are_not_waited_for_beyond_its_deadline() -> None:
    """Guards reserved blocks whose sender is silent for ever: the request is over, nobody looks at its time."""
    bench = Bench()
    record = RequestRecord(
        request=A,
        tokens=list(PROMPT),
        prompt_tokens=len(PROMPT),
        max_tokens=1,
        seed=0,
        remaining_s=3.0,
    )
    address = PeerAddress("prefill-0", "p:1")
    bench.tell(PeerUp(SOURCE, address, "shm", 4))
    bench.router(Place(record=record, placement=1, prefill=address))
    handoff = Handoff(A, 1, 0, ME, SOURCE)
    bench.tell(
        FromPeer(
            SOURCE,
            FirstToken(handoff=handoff, token=5, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0),
        )
    )
    assert bench.of(Ended) and bench.pool["reserved"] > 0
    bench.step()
    bench.step()
    assert bench.pool["reserved"] > 0 and not bench.of(Stop), "given up before its time"
    bench.step()
    assert bench.of(Stop) == [Stop(handoff)]
    assert "reserved" not in bench.pool and bench.scheduler.is_idle


def test_tokens_that_were_forced_have_no_log_probabilities() -> None:
    """Guards a client's list: of a run some tokens were drawn, with theirs, and the rest come without."""
    bench = Fetching()
    assert bench.place("a", [1, 2, 3], max_tokens=20, logprobs=1, context=b"x")
    bench.step()
    request = bench.request("a")
    drawn = TokenLogprobs(50, -0.5, ())
    before = len(request.logprobs)
    bench._do(bench.scheduler.endings.follow(request, [drawn, 51, 52], 1.0))
    told = bench.last(Tokens)
    assert isinstance(told, Tokens) and told.ids == [50, 51, 52] and told.logprobs == [drawn]
    assert len(request.logprobs) == before + 1
