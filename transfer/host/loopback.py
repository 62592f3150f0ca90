"""KV blocks inside one process: the colocated engine's transport, and the place where faults are scripted.

All transports of one `LoopbackHub` see each other's pools. The receiver reads the sender's pool itself, with the same
queue and generation checks as `shm`.
"""

from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Endpoint
from engine.types import BlockId, Incarnation
from transfer.host.pull import PeerPool, Puller
from transfer.transport import (
    BlockSlice,
    Completion,
    KVMemory,
    Landing,
    Move,
    Outcome,
    Ticket,
    TransferError,
)


class FaultKind(Enum):
    DROP = "drop"  # the bytes never come: the receive ends by cancel or disconnect
    DELAY = "delay"  # for `polls` polls of the receiver
    STALL = "stall"  # until `LoopbackHub.release`
    FAIL = "fail"
    CORRUPT = "corrupt"  # bytes `flip` of the first block are inverted
    SWAP = "swap"  # the first two blocks change places


class ScriptedFault(msgspec.Struct):
    """Applied to the next receive of chunk `seq` (None: any), `times` times. `applied` proves that it took effect."""

    kind: FaultKind
    seq: int | None = None
    polls: int = 1
    flip: tuple[int, ...] = (0,)
    times: int = 1
    applied: int = 0


class _Pool:
    """A neighbour's pool, of which `span` of each block is read. Fulfils `transfer.host.pull.PeerPool`."""

    def __init__(self, memory: KVMemory, span: BlockSlice) -> None:
        self._memory = memory
        self._span = span

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        if not 0 <= block < self._memory.blocks:
            raise TransferError(f"the peer has no block {block}")
        whole = np.frombuffer(self._memory.block(block), dtype=np.uint8)
        return whole[self._span.offset : self._span.offset + self._span.nbytes]

    def generation(self, block: BlockId) -> int:
        return self._memory.generation(block)


class _Corrupting:
    """Another source, with bytes of one of its blocks inverted."""

    def __init__(self, source: PeerPool, block: BlockId, flip: tuple[int, ...]) -> None:
        self._source = source
        self._block = block
        self._flip = flip

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        found = self._source.read(block)
        if block != self._block:
            return found
        changed = found.copy()
        changed[list(self._flip)] ^= 0xFF
        return changed

    def generation(self, block: BlockId) -> int:
        return self._source.generation(block)


class LoopbackHub:
    """The wire: which pools there are, and the faults to come, in order. Used from one thread at a time."""

    def __init__(self) -> None:
        self.pools: dict[Incarnation, KVMemory] = {}
        self.faults: list[ScriptedFault] = []
        self.released = 0

    def take_fault(self, move: Move) -> ScriptedFault | None:
        """The first fault that fits a receive and is not used up."""
        for fault in self.faults:
            if fault.applied < fault.times and fault.seq in (None, move.seq):
                if fault.kind is FaultKind.SWAP and len(move.remote) < 2:
                    continue
                fault.applied += 1
                return fault
        return None

    def release(self) -> None:
        """Let every stalled receive go on."""
        self.released += 1


class _Held:
    __slots__ = ("fault", "landing", "move", "peer", "polls", "released", "source")

    def __init__(
        self,
        peer: Incarnation,
        source: PeerPool,
        move: Move,
        landing: Landing | None,
        fault: ScriptedFault,
        released: int,
    ) -> None:
        self.peer = peer
        self.source = source
        self.move = move
        self.landing = landing
        self.fault = fault
        self.polls = fault.polls
        self.released = released


class LoopbackTransport:
    """`transfer.transport.Transport` inside one process."""

    name = "loopback"
    device = None
    reads_remotely = True
    scrapped_bytes = 0  # what nobody wants is not read

    def __init__(self, memory: KVMemory, incarnation: Incarnation, hub: LoopbackHub) -> None:
        self._hub = hub
        self._incarnation = incarnation
        self._peers: dict[Incarnation, _Pool] = {}
        self._held: dict[Ticket, _Held] = {}
        self._puller = Puller()
        hub.pools[incarnation] = memory

    def describe(self) -> Endpoint:
        return Endpoint(transport=self.name, details={"incarnation": self._incarnation})

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        memory = self._hub.pools.get(endpoint.details.get("incarnation", peer))
        if memory is None or memory.block_bytes != received.block_bytes:
            raise TransferError(f"no fitting pool of {peer} in this process")
        self._peers[peer] = _Pool(memory, received)

    def send(self, peer: Incarnation, move: Move, packed: None = None) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected")
        ticket = self._puller.ticket()
        self._puller.finish(ticket, Outcome.DONE)
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: Landing | None) -> Ticket:
        source: PeerPool | None = self._peers.get(peer)
        if source is None:
            raise TransferError(f"{peer} is not connected")
        ticket = self._puller.ticket()
        fault = self._hub.take_fault(move) if landing is not None else None
        match fault.kind if fault else None:
            case FaultKind.DROP | FaultKind.DELAY | FaultKind.STALL:
                assert fault is not None
                self._held[ticket] = _Held(peer, source, move, landing, fault, self._hub.released)
                self._puller.bell.ring()
                return ticket
            case FaultKind.FAIL:
                self._puller.finish(ticket, Outcome.FAILED, "scripted failure")
                return ticket
            case FaultKind.CORRUPT:
                assert fault is not None
                source = _Corrupting(source, move.remote[0][0], fault.flip)
            case FaultKind.SWAP:
                first, second, *rest = move.remote
                move = msgspec.structs.replace(move, remote=(second, first, *rest))
        self._puller.pull(ticket, peer, source, move, landing)
        return ticket

    def fileno(self) -> int:
        return self._puller.bell.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._puller.bell.wait(timeout_s)
        for ticket, held in list(self._held.items()):
            held.polls -= 1
            delayed = held.fault.kind is FaultKind.DELAY and held.polls < 0
            stalled = held.fault.kind is FaultKind.STALL and held.released < self._hub.released
            if delayed or stalled:
                del self._held[ticket]
                self._puller.pull(ticket, held.peer, held.source, held.move, held.landing)
        completions = self._puller.run()
        if any(held.fault.kind is not FaultKind.DROP for held in self._held.values()):
            self._puller.bell.ring()
        return completions

    def cancel(self, ticket: Ticket) -> bool:
        if self._held.pop(ticket, None) is not None:
            self._puller.finish(ticket, Outcome.CANCELLED)
            return True
        return self._puller.cancel(ticket)

    def disconnect(self, peer: Incarnation) -> None:
        for ticket, held in list(self._held.items()):
            if held.peer == peer:
                del self._held[ticket]
                self._puller.finish(ticket, Outcome.FAILED, "disconnected")
        self._puller.drop_peer(peer)
        self._peers.pop(peer, None)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._hub.pools.pop(self._incarnation, None)
        self._puller.bell.close()
