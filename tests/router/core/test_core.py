"""The router core by table: each test drives it event by event and reads its commands. Its parts have tests of their
own beside this one, any order of events is tried in test_core_machine.py, workers and faults with it in tests/sim."""

import pytest

from engine import identity
from engine.messages import Accepted, Cancel, Fault, Finish, HeldRun, HoldingTold, NeedPrefill, Place, Refused, Tokens
from engine.types import FinishReason, RequestId, TokenLogprobs
from router.core.events import (
    Begin,
    ClientLeft,
    Command,
    Complete,
    Deliver,
    Event,
    Fail,
    Ignored,
    Lost,
    StopFound,
    TellWorker,
    Tick,
    WorkerSaid,
)
from tests.router.bench import A, B, Bench, ended, is_told
from tests.router.fake_cluster import load, worker_info


def test_life_of_a_request() -> None:
    """Guards the plain path: place, accept, tokens in order, end."""
    bench = Bench()
    (place,) = bench.submit(deadline_s=5.0)
    assert is_told(place, Place) and place.worker == "d0"
    assert (place.record.placement, place.record.prefill.name) == (1, "p0")
    assert place.record.record.remaining_s == 5.0
    assert bench.accept() == [Begin(A)]
    assert bench.hear(Tokens(A, 1, 0, [7])) == [Deliver(A, [7])]
    assert bench.hear(Tokens(A, 1, 1, [8, 9])) == [Deliver(A, [8, 9])]
    (done,) = bench.hear(ended(output_tokens=3))
    assert isinstance(done, Complete) and done.reason is FinishReason.STOP
    assert bench.router.open == 0


@pytest.mark.parametrize(
    ("tokens", "commands"),
    [
        (Tokens(A, 1, 0, [1, 2]), [Ignored("duplicate", 2)]),
        (Tokens(A, 1, 0, [1]), [Ignored("duplicate", 1)]),
        (Tokens(A, 1, 0, []), []),
        (Tokens(A, 1, 1, [2, 3]), [Ignored("duplicate", 1), Deliver(A, [3])]),
        (Tokens(A, 1, 3, [4]), [Ignored("gap", 1)]),
        (Tokens(A, 2, 2, [3]), [Ignored("stale", 1)]),
        (Tokens(A, 0, 2, [3]), [Ignored("stale", 1)]),
        (Tokens(B, 1, 0, [3]), [Ignored("stale", 1)]),
    ],
)
def test_only_the_next_token_of_the_current_placement(
    tokens: Tokens, commands: list[Command]
) -> None:
    """Guards against tokens that reach a client twice, out of order, or from an old placement."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [1, 2]))
    assert bench.hear(tokens) == commands


def test_tokens_of_another_worker_are_stale() -> None:
    """Guards against a worker that speaks for a request it does not hold."""
    bench = Bench(decodes=2)
    (place,) = bench.submit()
    assert is_told(place, Place)
    other = {"d0": "d1", "d1": "d0"}[place.worker]
    assert bench.hear(Accepted(A, 1, 0), other) == [Ignored("stale", 0)]


def test_an_answer_with_a_hole_is_an_error() -> None:
    """Guards against lost tokens that end in status OK."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 1, [2]))
    (failed,) = bench.hear(ended(output_tokens=2))
    assert isinstance(failed, Fail) and failed.fault.code == "INTERNAL"


def test_refused_keeps_its_turn_and_waits_for_a_report() -> None:
    """Guards against a busy loop of offers, and against overtaking in the line."""
    bench = Bench()
    bench.submit(A)
    assert bench.hear(Refused(A, 1, 4)) == []
    assert bench.submit(B) == [], "B must not overtake A on a worker that said no"
    assert bench.hear(load(active=64)) == [], "the report shows no room"
    first, second = bench.hear(load(active=10))
    assert is_told(first, Place) and is_told(second, Place)
    assert (first.record.record.request, first.record.placement) == (A, 2)
    assert (second.record.record.request, second.record.placement) == (B, 1)


