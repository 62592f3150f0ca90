"""KV blocks inside one process: the colocated engine's transport, and the place where faults are scripted.

All transports of one `LoopbackHub` see each other's pools. The receiver reads the sender's pool itself, with the same
queue and generation checks as `shm`.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from engine.messages import Endpoint
from engine.types import BlockId, Incarnation
from transfer.host.pull import HostPool, HostPullTransport, Pull
from transfer.transport import BlockSlice, KVMemory, Landing, Move, Outcome, Ticket, TransferError


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
    """A neighbour's pool, of which `span` of each block is read. Fulfils `transfer.host.pull.HostPool`."""

    def __init__(self, memory: KVMemory, span: BlockSlice) -> None:
        self._memory = memory
        self._span = span

    def generation(self, block: BlockId) -> int:
        if not 0 <= block < self._memory.blocks:
            raise TransferError(f"the peer has no block {block}")
        return self._memory.generation(block)

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        whole = np.frombuffer(self._memory.block(block), dtype=np.uint8)
        return whole[self._span.offset : self._span.offset + self._span.nbytes]


class _Corrupting:
    """Another pool, with bytes of one of its blocks inverted."""

    def __init__(self, pool: HostPool, block: BlockId, flip: tuple[int, ...]) -> None:
        self.generation = pool.generation
        self._pool = pool
        self._block = block
        self._flip = flip

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        found = self._pool.read(block)
        if block != self._block:
            return found
        changed = found.copy()
        changed[list(self._flip)] ^= 0xFF
        return changed


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


@dataclass(slots=True, eq=False)
class _Held:
    pull: Pull[HostPool, Landing]
    fault: ScriptedFault
    polls: int
    released: int


class LoopbackTransport(HostPullTransport):
    """`transfer.transport.Transport` inside one process."""

    name = "loopback"

    # Mutable state: also the receives that a fault holds back.

    def __init__(self, memory: KVMemory, incarnation: Incarnation, hub: LoopbackHub) -> None:
        super().__init__()
        self._hub = hub
        self._incarnation = incarnation
        self._held: dict[Ticket, _Held] = {}
        hub.pools[incarnation] = memory

    def describe(self, peer: Incarnation) -> Endpoint:
        return Endpoint(transport=self.name, details={"incarnation": self._incarnation})

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        memory = self._hub.pools.get(endpoint.details.get("incarnation", peer))
        if memory is None or memory.block_bytes != received.block_bytes:
            raise TransferError(f"no fitting pool of {peer} in this process")
        self._peers[peer] = _Pool(memory, received)

    def cancel(self, ticket: Ticket) -> bool:
        held = self._held.pop(ticket, None)
        if held is None:
            return super().cancel(ticket)
        self._completions.end(ticket, Outcome.CANCELLED)
        return True

    def disconnect(self, peer: Incarnation) -> None:
        for ticket in [ticket for ticket, held in self._held.items() if held.pull.peer == peer]:
            del self._held[ticket]
            self._completions.end(ticket, Outcome.FAILED, "disconnected")
        super().disconnect(peer)

    def close(self) -> None:
        super().close()
        self._hub.pools.pop(self._incarnation, None)

    def _enqueue(self, pull: Pull[HostPool, Landing]) -> None:
        fault = self._hub.take_fault(pull.move)
        match fault.kind if fault else None:
            case FaultKind.DROP | FaultKind.DELAY | FaultKind.STALL:
                assert fault is not None
                self._held[pull.ticket] = _Held(pull, fault, fault.polls, self._hub.released)
                self._bell.ring()
                return
            case FaultKind.FAIL:
                self._completions.end(pull.ticket, Outcome.FAILED, "scripted failure")
                return
            case FaultKind.CORRUPT:
                assert fault is not None
                pull.source = _Corrupting(pull.source, pull.move.remote[0][0], fault.flip)
            case FaultKind.SWAP:
                first, second, *rest = pull.move.remote
                pull.move = msgspec.structs.replace(pull.move, remote=(second, first, *rest))
        super()._enqueue(pull)

    def _advance(self) -> bool:
        for ticket, held in list(self._held.items()):
            held.polls -= 1
            delayed = held.fault.kind is FaultKind.DELAY and held.polls < 0
            stalled = held.fault.kind is FaultKind.STALL and held.released < self._hub.released
            if delayed or stalled:
                super()._enqueue(self._held.pop(ticket).pull)
        return super()._advance() or any(held.fault.kind is not FaultKind.DROP for held in self._held.values())
