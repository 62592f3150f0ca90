"""What is refused for a deadline that it cannot meet, after how long it may come again, and what never is."""

import pytest

from engine.messages import Place, RequestStats, Tokens
from engine.types import FinishReason, RequestId
from router.core.admission import FEWEST_ANSWERS
from router.core.events import ClientLeft, Command, Fail, Lost, Submit, TellWorker
from tests.router.bench import Bench, ended, is_told
from tests.router.core.parts import request_record
from tests.router.fake_cluster import load

S_PER_TOKEN, S_PER_STEP = 0.01, 0.05


def measured(waiting_tokens: int = 0, blocks: int = 4096, **config: object) -> Bench:
    """A pair whose speeds are known, with a backlog, and a request that runs."""
    bench = Bench(blocks=blocks, **config)  # type: ignore[arg-type]
    bench.do(Submit(request_record("held", 8, 8, namespace=b"held")))
    bench.accept(RequestId("held"))
    bench.hear(Tokens(RequestId("held"), 1, 0, [7]))
    report(bench, waiting_tokens, blocks)
    return bench


def report(bench: Bench, waiting_tokens: int = 0, blocks: int = 4096) -> None:
    bench.hear(load(1, 0, blocks, s_per_token=S_PER_TOKEN, waiting_tokens=waiting_tokens), "p0")
    bench.hear(load(1, 0, blocks, s_per_token=S_PER_STEP), "d0")


def ask(
    bench: Bench,
    timeout_s: float | None,
    least_tokens: int | None = 1,
    name: str = "a",
    tokens: int = 100,
    namespace: bytes = b"",
) -> list[Command]:
    """A request with a deadline; one without `least_tokens` is the router's own."""
    record = request_record(name, tokens, 100, namespace=namespace)
    deadline_s = None if timeout_s is None else bench.now + timeout_s
    return bench.do(Submit(record, deadline_s, least_tokens=least_tokens))


def refusal(out: list[Command]) -> Fail:
    (failed,) = out
    assert isinstance(failed, Fail)
    return failed


def test_what_cannot_meet_its_deadline_is_refused_at_once() -> None:
    """The prompt takes 1 s, the backlog 10: with the margin of 2, whoever has less than 5.5 s is refused."""
    bench = measured(waiting_tokens=1000)
    failed = refusal(ask(bench, 5.4))
    assert (failed.fault.code, failed.refusal) == ("RESOURCE_EXHAUSTED", "deadline")
    assert failed.outcome is FinishReason.REJECTED, "it is no failure"
    assert "11.00 s" in failed.fault.message and "5.40 s" in failed.fault.message
    assert failed.retry_after_s == pytest.approx(11.0 - 5.4), "by then the backlog is short enough"
    assert bench.router.open == 1
    assert is_told(ask(bench, 5.6)[0], Place)


def test_nothing_without_a_deadline_of_its_callers_is_refused() -> None:
    bench = measured(waiting_tokens=10**6)
    for number, timeout_s in enumerate((None, 0.001, 3600.0)):
        assert is_told(ask(bench, timeout_s, None, f"r{number}")[0], Place)
    assert is_told(ask(bench, None, 1, "b")[0], Place)


def test_what_it_must_write_counts() -> None:
    """99 steps of 50 ms after the prompt's second."""
    assert refusal(ask(measured(), 2.9, 100)).retry_after_s == pytest.approx(1.0 + 99 * S_PER_STEP - 2.9)
    assert is_told(ask(measured(), 3.1, 100)[0], Place)
    assert is_told(ask(measured(), 0.6, 0)[0], Place), "nothing is known of its length"


