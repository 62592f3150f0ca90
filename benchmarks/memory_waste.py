"""Measures how much KV memory holds live tokens, paged against contiguous: `python -m benchmarks.memory_waste`.

Chat-like requests (log-normal prompt and answer lengths) run through the real block pool, admitted in order as soon as
there is room, one token each a step, until the pool has turned over several times. `live %` is the share of slots held
by requests that hold a token: the mean over all steps. Contiguous reservation, of which there are two, holds slots for
the longest possible sequence, or for the prompt and `max_tokens`, from a request's first step on.
`at once` is the mean number of requests running: paged requests are also promised room for `max_tokens`, which goes on
holding cached prefixes until it is needed. `if known` is how many would run if the length of every answer were known in
advance: the most that preemption could gain.
"""

import argparse
from dataclasses import dataclass, field
from random import Random

from benchmarks import output
from engine.kv.manager import KVCacheManager, Lease

BLOCK_SIZES = (1, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Mix:
    """Lengths of requests: log-normal with these medians (tokens) and sigmas, and cut so that a request fits `context`.
    `max_tokens` is what callers allow for the answer."""

    prompt_median: float = 180.0
    prompt_sigma: float = 1.1
    answer_median: float = 150.0
    answer_sigma: float = 1.0
    max_tokens: int = 1024
    context: int = 2048

    def draw(self, random: Random) -> tuple[int, int]:
        answer = random.lognormvariate(0.0, self.answer_sigma) * self.answer_median
        prompt = random.lognormvariate(0.0, self.prompt_sigma) * self.prompt_median
        answer_tokens = min(max(1, int(answer)), self.max_tokens)
        return min(max(1, int(prompt)), self.context - self.max_tokens), answer_tokens


@dataclass
class SlotTally:
    """Sums of slots over steps."""

    live: int = 0
    held: int = 0
    running: int = 0
    least: float = 1.0
    steps: int = 0

    def add(self, live: int, held: int, running: int) -> None:
        self.live += live
        self.held += held
        self.running += running
        self.least = min(self.least, live / held)
        self.steps += 1

    def row(self, name: str) -> dict[str, str | int | float]:
        return {
            "slots": name,
            "live %": 100 * self.live / self.held,
            "least live %": 100 * self.least,
            "at once": self.running / self.steps,
        }


@dataclass
class _Running:
    tokens: int
    end: int
    lease: Lease | None = None
    reserved: int = field(default=0)


def paged(mix: Mix, slots: int, block_size: int, steps: int, seed: int, promise: bool) -> SlotTally:
    kv = KVCacheManager(slots // block_size, block_size, "waste")
    random, tally = Random(seed), SlotTally()
    running: list[_Running] = []
    prompt, answer = mix.draw(random)
    for _ in range(steps):
        while True:
            grow = prompt + (mix.max_tokens if promise else answer)
            lease = kv.acquire(
                b"", range(prompt), match_limit=0, room_tokens=prompt, grow_tokens=grow
            )
            if lease is None:
                break
            running.append(_Running(prompt, prompt + answer, lease))
            prompt, answer = mix.draw(random)
        for one in running:
            assert one.lease is not None
            one.tokens += 1
            kv.extend(one.lease, one.tokens)
        held = kv.pool.counts()["active"] * block_size
        tally.add(sum(one.tokens for one in running), held, len(running))
        for one in [one for one in running if one.tokens >= one.end]:
            assert one.lease is not None
            kv.release(one.lease)
            running.remove(one)
        kv.take_handed_out()
    kv.check()
    return tally


def contiguous(mix: Mix, slots: int, steps: int, seed: int, whole_context: bool) -> SlotTally:
    """Run with one piece per request. Pieces are taken to fit whenever there are slots enough: gaps between them, which
    a real allocator also loses, are left out."""
    random, tally = Random(seed), SlotTally()
    running: list[_Running] = []
    held = 0
    prompt, answer = mix.draw(random)
    for _ in range(steps):
        while True:
            piece = mix.context if whole_context else prompt + mix.max_tokens
            if held + piece > slots:
                break
            held += piece
            running.append(_Running(prompt, prompt + answer, reserved=piece))
            prompt, answer = mix.draw(random)
        for one in running:
            one.tokens += 1
        tally.add(sum(one.tokens for one in running), held, len(running))
        for one in [one for one in running if one.tokens >= one.end]:
            held -= one.reserved
            running.remove(one)
    return tally


def measure(mix: Mix, slots: int, steps: int, seed: int) -> list[dict[str, str | int | float]]:
    table = []
    for block_size in BLOCK_SIZES:
        row = paged(mix, slots, block_size, steps, seed, promise=True).row(f"blocks of {block_size}")
        known = paged(mix, slots, block_size, steps, seed, promise=False)
        table.append(row | {"if known": known.running / known.steps})
    for name, whole in (("contiguous, prompt + max_tokens", False), ("contiguous, context", True)):
        row = contiguous(mix, slots, steps, seed, whole).row(name)
        table.append(row | {"if known": row["at once"]})
    return table


def wasted(reserved_tokens: int, lengths: list[int]) -> float:
    """Return the share of contiguously reserved slots that hold no token once all sequences have these lengths."""
    return 1 - sum(lengths) / (reserved_tokens * len(lengths))


def _options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--slots", type=int, default=65_536, help="token slots of the pool")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = _options(output.parser(__doc__))
    mix = Mix()
    table = measure(mix, options.slots, options.steps, options.seed)
    title = f"{options.slots} slots, {options.steps} steps, {mix}"
    output.tell(options, "memory_waste", {title: table})


if __name__ == "__main__":
    main()
