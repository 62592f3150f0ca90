"""The transfer thread in virtual time: the real commands in, the real events out, copies by halves of blocks.

Two wires, as the real ones differ. `shm`: the receiver reads the sender's memory itself, so the oracle asks at each
half block whether the owner still pins what is read. `tcp`: the sender's hand puts the bytes on a stream per pair, the
receiver takes them off in order, unwanted ones go to scrap. Either way a target block must still be the reserved block
that it was when the receive was posted.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.kv.layout import KVLayout
from engine.messages import Handoff
from engine.types import Incarnation
from tests.sim.connections import Connections
from tests.sim.landing import Landing, Recv
from tests.sim.pipes import Pipe, SimTransport
from tests.sim.rank_memory import shared
from tests.sim.sending import Sending
from tests.sim.shadow import ShadowKV
from transfer.digest import Tally
from transfer.handoff.commands import (
    CancelRecv,
    CancelSend,
    Connect,
    Disconnect,
    MoverCommand,
    MoverEvent,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Unreachable,
)
from transfer.ranks.group import part_of

if TYPE_CHECKING:
    from tests.sim.world import World

PAUSE_S = (0.00002, 0.0004)


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
        self.heads = layout.heads
        self.ranks = world.ranks.setdefault(self._process.pid, [])
        """The movers of all ranks of this process's worker, this one's too."""
        self.rank = len(self.ranks)
        self.ranks.append(self)
        self.life = part_of(Incarnation(self._process.incarnation), self.rank)
        self._commands: deque[MoverCommand] = deque()
        self._routes: dict[Incarnation, ShadowKV] = {}
        self._recvs: dict[Incarnation, deque[Recv]] = {}
        self.connections = Connections(world, self._process, self.life)
        self._sending = Sending(world, memory, self.connections, self._remote, on_event)
        self._landings: dict[Incarnation, Landing] = {}
        """By peer: it writes the heads that both have."""
        self._armed = self._looking = self._stopped = False
        self.speed = 1.0
        self.beat: int | None = None
        world.movers.setdefault(self._process.pid, self)

    def warm_up(self, wire: str) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float = 5.0) -> None:
        pass

    @property
    def copying(self) -> int:
        """The receives that write to this process's memory, of all its ranks."""
        return sum(
            not recv.cancelled and isinstance(recv.command, PostRecv)
            for mover in self.ranks
            for queue in mover._recvs.values()
            for recv in queue
        )

    def submit(self, command: MoverCommand) -> None:
        self._commands.append(command)
        self.wake()

    def wake(self) -> None:
        if not self._armed:
            self._armed = True
            clock = self._world.clock
            slow = 30.0 if clock.random() < self._world.plan.slow_copies else 1.0
            pause_s = PAUSE_S[0] + (PAUSE_S[1] - PAUSE_S[0]) * clock.random()
            clock.at(pause_s * slow * self.speed, self._turn, self._process)

    def stop_rank(self) -> None:
        """Stop this rank's process alone: it takes its commands, and moves nothing."""
        self._stopped = True

    def go_on(self) -> None:
        self._stopped = False
        self.wake()

    def _turn(self) -> None:
        self._armed = False
        if self._stopped:
            return
        if self._commands and not (
            self._remote and any(queue and queue[0].half for queue in self._recvs.values())
        ):
            while self._commands:
                self._execute(self._commands.popleft())
        worked = self._sending.push()
        for peer in [peer for peer, queue in self._recvs.items() if queue]:
            worked |= self._pull(peer)
        if worked or self._commands:
            self.wake()

    # ---- commands

    def _execute(self, command: MoverCommand) -> None:
        match command:
            case Connect(peer, endpoint, agreement):
                memory = self._world.memories.get(endpoint.details["pid"])
                if memory is None or not memory.process.alive:
                    self._tell(Unreachable(peer, "its process is gone"))
                    return
                if not self._remote:
                    self._disconnect(peer)
                both = shared(self.heads, agreement.layout.heads)
                self._routes[peer] = memory.part(both, endpoint.details.get("rank", 0))
                own = self._sending.parts[peer] = self._memory.part(both, self.rank)
                self._landings[peer] = Landing(self._world, own, self._remote)
                self.connections.make(peer)
            case Disconnect(peer):
                self._disconnect(peer)
            case PostSend():
                self._sending.post(command, self._routes)
            case PostRecv():
                self._post_recv(command)
            case PostScrap(peer):
                if not self._remote and peer in self._routes:
                    self._queue(peer, Recv(command, {}, self._dial(peer)))
            case CancelRecv(handoff, seq):
                self._cancel(handoff, seq)
            case CancelSend(handoff, seq):
                self._sending.withdraw(handoff, seq)
            case _:
                raise TypeError(f"not a command for the transfer thread: {command!r}")

    def _post_recv(self, command: PostRecv) -> None:
        name, seq = command.move.handoff, command.move.seq
        fault = self._world.faults.takes("recv_fails")
        if fault is not None:
            self._world.faults.strikes(fault)
        if command.peer not in self._routes or (fault is not None and self._remote):
            self._tell(Received(name, seq, "TransferError: cannot be posted", 0.0, 0))
            return
        recv = Recv(
            command,
            {r.target: self._memory.generations[r.target] for b in command.blocks for r in b.rows},
            self._dial(command.peer),
        )
        if fault is not None and recv.pipe is not None:
            recv.pipe.open = False  # over tcp a receive fails with its connection
        recv.flip = self._world.faults.takes("corrupt")
        if self._remote:
            recv.overwrite = self._world.faults.takes("overwrite")
        self._queue(command.peer, recv)
        self._world.saw_copy(self._process, self._routes[command.peer].process, name)

    def _queue(self, peer: Incarnation, recv: Recv) -> None:
        self._recvs.setdefault(peer, deque()).append(recv)
        if not (self._remote or self._looking):
            self._looking = True
            self._process.later(self.connections.look_s, self._look)

    def _look(self) -> None:
        """Give up what is due over tcp and does not come, as long as anything is outstanding."""
        due = [peer for peer, queue in self._recvs.items() if queue]
        for peer in () if self._stopped else self.connections.stalled(due):
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

    def _disconnect(self, peer: Incarnation) -> None:
        self._routes.pop(peer, None)
        for recv in self._recvs.pop(peer, ()):
            if not recv.cancelled:
                self._end_recv(recv, "disconnected")
        self._sending.drop(peer)
        self.connections.hang_up(peer)

    def _dial(self, peer: Incarnation) -> Pipe | None:
        if self._remote:
            return None
        route = self._routes[peer]
        sender = self._world.ranks[route.process.pid][route.rank]
        return self.connections.dial(peer, sender.connections)

    # ---- receiving

    def _pull(self, peer: Incarnation) -> bool:
        queue = self._recvs[peer]
        if not queue:
            return False
        recv, memory = queue[0], self._routes[peer]
        if self._remote:
            self._copy(queue, recv, memory, memory.rows)
            return True
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
        if self._copy(queue, recv, memory, frame.blocks):
            pipe.frames.popleft()
        return True

    def _lose(self, peer: Incarnation, why: str) -> None:
        """Lose a connection: what is outstanding on it fails, and the worker hears first that this way is gone."""
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
        self, queue: deque[Recv], recv: Recv, memory: ShadowKV, rows: list[list[int]]
    ) -> bool:
        """Copy half a block further; True if that was the last."""
        is_over = self._landings[recv.command.peer].half(recv, memory, rows)
        if is_over:
            queue.remove(recv)
            self._end_recv(recv, recv.error or ("digest mismatch" if recv.wrong else ""))
        return is_over

    def _end_recv(self, recv: Recv, error: str) -> None:
        move = recv.command.move
        if isinstance(recv.command, PostRecv):
            nbytes = 0 if error else len(move.remote) * self._memory.block_bytes
            self._tell(Received(move.handoff, move.seq, error, 0.0, nbytes))