def test_answers_of_late_say_how_long_the_next_is_likely_to_be() -> None:
    """Nine of ten had 60 tokens or more: so it is taken to have 60, if it may have as many."""
    bench = measured()
    for number in range(FEWEST_ANSWERS):
        assert is_told(ask(bench, 0.6, 0, f"r{number}", 8)[0], Place), "too few to tell"
        bench.accept(RequestId(f"r{number}"))
        call = bench.router._calls[RequestId(f"r{number}")]
        call.emitted.extend([1] * (5 if number in (0, 3, 9) else 60))
        bench.hear(ended(RequestId(f"r{number}"), 1, output_tokens=len(call.emitted)))
    needed_s = 8 * S_PER_TOKEN + 59 * S_PER_STEP
    assert refusal(ask(bench, needed_s / 2 - 0.1, 0, "b", 8)).refusal == "deadline"
    assert is_told(ask(bench, needed_s / 2 + 0.1, 0, "c", 8)[0], Place)


def test_who_has_measured_nothing_predicts_nothing() -> None:
    """Guards a fresh cluster: what placement assumes of it is for comparing workers, not for refusing."""
    bench = Bench(blocks=4096)
    assert is_told(ask(bench, 0.001, 100, tokens=5000)[0], Place)
    nobody = Bench(decodes=0, prefills=0)
    assert ask(nobody, 0.001) == [] and nobody.router.waiting == 1


def test_a_cached_prompt_is_not_refused() -> None:
    bench = measured()
    assert refusal(ask(bench, 4.0, tokens=1000)).refusal == "deadline"
    assert is_told(ask(bench, 60.0, name="b", tokens=1000)[0], Place)
    bench.accept(RequestId("b"))
    bench.hear(ended(RequestId("b"), 1))
    report(bench)
    assert is_told(ask(bench, 4.0, name="c", tokens=1000)[0], Place)


def test_the_margin_is_the_operators() -> None:
    assert refusal(ask(measured(1000, deadline_margin=1.0), 10.9)).refusal == "deadline"
    assert is_told(ask(measured(1000, deadline_margin=1.0), 11.1)[0], Place)
    assert is_told(ask(measured(1000, deadline_margin=0.0), 0.01)[0], Place)
    assert refusal(ask(measured(1000, deadline_margin=1.0, retry_after_s=7.0), 10.9)).retry_after_s == 7.0


def test_the_line_counts_at_the_speed_at_which_it_moves() -> None:
    """Ten wait, and one leaves the line each second: the eleventh is not offered for some ten seconds."""
    bench = measured(blocks=15)  # one request at a time
    for number in range(20):
        ask(bench, None, None, f"r{number}", namespace=b"%d" % number)
    for number in range(10):
        bench.now = number + 1.0
        report(bench, blocks=15)
        bench.accept(RequestId(f"r{number}"))
        bench.hear(ended(RequestId(f"r{number}"), 1))
        report(bench, blocks=15)
    waiting = bench.router.waiting
    assert waiting == 9
    assert refusal(ask(bench, 4.0, name="late")).refusal == "deadline"
    assert ask(bench, 7.0, name="later") == [] and bench.router.waiting == waiting + 1


def test_what_was_cancelled_in_the_line_reaches_no_worker() -> None:
    """Guards workers against requests whose clients have gone: nothing is ever said of them, whatever room there is."""
    bench = Bench(blocks=8)
    bench.submit(RequestId("a"), tokens=100)
    names = [RequestId(f"w{number}") for number in range(6)]
    for name in names:
        assert bench.submit(name) == [], "no room: it waits"
    told = list[Command]()
    for name in names[::2]:
        told += bench.do(ClientLeft(name))
    assert [type(command) for command in told] == [Fail] * 3, "only its client is answered"
    bench.accept(RequestId("a"))
    for name in (RequestId("a"), *names[1::2]):
        call = bench.router._calls[name]
        if call.placement:
            told += bench.accept(name)
            told += bench.hear(ended(name, call.placement))
    said = [command.record for command in told if isinstance(command, TellWorker)]
    requests = {record.record.request for record in said if isinstance(record, Place)}
    assert requests == set(names[1::2]) and len(said) == 3
    assert bench.router.open == 0 and not bench.router._table.share._entries


