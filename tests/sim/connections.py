"""tcp, as far as a transfer thread sees it: one connection per pair and direction, dialled, cut, silent, given up.

What is sent before the receiver has dialled waits at the sender. A connection that is cut is noticed by both ends, or,
where the word of it is lost, by the sender alone. One on which something is due and nothing comes is given up by the
receiver, as `transfer.liveness` judges it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.types import Incarnation
from tests.sim.clock import Process
from tests.sim.pipes import Pipe
from transfer.liveness import LOOK_S, Watchdog

if TYPE_CHECKING:
    from tests.sim.world import World


class Connections:
    """The connections of one process, or of one of its ranks. Mutable state: its pipes by peer, and who watches those
    that it reads."""

    def __init__(self, world: "World", process: Process, life: Incarnation) -> None:
        """`life`: of the process, or of one of its ranks."""
        self._world = world
        self._life = life
        self._process = process
        self.outgoing: dict[Incarnation, Pipe] = {}
        self.incoming: dict[Incarnation, Pipe] = {}
        self._dogs: dict[Pipe, Watchdog] = {}

    @property
    def look_s(self) -> float:
        """Time between two looks at what is due."""
        return min(LOOK_S, self._world.plan.stall_s / 2)

    def make(self, peer: Incarnation) -> None:
        """A new way to a peer; what waits for it goes out when it has dialled."""
        self.hang_up(peer)
        self.outgoing[peer] = Pipe()

    def hang_up(self, peer: Incarnation) -> None:
        for pipes in (self.outgoing, self.incoming):
            pipe = pipes.pop(peer, None)
            if pipe is not None:
                self._dogs.pop(pipe, None)
                pipe.open = False
                self._world.wake(peer)

    def dial(self, peer: Incarnation, sender: "Connections") -> Pipe:
        """The pipe to receive from `peer` over; dialled now, if there is none yet."""
        pipe = self.incoming.get(peer)
        if pipe is None:
            pipe = self.incoming[peer] = sender.admit(self._life)
            self._dogs[pipe] = Watchdog(self._world.plan.stall_s)
            self._world.wake(peer)
        return pipe

    def admit(self, dialer: Incarnation) -> Pipe:
        """Somebody has dialled: what waits for it goes out. Who dials again gets a new pipe, the old one breaks."""
        pipe = self.outgoing.get(dialer)
        if pipe is not None and pipe.dialled:
            pipe.open = False
            pipe = self.outgoing[dialer] = Pipe()
        if pipe is None:
            pipe = Pipe()
            pipe.open = False
        pipe.open &= self._process.alive
        pipe.dialled = True
        return pipe

    def stalled(self, due: Iterable[Incarnation]) -> list[Incarnation]:
        """Called every `look_s`: from whom something is `due` and has been for too long without a byte."""
        now, wanted = self._world.clock.now, set(due)
        return [
            peer
            for peer, pipe in self.incoming.items()
            if self._dogs[pipe].is_stuck(pipe.taken if peer in wanted else None, now)
        ]

    def die(self) -> None:
        """The process is gone, and its sockets with it."""
        for pipe in (*self.outgoing.values(), *self.incoming.values()):
            pipe.open = pipe.deaf = False
