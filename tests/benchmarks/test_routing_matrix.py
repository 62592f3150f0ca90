"""The faults of the routing benchmark, its matrix of goals, and routers of others in the place of the policy."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from benchmarks.routers.__main__ import NAMES, run_peer
from benchmarks.routers.held_workers import HeldWorkers
from benchmarks.routers.http_routers import BLOCK_CHARS, text, version
from benchmarks.routers.policy import PeerError, PeerPolicy
from benchmarks.routing import bounds, cluster, matrix
from benchmarks.routing.cluster import RoutingFaults
from benchmarks.routing.runs import RoutingCase, around_restart, run, run_with
from benchmarks.routing.workers import FINGERPRINT, ClusterShape
from benchmarks.routing.workloads import BLOCK, GENERATED, PromptTurn, in_order
from engine import identity
from engine.types import RequestId
from router.core.policies import make_policy

SMALL = ClusterShape(prefill=2, decode=2, prefill_blocks=400, decode_blocks=2000)
CASE = RoutingCase("chat", 400, 1, 0.6, "least-cost", SMALL)


def test_lost_reports_are_lost_and_everybody_is_served() -> None:
    plain, half = run(CASE), run(replace(CASE, faults=RoutingFaults(reports_lost=0.5)))
    assert plain.reports_lost == 0 < half.reports_lost
    assert len(half.ttft_s) == len(plain.ttft_s) and half.failed == 0


def test_evictions_that_workers_report_are_understood() -> None:
    """Guards names of blocks that no router knows: then no report of an eviction would change any belief."""
    outcome = run(replace(CASE, shape=replace(SMALL, prefill_blocks=120)))
    deaf = run(replace(CASE, shape=replace(SMALL, prefill_blocks=120), faults=RoutingFaults(reports_lost=1.0)))
    assert outcome.ttft_s != deaf.ttft_s
    made = cluster.SimulatedCluster(SMALL, lambda: make_policy("least-cost", 0))
    worker, index = made.prefills["prefill-0"], made.router.index
    prompt = list(range(10 * BLOCK))
    chain = identity.chain(identity.root(b"", FINGERPRINT), prompt, BLOCK)
    index.insert("prefill-0", chain)
    worker.kv._evicted.append(chain[4])
    worker.report()
    made.time.run(lambda: index.match("prefill-0", chain) == 4)
    assert index.match("prefill-0", chain) == 4


def test_a_restarted_router_goes_on_and_learns_what_workers_hold() -> None:
    """Guards what is told when a router attaches: without it, the hits after a restart are lost."""
    case = replace(CASE, seed=2, requests=800)
    told = run(replace(case, faults=RoutingFaults(restart_at=0.5)))
    untold = run(replace(case, faults=RoutingFaults(restart_at=0.5, is_told=False)))
    for outcome in (told, untold):
        assert outcome.restarted_s is not None and outcome.failed == 0
        assert len(outcome.ttft_s) == len(list(in_order(GENERATED["chat"](800, 2))))
    before, after = around_restart(told)
    lost_before, lost_after = around_restart(untold)
    assert before == lost_before and after > lost_after + 0.02
    assert around_restart(run(CASE)) == (0.0, 0.0)


def test_a_queue_that_only_grows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_S", 5.0)
    outcome = run(replace(CASE, source="cold", load=3.0))
    assert outcome.diverged and len(outcome.ttft_s) < 400
    assert not run(replace(CASE, source="cold", load=0.3)).diverged


def test_tenants_find_nothing_of_each_other() -> None:
    one = PromptTurn((1, 2), 2 * BLOCK, 4, tenant=b"a")
    assert bounds.infinite([one, replace(one, tenant=b"b")]) == 0.0 < bounds.infinite([one, one])
    sessions = GENERATED["tenants"](200, 1)
    assert len({turn.tenant for turn in in_order(sessions)}) > 3
    for session in sessions:
        assert all(a.tenant == b.tenant for a, b in pairwise(session.turns))
    outcome = run(replace(CASE, source="tenants"))
    turns = list(in_order(GENERATED["tenants"](400, 1)))
    shared = [replace(turn, tenant=b"") for turn in turns]
    assert outcome.hit_tokens / outcome.prompt_tokens <= bounds.infinite(turns) < bounds.infinite(shared)


def test_the_matrix_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards hours of runs: none is made twice, and a torn line is made again."""
    out = tmp_path / "matrix.jsonl"
    arguments = ["--out", str(out), "--workload", "cold", "--requests", "40", "--seeds", "1", "--load", ".5"]
    arguments += ["--policies", "least-cost,random"]
    assert matrix.main([*arguments, "--seconds", "0"]) == 1 and not out.read_bytes()
    assert matrix.main(arguments) == 0
    assert "2 runs" in capsys.readouterr().out
    whole = out.read_bytes()
    assert matrix.main(arguments) == 0 and out.read_bytes() == whole
    out.write_bytes(whole[:-20])
    assert matrix.main(arguments) == 0
    assert [made.key for made in matrix.read(out)] == [("cold", 40, 1, 0.5, p, 2000) for p in ("least-cost", "random")]