def test_refused_goes_to_another_worker_at_once() -> None:
    """Guards against waiting for one worker while another has room."""
    bench = Bench(decodes=2)
    (first,) = bench.submit(A)
    assert is_told(first, Place)
    (second,) = bench.hear(Refused(A, 1, 4), first.worker)
    assert is_told(second, Place) and second.worker != first.worker


def test_an_offer_made_again_is_no_new_work_for_other_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a copy is taken to delay: under load, where workers refuse, every offer would count as a request."""
    bench, other, counted = Bench(decodes=2), Bench(decodes=2), list[str]()
    (place,) = bench.submit(A)
    assert is_told(place, Place)
    first = bench.router.reading(A)
    bench.hear(Refused(A, 1, 4), place.worker)
    again = bench.router.reading(A)
    assert first is not None and again is not None and (first.is_new, again.is_new) == (True, False)
    monkeypatch.setattr(other.router._placer, "told", lambda record, now: counted.append(record.reader))
    other.hear(first)
    other.hear(again)
    assert counted == ["p0"] and other.router.index.held_blocks("p0") == 2


def test_nobody_is_told_of_a_prompt_that_nobody_reads() -> None:
    """Guards other routers' queues: a request that moves finds its KV where it was yielded."""
    bench = Bench()
    bench.submit(A)
    assert bench.router.reading(A) is not None and bench.router.reading(B) is None
    bench.router._calls[A].source = bench.router._calls[A].decode_life
    assert bench.router.reading(A) is None


def test_own_dispatches_count_until_a_report_does() -> None:
    """Guards against a burst that is sent to one worker beyond its pool."""
    bench = Bench(blocks=8)
    assert len(bench.submit(A)) == 1  # 4 of 8 blocks
    assert len(bench.submit(B)) == 1
    assert bench.submit(RequestId("c")) == []


def test_too_large_for_every_worker_fails_at_once() -> None:
    """Guards against a request that would wait in the line for ever."""
    bench = Bench(blocks=3)
    (failed,) = bench.submit(A)
    assert isinstance(failed, Fail)
    assert (failed.fault.code, failed.fault.field) == ("OUT_OF_RANGE", "max_tokens")
    assert failed.outcome is FinishReason.REJECTED


def test_too_large_is_noticed_when_workers_come_back() -> None:
    """Guards the head of the line: asked while no worker was there, it would wait, and hold up all others, for ever."""
    bench = Bench(blocks=3)
    bench.do(Lost("d0"))
    assert not any(isinstance(command, Fail) for command in bench.submit(A))
    (failed,) = bench.join("d0", "decode", 9, blocks=3)
    assert isinstance(failed, Fail) and failed.fault.code == "OUT_OF_RANGE"
    assert bench.router.open == 0


def test_full_line_and_no_workers() -> None:
    """Guards against an unbounded line, and against waiting for workers that never come."""
    bench = Bench(max_waiting=1, blocks=4)
    bench.submit(A)
    assert bench.submit(B) == []
    (failed,) = bench.submit(RequestId("c"))
    assert isinstance(failed, Fail) and failed.retry_after_s is not None
    assert failed.outcome is FinishReason.REJECTED
    assert failed.fault.code == "RESOURCE_EXHAUSTED"
    bench.do(Lost("d0"))
    bench.do(Tick())
    bench.now = 20.0
    failed_now = [c for c in bench.do(Tick()) if isinstance(c, Fail)]
    assert {c.fault.code for c in failed_now} == {"UNAVAILABLE"}
    assert all(c.retry_after_s is not None and c.outcome is FinishReason.ERROR for c in failed_now)
    assert bench.router.open == 0


