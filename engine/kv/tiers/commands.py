"""Commands and events between the index of the lower tiers (`engine.kv.tiers`) and the thread that moves their bytes
(`engine.storage.tiers.mover`)."""

import msgspec

from engine.types import BlockId


class TierSlot(msgspec.Struct, frozen=True):
    """A block's place in host memory."""

    index: int


class OnDisk(msgspec.Struct, frozen=True):
    """A block's place on disk: the `at`-th of a segment."""

    segment: int
    at: int


Place = TierSlot | OnDisk


class Save(msgspec.Struct, frozen=True):
    """Copy a device block into host memory, at once: before anybody writes to the block again."""

    block: BlockId
    slot: TierSlot


class Store(msgspec.Struct, frozen=True):
    """Copy device blocks into host memory beside the engine, and keep a digest of each. Whoever asks holds the blocks
    until it is answered, by `Stored`."""

    number: int
    identities: tuple[bytes, ...]
    blocks: tuple[BlockId, ...]
    slots: tuple[TierSlot, ...]


class TierLoad(msgspec.Struct, frozen=True):
    """Copy blocks into device blocks, in order, up to the first that is not whole. Answered by `Loaded`."""

    number: int
    identities: tuple[bytes, ...]
    places: tuple[Place, ...]
    targets: tuple[BlockId, ...]


class Spill(msgspec.Struct, frozen=True):
    """Write a new segment of these blocks of the host memory. Answered by `Spilled`."""

    segment: int
    identities: tuple[bytes, ...]
    slots: tuple[TierSlot, ...]


class TierDrop(msgspec.Struct, frozen=True):
    """Remove a segment's file."""

    segment: int


class Stored(msgspec.Struct, frozen=True):
    """All blocks of a store, so many, are in host memory, after so many seconds; or `error` says why they are not."""

    number: int
    blocks: int
    seconds: float
    error: str = ""


class Loaded(msgspec.Struct, frozen=True):
    """The first `blocks` of a load are in place; with fewer than were asked for, the next one could not be read.
    The seconds are those that its copies out of host memory and its reads from disk took."""

    number: int
    blocks: int
    host_s: float
    disk_s: float


class Spilled(msgspec.Struct, frozen=True):
    """A segment is written, or could not be: `error` says why."""

    segment: int
    error: str = ""


class DiskHung(msgspec.Struct, frozen=True):
    """A call of the disk does not come back, and is left to itself; the disk is not used any more."""

    error: str


class TiersDied(msgspec.Struct, frozen=True):
    """The tier thread has failed at something that is not the disk's fault; nothing is moved any more."""

    error: str


TierCommand = Save | Store | TierLoad | Spill | TierDrop
TierEvent = Stored | Loaded | Spilled | DiskHung