def test_goals_are_missed_where_another_is_better() -> None:
    base = matrix.MatrixRun(
        workload="w",
        requests=1,
        seed=1,
        load=0.8,
        policy="least-cost",
        hits=0.5,
        lru=0.5,
        infinite=1.0,
        mean_s=1.0,
        p50_s=1.0,
        p99_s=2.0,
        itl_p99_ms=8,
        busy=0.8,
        failed=0,
        diverged=False,
        took_s=1.0,
    )
    other = msgspec.structs.replace(base, policy="random")
    policies = ("least-cost", "random")

    def missed(ours: matrix.MatrixRun, theirs: matrix.MatrixRun) -> object:
        (line,) = matrix.goals([ours, theirs], policies)
        return line["missed"]

    change = msgspec.structs.replace
    assert missed(base, other) == "none"
    assert missed(change(base, mean_s=1.03), other) == "mean"
    assert missed(change(base, p99_s=2.2), other) == "p99"
    assert missed(change(base, hits=0.48), other) == "hits"
    assert missed(change(base, hits=0.48, load=0.95), change(other, load=0.95)) == "none", "0.94 is enough there"
    assert missed(change(base, hits=0.1, infinite=0.51), change(other, infinite=0.51)) == "none", "not asked"
    assert missed(change(base, itl_p99_ms=9), change(other, mean_s=0.99)) == "ITL"
    assert missed(change(base, itl_p99_ms=9, mean_s=0.5), other) == "ITL", "its own gaps are no yardstick"
    assert missed(change(base, mean_s=9.0, p99_s=9.0), change(other, diverged=True)) == "none"
    assert matrix.goals([base], policies) == [], "the seed is not complete"


class FirstHolder:
    """A router that sends prompts with the same first token where the first of them went, others in turn."""

    def __init__(self) -> None:
        self.homes: dict[int, str] = {}
        self.open: set[RequestId] = set()
        self.most = 0

    def choose(self, request: RequestId, tokens: Sequence[int], tenant: bytes) -> str:
        assert request not in self.open, "asked twice"
        self.open.add(request)
        self.most = max(self.most, len(self.open))
        return self.homes.setdefault(tokens[0], f"prefill-{len(self.homes) % 2}")

    def computed(self, request: RequestId) -> None:
        self.open.remove(request)

    def close(self) -> None:
        pass


def test_a_router_of_others_chooses_where_prompts_are_computed() -> None:
    peer = FirstHolder()
    outcome = run_with(replace(CASE, source="hot"), lambda: PeerPolicy(peer, 1))
    assert not peer.open and peer.most > 1 and outcome.failed == 0
    # Each of three prefixes is computed once, as nothing is ever evicted for long.
    turns = list(in_order(GENERATED["hot"](400, 1)))
    assert outcome.hit_tokens / outcome.prompt_tokens == pytest.approx(bounds.infinite(turns), abs=0.02)


def test_prompts_as_text_share_what_tokens_share() -> None:
    one, other = list(range(40)), [*range(32), *range(900, 908)]
    assert text(one, b"")[: 2 * BLOCK_CHARS] == text(other, b"")[: 2 * BLOCK_CHARS]
    assert text(one, b"")[2 * BLOCK_CHARS :] != text(other, b"")[2 * BLOCK_CHARS :]
    assert len(text(one, b"")) == 2 * BLOCK_CHARS + BLOCK_CHARS // 2
    assert text(one, b"a")[0] != text(one, b"b")[0], "tenants share nothing"


def test_a_worker_answers_when_it_is_told_to() -> None:
    """Guards a router's own counts: a request is in flight until its prompt has been computed."""
    workers = HeldWorkers(["a", "b"])
    try:
        port = int(workers.urls[1].rpartition(":")[2])
        assert workers.send(port, RequestId("r1"), "x") == "b"
        client = workers._clients["r1"]
        time.sleep(0.1)
        assert client.is_alive()
        workers.answer(RequestId("r1"))
        assert not client.is_alive()
    finally:
        workers.close()


def test_a_router_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.routers.held_workers.ANSWER_S", 0.2)
    workers = HeldWorkers(["a"])
    workers_port = int(workers.urls[0].rpartition(":")[2])
    workers.close()
    with pytest.raises(PeerError, match="reaches no worker"):
        workers.send(workers_port, RequestId("r1"), "x")


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_router_serves_everybody(name: str) -> None:
    python = Path(sys.executable)
    if not version(name, python):
        pytest.skip(f"{name} is not installed here")
    outcome, _ = run_peer(replace(CASE, policy=name, requests=60), python)
    assert len(outcome.ttft_s) == len(list(in_order(GENERATED["chat"](60, 1)))) and outcome.failed == 0