@pytest.mark.parametrize("state", ["waiting", "offered", "running", "finishing", "closing"])
@pytest.mark.parametrize("end", ["cancel", "deadline", "lost"])
def test_every_end_in_every_state(state: str, end: str) -> None:
    """Guards against a request that is answered twice or never, or stays on its worker."""
    bench = Bench()
    answers: list[Command] = []

    def do(event: Event) -> list[Command]:
        out = bench.do(event)
        answers.extend(c for c in out if isinstance(c, Fail | Complete))
        return out

    bench.submit(deadline_s=5.0)
    if state == "waiting":
        do(WorkerSaid("d0", Refused(A, 1, 4)))
    elif state != "offered":
        do(WorkerSaid("d0", Accepted(A, 1, 0)))
        do(WorkerSaid("d0", Tokens(A, 1, 0, [1, 2])))
        if state == "finishing":
            (finish,) = do(StopFound(A, 1))
            assert is_told(finish, Finish) and finish.record.tokens_kept == 1
        if state == "closing":
            do(ClientLeft(A))
    event: Event = {"cancel": ClientLeft(A), "deadline": Tick(), "lost": Lost("d0")}[end]
    bench.now = 6.0 if end == "deadline" else 1.0
    out = do(event)
    on_worker = state in ("offered", "running", "finishing")
    if end != "lost":
        told = FinishReason.DEADLINE if end == "deadline" else FinishReason.CANCELLED
        reasons = [c.record.reason for c in out if isinstance(c, TellWorker) and isinstance(c.record, Cancel)]
        assert reasons == [told] * on_worker
        if on_worker or state == "closing":
            do(WorkerSaid("d0", ended(reason=FinishReason.CANCELLED)))
    elif state in ("waiting", "offered", "running"):
        assert answers == [] and bench.router.waiting == 1
        (place,) = bench.join("d0", "decode", 2)
        assert is_told(place, Place) and place.record.placement == 2
        return
    assert len(answers) == 1
    if isinstance(answers[0], Fail) and state != "closing":
        assert answers[0].fault.code == {"cancel": "CANCELLED", "deadline": "DEADLINE_EXCEEDED"}[end]
    assert isinstance(answers[0], Complete) == (state == "finishing" and end == "lost")
    assert bench.router.open == 0


def test_stop_string_found_wins_over_the_workers_end() -> None:
    """Guards against tokens past a stop string in the count, and against a lost end."""
    bench = Bench()
    bench.submit()
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [1, 2, 3]))
    bench.do(StopFound(A, 2))
    assert bench.hear(Tokens(A, 1, 3, [4])) == [Ignored("overrun", 1)]
    (done,) = bench.hear(ended(reason=FinishReason.LENGTH, output_tokens=4))
    assert isinstance(done, Complete)
    assert (done.reason, done.stats.output_tokens) == (FinishReason.STOP, 2)


def test_faults_of_workers_reach_the_client() -> None:
    """Guards against a worker's reason being lost, or a code gRPC does not know."""
    bench = Bench()
    bench.submit()
    (failed,) = bench.hear(
        ended(reason=FinishReason.ERROR, fault=Fault("INVALID_ARGUMENT", "top_p: bad", "top_p"))
    )
    assert isinstance(failed, Fail) and failed.fault.field == "top_p"
    assert bench.router.open == 0
    assert bench.router.index.held_blocks("d0") == 0, "what failed is not cached"


def test_trees_learn_and_are_corrected() -> None:
    """Guards against routing by cached blocks that the worker never had, or has evicted."""
    bench = Bench(decodes=2)
    (first,) = bench.submit(A, tokens=64)
    assert is_told(first, Place) and first.reason == "load"
    home = first.worker
    bench.hear(Accepted(A, 1, 0), home)
    bench.hear(Tokens(A, 1, 0, [1]), home)
    bench.hear(ended(output_tokens=1), home)
    (second,) = bench.submit(B, tokens=64)
    assert is_told(second, Place)
    assert (second.worker, second.reason) == (home, "affinity")
    bench.hear(Accepted(B, 1, 48), home)
    (done,) = bench.hear(ended(B, reason=FinishReason.LENGTH, prefill_cached_tokens=63), home)
    assert isinstance(done, Complete) and done.expected_tokens == 63
    chain = identity.chain(identity.root(b"", "f"), list(range(64)), 16)
    bench.hear(load(evicted=chain), home)
    bench.hear(load(evicted=chain), "p0")
    (third,) = bench.submit(RequestId("c"), tokens=64)
    assert is_told(third, Place) and third.reason == "load"


