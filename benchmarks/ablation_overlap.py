"""Measures what moving blocks while the next chunk computes is worth: `python -m benchmarks.ablation_overlap`, demo
model.

Two clusters of real processes, one prefill and one decode worker each, take turns: one as it is, one whose prefill
worker offers nothing before the whole prompt is computed. One request at a time, so that what is seen is the overlap
alone: the wall time to the second token, which needs all blocks, and the stage `migrate`, which is what the overlap did
not hide. Medians of `--repeats`; the ratio is of two requests that followed each other.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import prefill_worker.role
from benchmarks import figures, output
from benchmarks.bed import Bed, random_prompt, transfer_config
from benchmarks.counting import FACTORIES, counting_prefill_worker
from engine.config import EngineConfig
from engine.model.prepared.cache import prepare
from prefill_worker.scheduler.order import Job
from prefill_worker.scheduler.scheduler import PrefillScheduler
from transfer.handoff.commands import Command
from worker.worker import Worker

WAITING = FACTORIES | {"prefill": "benchmarks.ablation_overlap:waiting_prefill_worker"}
VOCAB = 30_000


class WaitingScheduler(PrefillScheduler):
    """A prefill scheduler that offers a prompt's blocks when all of it is computed."""

    def _offer(self, job: Job, known_tokens: int) -> list[Command]:
        return super()._offer(job, known_tokens) if known_tokens == len(job.record.tokens) else []


def waiting_prefill_worker(*arguments: Any) -> Worker[Any]:
    """Open a prefill worker with WaitingScheduler. Runs in a process of its own, where the name it replaces has no
    other reader."""
    module: Any = prefill_worker.role
    module.PrefillScheduler = WaitingScheduler
    return counting_prefill_worker(*arguments)


def measure(model_dir: Path, prompts: list[int], transports: list[str], repeats: int) -> list[output.Line]:
    table: list[output.Line] = []
    for transport in transports:
        with ExitStack() as stack:
            beds = {
                name: stack.enter_context(
                    Bed(
                        model_dir,
                        transfer=transfer_config(transport, digests=True),
                        engine=EngineConfig(threads=1),
                        factories=factories,
                    )
                )
                for name, factories in (("overlapped", FACTORIES), ("waiting", WAITING))
            }
            for bed in beds.values():
                bed.ask(random_prompt(300, VOCAB, 0), 2, "warm")
            for tokens in prompts:
                asked = random_prompt(tokens, VOCAB, tokens)
                turns = [
                    {name: bed.ask(asked, 2, f"{turn} {tokens}") for name, bed in beds.items()}
                    for turn in range(repeats)
                ]
                if any(turn["overlapped"].tokens != turn["waiting"].tokens for turn in turns):
                    raise RuntimeError("when blocks are offered changes tokens")
                second = [{name: one.arrivals_s[1] for name, one in turn.items()} for turn in turns]
                ratios = [turn["waiting"] / turn["overlapped"] for turn in second]
                line: dict[str, str | int | float] = {"transport": transport, "prompt": tokens}
                for name in beds:
                    line[f"2nd token ms, {name}"] = median(1000 * turn[name] for turn in second)
                line |= {"ratio": median(ratios), "least": min(ratios), "most": max(ratios)}
                for name in beds:
                    line[f"migrate ms, {name}"] = median(
                        1000 * turn[name].finished.stats.stages["migrate"] for turn in turns
                    )
                table.append(line)
    return table


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--prompts", type=figures.numbers, default=[256, 1024], help="tokens: 256,1024")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    with TemporaryDirectory() as folder:
        model_dir = prepare(None, Path(folder))
        table = measure(model_dir, options.prompts, options.transports, options.repeats)
    output.tell(options, "ablation_overlap", {"one request at a time, demo model": table})


if __name__ == "__main__":
    main()