def test_a_flood_leaves_the_line_to_others() -> None:
    """Guards a bounded line: what has no room goes from the tenant that has most of it."""
    bench = Bench(decodes=0, prefills=0, max_waiting=4)
    for number in range(4):
        bench.do(Submit(request_record(f"f{number}"), tenant="flood"))
    failed = refusal(bench.do(Submit(request_record("late"), tenant="late")))
    assert (failed.request, failed.refusal, failed.retry_after_s) == ("f3", "full", 1.0)
    assert refusal(bench.do(Submit(request_record("f4"), tenant="flood"))).request == "f4"
    assert bench.router.waiting == 4


def test_an_idle_worker_is_not_taken_to_step_as_with_its_last_full_batch() -> None:
    """Guards against 64 tokens of 0.1 s, refused to a client with 1 s left, where a step of one row takes 5 ms."""
    bench = measured()
    bench.join("d1", "decode", 1, 4096)
    for number in range(64):
        rows = 1 + number % 20
        bench.hear(load(number, 0, 4096, s_per_token=0.005 * rows, running_requests=rows), "d1")
    bench.hear(load(90, 0, 4096, s_per_token=0.1), "d1")
    assert is_told(ask(bench, 1.0, 64, tokens=8)[0], Place)
    for name in ("d0", "d1"):
        bench.hear(load(91, 0, 4096, s_per_token=0.1, running_requests=20), name)
    assert refusal(ask(bench, 1.0, 64, "b", tokens=8)).refusal == "deadline", "beside 20 rows"


def test_who_has_measured_nothing_takes_no_time_beside_one_that_has() -> None:
    bench = measured(waiting_tokens=10**6)
    assert refusal(ask(bench, 0.4)).refusal == "deadline"
    bench.join("p1", "prefill", 1, 4096)
    assert is_told(ask(bench, 0.4, name="b")[0], Place)


@pytest.mark.parametrize("took", [8.0, 0.125])
def test_a_delay_that_was_fitted_refuses_nobody(took: float) -> None:
    """100 tokens take 1 s by the worker's own figure, 8 by what prompts have met."""
    bench = measured()
    for _ in range(100):
        stages = {"prefill_run": took}
        stats = RequestStats(prefill_worker="p0", decode_worker="d0", stages=stages)
        bench.router.registry.fitted.ended((1.0, 0.0), stats)
    assert bench.router.registry.fitted.delay("p0") == pytest.approx(took, rel=0.01)
    assert is_told(ask(bench, 0.6)[0], Place)
    assert is_told(ask(bench, 0.4, name="b")[0], Place) == (took < 1.0)


def test_nobody_is_refused_by_a_router_that_holds_nothing() -> None:
    """Guards against figures that refuse all, so that no worker ever measures again."""
    bench = Bench(blocks=4096)
    report(bench, waiting_tokens=10**6)
    assert is_told(ask(bench, 0.1)[0], Place)
    assert refusal(ask(bench, 0.1, name="b")).refusal == "deadline"
    bench.accept()
    bench.hear(ended())
    report(bench, waiting_tokens=10**6)
    assert is_told(ask(bench, 0.1, name="c")[0], Place)


def test_where_there_is_no_decode_worker_nothing_is_predicted() -> None:
    """Guards a router that has just begun: what comes before its workers waits for them, whatever its deadline."""
    bench = Bench()
    bench.do(Lost("d0"))
    assert not ask(bench, None, None, "held") and not ask(bench, 0.001)
    assert bench.router.waiting == 2


def test_an_answer_of_which_nothing_is_known_takes_no_step() -> None:
    """Guards the border of what is refused: the prompt's second, and not a step less, must fit."""
    needed_s = 100 * S_PER_TOKEN
    assert refusal(ask(measured(), needed_s / 2 - S_PER_STEP / 4, 0)).refusal == "deadline"
    assert is_told(ask(measured(), needed_s / 2 + S_PER_STEP / 4, 0)[0], Place)
