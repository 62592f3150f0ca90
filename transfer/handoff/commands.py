"""The records of a handoff's pure sides: commands to the transfer thread and to the scheduler, and the thread's
answers.

Plain immutable records of one process, no logic. `transfer.handoff.migration` makes the commands, `transfer.mover`
carries out those of `MoverCommand` and answers with a `MoverEvent`; the rest are for the scheduler and its shell. What
`worker.streams` hears of those who read from this worker are `ReaderEvent`s.
"""

import msgspec

from engine.messages import DecodeToPrefill, Endpoint, Handoff, Landed, PrefillToDecode, StartPrefill, Stop
from engine.types import BlockId, Incarnation
from transfer.handoff.negotiation import Agreement
from transfer.transport import Move


class OutgoingBlock(msgspec.Struct, frozen=True):
    """A finished source block: the sender keeps it pinned until its handoff is settled."""

    source: BlockId
    generation: int
    index: int
    tokens: int
    identity: bytes


class Rows(msgspec.Struct, frozen=True):
    """`count` rows of a sender's block, from row `first` on: they go to rows `at ..` of the block `target`."""

    first: int
    target: BlockId
    at: int
    count: int


class ExpectedBlock(msgspec.Struct, frozen=True):
    """Block `index` of the sequence, as the sender cuts it: what it must be, its valid tokens, and where its
    rows shall land. Where both sides have blocks of one size, it lands whole in the target of its only `rows`."""

    rows: tuple[Rows, ...]
    identity: bytes
    tokens: int


class IncomingBlock(msgspec.Struct, frozen=True):
    """An offered block that matches an expected one, with the digest its valid bytes must have."""

    rows: tuple[Rows, ...]
    generation: int
    tokens: int
    identity: bytes
    digest: int
    more: tuple[int, ...] = ()
    """The digests of its further parts, where it comes from or goes to several pools (`transfer.ranks.group`)."""


# ---- to the transfer thread


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    endpoint: Endpoint
    agreement: Agreement


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Forget a peer; whatever is outstanding with it ends as failed."""

    peer: Incarnation


class PostSend(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    move: Move
    blocks: tuple[OutgoingBlock, ...]


class PostRecv(msgspec.Struct, frozen=True, tag=True):
    peer: Incarnation
    move: Move
    blocks: tuple[IncomingBlock, ...]


class PostScrap(msgspec.Struct, frozen=True, tag=True):
    """Bytes that nobody wants may be on their way: let them land nowhere."""

    peer: Incarnation
    move: Move


class CancelRecv(msgspec.Struct, frozen=True, tag=True):
    handoff: Handoff
    seq: int


class CancelSend(msgspec.Struct, frozen=True, tag=True):
    """The receiver reads no more: do not wait for it to take the bytes. `Sent` follows, as cancelled."""

    handoff: Handoff
    seq: int


MoverCommand = Connect | Disconnect | PostSend | PostRecv | PostScrap | CancelRecv | CancelSend


# ---- to the scheduler and its shell


class Emit(msgspec.Struct, frozen=True):
    """Say this to the peer."""

    peer: Incarnation
    record: DecodeToPrefill | PrefillToDecode


class Settled(msgspec.Struct, frozen=True):
    """Sender: nobody reads a source block of this handoff any more; every one of them may be unpinned."""

    handoff: Handoff


class Arrived(msgspec.Struct, frozen=True):
    """Receiver: every expected block has landed and is verified; the handoff is over on this side."""

    handoff: Handoff


class Broken(msgspec.Struct, frozen=True):
    """Either side: this attempt cannot succeed. Sender: report it and `close`. Receiver: `stop`, then try anew."""

    handoff: Handoff
    why: str


class Fenced(msgspec.Struct, frozen=True):
    """Receiver: after `stop`, nothing writes to a target block any more: all may be freed.

    `landed` are the indices whose blocks did land and were verified: a new attempt may keep them.
    """

    handoff: Handoff
    landed: tuple[int, ...]


Command = MoverCommand | Emit | Settled | Arrived | Broken | Fenced


# ---- from the transfer thread


class Posted(msgspec.Struct, frozen=True, tag=True):
    """The source blocks are digested and their send is posted: they can be offered. `more`: for each block the
    digests of its further parts, or nothing at all."""

    handoff: Handoff
    seq: int
    digests: tuple[int, ...]
    more: tuple[tuple[int, ...], ...] = ()


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A send has ended; with `error` set it failed, or could not be posted at all (then no `Posted` came before)."""

    handoff: Handoff
    seq: int
    error: str
    seconds: float


class Received(msgspec.Struct, frozen=True, tag=True):
    """A receive has ended: nothing of it touches local memory any more. `error` is empty if it landed verified."""

    handoff: Handoff
    seq: int
    error: str
    seconds: float
    nbytes: int


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """A `Connect` failed, or the way that it made has broken: nothing can be read from `peer` until the next one."""

    peer: Incarnation
    error: str


class MoverDied(msgspec.Struct, frozen=True, tag=True):
    """The transfer thread met an error it does not know and has ended; the worker must exit."""

    error: str


MoverEvent = Posted | Sent | Received | Unreachable | MoverDied


# ---- from those who read: decode workers that ask this worker for KV


class FromReader(msgspec.Struct, frozen=True):
    """A reader said something."""

    peer: Incarnation
    message: StartPrefill | Landed | Stop


class ReaderUp(msgspec.Struct, frozen=True):
    """A reader has said hello. `reads_remotely`: it reads our memory itself (`transfer.transport`)."""

    peer: Incarnation
    reads_remotely: bool
    unfinished: tuple[Handoff, ...] = ()
    """The handoffs it still reads for: it has nothing to do with any other."""


class ReaderLost(msgspec.Struct, frozen=True):
    """The stream to a reader is gone; the process may still live, and read."""

    peer: Incarnation


class ReaderDead(msgspec.Struct, frozen=True):
    """Proof that the process behind `peer` has ended: it reads nothing any more."""

    peer: Incarnation


ReaderEvent = FromReader | ReaderUp | ReaderLost | ReaderDead


# ---- from whoever runs the worker


class Leave(msgspec.Struct, frozen=True):
    """Take nothing new, finish or hand over what is held, serve all reads, and end: at the latest after `grace_s`."""

    grace_s: float
