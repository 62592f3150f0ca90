"""What can happen to a decode scheduler, and what it asks of its shell besides the commands of `transfer.migration`."""

from dataclasses import dataclass

from engine.messages import (
    DecodeRecord,
    FirstToken,
    Offer,
    PeerAddress,
    PrefillFailed,
    RouterRecord,
)
from engine.types import Incarnation


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A router said something on stream `link`."""

    link: int
    message: RouterRecord


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The stream `link` has ended: its requests are orphans, or over."""

    link: int


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A worker to read from answered, and its memory can be reached. `block_size` is that of its blocks, in tokens."""

    peer: Incarnation
    address: PeerAddress
    transport: str
    block_size: int


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A worker to read from cannot be reached, or is lost. `peer` is None where it was never up."""

    address: PeerAddress
    peer: Incarnation | None
    why: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A worker to read from said something."""

    peer: Incarnation
    message: Offer | FirstToken | PrefillFailed


@dataclass(frozen=True, slots=True)
class Tell:
    """Command: send a record to the router on stream `link`, in this step's frame. Dropped where the stream is gone."""

    link: int
    record: DecodeRecord


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Command: reach this worker, to read from it; answered by PeerUp or PeerDown."""

    address: PeerAddress
