"""The routing benchmark: its bounds, its workloads, and that its cluster serves everybody and counts its work."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from benchmarks import traces
from benchmarks.routing import bounds
from benchmarks.routing.__main__ import _pools, lines, main
from benchmarks.routing.cluster import SimulatedCluster
from benchmarks.routing.runs import NAMES, RoutingCase, at_load, gap_ms, run, workload
from benchmarks.routing.workers import ClusterShape, RoutingOutcome, Speeds
from benchmarks.routing.workloads import BLOCK, GENERATED, TOKEN_SCALE, PromptTurn, Visit, in_order
from router.core.policies import make_policy

FORMULA = ["--policies", "lmetric", "--decision"]
SMALL = ClusterShape(prefill=2, decode=2, prefill_blocks=400, decode_blocks=2000)


def turn(*blocks: int, tokens: int | None = None) -> PromptTurn:
    return PromptTurn(blocks, len(blocks) * BLOCK if tokens is None else tokens, 4)


def test_bounds_of_a_small_example() -> None:
    """Guards the figures that all hits are compared with: of 1 2, 3 4, 1 2 again, with room for two blocks."""
    turns = [turn(1, 2), turn(3, 4), turn(1, 2), turn(5, tokens=3)]
    total, whole = 6 * BLOCK + 3, 2 * BLOCK - 1
    assert bounds.infinite(turns) == pytest.approx(whole / total), "the last token is always computed"
    assert bounds.lru(turns, 4) == pytest.approx(whole / total)
    assert bounds.lru(turns, 2) == 0.0
    assert bounds.belady(turns, 2) == pytest.approx(whole / total), "it keeps what comes again"
    assert bounds.lru([turn(1, 2), turn(3), turn(1, 4)], 2) == pytest.approx(BLOCK / (5 * BLOCK)), "leaves go first"


@pytest.mark.parametrize("name", GENERATED)
def test_workloads_are_the_same_for_the_same_seed_and_grow_along_sessions(name: str) -> None:
    made = GENERATED[name](200, 3)
    assert made == GENERATED[name](200, 3) != GENERATED[name](200, 4)
    assert sum(len(session.turns) for session in made) >= 200
    for session in made:
        for before, after in pairwise(session.turns):
            assert after.blocks[: len(before.blocks)] == before.blocks
        for each in session.turns:
            assert (len(each.blocks) - 1) * BLOCK < each.prompt_tokens <= len(each.blocks) * BLOCK
            assert len(each.tokens()) == each.prompt_tokens
    turns = list(in_order(made))
    assert bounds.lru(turns, 100) <= bounds.belady(turns, 100) + 1e-9 <= bounds.infinite(turns) + 2e-9


@pytest.mark.parametrize("policy", NAMES)
def test_everybody_is_served_and_every_token_is_computed_or_found(policy: str) -> None:
    """Guards the count of hits: what was not found was computed, and took its time."""
    case = RoutingCase("chat", 300, 1, 0.6, policy, SMALL)
    outcome = run(case)
    turns = list(in_order(workload(case.source, case.requests, case.seed)))
    assert len(outcome.ttft_s) == len(turns) and outcome.failed == 0
    assert outcome.prompt_tokens == sum(each.prompt_tokens for each in turns)
    assert 0 < outcome.hit_tokens / outcome.prompt_tokens <= bounds.infinite(turns)
    computed_s = (outcome.prompt_tokens - outcome.hit_tokens) * SMALL.speeds.prefill_token_s
    assert computed_s <= outcome.busy_s <= computed_s * 1.2
    assert outcome.busy_s < SMALL.prefill * outcome.span_s
    assert sum(outcome.gaps.values()) == sum(each.output_tokens - 1 for each in turns)


def test_a_run_repeats_to_the_bit() -> None:
    case = RoutingCase("bursts", 150, 2, 0.9, "least-cost", SMALL)
    one, two = run(case), run(case)
    assert (one.ttft_s, one.gaps, one.hit_tokens) == (two.ttft_s, two.gaps, two.hit_tokens)


def test_one_prompt_takes_what_the_speeds_say() -> None:
    """Guards the clock of the simulation: prefill in two chunks, then the wire, then a token a step."""
    speeds = Speeds(0.1, 0.01, 0.001, 0.5, 0.0, 0.0)
    shape = ClusterShape(prefill=1, decode=1, chunk_tokens=20, speeds=speeds, latency_s=0.0)
    outcome = SimulatedCluster(shape, lambda: make_policy("least-cost", 0)).run([Visit(1.0, (turn(1, 2, tokens=30),))])
    assert outcome.ttft_s == [pytest.approx(2 * 0.1 + 30 * 0.01 + 0.001)]
    assert outcome.gaps == {500: 3} and gap_ms(outcome, 0.99) == 500


def test_an_answer_is_priced_by_as_many_steps_as_it_takes() -> None:
    """Guards the weight of rows in a price: a router that was told of the model's steps and of tokens that are many of
    them, took an answer for a thirtieth of its time, and piled rows up wherever a prefix was."""
    speeds = Speeds(0.01, 0.001, 0.0001, 0.5, 0.0, 0.0)
    shape = ClusterShape(prefill=1, decode=1, speeds=speeds, latency_s=0.0)
    cluster = SimulatedCluster(shape, lambda: make_policy("least-cost", 0))
    steps = 20 * TOKEN_SCALE
    cluster.run([Visit(0.0, (PromptTurn((1, 2), 2 * BLOCK, steps),))])
    decode = cluster.router.registry.get("decode-0")
    assert decode is not None and decode.load is not None
    assert sum(cluster.outcome.gaps.values()) == steps - 1
    assert 20 * decode.load.s_per_token == pytest.approx(steps * 0.5)


def test_a_load_is_that_of_a_perfect_cache() -> None:
    sessions = GENERATED["cold"](300, 1)
    spread = at_load(sessions, 0.5, SMALL)
    work_s = sum(each.prompt_tokens for each in in_order(sessions)) * SMALL.speeds.prefill_token_s
    assert spread[-1].begins_s == pytest.approx(work_s / 0.5 / SMALL.prefill)


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_what_a_small_cache_finds_is_that_of_the_order_in_which_prompts_come(load: float) -> None:
    """Guards loads and bounds against sessions that are brought closer to each other: between two turns of one, more is
    asked by others, and a small cache has lost more of it."""
    shape = ClusterShape(prefill=4, prefill_blocks=100)
    sessions = GENERATED["chat"](400, 1)
    spread = at_load(sessions, load, shape)
    far, near = (bounds.lru(in_order(each), shape.cached_blocks) for each in (sessions, spread))
    assert near < far - 0.05
    work_s = sum(turn.prompt_tokens for turn in in_order(spread)) * shape.speeds.prefill_token_s * (1 - near)
    span_s = max(session.begins_s for session in spread)
    assert work_s / shape.prefill / span_s == pytest.approx(load, rel=0.05)


def test_the_slow_worker_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prices per worker: one that is three times slower is not sent a third of the work."""
    shape = ClusterShape(prefill=3, decode=2, slow=3.0)
    cluster = SimulatedCluster(shape, lambda: make_policy("least-cost", 0))
    cluster.run(at_load(GENERATED["cold"](400, 1), 0.7, shape))
    tokens = {name: worker.busy_s / (3.0 if name == "prefill-0" else 1.0) for name, worker in cluster.prefills.items()}
    assert tokens["prefill-0"] < 0.6 * min(tokens["prefill-1"], tokens["prefill-2"])