def test_a_new_life_has_an_empty_cache_and_a_broken_stream_does_not() -> None:
    """Guards against beliefs that outlive a worker's memory, or die with a connection."""
    bench = Bench()
    bench.submit(A, tokens=64)
    bench.accept()
    bench.hear(ended(output_tokens=0))
    bench.do(Lost("d0"))
    bench.join("d0", "decode", 1)
    assert bench.router.index.held_blocks("d0") == 4
    bench.do(Lost("d0"))
    bench.join("d0", "decode", 2)
    assert bench.router.index.held_blocks("d0") == 0


def test_a_worker_tells_what_it_holds() -> None:
    """Guards the hit rate of a router that has just begun: it knows no request, and goes where the prefix is."""
    bench = Bench(decodes=2)
    chain = identity.chain(identity.root(b"", "f"), list(range(64)), 16)
    told = b"".join(one[: identity.SHORT_BYTES] for one in chain)
    assert bench.hear(HoldingTold([HeldRun(b"", told[:24]), HeldRun(told[16:24], told[24:])]), "d1") == []
    assert bench.hear(HoldingTold([HeldRun(b"", told)]), "nobody") == []
    (place,) = bench.submit(A, tokens=64)
    assert (place.worker, place.reason) == ("d1", "affinity")
    assert bench.router._calls[A].believed_decode_blocks == 4


def test_a_worker_tells_where_its_blocks_have_gone() -> None:
    """Guards the price of a prefix that its holder must load first: it went to host memory, then what is behind it to
    nowhere, as one report may say."""
    bench = Bench(decodes=1)
    chain = identity.chain(identity.root(b"", "f"), list(range(64)), 16)
    bench.router.index.add("d0", 64, 64)
    bench.router.index.insert("d0", chain)
    short = [one[: identity.SHORT_BYTES] for one in chain]
    bench.hear(load(moved={"host": b"".join(short[2:])}, evicted=[chain[3]]), "d0")
    assert bench.router.index.tiers(chain) == {"d0": {"device": 2, "host": 3}}


def test_silent_workers_get_nothing_new() -> None:
    """Guards against requests sent to a worker whose engine stands still."""
    bench = Bench(decodes=2)
    bench.now = 30.0
    bench.hear(load(), "p0")
    bench.hear(load(), "d1")
    (place,) = bench.submit()
    assert is_told(place, Place) and place.worker == "d1"


def test_the_short_way_of_tokens_is_that_of_handle_or_none() -> None:
    """Guards exactness: a token of an earlier placement, of another worker, doubled, ahead, early or late must not slip
    through where no event is made of it."""

    def started() -> Bench:
        bench = Bench()
        bench.submit()
        bench.accept()
        bench.hear(Tokens(A, 1, 0, [7]))
        return bench

    short, long = started(), started()
    assert short.router.next_tokens("d0", Tokens(A, 1, 1, [8, 9])) == [8, 9]
    long.hear(Tokens(A, 1, 1, [8, 9]))
    assert short.hear(Tokens(A, 1, 3, [5])) == long.hear(Tokens(A, 1, 3, [5])) == [Deliver(A, [5])]
    assert repr(short.router) == repr(long.router)
    others = [("d1", 1, 4, [1]), ("d0", 2, 4, [1]), ("d0", 1, 5, [1]), ("d0", 1, 3, [5, 1]), ("d0", 1, 0, [7])]
    for worker, placement, index, ids in [*others, ("d0", 1, 4, [])]:
        assert short.router.next_tokens(worker, Tokens(A, placement, index, ids)) == []
    assert short.router.next_tokens("d0", Tokens(B, 1, 1, [1])) == []
    assert short.hear(Tokens(A, 1, 4, [6])) == [Deliver(A, [6])], "nothing was taken in meanwhile"
    short.do(StopFound(A, 2))
    assert short.router.next_tokens("d0", Tokens(A, 1, 5, [1])) == [], "it is over for its client"


