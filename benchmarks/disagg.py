"""Compares two pools with one, on equal resources: `python -m benchmarks.disagg`.

Three clusters of real processes with the same number of workers, one compute thread each: `split`, half of them for
prefill; `one pool`, where each worker reads its prompts itself; and `auto`, split, with decode workers that read
prompts where that is predicted to be the cheaper (`router.local_prefill`). All are up at once and are asked in turn, so
that what else the machine does falls on all alike. Requests come in an open loop (Poisson), for each length of prompt
and each rate; with `--turns`, as chats, where each next prompt holds the answers before.

Told of each: time to first token, the gaps between tokens, and the share of requests that kept both limits; the last is
what splitting is for, and is also given against `split`. With `--report`, the split cluster is also asked what
`headrace report disagg` says of that traffic, and whether the three clusters agree with it.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import msgspec

from benchmarks import output
from cluster.bench.driver import Level, LoadGenerator, LoadPlan
from cluster.bench.slo import Slo, parse_slo
from cluster.bench.targets import open_target
from cluster.bench.workloads import Kind, Workload
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.report.disagg import Objective, StepBounds, TimeLimits, report, verdict_of
from cluster.report.pools import PredictedTimes
from engine.config import EngineConfig
from engine.model.prepared.cache import prepare
from router.config import LocalPrefill, RouterConfig
from router.status.traffic import RequestShape, Traffic
from worker.config import DecodeConfig, PrefillConfig

MODES: dict[str, tuple[bool, LocalPrefill]] = {
    "split": (True, "never"),
    "one pool": (False, "never"),
    "auto": (True, "auto"),
}
"""Whether there is a prefill pool, and whether decode workers read prompts beside it."""
TIMEOUT_S = 300.0


def cluster_of(mode: str, workers: int, model_dir: Path, mixed_step_s: float) -> Cluster:
    """Return a cluster of so many workers in all, an even number."""
    is_split, local_prefill = MODES[mode]
    engine = EngineConfig(threads=1)
    chunk_tokens = PrefillConfig().chunk_tokens
    config = ClusterConfig(
        launcher="process",
        prefill_workers=workers // 2 if is_split else 0,
        decode_workers=workers // 2 if is_split else workers,
        log_level="error",
        router=RouterConfig(grpc_port=0, http_port=-1, local_prefill=local_prefill),
        prefill=PrefillConfig(engine=engine, chunk_tokens=chunk_tokens),
        decode=DecodeConfig(engine=engine, local_chunk_tokens=chunk_tokens, mixed_step_s=mixed_step_s),
    )
    return Cluster(config, make_launcher("process"), model_dir=str(model_dir))


def workload(prompt_tokens: int, output_tokens: int, turns: int, think_s: float) -> Workload:
    if turns == 1:
        return Workload(kind=Kind.RANDOM, input_tokens=prompt_tokens, output_tokens=output_tokens)
    return Workload(
        kind=Kind.CHAT, input_tokens=prompt_tokens, output_tokens=output_tokens, turns=turns, think_s=think_s
    )


async def level(address: str, load: Workload, rate: float, requests: int, slo: Slo, seed: int) -> Level:
    """Ask one cluster so many requests, so many a second."""
    plan = LoadPlan(
        target="grpc",
        address=address,
        workload=load,
        requests=requests,
        warmup=2,
        seed=seed,
        timeout_s=TIMEOUT_S,
        model=None,
        loads=(rate,),
        slo=slo,
    )
    target = open_target(plan.target, plan.address, None)
    try:
        generator = LoadGenerator(target, plan)
        await generator.warm_up()
        return await generator.at_load(rate, requests)
    finally:
        await target.close()


def measure(
    loads: list[Workload],
    rates: list[float],
    *,
    workers: int,
    requests: int,
    rounds: int,
    slo: Slo,
    mixed_step_s: float,
    seed: int,
    modes: tuple[str, ...] = tuple(MODES),
    verdicts: list[dict[str, str | int | float]] | None = None,
) -> list[dict[str, str | int | float]]:
    """Return a line for each workload, rate and mode: milliseconds at p50 and p99, and shares in percent, each the mean
    over the rounds. `verdicts`, if given, gets what the report says of each workload and rate, and what was measured;
    `split` and `one pool` are needed for that."""
    table: list[dict[str, str | int | float]] = []
    clusters: dict[str, Cluster] = {}
    with ExitStack() as opened, TemporaryDirectory(prefix="headrace-disagg-") as folder:
        model_dir = prepare(None, Path(folder))
        addresses = {}
        for mode in modes:
            cluster = opened.enter_context(cluster_of(mode, workers, model_dir, mixed_step_s))
            clusters[mode] = cluster
            addresses[mode] = cluster.start().grpc
        for load in loads:
            for rate in rates:
                found: dict[str, list[Level]] = {mode: [] for mode in modes}
                for turn in range(rounds):
                    for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                        asked = level(addresses[mode], load, rate, requests, slo, seed + turn)
                        found[mode].append(asyncio.run(asked))
                if verdicts is not None:
                    told = {mode: _traffic(cluster, requests * rounds) for mode, cluster in clusters.items()}
                    verdicts += _verdicts(load, rate, told, slo, mixed_step_s)
                table += [_line(load, rate, mode, found[mode], found[modes[0]]) for mode in modes]
    return table


def _line(
    load: Workload, rate: float, mode: str, levels: list[Level], split: list[Level]
) -> dict[str, str | int | float]:
    def mean(figures: list[float]) -> float:
        return sum(figures) / len(figures)

    def met(of: list[Level]) -> float:
        return mean([one.slo.share for one in of if one.slo is not None])

    spreads = {"TTFT": [one.summary.ttft_s for one in levels], "gap": [one.summary.itl_s for one in levels]}
    line: dict[str, str | int | float] = {"prompt": load.input_tokens, "rate /s": rate, "mode": mode}
    for name, of in spreads.items():
        for percent in ("p50", "p99"):
            values = [getattr(one, percent) * 1e3 for one in of if one is not None]
            line[f"{name} {percent} ms"] = mean(values) if values else "-"
    line["cached %"] = 100 * mean([one.summary.hit_rate for one in levels])
    line["migrated blocks"] = sum(one.summary.migrated_blocks for one in levels)
    line["failed"] = sum(one.summary.failed for one in levels)
    line["within limits %"] = 100 * met(levels)
    line["over split"] = met(levels) / met(split) if met(split) else "-"
    return line


def _traffic(cluster: Cluster, last: int) -> Traffic:
    """Return what a cluster's router tells of its latest requests, as they came."""
    told = msgspec.json.decode(cluster.ask(cluster.router.name, "traffic"), type=Traffic)
    latest = sorted(told.shapes[-last:], key=lambda shape: shape.arrived_s)
    return msgspec.structs.replace(told, shapes=latest)


