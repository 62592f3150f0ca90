"""The router's process: the real `Hub` over the real `Router`, and its links to workers."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from engine.messages import LifeOfProcess, Orphan, PeerAddress, ProcessesTold, RouterRecord, WorkerInfo, encode
from router.config import RouterConfig
from router.core.call import State
from router.core.core import Router
from router.core.events import Submit
from router.core.policies import make_policy
from router.dispatch import ATTACH, PAUSE_S
from router.hub import Hub
from router.status.observer import NullObserver
from tests.sim.client import Client
from tests.sim.clock import Process
from tests.sim.link import Link
from tests.sim.network import DialerSession, Send
from tests.sim.revived import Revived

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 0.05


class Counting(NullObserver):
    """Lets the world count what the router drops."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def dropped(self, kind: str) -> None:
        self._note(f"router dropped: {kind}")


class Front:
    """One life of the router. Mutable state: the hub's, the outboxes and the pauses between two attempts to dial."""

    def __init__(self, world: "World", process: Process, config: RouterConfig, seed: int) -> None:
        self.world = world
        self.process = process
        policy = make_policy(config.policy, Random(seed).getrandbits(32))
        self.core = Router(config, policy, life=100 * process.pid)
        self.hub = Hub(self.core, world.clock.read, Counting(world.note))
        self.hub.connect(self._to_worker, self._sever)
        self.hub.adopt_with(self._revive)
        self.revived: dict[str, Revived] = {}
        self.outboxes: dict[str, Send] = {}
        self.pauses: dict[str, float] = {}
        self._named: dict[str, LifeOfProcess] = {}
        self._met: dict[str, LifeOfProcess] = {}
        self._links: dict[str, Link] = {}
        self._wanted: dict[str, tuple[str, PeerAddress]] = {}

    def start(self) -> None:
        self.process.later(TICK_S, self._tick)

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """Do as `router.dispatch.Links` does."""
        lives = [(peer.name, peer.incarnation) for peer in (*prefill, *decode) if peer.incarnation]
        peers = [*prefill, *decode]
        self._named = {p.name: LifeOfProcess(p.name, p.incarnation, p.pid, p.host) for p in peers if p.pid}
        self._tell_processes()
        wanted = {
            peer.name: (role, PeerAddress(peer.name, peer.address))
            for role, peers in (("prefill", prefill), ("decode", decode))
            for peer in peers
        }
        for name in [name for name, known in self._wanted.items() if wanted.get(name) != known]:
            del self._wanted[name]
            self.world.note("life withdrawn")
            self._links.pop(name).end()
            self.hub.lost(name, for_good=True)
        self.hub.named([peer.name for peer in decode], lives)
        for name in [name for name in wanted if name not in self._wanted]:
            self._wanted[name] = wanted[name]
            if lives:
                self.world.note("life announced")
            self.pauses[name] = PAUSE_S[0]
            self._dial(name)
        self.check()

    def met(self, info: WorkerInfo) -> None:
        self._met[info.name] = LifeOfProcess(info.name, info.incarnation, info.pid, info.host)
        self._tell_processes()

    def _tell_processes(self) -> None:
        told = ProcessesTold(list({**self._met, **self._named}.values()))
        for link in self._links.values():
            link.tell(told)

    def check(self) -> None:
        if self.world.audit.is_due(self.process):
            self.world.audit.recompute(self.process)

    def submit(self, client: Client) -> None:
        self.hub.submit(Submit(client.record, client.deadline_s), client)
        self.check()

    def leave(self, client: Client) -> None:
        client.leave()
        self.hub.leave(client.record.request)
        self.check()

    def redial(self, name: str) -> None:
        pause = self.pauses[name]
        self.pauses[name] = min(pause * 2, PAUSE_S[1])
        self._dial_later(name, pause * self.world.rng.uniform(0.8, 1.2))

    def runs_on(self, client: Client) -> str:
        """Return the decode worker that runs its request, for all this router knows; empty if it is not running."""
        call = self.core._calls.get(client.record.request)
        running = call is not None and call.state in (State.RUNNING, State.FINISHING)
        return call.decode if call is not None and running else ""

    def _revive(self, orphan: Orphan, now: float) -> Revived:
        name = orphan.record.request
        self.world.promises.adopted(orphan)
        self.world.note("orphan adopted" if name not in self.revived else "orphan: a higher placement")
        client = next(c for c in self.world.clients if c.name == name)
        revived = self.revived[name] = Revived(client)
        return revived

    def _dial(self, name: str) -> None:
        role, peer = self._wanted[name]

        def open_session(send: Send) -> DialerSession:
            link = self._links[name] = Link(self, role, peer, send)
            return link

        self.world.wire.connect(self.process, peer.address, ATTACH[role], open_session)

    def _dial_later(self, name: str, pause_s: float) -> None:
        """Dial after a pause, unless the link is not wanted by then, or has been dialled."""
        link = self._links[name]

        def dial() -> None:
            if self._links.get(name) is link:
                self._dial(name)

        self.process.later(pause_s, dial)

    def _sever(self, name: str) -> None:
        if name in self._links:
            self.process.later(0.0, self._links[name].end)
            self._dial_later(name, PAUSE_S[1])

    def _to_worker(self, worker: str, record: RouterRecord) -> None:
        self.world.promises.told(worker, record)
        self.outboxes[worker](encode([record]))

    def _tick(self) -> None:
        self.hub.tick()
        if self.core.open:
            self.check()
        self.process.later(TICK_S, self._tick)
