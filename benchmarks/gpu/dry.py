"""A dry run: every part on tiny shapes, on the CPU, in Triton's interpreter. Its figures mean nothing; that they come
shows that the command would run. What only a GPU has is left out: recorded steps, and its transports, in whose place
shared memory stands in the part on transports."""

import os
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.card import Card, Sizes

TINY = Sizes(
    heads=4,
    kv_heads=2,
    head_dim=16,
    batch=2,
    unit=256,
    layers=1,
    pool_bytes=1 << 16,
    rounds=1,
    programs_per_sm=1,
)


class Clock:
    """A timer that runs work once and looks at the clock."""

    def seconds(self, work: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    busy_seconds = seconds


def dry_card() -> Card:
    """Return a card of tiny shapes. To be called before anything imports Triton, which then takes its interpreter."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return Card(torch.device("cpu"), Clock(), torch.float16, 90, 2, TINY)


def compile_for_real() -> None:
    """Make Triton compile in a process of a dry run; also to be called before anything imports Triton."""
    os.environ.pop("TRITON_INTERPRET", None)
