"""The transfer thread in virtual time: the real commands in, the real events out, copies by halves of blocks.

Two wires, as the real ones differ. `shm`: the receiver reads the sender's memory itself, so the oracle asks at each
half block whether the owner still pins what is read. `tcp`: the sender's hand puts the bytes on a stream per pair, the
receiver takes them off in order, unwanted ones go to scrap. Either way a target block must still be the reserved block
that it was when the receive was posted.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kv.block_pool import BlockState
from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import BlockId, Incarnation
from tests.sim.clock import Violation
from tests.sim.connections import Connections
from tests.sim.faults import Fault
from tests.sim.pipes import Frame, Pipe, SimTransport
from tests.sim.shadow import ShadowKV, block_digest
from transfer.commands import (
    CancelRecv,
    CancelSend,
    Connect,
    Disconnect,
    IncomingBlock,
    MoverCommand,
    MoverEvent,
    Posted,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Sent,
    Unreachable,
)
from transfer.digest import Tally

if TYPE_CHECKING:
    from tests.sim.world import World

PAUSE_S = (0.00002, 0.0004)


@dataclass(slots=True, eq=False)
class _Send:
    command: PostSend
    pipe: Pipe | None
    frame: Frame | None


@dataclass(slots=True, eq=False)
class _Recv:
    command: PostRecv | PostScrap
    targets: dict[BlockId, int]  # generations of the target blocks when the receive was posted
    pipe: Pipe | None
    done: int = 0
    half: int = 0
    cancelled: bool = False
    flip: Fault | None = None
    buffer: list[int] = field(default_factory=list)  # one block of another size than ours
    wrong: int = 0


class SimMover:
    """Stands in for `transfer.mover.Mover`, with the same constructor after `world`. Owner: its process."""

    def __init__(
        self,
        world: "World",
        transports: Mapping[str, SimTransport],
        memory: ShadowKV,
        layout: KVLayout,
        on_event: Callable[[MoverEvent], None],
    ) -> None:
        self._world = world
        self._memory = memory
        self._process = memory.process
        self._remote = "shm" in transports
        self.digests = Tally()
        self.scrapped_bytes = 0
        self.outstanding = 0
        self._tell = on_event
        self._commands: deque[MoverCommand] = deque()
        self._routes: dict[Incarnation, ShadowKV] = {}
        self._sends: deque[_Send] = deque()
        self._recvs: dict[Incarnation, deque[_Recv]] = {}
        self.connections = Connections(world, self._process)
        self._armed = self._looking = False
        self.speed = 1.0
        self.beat: int | None = None
        world.movers[self._process.pid] = self

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float = 5.0) -> None:
        pass

    @property
    def copying(self) -> int:
        """Receives that write to this process's memory."""
        return sum(
            not recv.cancelled and isinstance(recv.command, PostRecv)
            for queue in self._recvs.values()
            for recv in queue
        )

    def submit(self, command: MoverCommand) -> None:
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        if not self._armed:
            self._armed = True
            rng = self._world.rng
            slow = 30.0 if rng.random() < self._world.plan.slow_copies else 1.0
            self._process.later(rng.uniform(*PAUSE_S) * slow * self.speed, self._turn)

    def _turn(self) -> None:
        self._armed = False
        if self._commands and not (
            self._remote and any(queue and queue[0].half for queue in self._recvs.values())
        ):
            while self._commands:
                self._execute(self._commands.popleft())
        worked = self._push() if self._sends else False
        for peer in list(self._recvs):
            worked |= self._pull(peer)
        if worked or self._commands:
            self.wake()

    # ---- commands

    def _execute(self, command: MoverCommand) -> None:
        match command:
            case Connect(peer, endpoint):
                memory = self._world.memories.get(endpoint.details["pid"])
                if memory is None or not memory.process.alive:
                    self._tell(Unreachable(peer, "its process is gone"))
                    return
                if not self._remote:
                    self._disconnect(peer)
                self._routes[peer] = memory
                self.connections.make(peer)
            case Disconnect(peer):
                self._disconnect(peer)
            case PostSend():
                self._post_send(command)
            case PostRecv():
                self._post_recv(command)
            case PostScrap(peer):
                if not self._remote and peer in self._routes:
                    self._queue(peer, _Recv(command, {}, self._dial(peer)))
            case CancelRecv(handoff, seq):
                self._cancel(handoff, seq)
            case CancelSend(handoff, seq):
                self._withdraw(handoff, seq)
            case _:
                raise TypeError(f"not a command for the transfer thread: {command!r}")

    def _post_send(self, command: PostSend) -> None:
        name, seq = command.move.handoff, command.move.seq
        world, memory = self._world, self._memory
        fault = world.faults.takes("send_fails", name)
        if fault is not None:
            world.faults.strikes(fault)
        if command.peer not in self._routes or fault is not None:
            self._tell(Sent(name, seq, "TransferError: cannot be posted", 0.0))
            return
        for block in command.blocks:
            self._pinned(memory, block.source, block.generation, "is digested")
        digests = tuple(
            block_digest(memory.rows[b.source], b.tokens, b.identity, b.generation, name)
            for b in command.blocks
        )
        pipe = frame = None
        if not self._remote:
            pipe = self.connections.outgoing[command.peer]
            frame = Frame(name, seq)
            pipe.frames.append(frame)
        self._sends.append(_Send(command, pipe, frame))
        self._tell(Posted(name, seq, digests))

    def _post_recv(self, command: PostRecv) -> None:
        name, seq = command.move.handoff, command.move.seq
        fault = self._world.faults.takes("recv_fails", name)
        if fault is not None:
            self._world.faults.strikes(fault)
        if command.peer not in self._routes or (fault is not None and self._remote):
            self._tell(Received(name, seq, "TransferError: cannot be posted", 0.0, 0))
            return
        recv = _Recv(
            command,
            {r.target: self._memory.generations[r.target] for b in command.blocks for r in b.rows},
            self._dial(command.peer),
        )
        if fault is not None and recv.pipe is not None:
            recv.pipe.open = False  # over tcp a receive fails with its connection
        recv.flip = self._world.faults.takes("corrupt", name)
        self._queue(command.peer, recv)
        self._world.saw_copy(self._process, self._routes[command.peer].process, name)

    def _queue(self, peer: Incarnation, recv: _Recv) -> None:
        self._recvs.setdefault(peer, deque()).append(recv)
        if not (self._remote or self._looking):
            self._looking = True
            self._process.later(self.connections.look_s, self._look)

    def _look(self) -> None:
        """tcp: give up what is due and does not come, as long as anything is outstanding."""
        due = [peer for peer, queue in self._recvs.items() if queue]
        for peer in self.connections.stalled(due):
            self._world.note("data connection stalled")
            self._lose(peer, f"nothing came for {self._world.plan.stall_s:g} s")
        self._looking = bool(due)
        if due:
            self._process.later(self.connections.look_s, self._look)

    def _cancel(self, name: Handoff, seq: int) -> None:
        for queue in self._recvs.values():
            for recv in queue:
                move = recv.command.move
                if (move.handoff, move.seq) == (name, seq) and not recv.cancelled:
                    self._world.note("receive cancelled mid-copy" if recv.done else "receive cancelled")
                    self._end_recv(recv, "cancelled")
                    recv.cancelled = True
                    if self._remote:
                        queue.remove(recv)
                    return

    def _withdraw(self, name: Handoff, seq: int) -> None:
        """tcp: what is left of the frame is padding now, and nobody vouches for it."""
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

    def _disconnect(self, peer: Incarnation) -> None:
        self._routes.pop(peer, None)
        for recv in self._recvs.pop(peer, ()):
            if not recv.cancelled:
                self._end_recv(recv, "disconnected")
        for send in [s for s in self._sends if s.command.peer == peer]:
            self._sends.remove(send)
            move = send.command.move
            self._tell(Sent(move.handoff, move.seq, "disconnected", 0.0))
        self.connections.hang_up(peer)

    def _dial(self, peer: Incarnation) -> Pipe | None:
        if self._remote:
            return None
        sender = self._world.movers[self._routes[peer].process.pid]
        return self.connections.dial(peer, sender.connections)

    # ---- sending

    def _push(self) -> bool:
        """One block further on each pipe; True if there was anything to do."""
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
                    self._pinned(self._memory, block.source, block.generation, "is being sent")
                    frame.blocks.append(list(self._memory.rows[block.source]))
                    return True
                frame.vouched = True
        self._sends.remove(send)
        self._tell(Sent(move.handoff, move.seq, error, 0.0))
        return True

    # ---- receiving

    def _pull(self, peer: Incarnation) -> bool:
        queue = self._recvs[peer]
        if not queue:
            return False
        recv, memory = queue[0], self._routes[peer]
        if self._remote:
            return self._copy(queue, recv, memory, memory.rows)
        pipe = recv.pipe
        assert pipe is not None
        if not (pipe.open or pipe.deaf):
            self._lose(peer, "the connection was reset")
            return False
        if not pipe.frames or self._world.faults.swallows(self._process, memory.process):
            return False
        frame, move = pipe.frames[0], recv.command.move
        if (frame.name, frame.seq) != (move.handoff, move.seq):
            self._lose(peer, "a frame came that is not the next one posted")
            return False
        if isinstance(recv.command, PostScrap) or recv.cancelled:
            if frame.vouched is None:
                return False
            pipe.frames.popleft()
            pipe.taken += 1
            queue.popleft()
            self._world.note("bytes to scrap")
            return True
        if recv.done >= len(frame.blocks):
            return False
        if recv.done + 1 == len(move.remote) and recv.half and not frame.vouched:
            if frame.vouched is None:
                return False
            pipe.frames.popleft()
            pipe.taken += 1
            queue.popleft()
            self._end_recv(recv, "the sender withdrew the chunk")
            return True
        pipe.taken += 1
        fits = self._copy(queue, recv, memory, frame.blocks)
        if recv.done == len(move.remote) and recv not in queue:
            pipe.frames.popleft()
        return fits

    def _lose(self, peer: Incarnation, why: str) -> None:
        """A connection is over: what is outstanding on it fails, and the worker hears first that this way is gone."""
        self._world.note("data connection lost")
        pipe, queue = self.connections.incoming[peer], self._recvs[peer]
        pipe.open = pipe.deaf = False
        lost = [r for r in queue if not r.cancelled and isinstance(r.command, PostRecv)]
        queue.clear()
        for recv in lost:
            self._tell(Unreachable(peer, why))
            self._end_recv(recv, why)
        self._world.wake(peer)

    def _copy(
        self, queue: deque[_Recv], recv: _Recv, memory: ShadowKV, rows: list[list[int]]
    ) -> bool:
        """Half a block. The other half comes in a later turn."""
        command, mine, at = recv.command, self._memory, recv.done
        assert isinstance(command, PostRecv)
        block = command.blocks[at]
        source, generation = command.move.remote[at]
        if self._remote:
            self._pinned(memory, source, generation, f"is read by {self._process}")
        in_place = memory.block_size == mine.block_size
        if in_place:
            self._writable(recv, block.rows[0].target)
            into = mine.rows[block.rows[0].target]
        else:
            self._world.note("converted")
            into = recv.buffer = recv.buffer or [0] * memory.block_size
        size = memory.block_size
        first, last = (0, size // 2) if recv.half == 0 else (size // 2, size)
        into[first:last] = rows[source if self._remote else at][first:last]
        recv.half ^= 1
        if recv.half == 0:
            if recv.flip is not None and at == 0:
                into[0] ^= 1
                self._world.faults.strikes(recv.flip)
            recv.done += 1
            self._check(recv, block, into)
            if not in_place and not recv.wrong:
                self._scatter(recv, block, into)
        if recv.done == len(command.blocks):
            queue.remove(recv)
            self._end_recv(recv, "digest mismatch" if recv.wrong else "")
        return True

    def _writable(self, recv: _Recv, target: BlockId) -> None:
        """The fence, seen from outside: a target is still the reserved block that it was, and nobody shares it."""
        mine = self._memory
        state = mine.pool.state(target)
        shared = mine.pool.refs(target) != 1 or mine.manager.cache.holds(target)
        held = state in (BlockState.RESERVED, BlockState.QUARANTINED, BlockState.ACTIVE)
        if not held or shared or mine.generations[target] != recv.targets[target]:
            raise Violation(
                f"{self._process}: a copy for {recv.command.move.handoff.request} writes to block "
                f"{target}, which is {state} by now"
            )

    def _check(self, recv: _Recv, block: IncomingBlock, rows: list[int]) -> None:
        name = recv.command.move.handoff
        found = block_digest(rows, block.tokens, block.identity, block.generation, name)
        if found != block.digest:
            self._world.note("digest mismatch")
            recv.wrong += 1

    def _scatter(self, recv: _Recv, block: IncomingBlock, source: list[int]) -> None:
        """As `transfer.landing.Repacked`."""
        for rows in block.rows:
            self._writable(recv, rows.target)
            mine = self._memory.rows[rows.target]
            mine[rows.at : rows.at + rows.count] = source[rows.first : rows.first + rows.count]

    def _end_recv(self, recv: _Recv, error: str) -> None:
        move = recv.command.move
        if isinstance(recv.command, PostRecv):
            nbytes = 0 if error else len(move.remote) * self._memory.block_bytes
            self._tell(Received(move.handoff, move.seq, error, 0.0, nbytes))

    def _pinned(self, memory: ShadowKV, block: int, generation: int, what: str) -> None:
        """The fence, seen from outside: whoever reads a block finds it held, in the generation that was offered."""
        owner = memory.process
        if not owner.alive:
            return
        if memory.generations[block] != generation or not memory.pool.refs(block):  # type: ignore[arg-type]
            raise Violation(
                f"{owner}: source block {block} {what}, but is at generation "
                f"{memory.generations[block]} (offered: {generation}), held by "
                f"{memory.pool.refs(block)}"  # type: ignore[arg-type]
            )
