"""The card that is measured: what it is, how long work takes on it, and how fast it copies."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.configs import table_arch

Line = dict[str, str | int | float]


class NoCard(Exception):
    """There is no GPU to measure."""


class Timer(Protocol):
    def seconds(self, work: Callable[[], object]) -> float:
        """Time how long the device takes for `work`, which launches kernels over memory that does not move, with
        nothing of its operands in the cache."""

    def busy_seconds(self, work: Callable[[], object]) -> float:
        """Time how long, of `work`, which may do as it likes, a kernel ran or a copy was made."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The measured shapes. `unit` divides every length of a context, for a run that only shows that it runs.
    `programs_per_sm`: of the decode grid; 0: as many as the compiled kernel lets an SM hold."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 32
    unit: int = 1
    layers: int = 32
    pool_bytes: int = 32 << 30
    rounds: int = 9
    programs_per_sm: int = 0

    def tokens(self, count: int) -> int:
        return max(1, count // self.unit)


@dataclass(frozen=True, slots=True)
class Card:
    device: torch.device
    timer: Timer
    dtype: torch.dtype
    arch: int
    sms: int
    sizes: Sizes

    def random(self, *shape: int) -> Tensor:
        """Return a random tensor, filled a GiB at a time: some fills count elements with 32 bits."""
        made = torch.empty(*shape, dtype=self.dtype, device=self.device)
        for piece in made.view(-1).split(1 << 29):
            piece.uniform_(-1.0, 1.0)
        return made

    def ids(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(self.device)


class CudaTimer:
    """Times work on the device. Work is captured in two graphs: one that evicts the cache and works, over and over, and
    one that only evicts. Their difference is free of launch costs and finds a cold cache. The median of `rounds`."""

    def __init__(self, device: torch.device, rounds: int = 9, inner: int = 8) -> None:
        self._rounds = rounds
        self._inner = inner
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._evicting = torch.empty(4 * cache_bytes, dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        both = self._captured(work)
        alone = self._captured(lambda: None)
        taken = [self._replay_s(both) - self._replay_s(alone) for _ in range(self._rounds)]
        return statistics.median(taken) / self._inner

    def busy_seconds(self, work: Callable[[], object]) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        on_card = (event.time_range for event in seen.events() if event.device_type.name == "CUDA")
        return covered((taken.start, taken.end) for taken in on_card) / 1e6

    def _captured(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._inner):
                self._evicting.zero_()
                work()
        return graph

    def _replay_s(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """Return how long any of `ranges` (begin, end) lasts. A dependent launch begins while the one before it runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def open_card(sizes: Sizes) -> Card:
    """Open the first GPU. Raises NoCard, saying what was found instead."""
    if not torch.cuda.is_available():
        build = torch.version.cuda or "no CUDA"
        raise NoCard(f"no NVIDIA GPU is visible to torch {torch.__version__} (built with {build})")
    device = torch.device("cuda", torch.cuda.current_device())
    major, _ = torch.cuda.get_device_capability(device)
    if major < 8:
        raise NoCard(f"{torch.cuda.get_device_name(device)}: the kernels need sm_80 or later")
    properties = torch.cuda.get_device_properties(device)
    timer = CudaTimer(device, sizes.rounds)
    sms = int(properties.multi_processor_count)
    return Card(device, timer, torch.bfloat16, table_arch(major), sms, sizes)


def describe(card: Card) -> Line:
    """Describe the card and what drives it."""
    properties = torch.cuda.get_device_properties(card.device)
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": card.sms,
        "l2_bytes": properties.L2_cache_size,
        "cuda": str(torch.version.cuda),
    }


def copy_rate(card: Card) -> list[Line]:
    """Measure what figures are held against: a device copy, both directions counted, a read, and a product of two
    matrices."""
    count = card.sizes.tokens(1 << 31)
    source = torch.zeros(count, dtype=torch.uint8, device=card.device)
    target = torch.empty_like(source)
    words = source.view(torch.int64) if count % 8 == 0 else source
    copied = card.timer.seconds(lambda: target.copy_(source))
    read = card.timer.seconds(lambda: words.sum())
    width = card.sizes.tokens(8192)
    left, right = card.random(width, width), card.random(width, width)
    product = torch.empty_like(left)
    multiplied = card.timer.seconds(lambda: torch.mm(left, right, out=product))
    return [
        {"what": "copy, read and written", "tb_per_s": 2 * count / copied / 1e12},
        {"what": "read", "tb_per_s": count / read / 1e12},
        {"what": "matrix product", "tflop_per_s": 2 * width**3 / multiplied / 1e12},
    ]
