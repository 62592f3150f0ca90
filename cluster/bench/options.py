"""The flags of `headrace bench`, and the plan that they make."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from cluster.bench import traces
from cluster.bench.driver import WARMUP_AT_ONCE, LoadPlan
from cluster.bench.search import SearchPlan, long_enough_s
from cluster.bench.slo import parse_slo
from cluster.bench.workloads import PRESETS, Kind, Preset, Workload, check_burstiness
from cluster.cli.credentials import add_client_flags
from cluster.cli.numbers import seconds, seed
from cluster.resolve import add_flags

CUSTOM = Preset(Workload(kind=Kind.RANDOM, input_tokens=256, output_tokens=64), requests=32, concurrency=(8,))
CHAT = {"turns": 4, "think_s": 5.0}
"""A chat, where no flag says more."""
PROBE_REQUESTS = 100
"""The least that a probe of a search sends, where no flag says more: a share of 0.9 of them is known to 0.03."""
_SHAPE = ("preset", "workload", "input_tokens", "output_tokens", "prefix_tokens", "groups", "turns", "think")
_OPEN = ("rate", "burstiness")
_SEARCH = {"attainment": 0.9, "tolerance": 0.1, "max_rate": 1024.0, "probe_s": None}
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag."""
    add = parser.add_argument
    add("--target", choices=("grpc", "http"), default="grpc")
    add(
        "--address",
        default="",
        metavar="HOST:PORT",
        help="of any server (default: the cluster of that name on this host, or the configured address)",
    )
    add_flags(parser, only=("name",))
    add_client_flags(parser)
    _add_workload(parser)
    _add_loops(parser)
    _add_goodput(parser)
    add("--seed", type=seed, default=0)
    add("--timeout-s", type=float, default=600.0, help="of one request, from when it is sent")
    add("--model")
    add("--pid", type=int, action="append", default=[], help="sum the PSS of this process and its descendants")
    add("--json", type=Path, metavar="FILE", help="write the figures and the environment here")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is sent").add_argument
    add("--preset", choices=sorted(PRESETS), help="a workload of docs/benchmarks.md; flags below change it")
    add("--workload", choices=[kind.value for kind in Kind if kind is not Kind.TRACE])
    add("--input-tokens", type=int, help="prompt tokens new to every request")
    add("--output-tokens", type=int)
    add("--prefix-tokens", type=int, help="shared-prefix, chat: tokens common to a group, before the new ones")
    add("--groups", type=int, help="shared-prefix, chat: number of groups")
    add("--turns", type=int, help=f"chat: requests of each, default {CHAT['turns']}")
    add(
        "--think",
        type=float,
        metavar="S",
        help=f"chat: mean pause between an answer and the next question, default {CHAT['think_s']:g}",
    )
    add("--token-range", type=_reading(_range), metavar="LOW:HIGH", help="draw token ids from here; default 100:32000")


