"""The interface of a device for the GPU transports, and the words in which they see blocks.

A pool's memory is seen as int64 words `[blocks, kv_heads, words]`: what a copy kernel moves. `transfer.gpu.cuda` is the
device of a machine that has one. Tests bring another, of this host's memory, so that everything above this border runs
without a GPU.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from kernels.block_shape import BlockShape
from kernels.pool import KVPool
from transfer.transport import BlockSlice, KVMemory, TransferError


class Event(Protocol):
    def done(self) -> bool:
        """Return True once everything has ended that was in its stream when it was recorded. Never blocks."""


class Stream(Protocol):
    handle: int
    """Its name in other libraries: a `cudaStream_t`."""

    def use(self) -> AbstractContextManager[object]:
        """Make this the current stream of the calling thread, and its device the current one, while the context
        lasts."""

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Let nothing enqueued from now on begin before `event`; does not block the caller."""


class DeviceMemory(KVMemory, Protocol):
    """A pool on a device. `engine.storage.paged.PagedKV` fulfils it on this host."""

    @property
    def memory(self) -> Tensor:
        """uint8 `[blocks, block_bytes]`, contiguous."""


class Peek(Event, Protocol):
    """Words of device memory on their way to the CPU."""

    @property
    def words(self) -> list[int]:
        """The words, once it is `done`."""


class Device(Protocol):
    name: str
    """Its UUID, the same for two processes that share the device and for nobody else."""

    def stream(self) -> Stream:
        """One of this process's few (torch has 32, and hands them out again from the first on): for what there is one
        of, and not for each peer."""

    @property
    def digest_stream(self) -> Stream:
        """The one of all peers, for work that the transfer thread waits for at once."""

    def words(self, count: int) -> Tensor:
        """int64 `[count]` of fresh device memory, for as long as the process lives."""

    def numbers(self, *rows: Sequence[int]) -> Tensor:
        """Rows of equal length, int32 `[rows, n]`, on their way to the device by the current stream. Never waits."""

    def fetch(self, words: Tensor) -> Tensor:
        """Begin to bring words to the host by the current stream: to be read once an event that is recorded behind is
        done, and not before."""

    def copy(
        self,
        source: Tensor,
        target: Tensor | None,
        source_blocks: Tensor,
        target_blocks: Tensor,
        shape: BlockShape,
        tokens: Tensor | None = None,
    ) -> Tensor | None:
        """Enqueue `kernels.block_copy.copy_blocks` on the current stream: int64 `[blocks, heads, words]` to the same,
        with digests int64 `[n, heads]` of the valid `tokens` if these are given. `numbers` brings what says which
        blocks."""

    def convert(self, source: KVPool, target: KVPool, source_blocks: Tensor, target_blocks: Tensor) -> None:
        """Enqueue `kernels.block_convert.convert_blocks` on the current stream."""

    def view(self, address: int, nbytes: int) -> Tensor:
        """Memory of the device that another library has allocated, as int64 words."""

    def peek(self, words: Tensor, stream: Stream) -> Peek:
        """Begin to read a few words, on `stream`."""

    def export(self, memory: DeviceMemory) -> bytes:
        """A name under which another process of this host can `open` the pool. Raises TransferError."""

    def open(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        """A peer's pool, uint8 `[blocks, block_bytes]`. Nobody writes to it. Raises TransferError."""

    def shut(self, name: bytes) -> None:
        """Undo `open`; its tensor must not be used any more."""

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that are free."""

    def unique_id(self) -> bytes:
        """Names a communicator to be made. Raises TransferError."""


def words_of(memory: Tensor, span: BlockSlice) -> Tensor:
    """`span` of each block of `memory`, uint8 `[blocks, block_bytes]`: int64 `[blocks, span.nbytes / 8]`, the same
    memory. Raises TransferError where these are not whole 64-bit words."""
    if span.offset % 8 or span.nbytes % 16 or memory.shape[1] % 8:
        raise TransferError(f"{span} is not whole 64-bit words")
    first = span.offset // 8
    return memory.view(torch.int64)[:, first : first + span.nbytes // 8]


def flat(words: Tensor) -> tuple[Tensor, BlockShape]:
    """int64 `[n, words]` as a copy kernel takes it that knows nothing of heads."""
    return words.unsqueeze(1), BlockShape(1, 1, words.shape[1] * 4)


class StuckStreamError(Exception):
    """The device's stream does not stop: this process cannot go on."""


def settle(event: Event, limit_s: float = 5.0) -> None:
    """Wait for copies of this worker's own, which wait for nobody. Raises StuckStreamError."""
    until_s = time.monotonic() + limit_s
    while not event.done():
        if time.monotonic() > until_s:
            raise StuckStreamError(f"a copy on this device has not ended in {limit_s:g} s")
        time.sleep(5e-5)
