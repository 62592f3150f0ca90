"""`headrace report disagg`: verdicts on traffic of which the truth is known, since a simulated cluster made it."""

from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cluster.cli import __main__ as cli
from cluster.report.disagg import (
    FEWEST_REQUESTS,
    NO_DIFFERENCE,
    StepBounds,
    TimeLimits,
    TooLittleTrafficError,
    arrangements,
    report,
    text,
    verdict_of,
)
from cluster.report.pools import PoolSizes, PoolSpeeds, PredictedTimes, simulate
from router.status.traffic import Traffic
from tests.cluster.report.test_pools import SPEEDS, shape

BOUNDS = StepBounds(0.05, 64, 16)


def poisson(rate: float, prompt: int, output: int, count: int = 60, seed: int = 3) -> list[Any]:
    random, at, shapes = Random(seed), 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        shapes.append(shape(at, prompt, output))
    return shapes


def lived(shapes: list[Any], sizes: PoolSizes, speeds: PoolSpeeds = SPEEDS) -> Traffic:
    """What the router of such a cluster would tell, whose workers are as quick as `speeds`."""
    times = simulate(shapes, sizes, speeds)
    told = [
        msgspec.structs.replace(
            one,
            ttft_s=had.ttft_s,
            itl_s=had.itl_s,
            prefill_s=had.ttft_s - speeds.overhead_s - (speeds.migrate_s if sizes.prefill else 0.0),
            migrate_s=speeds.migrate_s if sizes.prefill else 0.0,
            is_local=not sizes.prefill,
        )
        for one, had in zip(shapes, times, strict=True)
    ]
    return Traffic(
        shapes=told,
        prefill_workers=sizes.prefill,
        decode_workers=sizes.decode,
        local_prefill="auto" if sizes.is_auto else "never",
        s_per_token=speeds.token_s,
        alone_s=speeds.alone_s,
        s_per_row=speeds.row_s,
        slo_ttft_s=0.5,
        slo_itl_s=0.02,
    )


LONG_STREAMS = poisson(2.0, 400, 30), TimeLimits(3.0, 0.017)
"""Prompts between tokens cost streams their limit: for these it pays to split."""
MANY_PROMPTS = poisson(4.0, 300, 4), TimeLimits(0.6, 0.2)
"""All work is prefill, and a decode worker idles: for these it does not."""


@pytest.mark.parametrize(("traffic", "verdict"), [(LONG_STREAMS, "split"), (MANY_PROMPTS, "one pool")])
@pytest.mark.parametrize("now", [PoolSizes(1, 1), PoolSizes(0, 2)])
def test_the_verdict_is_what_would_have_been_measured(traffic: Any, verdict: str, now: PoolSizes) -> None:
    """Guards both verdicts from both sides: as it runs split, and as it runs as one pool."""
    shapes, limits = traffic
    found = report(lived(shapes, now), BOUNDS, limits)
    split = simulate(shapes, PoolSizes(1, 1), SPEEDS)
    assert verdict_of(split, simulate(shapes, PoolSizes(0, 2), SPEEDS), limits) == verdict
    assert found.verdict == verdict and found.self_error < 0.02
    runs_best = bool(now.prefill) == (verdict == "split")
    present = next(one for one in found.forecasts if one.is_now)
    assert present.gain == 0.0
    if runs_best:
        assert found.regret <= max(one.gain for one in found.forecasts)
    else:
        assert found.regret > 0.2 and found.best != found.now
    assert ("splitting pays" in text(found)) == (verdict == "split")


def test_where_nothing_is_short_it_says_that_there_is_no_difference() -> None:
    """Guards against a verdict on a coin's toss: all limits are kept either way."""
    found = report(lived(poisson(0.3, 64, 16), PoolSizes(1, 1)), BOUNDS, TimeLimits(2.0, 0.1))
    assert (found.verdict, found.regret, found.best) == (NO_DIFFERENCE, 0.0, "split 1+1")
    assert "no difference" in text(found) and "nothing is surely better" in text(found)
    assert found.within_share == 1.0 and "kept both limits" not in text(found)


