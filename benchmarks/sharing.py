"""Measures what samples and beam searches save by sharing blocks: `python -m benchmarks.sharing`.

On the demo model, both workers in one process and thread. `n` samples of one prompt: once as forks of the first, once
as `n` requests with the same prompt that come at the same moment. A search of width `n`: once with hypotheses that
fork each other's blocks, once with every fork copied whole, as where a sequence's memory is one piece. `blocks` is the
most that the decode worker's pool held at once, `migrated` what came to it, `tokens/s` the rows of all samples or
hypotheses over the processor time from the first placement to the last end, which other work on the machine inflates
little. Both ways give the same answers, which is checked. The median of `--repeats` runs that take turns, each on an
empty cache.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks import output
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.kv.block_pool import BlockPool
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.tiers import Tiers
from engine.model.prepared.cache import prepare
from engine.runner import Launched, Runner
from engine.step import StepPlan
from engine.types import BeamParams, RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated

Make = Callable[[], EngineDevice]
Table = list[dict[str, str | int | float]]


@dataclass(frozen=True)
class SharedRun:
    """One group to its end. Blocks of the decode worker; `seconds` from the first placement to the last end."""

    peak_blocks: int
    migrated_blocks: int
    seconds: float
    answers: list[list[int]]


class _Copying(KVCacheManager):
    """A manager that shares nothing: a fork has a copy of every block, and no block is indexed for others to find."""

    def fork(self, parent: Lease, child: Lease, tokens: int) -> None:
        if not self.grow(child, tokens // self.block_size):  # for the rest it has a promise
            raise RuntimeError("the pool is too small for hypotheses that share nothing")
        self.extend(child, tokens)
        child.cached_tokens = tokens
        pending = {target: source for source, target in parent.copies}
        sources = parent.blocks[: len(child.blocks)]
        child.copies = [(pending.get(s, s), t) for s, t in zip(sources, child.blocks, strict=True)]
        for source, _ in child.copies:
            self._hold(source)

    def commit(self, lease: Lease, tokens: Sequence[int], *, tail: bool = False) -> None:
        pass


@dataclass(frozen=True)
class _Apart(EngineDevice):
    def manager(self, tiers: Tiers | None = None, step_tokens: int = 1) -> KVCacheManager:
        return _Copying(self.blocks, self.layout.block_size, self.fingerprint, tiers)


def _record(prompt: list[int], answer: int, at: int, width: int) -> RequestRecord:
    return RequestRecord(
        request=RequestId(str(at)),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=answer,
        seed=5,
        sample_index=at,
        sampling=SamplingParams(temperature=1.0),
        beams=BeamParams(width=width, answers=width) if width else None,
        ignore_eos=True,
    )


class _Watched:
    """A runner that looks at the pool at each step: a fork that nobody continues lives only that long. Fulfils
    `engine.runner.Runner`."""

    def __init__(self, runner: Runner) -> None:
        self.kv = runner.kv
        self.pool: BlockPool | None = None
        self.peak_blocks = 0
        self._runner = runner

    def look(self) -> None:
        assert self.pool is not None
        counts = self.pool.counts()
        self.peak_blocks = max(self.peak_blocks, counts["active"] + counts["reserved"])

    def launch(self, plan: StepPlan) -> Launched:
        self.look()
        return self._runner.launch(plan)


def samples(make: Make, prompt: list[int], answer: int, n: int, is_sharing: bool) -> SharedRun:
    """Run `n` samples of `answer` tokens each behind `prompt`, on two new devices."""
    records = [_record(prompt, answer, at, width=0) for at in range(n)]
    return _run(make(), make(), records, is_sharing)


def search(make: Make, prompt: list[int], answer: int, n: int, is_sharing: bool) -> SharedRun:
    """Run a search of width `n` to `answer` tokens, on two new devices."""
    decode = make()
    if not is_sharing:
        values = {field.name: getattr(decode, field.name) for field in dataclasses.fields(decode)}
        decode = _Apart(**values)
    return _run(make(), decode, [_record(prompt, answer, 0, width=n)], False)


def _run(prefill: EngineDevice, decode: EngineDevice, records: list[RequestRecord], is_forking: bool) -> SharedRun:
    watched = _Watched(decode.runner)
    engine = Colocated(prefill, dataclasses.replace(decode, runner=watched))
    watched.pool = engine.decode.kv.pool
    began_s = time.thread_time()
    first = records[0].request
    asked = [
        engine.submit(one, first if is_forking and one.sample_index else None) for one in records
    ]
    while any(one.ended is None for one in asked):
        if not engine.turn():
            raise RuntimeError("stuck")
        watched.look()
    seconds = time.thread_time() - began_s
    while engine.turn():
        pass
    migrated_blocks = sum(migration.blocks for migration in engine.decode.prefills.handoffs.take_migrated())
    engine.close()
    found = [beam.ids for one in asked if one.ended for beam in one.ended.beams]
    answers = found or [one.tokens for one in asked]
    return SharedRun(watched.peak_blocks, migrated_blocks, seconds, answers)


def measure(
    run: Callable[[Make, list[int], int, int, bool], SharedRun],
    make: Make,
    prompt: list[int],
    answer: int,
    widths: Sequence[int],
    repeats: int,
) -> Table:
    """Measure both ways; `run` is `samples` or `search`. Raises RuntimeError if sharing changes a token."""
    samples(make, prompt, 2, 1, False)  # what a first run pays for
    table: Table = []
    for n in widths:
        pairs = [[run(make, prompt, answer, n, on) for on in (True, False)] for _ in range(repeats)]
        if any(shared.answers != alone.answers for shared, alone in pairs):
            raise RuntimeError("sharing changes tokens")
        rates = [
            statistics.median(n * answer / pair[at].seconds for pair in pairs) for at in (0, 1)
        ]
        shared, alone = pairs[0]
        table.append(
            {
                "n": n,
                "blocks": shared.peak_blocks,
                "not shared": alone.peak_blocks,
                "saved %": 100 * (1 - shared.peak_blocks / alone.peak_blocks),
                "migrated": shared.migrated_blocks,
                "migrated, not shared": alone.migrated_blocks,
                "tokens/s": rates[0],
                "tokens/s, not shared": rates[1],
            }
        )
    return table


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--answer", type=int, default=48, help="tokens of each sample")
    parser.add_argument("--samples", type=int, nargs="+", default=[2, 4, 6], help="and widths")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    random = Random(0)
    prompt = [random.randrange(1000, 40_000) for _ in range(options.prompt)]
    with TemporaryDirectory() as folder:
        config = EngineConfig(model_dir=str(prepare(None, Path(folder))), threads=1)
        make = partial(open_device, config)
        tables = {
            f"{what.__name__}: {options.prompt} prompt tokens, {options.answer} tokens, demo model": measure(
                what, make, prompt, options.answer, options.samples, options.repeats
            )
            for what in (samples, search)
        }
    output.tell(options, "sharing", tables)


if __name__ == "__main__":
    main()
