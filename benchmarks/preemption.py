"""Compares recompute with swap, what it costs to take a KV away and to have it back: `python -m benchmarks.preemption`.

One request at a time decodes on the demo model, is preempted, loses every block of its own on the device, and comes
back, by both ways, for several lengths and block sizes. *Recompute*: the prefill pool computes all of its tokens again,
or has all whole blocks in its cache and only sends them; *swap*: whole blocks are copied to host memory (out) and back
(in), with digests, and the rest is computed. Both schedulers run in one thread, whose processor time is told, in
milliseconds until the request decodes again; medians of `--repeats` in which the ways take turns, and ratios to swap,
out and in, of the same turn.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import figures, output
from benchmarks.bed import random_prompt
from benchmarks.offline import record
from decode_worker.scheduler.request import Request, RequestState
from engine.config import EngineConfig, TierConfig
from engine.device import EngineDevice, open_device
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import TierEvent, TiersDied
from engine.model.prepared.cache import prepare
from engine.storage.tiers.opening import Tiering, open_tiers
from fakes.colocated import Colocated
from worker.config import DecodeConfig

Make = Callable[[int], EngineDevice]
ANSWER = 8
DECODED = 3
"""Tokens of the answer before the request is preempted."""
VOCAB = 200
POOL_BYTES = 64 * 1024 * 1024
STUCK_TURNS = 10_000


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds that one request took by one way."""

    out_s: float
    back_s: float
    way: str


class SchedulerPair:
    """One pair of schedulers. Mutable state: events of the tier thread that are held back."""

    def __init__(self, prefill: EngineDevice, decode: EngineDevice) -> None:
        self._held: list[TierEvent | TiersDied] | None = None
        self._decode_device = decode
        # All but what is less than a block comes from the prefill pool; its cache has no tier below it.
        chunk_tokens = decode.layout.block_size
        config = DecodeConfig(preemption="swap", local_chunk_tokens=chunk_tokens)
        self.both = Colocated(prefill, decode, decode_config=config, decode_tiering=self._open)

    def _open(self, on_event: Callable[[object], None]) -> Tiering:
        def told(event: TierEvent | TiersDied) -> None:
            (on_event if self._held is None else self._held.append)(event)

        nbytes = self._decode_device.blocks * self._decode_device.layout.block_bytes
        tiering = open_tiers(TierConfig(host_bytes=nbytes), self._decode_device, "decode-0", told)
        assert tiering is not None
        self._tiering = tiering
        return tiering

    def run(self, name: str, prompt: list[int], *, swaps: bool = False, cached: bool = False) -> Turn:
        """Preempt one request and bring it back. `swaps`: by the copies, else they are dropped; `cached`: the prefill
        pool still has the request's whole blocks when it comes back."""
        both = self.both
        answer = both.submit(record(name, prompt, ANSWER, name.encode()))
        self._until(lambda: len(answer.tokens) >= DECODED)
        (request,) = both.decode.batch.running
        began_s = time.thread_time()
        both.decode.preemption.preempt([request], time.monotonic())
        self._copy_out()
        out_s = time.thread_time() - began_s
        if not swaps:
            both.decode.swapping.drop(request)
        with emptied(both.decode.kv):
            pass
        if not cached:
            with emptied(both.prefill.kv):
                pass
        back_s = self._back(request)
        if len(answer.tokens) < ANSWER:
            self._until(lambda: answer.ended is not None)
        while both.turn():
            pass
        return Turn(out_s, back_s, both.decode.swapping.take_resumed()[-1].way)

    def _copy_out(self) -> None:
        """Copy the blocks out as the engine and its tier thread do, but without the request's coming back at once."""
        tiers, mover = self._tiering.tiers, self._tiering.mover
        self._held = []
        commands = tiers.take_commands()
        mover.save(commands)
        mover.submit(commands)
        mover.run_once()
        held, self._held = self._held, None
        for event in held:
            assert not isinstance(event, TiersDied)
            self.both.decode.handle(event, time.monotonic())

    def _back(self, request: Request) -> float:
        began_s = time.thread_time()
        self._until(lambda: request.state is RequestState.RUNNING or request.record.request not in names(self.both))
        return time.thread_time() - began_s

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(STUCK_TURNS):
            if done():
                return
            self.both.turn()
        raise RuntimeError(f"stuck: {self.both.prefill!r}, {self.both.decode!r}")


def names(both: Colocated) -> set[str]:
    """The names of the requests that have not ended."""
    return {name for name, answer in both.answers.items() if answer.ended is None}


@contextmanager
def emptied(kv: KVCacheManager) -> Iterator[Lease]:
    """Empty the cache, inside this block and when it ends."""
    room = kv.available * kv.block_size
    lease = kv.acquire(b"everything", [0], match_limit=0, room_tokens=room)
    assert lease is not None
    yield lease
    kv.release(lease)


def measure(
    make: Make, sizes: Sequence[int], lengths: Sequence[int], repeats: int
) -> list[dict[str, str | int | float]]:
    """Return a line for each block size and length of a prompt in tokens."""
    table: list[dict[str, str | int | float]] = []
    for size in sizes:
        with ExitStack() as stack:
            devices = make(size), make(size)
            for device in devices:
                stack.callback(device.kv.close)
            bench = SchedulerPair(*devices)
            stack.callback(bench.both.close)
            bench.run("first", random_prompt(size * 2, VOCAB, "first"))  # what a first run pays for
            for length in lengths:
                turns = []
                for at in range(repeats):
                    name = f"{length} {at}"
                    prompt = random_prompt(length, VOCAB, name)
                    turns.append(
                        (
                            bench.run(f"{name} computed", prompt),
                            bench.run(f"{name} sent", prompt, cached=True),
                            bench.run(f"{name} swapped", prompt, swaps=True),
                        )
                    )
                table.append(_line(size, length, turns))
    return table


def _line(size: int, length: int, turns: Sequence[tuple[Turn, Turn, Turn]]) -> dict[str, str | int | float]:
    for computed, sent, swapped in turns:
        if (computed.way, sent.way, swapped.way) != ("pool", "pool", "swap"):
            raise RuntimeError(f"came back by {computed.way}, {sent.way}, {swapped.way}")
    whole = [swapped.out_s + swapped.back_s for _, _, swapped in turns]
    ratios = [computed.back_s / w for (computed, _, _), w in zip(turns, whole, strict=True)]
    sent_ratios = [sent.back_s / w for (_, sent, _), w in zip(turns, whole, strict=True)]
    return {
        "block size": size,
        "tokens": length,
        "computed ms": median(1000 * computed.back_s for computed, _, _ in turns),
        "sent ms": median(1000 * sent.back_s for _, sent, _ in turns),
        "swap out ms": median(1000 * swapped.out_s for _, _, swapped in turns),
        "swap in ms": median(1000 * swapped.back_s for _, _, swapped in turns),
        "computed / swap": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "sent / swap": median(sent_ratios),
    }


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--sizes", type=figures.numbers, default=[16, 64])
    parser.add_argument("--lengths", type=figures.numbers, default=[64, 128, 256], help="of prompts")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    with TemporaryDirectory() as folder:
        model_dir = str(prepare(None, Path(folder)))

        def make(block_size: int) -> EngineDevice:
            config = EngineConfig(model_dir=model_dir, threads=1, block_size=block_size, pool_bytes=POOL_BYTES)
            return open_device(config)

        table = measure(make, options.sizes, options.lengths, options.repeats)
    output.tell(options, "preemption", {f"after {DECODED} output tokens, demo model": table})


if __name__ == "__main__":
    main()
