"""The contract every KV transport fulfils.

A transport moves whole blocks between this process's pool and a peer's. Only the process that owns a pool writes to it:
`recv` lands bytes by the receiver's own hand, whatever the wire. The contract is symmetric even where the hardware is
one-sided: for every move the sender posts `send` and the receiver posts `recv`, in the same order per pair. Deadlines,
retries and chunking live above it, in `transfer.handoff.migration`; digests in `transfer.digest`; the thread that
drives it in `transfer.mover`. A transport is used by that one thread alone and owns no thread of its own.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NewType, Protocol, TypeVar

import msgspec

from engine.messages import Endpoint, Handoff
from engine.types import BlockId, Incarnation

Ticket = NewType("Ticket", int)
"""Names one posted send or receive until `poll` reports its end."""


class TransferError(Exception):
    """A transport could not do what was asked; the attempt fails, the worker lives."""


class StaleBlockError(TransferError):
    """The source block's generation moved on: its bytes are somebody else's by now."""


class Move(msgspec.Struct, frozen=True):
    """The sender's blocks of one chunk. The sender names them in `local`, the receiver in `remote`, with the
    generations that they must still have."""

    handoff: Handoff
    seq: int
    local: tuple[BlockId, ...] = ()
    remote: tuple[tuple[BlockId, int], ...] = ()


class BlockSlice(msgspec.Struct, frozen=True):
    """The bytes of each block of `block_bytes` that travel: all, or the contiguous slice of the KV heads that both
    workers hold; of blocks that are converted on the way, `nbytes` each."""

    offset: int
    nbytes: int
    block_bytes: int


Packed = Sequence[memoryview]
"""The part that travels of each block of a send, on the CPU, where that is not as it is stored."""


class Landing(Protocol):
    """The places where the blocks of one receive go. Blocks come one at a time, in the order of `Move.remote`: a
    transport asks for the place of a block when its bytes begin to come, and says so when they are all there. Neither
    call raises."""

    def place(self, at: int) -> memoryview:
        """A writable view of exactly as many bytes as travel of one block."""

    def landed(self, at: int) -> None:
        """Note that all bytes of the block are in their place, and nothing shows that they are stale."""


class Outcome(Enum):
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"
    """A receive failed since the way from the peer is broken: so does every further one until the next `connect`."""


class Completion(msgspec.Struct, frozen=True):
    ticket: Ticket
    outcome: Outcome
    error: str = ""


class KVMemory(Protocol):
    """A worker's pool, as a transport sees it: bytes by block. `engine.storage.paged.PagedKV` fulfils it."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def device(self) -> str:
        """The device that holds the blocks: `cpu`, or a device as torch names it, such as `cuda:0`."""

    @property
    def fd(self) -> int:
        """The memfd that backs the pool, or -1. Its file layout is told in `engine.storage.paged`."""

    def block(self, block: BlockId) -> memoryview:
        """A writable flat byte view of one block. Not on a device."""

    def generation(self, block: BlockId) -> int:
        """Return how often the block has been handed out; advanced by the owner before each reuse."""


LandingT = TypeVar("LandingT", contravariant=True)
PackedT = TypeVar("PackedT", contravariant=True)


class Transport(Protocol[LandingT, PackedT]):
    """`LandingT`: `Landing` where blocks are in host memory, `transfer.gpu.landing.DeviceLanding` on a device.
    `PackedT`: `Packed`, `transfer.gpu.narrow.DevicePacked` on a device, None where the receiver `reads_remotely`."""

    name: str

    @property
    def device(self) -> object | None:
        """The device whose memory it moves, a `transfer.gpu.device.Device`; None stands for the host."""

    reads_remotely: bool
    """True where the receiver reads the sender's memory itself (shm): then a source block stays pinned until the
    receiver says `Landed` or `Stop`, or its process is proven dead. False where the sender's own completion is the
    proof."""

    @property
    def scrapped_bytes(self) -> int:
        """Bytes that came for receives that nobody wanted (any more), since the start: they landed nowhere. Only
        grows."""

    def describe(self, peer: Incarnation) -> Endpoint:
        """Return what `peer`, and nobody else, needs in order to reach this worker's memory; travels in `Hello`. From
        any thread."""

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        """Make a peer reachable: `sent` of each block of this worker goes there, `received` of each of the peer's comes
        from there. Raises TransferError."""

    def send(self, peer: Incarnation, move: Move, packed: PackedT | None = None) -> Ticket:
        """Post a send; never blocks. `packed`: what travels of each block where `sent` is not a part of it as it is
        stored."""

    def recv(self, peer: Incarnation, move: Move, landing: LandingT | None) -> Ticket:
        """Post a receive; never blocks. None is scrap: if the wire carries bytes for it, they land nowhere."""

    def fileno(self) -> int:
        """A descriptor that is readable whenever `poll` has something to do: one thread can wait for several
        transports at once."""

    def poll(self, timeout_s: float) -> list[Completion]:
        """Make progress and return what has ended, waiting at most `timeout_s` for the first."""

    def cancel(self, ticket: Ticket) -> bool:
        """Stop a transfer. True is proof: from now on nothing of it touches local memory, and its completion is
        reported as CANCELLED by the next `poll`. False: it has already ended, its completion is or will be reported."""

    def disconnect(self, peer: Incarnation) -> None:
        """Forget a peer; its outstanding transfers fail."""

    def close(self) -> None: ...