def test_what_never_fits_does_not_stand_in_line() -> None:
    """Guards a client that would wait behind others for an answer that is known."""
    bench = Bench(blocks=8)
    bench.submit(A)
    bench.hear(Refused(A, 1, 4))
    (failed,) = bench.submit(B, tokens=400)
    assert isinstance(failed, Fail) and failed.fault.code == "OUT_OF_RANGE" and bench.router.open == 1


def test_a_report_counts_what_was_accepted_once() -> None:
    """Guards room that is never used: a request counted by its worker's report, and by the router for ever."""
    bench = Bench()
    bench.submit(A)
    bench.accept()
    bench.hear(load(active=4))
    bench.hear(load(waiting_tokens=40), "p0")
    decode, prefill = bench.router.registry.get("d0"), bench.router.registry.get("p0")
    assert decode is not None and decode.used_blocks == 4
    assert prefill is not None and prefill.queue_tokens == 40


def test_a_worker_that_was_taken_away_is_forgotten() -> None:
    """Guards verdicts on a worker that nobody starts again."""
    bench = Bench(decodes=2)
    bench.do(Lost("d0"))
    bench.submit(A)
    bench.accept(worker="d1")
    assert bench.router.index.held_blocks("d1") == 2
    bench.do(Lost("d1", True))
    assert {name for name, _ in bench.router.registry.lives()} == {"p0", "d0"}
    assert bench.router.index.held_blocks("d1") == 0


def test_a_workers_hello_is_heard_once() -> None:
    bench = Bench()
    assert bench.hear(worker_info("d0", "decode", 1, 64)) == []


def test_a_worker_may_repeat_itself_or_come_too_late() -> None:
    """Guards a request that begins twice, and one that its worker never took: it holds nothing there."""
    bench = Bench()
    bench.submit(A)
    assert bench.accept() == [Begin(A)]
    assert bench.accept() == [Ignored("duplicate", 0)]
    assert bench.hear(Refused(A, 1, 4)) == [Ignored("duplicate", 0)]
    bench.do(ClientLeft(A))
    assert bench.accept() == []
    bench.hear(ended(reason=FinishReason.CANCELLED))
    bench.submit(B)
    if bench.router.waiting:
        bench.hear(load(active=4))
    bench.do(ClientLeft(B))
    assert bench.router.open == 1
    assert bench.hear(Refused(B, 1, 4)) == [] and bench.router.open == 0


def test_a_deadline_is_over_when_it_is_reached_and_not_before() -> None:
    bench = Bench()
    bench.submit(A, deadline_s=5.0)
    bench.submit(B)
    bench.now = 4.9
    assert bench.do(Tick()) == []
    bench.now = 5.0
    assert [c.request for c in bench.do(Tick()) if isinstance(c, Fail)] == [A]
    assert bench.router.open == 2, "its worker has not said that it let go"


def test_what_one_request_gives_back_the_next_one_is_offered() -> None:
    """Guards a line that moves only with reports: each end would cost whoever waits the time to the next one."""
    bench = Bench(blocks=4)
    bench.submit(A)
    assert bench.submit(B) == []
    bench.accept()
    out = bench.hear(ended())
    assert [c.record.record.request for c in out if isinstance(c, TellWorker) and isinstance(c.record, Place)] == [B]


def test_the_patience_for_decode_workers_begins_anew_with_each_outage() -> None:
    """Guards clients against a short outage after an earlier one: the two are not one long one."""
    bench = Bench(unplaceable_s=10.0)
    bench.do(Lost("d0"))
    bench.submit(A)
    bench.do(Tick())
    bench.now = 8.0
    bench.join("d0", "decode", 2)
    bench.do(Tick())
    bench.do(Lost("d0"))
    bench.now = 12.0
    assert not any(isinstance(c, Fail) for c in bench.do(Tick()))
    bench.now = 21.9
    assert not any(isinstance(c, Fail) for c in bench.do(Tick()))
    bench.now = 22.0
    assert any(isinstance(c, Fail) for c in bench.do(Tick()))