def test_missed_limits_are_said_beside_a_verdict_that_changes_nothing() -> None:
    """Guards "nothing is surely better" as the last word, where no arrangement keeps limits that nobody could keep."""
    found = report(lived(poisson(0.3, 64, 16), PoolSizes(1, 1)), BOUNDS, TimeLimits(0.001, 0.001))
    assert (found.verdict, found.regret, found.within_share) == (NO_DIFFERENCE, 0.0, 0.0)
    last = text(found).splitlines()[-1]
    assert last.startswith("only 0% of the requests kept both limits")


def test_what_it_does_not_understand_makes_it_unsure() -> None:
    """Guards honesty: measured times that no such cluster has, as where something else holds half of all streams up."""
    told = lived(poisson(3.0, 300, 4), PoolSizes(1, 1))
    shapes = [
        msgspec.structs.replace(one, itl_s=5.0) if number % 2 else one for number, one in enumerate(told.shapes)
    ]
    found = report(msgspec.structs.replace(told, shapes=shapes), BOUNDS, MANY_PROMPTS[1])
    sure = report(told, BOUNDS, MANY_PROMPTS[1])
    assert sure.verdict == "one pool" and found.verdict == NO_DIFFERENCE
    assert found.self_error > 10 * sure.self_error


def test_speeds_that_are_off_are_scaled_to_what_was_measured() -> None:
    """Guards against fitted speeds that are those of a quiet machine: everything took half as long again."""
    shapes, limits = LONG_STREAMS
    slow = msgspec.structs.replace(SPEEDS, token_s=0.0015, alone_s=0.012, row_s=0.0024)
    lived_slowly = lived(shapes, PoolSizes(1, 1), slow)
    told = msgspec.structs.replace(lived_slowly, s_per_token=0.001, alone_s=0.01, s_per_row=0.002)
    found = report(told, BOUNDS, limits, "latency")
    present = next(one for one in found.forecasts if one.is_now)
    mean_ms = sum(one.ttft_s for one in told.shapes) / len(shapes) * 1e3
    assert present.ttft_ms == pytest.approx(mean_ms, rel=0.1)
    assert present.itl_ms == pytest.approx(sum(one.itl_s for one in told.shapes) / len(shapes) * 1e3, rel=0.05)


