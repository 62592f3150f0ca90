"""The events of a decode scheduler, what it asks of its shell besides the commands of `transfer.handoff.commands`, and
what its parts say of a request that can be forgotten, or is to end."""

import msgspec

from decode_worker.scheduler.request import Request
from engine.kv.tiers.commands import TierEvent
from engine.messages import DecodeOrder, DecodeRecord, Fault, FirstToken, Offer, PeerAddress, PrefillFailed
from engine.types import Incarnation
from transfer.handoff.commands import Command as TransferCommand
from transfer.handoff.commands import Leave, Posted, ReaderEvent, Received, Sent


class FromRouter(msgspec.Struct, frozen=True):
    """A router said something on stream `link`."""

    link: int
    message: DecodeOrder


class RouterLost(msgspec.Struct, frozen=True):
    """The stream `link` has ended: its requests become orphans, or end."""

    link: int


class PeerUp(msgspec.Struct, frozen=True):
    """A worker to read from answered, and its memory can be reached. `block_size` is that of its blocks, in tokens;
    `block_bytes` what travels for one of this worker's, 0 where that is all of its bytes."""

    peer: Incarnation
    address: PeerAddress
    transport: str
    block_size: int
    block_bytes: int = 0


class PeerDown(msgspec.Struct, frozen=True):
    """A worker to read from cannot be reached, or is lost. `peer` is None where it was never up."""

    address: PeerAddress
    peer: Incarnation | None
    why: str


class FromPeer(msgspec.Struct, frozen=True):
    """A worker to read from said something."""

    peer: Incarnation
    message: Offer | FirstToken | PrefillFailed


class Tell(msgspec.Struct, frozen=True):
    """Command: send a record to the router on stream `link`, in this step's frame. Dropped where the stream is gone."""

    link: int
    record: DecodeRecord


class ConnectPeer(msgspec.Struct, frozen=True):
    """Command: reach this worker, to read from it; answered by PeerUp or PeerDown."""

    address: PeerAddress


class Freed(msgspec.Struct, frozen=True):
    """Outcome: the request has ended, and nothing of ours writes to its blocks any more."""

    request: Request


class Unloaded(msgspec.Struct, frozen=True):
    """Outcome: a lower tier has not brought what the request was to go on behind; it begins anew, without."""

    request: Request


class Unservable(msgspec.Struct, frozen=True):
    """Outcome: neither a prefill worker nor this one can serve the request; it is to end."""

    request: Request
    fault: Fault


FromSource = PeerUp | PeerDown | FromPeer | Received
Event = FromRouter | RouterLost | FromSource | ReaderEvent | Posted | Sent | Leave | TierEvent
Command = TransferCommand | Tell | ConnectPeer
Result = Command | Freed | Unloaded | Unservable