def test_only_those_that_wait_are_told_that_nobody_takes_them() -> None:
    """Guards answers under way on workers that are silent, not lost: a step may be long."""
    bench = Bench(blocks=4, worker_silent_s=1.0)
    bench.submit(A)
    bench.accept()
    bench.submit(B)
    failed = []
    for _ in range(30):
        bench.now += 0.5
        failed += [c.request for c in bench.do(Tick()) if isinstance(c, Fail)]
    assert failed == [B] and bench.router.open == 1


def test_who_stands_behind_one_that_leaves_moves_up() -> None:
    """Guards a small request behind a large one whose client has given up: it must not wait for the next report."""
    bench = Bench(blocks=8)
    bench.submit(RequestId("c"))
    bench.accept(RequestId("c"))
    assert bench.submit(A, tokens=80) == [] and bench.submit(B) == []
    _, place = bench.do(ClientLeft(A))
    assert is_told(place, Place) and place.record.record.request == B


def test_every_new_request_adds_to_the_budget_of_placements() -> None:
    """Guards a cluster with much to do: what may be placed again after losses is a share of what arrives."""
    bench = Bench(retry_reserve=2, retry_fraction=0.25)
    budget = bench.router._losses.budget
    assert budget.take(0.0) and budget.take(0.0) and not budget.take(0.0)
    for number in range(4):
        bench.submit(RequestId(f"r{number}"))
    assert budget.take(0.0) and not budget.take(0.0)


def test_nobody_is_named_to_prefill_what_is_about_to_end() -> None:
    bench = Bench(prefills=2)
    bench.submit(A)
    bench.accept()
    bench.hear(Tokens(A, 1, 0, [1, 2]))
    bench.do(StopFound(A, 1))
    failed = bench.router._calls[A].prefill
    assert bench.hear(NeedPrefill(A, 1, failed)) == [Ignored("stale", 0)]


def test_a_stop_string_in_what_is_over_changes_nothing() -> None:
    """Guards the router: a reader finds it after the worker has said the end."""
    assert Bench().do(StopFound(A, 1)) == []


def test_what_an_answer_has_written_is_believed_to_be_cached() -> None:
    """Guards a chat's next turn: 64 of 40 prompt tokens and 25 of the answer are four whole blocks."""
    bench = Bench()
    bench.submit(A, max_tokens=30)
    bench.accept()
    bench.hear(Tokens(A, 1, 0, list(range(25))))
    assert bench.router.index.held_blocks("d0") == 2
    bench.hear(ended(output_tokens=25))
    assert bench.router.index.held_blocks("d0") == 4


def test_of_tokens_that_are_told_again_only_the_new_ones_bring_log_probabilities() -> None:
    """Guards a client whose log probabilities would be those of other tokens behind a duplicate."""
    bench = Bench()
    bench.submit()
    bench.accept()
    said = [TokenLogprobs(token, -0.5 * token, ()) for token in (1, 2, 3, 4)]
    bench.hear(Tokens(A, 1, 0, [1, 2], said[:2]))
    told = bench.hear(Tokens(A, 1, 1, [2, 3, 4], said[1:]))
    assert told == [Ignored("duplicate", 1), Deliver(A, [3, 4], said[2:])]


def test_a_prompts_log_probabilities_are_told_once() -> None:
    """Guards a client that is given its prompt twice: a worker begins again where it is not sure that it was heard."""
    bench = Bench()
    bench.submit()
    bench.accept()
    scores = [TokenLogprobs(3, -0.5)]
    told = [
        command
        for ids in ([5], [5, 6])
        for command in bench.hear(Tokens(A, 1, 0, ids, prompt_logprobs=scores))
        if isinstance(command, Deliver)
    ]
    assert [(one.ids, list(one.prompt_logprobs)) for one in told] == [([5], scores), ([6], [])]


def test_nobody_reads_a_prompt_whose_offer_was_refused() -> None:
    """Guards requests with the same beginning, which would go where it is thought to be about to be computed."""
    bench = Bench()
    bench.submit()
    assert bench.router.index.held_blocks("p0") == 2
    bench.hear(Refused(A, 1, 9))
    assert bench.router.waiting == 1 and bench.router.index.held_blocks("p0") == 0