def test_workers_may_be_other_than_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a verdict that holds only if one pool's workers are exactly as quick: at this rate prompts would
    be late, were they a quarter slower."""
    told, limits = lived(poisson(3.0, 300, 4), PoolSizes(1, 1)), TimeLimits(0.6, 0.2)
    assert report(told, BOUNDS, limits).verdict == "one pool"
    close = TimeLimits(0.34, 0.2)
    assert report(told, BOUNDS, close).verdict == NO_DIFFERENCE
    monkeypatch.setattr("cluster.report.disagg.UNSURE", 1.0)
    assert report(told, BOUNDS, close).verdict == "one pool"


def test_the_objective_is_the_users() -> None:
    """Guards the two objectives against being one: within wide limits goodput knows no difference, and latency does."""
    told, wide = lived(MANY_PROMPTS[0], PoolSizes(1, 1)), TimeLimits(60.0, 5.0)
    assert report(told, BOUNDS, wide, "goodput").verdict == NO_DIFFERENCE
    assert report(told, BOUNDS, wide, "latency").verdict == "one pool"


def test_every_arrangement_has_as_many_workers() -> None:
    for now in (PoolSizes(3, 2), PoolSizes(0, 4), PoolSizes(1, 1, is_auto=True)):
        found = arrangements(now)
        assert found[0] == now and len(set(found)) == len(found)
        assert {one.prefill + one.decode for one in found} == {now.prefill + now.decode}
    assert PoolSizes(0, 5) in arrangements(PoolSizes(3, 2)) and PoolSizes(3, 2, True) in arrangements(PoolSizes(3, 2))
    assert PoolSizes(1, 1, False) in arrangements(PoolSizes(1, 1, True))


def test_too_little_is_said() -> None:
    told = lived(poisson(1.0, 64, 16, count=FEWEST_REQUESTS), PoolSizes(1, 1))
    assert report(told, BOUNDS, TimeLimits(1.0, 1.0)).requests == FEWEST_REQUESTS
    with pytest.raises(TooLittleTrafficError, match="8 are needed"):
        report(told, BOUNDS, TimeLimits(1.0, 1.0), last=FEWEST_REQUESTS - 1)
    with pytest.raises(TooLittleTrafficError, match="two workers"):
        report(msgspec.structs.replace(told, prefill_workers=0), BOUNDS, TimeLimits(1.0, 1.0))


def test_a_verdict_on_measured_times_needs_more_than_noise() -> None:
    quick, slow = [PredictedTimes(0.1, 0.01)] * 20, [PredictedTimes(9.0, 0.01)] * 20
    assert verdict_of(quick, slow, TimeLimits(1.0, 1.0)) == "split"
    assert verdict_of(slow, quick, TimeLimits(1.0, 1.0)) == "one pool"
    one_of_twenty = [*quick[:-1], slow[0]]
    assert verdict_of(quick, one_of_twenty, TimeLimits(1.0, 1.0)) == NO_DIFFERENCE


class _Client:
    """Answers as a running cluster would."""

    def __init__(self, told: Traffic) -> None:
        self._told = told

    def __enter__(self) -> "_Client":
        return self

    def __exit__(self, *_: object) -> None: ...

    def traffic(self) -> Traffic:
        return self._told

    def config(self) -> dict[str, dict[str, object]]:
        keys = {"decode.mixed_step_s": 0.05, "decode.local_chunk_tokens": 64, "decode.engine.block_size": 16}
        return {key: {"value": value, "origin": "default"} for key, value in keys.items()}


def test_the_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the command: limits of the cluster unless others are asked for, JSON of all of it, and its statuses."""
    told = lived(MANY_PROMPTS[0], PoolSizes(1, 1))
    monkeypatch.setattr("cluster.admin_client.AdminClient", lambda rundir: _Client(told))
    assert cli.main(["report", "disagg"]) == 0
    assert "first token 0.5 s, mean gap 20 ms" in capsys.readouterr().out
    assert cli.main(["report", "disagg", "--slo", "ttft=600ms,itl=0.2", "--json"]) == 0
    found = SimpleNamespace(**msgspec.json.decode(capsys.readouterr().out))
    assert found.verdict == "one pool" and found.limits == {"ttft_s": 0.6, "itl_s": 0.2}
    assert len(found.forecasts) == 3
    assert cli.main(["report", "disagg", "--slo", "e2e=1"]) == 2
    assert cli.main(["report", "disagg", "--slo", "nonsense"]) == 2
    assert cli.main(["report", "disagg", "--last", "3"]) == 1
    assert "8 are needed" in capsys.readouterr().err


def test_requests_of_a_router_that_does_not_answer_are_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a verdict on the requests of some of the routers that is taken for one on all."""
    silent = {"router-1": "did not answer in 10 s"}
    told = msgspec.structs.replace(lived(MANY_PROMPTS[0], PoolSizes(1, 1)), silent=silent)
    monkeypatch.setattr("cluster.admin_client.AdminClient", lambda rundir: _Client(told))
    assert cli.main(["report", "disagg"]) == 0
    assert "router-1 could not be asked, its requests are left out: did not" in capsys.readouterr().out
    assert cli.main(["report", "disagg", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["silent"] == silent
    assert cli.main(["report", "disagg", "--last", "3"]) == 1
    assert "8 are needed; router-1 could not be asked" in capsys.readouterr().err