def _add_loops(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("when it is sent").add_argument
    add(
        "--concurrency",
        type=_reading(_levels),
        metavar="N[,N...]",
        help="closed loop: requests at once, one level for each",
    )
    add(
        "--rate",
        type=_reading(_loads),
        metavar="R[,R...]",
        help="open loop: requests per second, whatever is outstanding, one level for each",
    )
    add("--burstiness", type=float, help="gamma shape of the gaps at a rate; default 1: Poisson arrivals")
    add("--trace", type=Path, metavar="FILE", help="open loop: prompts and times of a trace in Mooncake's form")
    add("--trace-speed", type=_reading(_loads), metavar="X[,X...]", help="play the trace faster, or slower below 1")
    add("--requests", type=int, help="per level, in whole chats; of a trace: its first rows, default all")
    add(
        "--warmup",
        type=int,
        help=f"requests before the first level; default: the highest concurrency, or {WARMUP_AT_ONCE}",
    )


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is good enough").add_argument
    add("--slo", type=_reading(parse_slo), metavar="ttft=T,itl=T,e2e=T", help="limits of a request: 0.5, 0.5s or 500ms")
    add("--search", action="store_true", help="find the largest rate, or trace speed, that keeps --slo")
    add("--attainment", type=float, help="search: the share of requests that must keep it, default 0.9")
    add("--tolerance", type=float, help="search: stop when the limit is known to this share, default 0.1")
    add("--max-rate", type=float, help="search: try no larger rate, or speed; default 1024")
    add("--probe-s", type=seconds, metavar="S", help="search: the least that a probe lasts; default: as --slo needs")


def read_plan(options: argparse.Namespace) -> tuple[LoadPlan, list[traces.TraceRow]]:
    """Combine the preset, or the defaults, with the flags that were given; with the rows of the trace, if one is.
    Raises `ValueError`, and OSError for a trace that cannot be read."""
    _agree(options)
    rows = _rows(options) if options.trace is not None else []
    base = PRESETS.get(options.preset, CUSTOM)
    workload = _of_trace(rows) if rows else base.workload
    workload = msgspec.structs.replace(workload, **_workload_flags(options, workload))
    workload.check()
    loads: tuple[float, ...] = options.rate or ()
    if rows:
        loads = options.trace_speed or (1.0,)
    elif options.search and not loads:
        loads = (1.0,)
    concurrency = () if loads else _concurrency(options, base, workload)
    if workload.kind is Kind.STREAM and concurrency != (1,):
        raise ValueError("the stream workload runs one request at once")
    requests = len(rows) or options.requests
    if requests is None:
        requests = PROBE_REQUESTS if options.search else base.requests
    warmup = max(concurrency, default=WARMUP_AT_ONCE) if options.warmup is None else options.warmup
    if min((*concurrency, requests)) < 1 or warmup < 0 or not options.timeout_s > 0:
        raise ValueError("concurrency, requests and timeout must be above zero")
    plan = LoadPlan(
        target=options.target,
        address=options.address,
        workload=workload,
        requests=requests,
        concurrency=concurrency,
        warmup=warmup,
        seed=options.seed,
        timeout_s=options.timeout_s,
        model=options.model,
        pids=tuple(options.pid),
        loads=loads,
        burstiness=1.0 if options.burstiness is None else options.burstiness,
        trace="" if options.trace is None else str(options.trace),
        slo=options.slo,
        search=_search(options, workload, loads) if options.search else None,
    )
    check_burstiness(plan.burstiness)
    return plan, rows


def _agree(options: argparse.Namespace) -> None:
    """Raise ValueError where two flags contradict each other, or one lacks another."""

    def given(names: tuple[str, ...]) -> str:
        """Return the first flag of these that was given; empty if none was."""
        found = next((name for name in names if getattr(options, name) is not None), "")
        return f"--{found}".replace("_", "-") if found else ""

    if options.trace is not None and (other := given((*_SHAPE, *_OPEN, "concurrency"))):
        raise ValueError(f"{other} and --trace exclude each other: a trace has prompts and times of its own")
    if options.trace is None and options.trace_speed is not None:
        raise ValueError("--trace-speed needs --trace")
    if options.concurrency is not None and (options.rate is not None or options.search):
        raise ValueError("--concurrency is of the closed loop, --rate and --search are of the open one")
    if options.burstiness is not None and options.rate is None and not options.search:
        raise ValueError("--burstiness needs --rate")
    if not options.search and (other := given(tuple(_SEARCH))):
        raise ValueError(f"{other} needs --search")
    if options.search and options.slo is None:
        raise ValueError("--search needs --slo: what is to be kept")


def _concurrency(options: argparse.Namespace, base: Preset, workload: Workload) -> tuple[int, ...]:
    if options.concurrency is not None:
        return tuple(options.concurrency)
    if workload.kind is base.workload.kind:
        return base.concurrency
    return (1,) if workload.kind is Kind.STREAM else (8,)


def _search(options: argparse.Namespace, workload: Workload, loads: tuple[float, ...]) -> SearchPlan:
    given = {name: getattr(options, name) for name in _SEARCH if getattr(options, name) is not None}
    wanted = _SEARCH | given
    plan = SearchPlan(
        attainment=wanted["attainment"], tolerance=wanted["tolerance"], most=wanted["max_rate"], probe_s=1.0
    )
    plan.check()
    if len(loads) != 1:
        raise ValueError("--search begins at one rate, or one speed")
    if loads[0] > plan.most:
        raise ValueError("--search begins above --max-rate")
    least_s = long_enough_s(options.slo, plan.attainment, plan.tolerance, workload)
    return msgspec.structs.replace(plan, probe_s=wanted["probe_s"] or least_s)


def _rows(options: argparse.Namespace) -> list[traces.TraceRow]:
    if options.requests is not None and options.requests < 1:
        raise ValueError("requests must be above zero")
    rows = traces.read(options.trace)[: options.requests]
    if not rows:
        raise ValueError(f"{options.trace}: the trace is empty")
    for number, row in enumerate(rows, 1):
        if row.input_length < 1 or row.output_length < 1:
            raise ValueError(f"{options.trace}, row {number}: no prompt or no answer, which cannot be asked for")
    if options.search and not traces.span_s(rows) > 0:
        raise ValueError(f"{options.trace}: all requests come at once, and no speed changes that")
    return rows


def _of_trace(rows: list[traces.TraceRow]) -> Workload:
    """Return the workload that a trace is, with its mean lengths, rounded."""
    inputs, outputs = (sum(lengths) for lengths in zip(*((r.input_length, r.output_length) for r in rows), strict=True))
    count = len(rows)
    return Workload(
        kind=Kind.TRACE, input_tokens=max(1, round(inputs / count)), output_tokens=max(1, round(outputs / count))
    )


def _workload_flags(options: argparse.Namespace, base: Workload) -> dict[str, object]:
    names = ("input_tokens", "output_tokens", "prefix_tokens", "groups", "turns")
    given: dict[str, object] = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    kind = base.kind if options.workload is None else Kind(options.workload)
    given["kind"] = kind
    if kind is Kind.SHARED_PREFIX and base.kind is not kind:
        shared = PRESETS["B"].workload
        given = {"prefix_tokens": shared.prefix_tokens, "groups": shared.groups} | given
    if options.think is not None:
        given["think_s"] = options.think
    if kind is Kind.CHAT:
        given = CHAT | given
    if options.token_range is not None:
        given |= dict(zip(("token_low", "token_high"), options.token_range, strict=True))
    return given


def _levels(text: str) -> tuple[int, ...]:
    """Parse how many requests are to run at once, level by level. Raises ValueError."""
    return _once(tuple(int(part) for part in text.split(",")))


def _loads(text: str) -> tuple[float, ...]:
    """Parse rates, or speeds. Raises ValueError."""
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < load < math.inf for load in found):
        raise ValueError("each must be above zero and finite")
    return _once(found)


def _range(text: str) -> tuple[int, int]:
    """Parse the first id and the one after the last. Raises ValueError."""
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise ValueError("must be two whole numbers, LOW:HIGH") from None


def _once(levels: tuple[_T, ...]) -> tuple[_T, ...]:
    """Return the levels, whose prompts are drawn by what they are. Raises ValueError where one is there twice."""
    if len(set(levels)) < len(levels):
        raise ValueError("the same one twice would send the same prompts again")
    return levels


def _reading(read: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return a parser whose ValueError argparse shows with its own words."""

    def parse(text: str) -> _T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error

    return parse
