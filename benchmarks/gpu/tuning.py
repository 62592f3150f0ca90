"""The candidates for an entry of the table of configurations, each measured on the work that the entry is for.

A candidate that needs more shared memory than there is, or that the compiler refuses, is passed over; one whose answer
differs from that of the present entry is never taken, and told; one that breaks its process is told, and costs itself.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from random import Random

from torch import Tensor

from benchmarks.gpu import isolated
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.compiled_ahead import Answers, CompilePool, target_of
from benchmarks.gpu.tuned_steps import Step, step_of
from kernels.configs import TABLE, ConfigKey, KernelConfig

Task = tuple[ConfigKey, KernelConfig]
KERNELS = ("decode", "decode_shared", "prefill", "copy_blocks")
APART = 0.05
"""The largest difference between answers that differ by the order of addition, of values up to 1."""
GAIN = 0.99
"""An entry is replaced by a configuration that takes less than this share of its time."""
CANDIDATE_S = 20.0
"""How long a candidate may take to be timed, compilation included where it was not compiled ahead."""
IN_DRY_RUN = 2
"""Candidates, and one entry of each kernel."""


@dataclass(slots=True)
class Tuned:
    """The result for one entry. `line` is None where the present configuration could not be timed; `wrong` and `broken`
    say which candidates gave another answer, and which broke their process."""

    key: ConfigKey
    line: Line | None = None
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def key_name(key: ConfigKey) -> str:
    return f"{key.kernel} {key.head_dim}/{key.group}/{key.block_size} {key.dtype}"


def keys_for(card: Card, patterns: Sequence[str]) -> list[ConfigKey]:
    """Return the table's keys of this card's architecture that are tuned. A pattern is words, as in a shell, each of
    which fits a word of the key's name; without patterns all are taken."""
    found = [key for kernel in KERNELS for key in TABLE if key.kernel == kernel and key.arch == card.arch]
    if card.sizes.unit > 1:
        found = [next(key for key in found if key.kernel == kernel) for kernel in KERNELS]
    return [key for key in found if not patterns or any(_fits(key, pattern) for pattern in patterns)]


def _fits(key: ConfigKey, pattern: str) -> bool:
    name = key_name(key).split()
    return all(any(fnmatchcase(part, word) for part in name) for word in pattern.split())


def candidates(key: ConfigKey) -> list[KernelConfig]:
    """Return what may be faster than the table's entry, which is not among them. In no order, so that those for which
    no time is left are not all of a kind."""
    present = replace(TABLE[key], origin="contract")
    tiles = [512, 1024, 2048] if key.kernel == "copy_blocks" else [32, 64, 128]
    rows = [64, 128] if key.kernel == "prefill" else [present.rows]
    found = [KernelConfig(*shape) for shape in product(tiles, (4, 8), (2, 3, 4, 5), rows)]
    Random(0).shuffle(found)
    return [config for config in found if config != present]


def tuned(
    card: Card, keys: Sequence[ConfigKey], seconds: float, measure: isolated.Measure | None = None
) -> Iterator[Tuned]:
    """Tune one entry after the other, each within its share of the time that is left, until none is. While one is
    timed, the candidates of the next are compiled. `measure`: by default a `CandidateTimer`."""
    deadline_s = time.monotonic() + seconds
    pool = CompilePool(target_of(card))
    asked = _ask(card, pool, keys[:1])
    try:
        for at, key in enumerate(keys):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            until_s = time.monotonic() + left_s / (len(keys) - at)
            fitting = _fitting(asked[key], until_s)
            asked = _ask(card, pool, keys[at + 1 : at + 2])
            yield _tune(card, key, fitting, until_s, measure or CandidateTimer())
    finally:
        pool.close()


def _ask(card: Card, pool: CompilePool, keys: Sequence[ConfigKey]) -> dict[ConfigKey, Answers]:
    some = slice(IN_DRY_RUN if card.sizes.unit > 1 else None)
    return {key: pool.ask(key, [TABLE[key], *candidates(key)[some]]) for key in keys}


def _fitting(answers: Answers, until_s: float) -> list[KernelConfig]:
    """Return those that were not refused, or of which nothing is known when half of the time has passed."""
    compiling_until_s = (time.monotonic() + until_s) / 2
    found = []
    for config, answer in answers.items():
        try:
            refused = answer.result(max(0.0, min(compiling_until_s - time.monotonic(), 1e6)))
        except (TimeoutError, BrokenProcessPool, CancelledError):
            answer.cancel()
            refused = ""
        if refused:
            print(f"refused: {config}: {refused}", flush=True)
        else:
            found.append(config)
    return found


def _tune(
    card: Card, key: ConfigKey, some: Sequence[KernelConfig], until_s: float, measure: isolated.Measure
) -> Tuned:
    """Time some configurations, the present one first; without its time, those of others say nothing."""
    found, present = Tuned(key), TABLE[key]
    taken_us: dict[KernelConfig, float] = {}
    for (_, config), told in isolated.each([(key, config) for config in some], measure, card, CANDIDATE_S):
        if isinstance(told, isolated.Failure):
            if not isinstance(told, isolated.Refusal):
                found.broken.append(f"{key_name(key)} with {config}: {told}")
        elif not float(told["apart"]) <= APART:
            found.wrong.append(f"{key_name(key)} with {config}: {told['apart']} apart")
        else:
            taken_us[config] = float(told["us"])
        if time.monotonic() >= until_s or present not in taken_us:
            break
    if present in taken_us:
        best = min(taken_us, key=lambda config: taken_us[config])
        if taken_us[best] >= GAIN * taken_us[present]:
            best = present
        shape = {name: value for name, value in asdict(best).items() if name != "origin"}
        times = {"us": taken_us[best], "present_us": taken_us[present]}
        found.line = {**asdict(key), **shape, **times, "timed": len(taken_us), "of": len(some)}
    return found


class CandidateTimer:
    """Times candidates in a process of its own: how long the step of a key takes with a configuration, and how far its
    answer is from that of the present one. What the step reads is made once for all configurations of a key."""

    def __init__(self) -> None:
        self._key: ConfigKey | None = None
        self._step: Step | None = None
        self._want: Tensor | None = None

    def __call__(self, card: Card, task: Task) -> Line:
        key, config = task
        if self._step is None or self._want is None or key != self._key:
            self._key, self._step = key, step_of(card, key)
            self._want = self._step(TABLE[key])().float().clone()
        work = self._step(config)
        apart = float((work().float() - self._want).abs().max())
        return {"apart": apart, "us": card.timer.seconds(work) * 1e6}