def test_caches_are_worth_more_than_turns() -> None:
    """Guards what the router is for: shared prefixes found on the worker that has them."""
    policies = ("least-cost", "round-robin", "random")
    found = {policy: run(RoutingCase("chat", 600, 1, 0.8, policy, SMALL)) for policy in policies}
    hits = {policy: outcome.hit_tokens / outcome.prompt_tokens for policy, outcome in found.items()}
    assert hits["least-cost"] > 1.2 * max(hits["round-robin"], hits["random"])


def test_more_weight_on_hits_finds_more_and_waits_longer() -> None:
    """Guards the curve of hits and times: weight 1 is the policy itself, and a heavy one has its price."""
    small = ClusterShape(prefill=4, decode=4, prefill_blocks=200)
    ours, same, heavy = (
        run(RoutingCase("chat", 500, 1, 0.5, policy, small)) for policy in ("least-cost", "hits-1", "hits-16")
    )
    assert (same.ttft_s, same.hit_tokens) == (ours.ttft_s, ours.hit_tokens)
    assert heavy.hit_tokens > 1.005 * ours.hit_tokens
    assert sum(heavy.ttft_s) > 1.2 * sum(ours.ttft_s)


def test_lines_compare_with_the_best() -> None:
    cases = [RoutingCase("cold", 10, 1, 0.5, policy, SMALL) for policy in ("least-cost", "random")]
    made = [RoutingOutcome([1.0, 3.0], {5: 99, 50: 1}, 0, 10, 1.0, 2.0), RoutingOutcome([4.0], {}, 5, 10, 1.0, 2.0)]
    for outcome in made:
        outcome.came += [turn(1, 2), turn(1, 2)]
    first, second = lines(cases, made)
    assert second["of LRU"] == pytest.approx(0.5 / bounds.lru(made[0].came, 2 * SMALL.prefill_blocks))
    assert (first["TTFT mean s"], first["of best"], second["of best"]) == (2.0, 1.0, 2.0)
    assert (first["ITL p99 ms"], second["hits"], first["busy"]) == (5, 0.5, 0.25)


