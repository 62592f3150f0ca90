"""The contract of every decoder: it returns, or raises what it declares, within bounded time and memory.

A decoder is whatever turns bytes that somebody else wrote into our own records: a peer's frame, a client's body, a file
of a model. Any other exception is a defect, and so is an input that costs seconds or memory out of proportion.
"""

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

LIMIT_S = 2.0
"""Processor time that one input may cost; the largest of them have some 100 KiB."""
LIMIT_BYTES = 64 << 20
"""Memory, as Python counts it, that one input may cost at any time."""


class ContractError(AssertionError):
    """A decoder that took too long, or too much."""


@dataclass(frozen=True)
class Decoder:
    """`feed` gives bytes to the decoder; it may raise `refuses` and nothing else. `seeds` are inputs that it takes,
    from which others are made; `found` are inputs that it may refuse, those that once broke the contract among them."""

    name: str
    feed: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]
    found: tuple[bytes, ...] = ()
    limit_bytes: int = LIMIT_BYTES

    @property
    def inputs(self) -> tuple[bytes, ...]:
        return self.seeds + self.found


def judge(decoder: Decoder, data: bytes, *, count_memory: bool = True) -> bool:
    """Feed `data`; returns whether it was taken. Raises what the decoder should not have raised, and ContractError."""
    if count_memory:
        tracemalloc.start()
    began_s = time.thread_time()
    try:
        decoder.feed(data)
        taken = True
    except decoder.refuses:
        taken = False
    finally:
        took_s = time.thread_time() - began_s
        peak_bytes = tracemalloc.get_traced_memory()[1] if count_memory else 0
        if count_memory:
            tracemalloc.stop()
    if took_s > LIMIT_S:
        raise ContractError(f"{decoder.name}: {took_s:.1f} s for {len(data)} bytes")
    if peak_bytes > decoder.limit_bytes:
        raise ContractError(f"{decoder.name}: {peak_bytes >> 20} MiB for {len(data)} bytes")
    return taken
