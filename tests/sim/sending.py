"""The sending half of a transfer thread: digests made, and over tcp the bytes put on a pipe, block by block."""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.messages import Handoff
from engine.types import Incarnation
from tests.sim.connections import Connections
from tests.sim.fence import readable
from tests.sim.pipes import Frame, Pipe
from tests.sim.shadow import ShadowKV, block_digest
from transfer.handoff.commands import MoverEvent, Posted, PostSend, Sent

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True, eq=False)
class _Send:
    command: PostSend
    memory: ShadowKV
    pipe: Pipe | None
    frame: Frame | None


class Sending:
    """The sends of one process. Mutable state: those that have not ended. Where the reader reads by itself (`remote`),
    nothing is put anywhere."""

    def __init__(
        self,
        world: "World",
        memory: ShadowKV,
        connections: Connections,
        remote: bool,
        tell: Callable[[MoverEvent], None],
    ) -> None:
        self._world = world
        self._memory = memory
        self._connections = connections
        self._remote = remote
        self._tell = tell
        self._sends: deque[_Send] = deque()
        self.parts: dict[Incarnation, ShadowKV] = {}
        """By peer: the heads that are sent to it."""

    def post(self, command: PostSend, known: Container[Incarnation]) -> None:
        """`known`: the peers to whom there is a way."""
        name, seq = command.move.handoff, command.move.seq
        world = self._world
        fault = world.faults.takes("send_fails")
        if fault is not None:
            world.faults.strikes(fault)
        if command.peer not in known or fault is not None:
            self._tell(Sent(name, seq, "TransferError: cannot be posted", 0.0))
            return
        memory = self.parts[command.peer]
        for block in command.blocks:
            readable(memory, block.source, block.generation, "is digested")
        digests = tuple(
            block_digest(memory.rows[b.source], memory.layout, b.tokens, b.identity, b.generation, name)
            for b in command.blocks
        )
        pipe = frame = None
        if not self._remote:
            pipe = self._connections.outgoing[command.peer]
            frame = Frame(name, seq)
            pipe.frames.append(frame)
        self._sends.append(_Send(command, memory, pipe, frame))
        self._tell(Posted(name, seq, digests))

    def withdraw(self, name: Handoff, seq: int) -> None:
        """Withdraw a frame over tcp: what is left of it is padding now, and nobody vouches for it."""
        for send in list(self._sends):
            move, frame = send.command.move, send.frame
            if (move.handoff, move.seq) == (name, seq) and frame is not None:
                missing = len(move.local) - len(frame.blocks)
                frame.blocks += [[0] * self._memory.block_size] * missing
                frame.vouched = False
                self._sends.remove(send)
                self._world.note("send withdrawn")
                self._world.wake(send.command.peer)
                self._tell(Sent(name, seq, "cancelled", 0.0))

    def drop(self, peer: Incarnation) -> None:
        """Drop the way to a peer, which is gone."""
        for send in [s for s in self._sends if s.command.peer == peer]:
            self._sends.remove(send)
            move = send.command.move
            self._tell(Sent(move.handoff, move.seq, "disconnected", 0.0))

    def push(self) -> bool:
        """Move one block further on each pipe; True if there was anything to do."""
        if not self._sends:
            return False
        worked = False
        busy: set[int] = set()
        for send in list(self._sends):
            if id(send.pipe) not in busy:
                busy.add(id(send.pipe) if send.pipe is not None else -1)
                worked |= self._push_one(send)
        return worked

    def _push_one(self, send: _Send) -> bool:
        move, frame, pipe = send.command.move, send.frame, send.pipe
        error = ""
        if pipe is not None and frame is not None:
            if not pipe.open:
                error = "ConnectionResetError"
            elif not pipe.dialled:
                return False
            else:
                self._world.wake(send.command.peer)
                if len(frame.blocks) < len(move.local):
                    block = send.command.blocks[len(frame.blocks)]
                    readable(send.memory, block.source, block.generation, "is being sent")
                    frame.blocks.append(list(send.memory.rows[block.source]))
                    return True
                frame.vouched = True
        self._sends.remove(send)
        self._tell(Sent(move.handoff, move.seq, error, 0.0))
        return True