def _verdicts(
    load: Workload, rate: float, told: dict[str, Traffic], slo: Slo, mixed_step_s: float
) -> list[dict[str, str | int | float]]:
    """Return a line for each objective: what the report says of the split cluster's traffic, and what was measured."""
    if slo.ttft_s is None or slo.itl_s is None:
        raise ValueError("the report needs a limit of ttft and one of itl")
    limits = TimeLimits(slo.ttft_s, slo.itl_s)
    bounds = StepBounds(mixed_step_s, PrefillConfig().chunk_tokens, EngineConfig().block_size)
    measured = {mode: _times(one.shapes) for mode, one in told.items()}
    lines: list[dict[str, str | int | float]] = []
    for objective in get_args(Objective):
        found = report(told["split"], bounds, limits, objective)
        truth = verdict_of(measured["split"], measured["one pool"], limits, objective)
        named = {"split 1+1": "split", "one pool of 2": "one pool", "split 1+1 with local prefill": "auto"}
        predicted = {named.get(one.name, one.name): one.ttft_ms for one in found.forecasts}
        lines.append(
            {
                "prompt": load.input_tokens,
                "rate /s": rate,
                "objective": objective,
                "report": found.verdict,
                "measured": truth,
                "agree": int(found.verdict == truth),
                "self error": found.self_error,
                "regret": found.regret,
                "one pool, TTFT ms predicted": predicted.get("one pool", 0.0),
                "one pool, TTFT ms measured": 1e3 * sum(one.ttft_s for one in measured["one pool"]) / found.requests,
            }
        )
    return lines


def _times(shapes: list[RequestShape]) -> list[PredictedTimes]:
    return [PredictedTimes(shape.ttft_s, shape.itl_s) for shape in shapes]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="in each cluster, an even number")
    parser.add_argument("--prompt", default="64,256,768", help="lengths, in tokens")
    parser.add_argument("--output", dest="answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rate", default="0.5,1,2", help="requests per second")
    parser.add_argument("--requests", type=int, default=24, help="in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=1, help="of a chat")
    parser.add_argument("--think", type=float, default=1.0, help="seconds between turns, on average")
    parser.add_argument("--slo", type=parse_slo, default=parse_slo("ttft=2,itl=0.1"))
    parser.add_argument("--mixed-step-s", type=float, default=DecodeConfig().mixed_step_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", default=",".join(MODES), help="which clusters; the first is `split`")
    parser.add_argument("--report", action="store_true", help="compare with what `headrace report disagg` says")
    options = parser.parse_args()
    if options.workers < 2 or options.workers % 2:
        parser.error(f"--workers {options.workers}: an even number is needed")
    modes = tuple(options.modes.split(","))
    if modes[0] != "split" or not set(modes) <= MODES.keys() or (options.report and "one pool" not in modes):
        parser.error(f"--modes {options.modes}: split, and others of {', '.join(MODES)}; a report needs one pool too")
    loads = [
        workload(int(length), options.answer, options.turns, options.think) for length in _numbers(options.prompt)
    ]
    verdicts: list[dict[str, str | int | float]] = []
    table = measure(
        loads,
        _numbers(options.rate),
        workers=options.workers,
        requests=options.requests,
        rounds=options.rounds,
        slo=options.slo,
        mixed_step_s=options.mixed_step_s,
        seed=options.seed,
        modes=modes,
        verdicts=verdicts if options.report else None,
    )
    results = {f"One pool and two, limits {options.slo}": table}
    if verdicts:
        results["What the report says of the split cluster's traffic"] = verdicts
    output.tell(options, "disagg", results)


if __name__ == "__main__":
    main()
