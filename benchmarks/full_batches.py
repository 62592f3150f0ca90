"""Throughput against inter-token latency: what a decode worker gains by steps that wait for rows about to land.

    python -m benchmarks.full_batches --targets none,auto,30,60,100,200,pool --rounds 3

A cluster of one prefill and one decode worker is started for each target in each round (`decode.itl_target_ms`, in
milliseconds; `none`: no step waits; `auto`: the default; `pool`: one pool of two workers instead), and asked over HTTP;
the order turns from round to round. A line is a point of the curve: medians over rounds (middle half), and the rate
over that of the first target in the same round. `CPU ms` is the processor time of all processes of the cluster for each
token of the answers, which depends least on what else runs on the machine; the other figures are of an idle one.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from rich.table import Table

from benchmarks.figures import middle, show, write_json
from benchmarks.peers import PeerServer, free_port, headrace, running
from benchmarks.processor import ProcessorTime, processor_time
from cluster.bench.driver import Level, LoadGenerator, LoadPlan
from cluster.bench.stats import Summary
from cluster.bench.targets import open_target
from cluster.bench.workloads import PRESETS
from cluster.processes.spec import LaunchError
from router.front.api import ApiError

POOL, NONE, AUTO = "pool", "none", "auto"


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One target in one round."""

    round: int
    target: str
    processor: ProcessorTime
    summary: Summary

    @property
    def rate(self) -> float:
        return self.summary.output_tokens_per_s

    @property
    def token_s(self) -> float:
        """Return the processor time of a token of the answers."""
        return self.processor.all_s / self.summary.output_tokens


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_batches", description=__doc__)
    add = parser.add_argument
    add("--targets", default="none,auto,30,60,100,200,pool", help="milliseconds, none, auto, or pool")
    add("--preset", default="A", choices=sorted(PRESETS))
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=0, help="instead of the preset's number")
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    targets = options.targets.split(",")
    for target in targets:
        if target not in (NONE, AUTO, POOL) and not _is_positive(target):
            parser.error(f"--targets {target}: milliseconds above 0, {NONE}, {AUTO}, or {POOL}")
    rows = []
    try:
        with TemporaryDirectory(prefix="headrace-batches-") as folder:
            for number in range(options.rounds):
                for target in targets[number % len(targets) :] + targets[: number % len(targets)]:
                    log = Path(folder) / f"{target}-{number}.log"
                    rows.append(_measure(target, options.preset, options.requests, number, log))
    except (LaunchError, ApiError) as error:
        print(f"full_batches: {error}", file=sys.stderr)
        return 1
    show(_table(rows, targets))
    if options.json is not None:
        settings = {"preset": options.preset, "rounds": options.rounds, "requests": options.requests}
        write_json(options.json, "full_batches", settings, rows)
    return 0


def _is_positive(text: str) -> bool:
    try:
        return 0.0 < float(text) < float("inf")
    except ValueError:
        return False


def _server(target: str, port: int) -> PeerServer:
    if target == POOL:
        return headrace(port, flags=("--workers", "2"))
    value = "off" if target == NONE else target
    return headrace(port, flags=("--set", f"decode.itl_target_ms={value}"))


def _measure(target: str, preset_name: str, requests: int, number: int, log: Path) -> BatchRow:
    preset, port = PRESETS[preset_name], free_port()
    with log.open("wb") as output, running(_server(target, port), port, output) as (pid, _):
        plan = LoadPlan(
            target="http",
            address=f"127.0.0.1:{port}",
            workload=preset.workload,
            requests=requests or preset.requests,
            concurrency=preset.concurrency,
            warmup=max(preset.concurrency),
            seed=number,
            timeout_s=600.0,
            model=None,
            pids=(pid,),
        )
        level, spent = asyncio.run(_asked(plan, pid))
    if level.summary.failed:
        raise ApiError("FAILED", f"target {target}: {level.messages}")
    row = BatchRow(round=number, target=target, processor=spent, summary=level.summary)
    print(f"{number} {target}: {row.rate:.1f} tokens/s, {row.token_s * 1e3:.2f} ms of a core each", file=sys.stderr)
    return row


async def _asked(plan: LoadPlan, pid: int) -> tuple[Level, ProcessorTime]:
    """Warm up and measure; return what came of it, and the processor time of the measured part."""
    target = open_target(plan.target, plan.address)
    try:
        generator = LoadGenerator(target, plan)
        await generator.warm_up()
        before = processor_time(pid)
        level = await generator.at_once(plan.concurrency[0])
        return level, processor_time(pid).since(before)
    finally:
        await target.close()


def _table(rows: list[BatchRow], targets: list[str]) -> Table:
    """Make one line per target: its rate, and over that of the first target per round; gaps, and the first token."""
    table = Table(title="one run: medians over rounds (middle half)", title_justify="left")
    over = f"over {targets[0]}"
    for heading in ("target ms", "tokens/s", over, "CPU ms", over, "ITL ms", "ITL p99 ms", "TTFT ms"):
        table.add_column(heading, justify="right")
    first = {row.round: row for row in rows if row.target == targets[0]}
    for target in targets:
        mine = [row for row in rows if row.target == target]
        gaps = [row.summary.itl_s for row in mine if row.summary.itl_s]
        ttft = [row.summary.ttft_s.mean for row in mine if row.summary.ttft_s]
        table.add_row(
            target,
            middle([row.rate for row in mine]).cell(),
            middle([row.rate / first[row.round].rate for row in mine]).cell(digits=2),
            middle([row.token_s for row in mine]).cell(1000, 2),
            middle([row.token_s / first[row.round].token_s for row in mine]).cell(digits=2),
            middle([gap.mean for gap in gaps]).cell(1000, 0) if gaps else "",
            middle([gap.p99 for gap in gaps]).cell(1000, 0) if gaps else "",
            middle(ttft).cell(1000, 0),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