def test_the_command_reads_traces_and_writes_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("PROMPT_BLOCKS", 16), ("POOL_BLOCKS", 64), ("DECISIONS", 50)):
        monkeypatch.setattr(f"benchmarks.routing.__main__.{name}", few)
    rows = traces.make(traces.TraceShape(rows=60), 1)
    trace, out = tmp_path / "small.jsonl", tmp_path / "out.json"
    trace.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    arguments = ["--trace", str(trace), "--load", "0.5", "--policies", "least-cost,random", "--json", str(out)]
    assert main([*arguments, "--workers", "3", "--prefill", "2", "--decode", "1", "--decision"]) == 0
    assert "least-cost" in capsys.readouterr().out
    written = json.loads(out.read_text())
    found = written["rows"]["What policies found"]
    assert [line["policy"] for line in found] == ["least-cost", "random"] and found[0]["workload"] == "small"
    timed = {line["what"]: line["cpu_p99_us"] for line in written["rows"]["Decisions, CPU and wall"]}
    assert {"decision", "policy", "accepted"} <= timed.keys() and timed["decision"] > timed["policy"] > 0
    for refused in (["--policies", "nonsense"], [*arguments, "--workers=4", "--prefill=2", "--decode=1"], FORMULA):
        with pytest.raises(SystemExit):
            main(refused)


def test_workers_of_either_kind_follow_from_all() -> None:
    assert [_pools(8, 4, 4), _pools(9, None, None), _pools(8, 6, None), _pools(8, None, 2)] == [
        (4, 4), (4, 5), (6, 2), (6, 2)
    ]  # fmt: skip
    usual = ClusterShape()
    assert _pools(None, 8, None) == (8, usual.decode) and _pools(None, None, 1) == (usual.prefill, 1)


def test_the_published_gain_of_cache_aware_routing_is_there() -> None:
    """Guards the classic figure, 20 to 75 % on 8 workers: 64 long prompts shared by 8 requests each, of which one
    worker's cache holds a quarter."""
    shape = ClusterShape(prefill=8, decode=4, prefill_blocks=80)
    found = {policy: run(RoutingCase("groups", 512, 1, 0.5, policy, shape)) for policy in ("least-cost", "round-robin")}
    hits = {policy: outcome.hit_tokens / outcome.prompt_tokens for policy, outcome in found.items()}
    assert hits["round-robin"] < 0.3 and hits["least-cost"] > 0.75
    assert sum(found["least-cost"].ttft_s) < 0.2 * sum(found["round-robin"].ttft_s)
