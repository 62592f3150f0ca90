"""The supervisor, as far as router and workers feel it: it names lives to the router, and kills those it gives up."""

from functools import partial
from typing import TYPE_CHECKING

from engine.messages import PeerAddress
from engine.types import Incarnation
from tests.sim.clock import Process

if TYPE_CHECKING:
    from tests.sim.world import World

LOOKS_S = 0.1
BOOT_S = 0.05
EXIT_S = 0.05
"""A process that has left ends its streams, and some time later itself: its last words arrive before that is seen."""


class Supervision:
    """Stands in for the supervisor. Mutable state: what the router that lives was told last."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._told: tuple[int, list[list[PeerAddress]]] = (0, [])

    def addresses(self, role: str) -> list[PeerAddress]:
        """Return the addresses of all workers of a role, dead or alive. An announced life has a port of its own, as
        under the launchers."""
        live, plan = self._world.live, self._world.plan
        base = 1000 if role == "prefill" else 2000
        found = []
        for slot in range(plan.workers[role]):
            name = f"{role}-{slot}"
            port = 10_000 + live[name].pid if plan.announced and name in live else base + slot
            found.append(PeerAddress(name, f"sim:{port}"))
        return found

    def start(self) -> None:
        self._world.clock.at(LOOKS_S, self._look)

    def tell(self) -> None:
        """Tell the router who lives: at its start, and if that has changed. Where lives are not announced it knows the
        workers' addresses from its start, and finds out the rest."""
        world, router = self._world, self._world.live["router"]
        lists = [self._known(role) for role in ("prefill", "decode")]
        told = (router.pid, lists)
        if told == self._told or not router.alive:
            return
        self._told = told
        router.run(partial(world.front.set_workers, *lists))

    def _known(self, role: str) -> list[PeerAddress]:
        if not self._world.plan.announced:
            return self.addresses(role)
        return [
            PeerAddress(peer.name, peer.address, Incarnation(process.incarnation))
            for peer in self.addresses(role)
            for process in (self._world.live.get(peer.name),)
            if process is not None and (process.alive or self._is_leaving(process))
        ]

    def _is_leaving(self, process: Process) -> bool:
        left_at = self._world.left_at.get(process.pid)
        return left_at is not None and self._world.clock.now - left_at < EXIT_S

    def _look(self) -> None:
        """See ten times a second who has died, and who is given up."""
        world = self._world
        world.clock.at(LOOKS_S, self._look)
        self.tell()
        router = world.live["router"]
        if not router.alive or router.frozen:
            return
        for verdict in world.front.core.condemned:
            process = world.live[verdict.name]
            if process.alive and process.incarnation == verdict.incarnation:
                self._kill(process, verdict.why)

    def _kill(self, process: Process, why: str) -> None:
        world = self._world
        world.note("given up, and killed")
        life = (process.name, Incarnation(process.incarnation))
        if not world.front.core.registry.has_met(life):
            world.note("given up, and never met by its router")
        if world.say is not None:
            world.say("supervisor", f"kills {process.name}: {why}")
        world.kill(process)
        world.clock.at(BOOT_S, partial(world.boot, process.name, process.role))
