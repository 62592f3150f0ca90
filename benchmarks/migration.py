"""Measures what moving a prompt's KV costs, by its length: `python -m benchmarks.migration`.

Real clusters of one prefill and one decode worker, for each transport one with digests and one without, all alive at
once and asked in turns, so that other work on the machine strikes all alike. Every prompt is new: nothing is cached.
`migration` is copying and comparing, summed over chunks; most of it hides behind the prefill, and the `migrate` stage
is what did not. Beside it the bound: the same bytes at the speed of one thread's memory copy, measured in the same run.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from benchmarks.bed import Bed, random_prompt, transfer_config
from benchmarks.counting import CopyCounts
from benchmarks.figures import Middle, middle, numbers, show, write_json
from cluster.processes.spec import model_cache
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare

TOKENS = (1, 64, 256, 512, 1024, 1500)
TRANSPORTS = ("shm", "tcp")
COPY_BYTES = 128 << 20


class MigrationLine(msgspec.Struct, frozen=True, kw_only=True):
    """One length over one transport; digests are made and compared, or not."""

    transport: str
    digests: bool
    prompt_tokens: int
    blocks: int
    nbytes: int
    migration_s: Middle
    migrate_stage_s: Middle
    ttft_s: Middle
    send_digest_cpu_s: Middle
    """CPU seconds of the transfer thread per request, on the prefill worker."""
    recv_digest_cpu_s: Middle
    digest_share: Middle
    """CPU time of the digests of both workers, as a share of the time to first token."""
    digests_made: int
    digests_off_thread: int
    """Digests that any thread but the transfer thread made: must be none."""


class _Sample(msgspec.Struct, frozen=True):
    blocks: int
    nbytes: int
    migration_s: float
    migrate_stage_s: float
    ttft_s: float
    send: CopyCounts
    recv: CopyCounts


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    model_dir = prepare(options.model, options.cache_dir)
    lines, copy = measure(model_dir, options.tokens, options.transports, options.repeats)
    show(_table(lines, copy))
    strays = sum(line.digests_off_thread for line in lines)
    if strays:
        print(f"{strays} digests were made outside the transfer thread", file=sys.stderr)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "migration", settings, {"copy_bytes_per_s": copy, "lines": lines})
    return 1 if strays else 0


def measure(
    model_dir: Path,
    lengths: list[int],
    transports: list[str],
    repeats: int,
    engine: EngineConfig | None = None,
) -> tuple[list[MigrationLine], Middle]:
    """Return the lines, and this machine's speed of copying memory in bytes per second."""
    kinds = [(transport, digests) for transport in transports for digests in (True, False)]
    vocab = ModelConfig.load(model_dir).vocab
    samples: dict[tuple[str, bool, int], list[_Sample]] = {}
    copies = []
    with ExitStack() as stack:
        beds = {}
        for transport, digests in kinds:
            transfer = transfer_config(transport, digests)
            bed = Bed(model_dir, transfer=transfer, engine=engine or EngineConfig())
            beds[transport, digests] = stack.enter_context(bed)
        for number in range(repeats + 1):
            copies.append(copy_bytes_per_s())
            for tokens in lengths:
                for kind in kinds[:: 1 if number % 2 else -1]:
                    prompt = random_prompt(tokens, vocab, (number, tokens, kind))
                    sample = _sample(beds[kind], prompt)
                    if number:  # the first round warms processes up
                        samples.setdefault((*kind, tokens), []).append(sample)
    return [_line(*key, found) for key, found in samples.items()], middle(copies)


def _sample(bed: Bed, prompt: list[int]) -> _Sample:
    before = bed.counts("")
    answer = bed.ask(prompt, 2, "")
    stats = answer.finished.stats
    spent = {name: counts.since(before[name]) for name, counts in bed.counts("").items()}
    return _Sample(
        blocks=stats.migrated_blocks,
        nbytes=stats.migrated_bytes,
        migration_s=stats.migration_s,
        migrate_stage_s=stats.stages["migrate"],
        ttft_s=answer.ttft_s,
        send=spent["prefill-0"],
        recv=spent["decode-0"],
    )


def _line(transport: str, digests: bool, tokens: int, found: list[_Sample]) -> MigrationLine:
    return MigrationLine(
        transport=transport,
        digests=digests,
        prompt_tokens=tokens,
        blocks=found[0].blocks,
        nbytes=found[0].nbytes,
        migration_s=middle([s.migration_s for s in found]),
        migrate_stage_s=middle([s.migrate_stage_s for s in found]),
        ttft_s=middle([s.ttft_s for s in found]),
        send_digest_cpu_s=middle([s.send.digest_cpu_s for s in found]),
        recv_digest_cpu_s=middle([s.recv.digest_cpu_s for s in found]),
        digest_share=middle([(s.send.digest_cpu_s + s.recv.digest_cpu_s) / s.ttft_s for s in found]),
        digests_made=sum(s.send.digests + s.recv.digests for s in found),
        digests_off_thread=sum(s.send.digests_elsewhere + s.recv.digests_elsewhere for s in found),
    )


def copy_bytes_per_s(size: int = COPY_BYTES) -> float:
    """Time one thread copying from memory to memory: what no transport can beat."""
    source, target = np.ones(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
    target[:] = 0
    began_s = time.perf_counter()
    target[:] = source
    return size / (time.perf_counter() - began_s)


def _table(lines: list[MigrationLine], copy: Middle) -> Table:
    title = f"KV migration; median (middle half); memory copies at {copy.median / 1e9:.1f} GB/s"
    table = Table(title=title, title_justify="left")
    for name in ("over", "digests", "prompt tokens", "blocks", "MiB", "copy + verify ms", "bound ms"):
        table.add_column(name, justify="right")
    for name in ("migrate ms", "TTFT ms", "digests ms CPU", "of TTFT"):
        table.add_column(name, justify="right")
    for line in sorted(lines, key=lambda line: (line.transport, line.prompt_tokens, not line.digests)):
        digest_s = line.send_digest_cpu_s.median + line.recv_digest_cpu_s.median
        table.add_row(
            line.transport,
            "on" if line.digests else "off",
            str(line.prompt_tokens),
            str(line.blocks),
            f"{line.nbytes / (1 << 20):.1f}",
            line.migration_s.cell(1e3),
            f"{line.nbytes / copy.median * 1e3:.1f}",
            line.migrate_stage_s.cell(1e3),
            line.ttft_s.cell(1e3, 0),
            f"{digest_s * 1e3:.1f}" if line.digests else "–",
            f"{line.digest_share.median:.2%}" if line.digests else "–",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a GGUF file or a directory; default: the demo's")
    add("--cache-dir", type=Path, default=model_cache(), help="of prepared models")
    add("--tokens", type=numbers, default=list(TOKENS), help="prompt lengths")
    add("--transports", type=lambda text: text.split(","), default=list(TRANSPORTS))
    add("--repeats", type=int, default=5)
    add("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
