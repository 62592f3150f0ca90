"""The router's process: the real `Hub` over the real `Router`, its links to workers, and the clients it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from engine.messages import (
    Fault,
    Orphan,
    PeerAddress,
    RouterRecord,
    encode,
)
from engine.types import FinishReason, RequestRecord
from router.call import State
from router.config import RouterConfig
from router.core import Router
from router.dispatch import ATTACH, PAUSE_S, WATCH
from router.events import Complete
from router.hub import Hub
from router.observer import NullObserver
from router.policy import make_policy
from tests.sim.clock import Process, Violation
from tests.sim.link import Link
from tests.sim.network import Send, Session
from tests.sim.revived import Revived
from tests.sim.shadow import expected_output

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 0.05


@dataclass(slots=True)
class Client:
    """One caller. Fulfils `router.hub.Sink`; compares every token, as it comes, with the uninterrupted run."""

    world: "World"
    record: RequestRecord
    deadline_s: float | None = None
    cancel_at: float | None = None
    stop_after: int | None = None
    tokens_: list[int] = field(default_factory=list)
    want: list[int] = field(default_factory=list)
    began: bool = False
    left: bool = False
    adrift: bool = False
    """Its router died; it comes back, and goes on where it was."""
    kept_by: Process | None = None
    """Of one that is adrift: the decode worker that ran it for the router, if both knew so."""
    outcome: str = ""
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.want = expected_output(self.record)

    @property
    def name(self) -> str:
        return self.record.request

    def offered(self, now: float) -> None:
        pass

    def accepted(self, now: float) -> None:
        self.began = True

    def interrupted(self, now: float) -> None:
        self.world.note("interrupted, and placed again")

    def moved(self, stages: dict[str, float], now: float) -> None:
        self.world.note("request moved")

    def tokens(self, ids: list[int], now: float) -> int | None:
        if self.outcome:
            raise Violation(f"{self.name}: tokens {ids} after its end ({self.outcome})")
        self.tokens_ += ids
        if self.tokens_ != self.want[: len(self.tokens_)]:
            raise Violation(f"{self.name}: got {self.tokens_}, the uninterrupted run is {self.want}")
        if self.stop_after is not None and len(self.tokens_) >= self.stop_after:
            self.world.note("stop string found")
            return self.stop_after
        return None

    def completed(self, end: Complete, now: float) -> None:
        got = self.tokens_
        if self.stop_after is not None and len(got) >= self.stop_after:
            got = got[: self.stop_after]
        elif got != self.want:
            raise Violation(f"{self.name}: ended with {got}, the uninterrupted run is {self.want}")
        if end.stats.output_tokens != len(got):
            raise Violation(f"{self.name}: {end.stats.output_tokens} tokens counted, {len(got)} came")
        self._over(f"complete ({end.reason.value})", now)

    def failed(
        self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float
    ) -> None:
        if fault.code == "DEADLINE_EXCEEDED":
            if self.deadline_s is None or now < self.deadline_s - 1e-9:
                raise Violation(f"{self.name}: DEADLINE_EXCEEDED at {now:.3f}, due {self.deadline_s}")
        elif fault.code != "UNAVAILABLE":
            raise Violation(f"{self.name}: {fault.code}: {fault.message}")
        else:
            self.world.unavailable(self, fault.message)
        self._over(fault.code, now)

    def leave(self) -> None:
        """The client goes away; nothing more may reach it."""
        if not self.outcome:
            self.left = True
            self._over("CANCELLED", self.world.clock.now)

    def router_lost(self, kept_by: Process | None) -> None:
        if self.outcome or self.adrift:
            return
        if self.record.context and self.began:
            self.adrift, self.kept_by = True, kept_by
            self.world.note("client adrift")
            self.world.clock.at(self.world.rng.uniform(0.001, 0.2), self._come_back)
        else:
            self._over("UNAVAILABLE", self.world.clock.now)

    def _come_back(self) -> None:
        """Ask the router of the time, until one has an answer."""
        world, now = self.world, self.world.clock.now
        if self.outcome:
            return
        if self.deadline_s is not None and now >= self.deadline_s:
            self._over("DEADLINE_EXCEEDED", now)
            return
        front = world.front
        if not front.process.alive or front.process.frozen or not front.hub.is_settled():
            world.clock.at(world.rng.uniform(0.01, 0.05), self._come_back)
            return
        self.adrift = False
        revived = front.revived.get(self.name)
        if revived is not None:
            world.note("client resumed")
            revived.read_on(now)
            front.check()
        else:
            world.lost(self)
            self._over("UNAVAILABLE", now)

    def _over(self, outcome: str, now: float) -> None:
        if self.outcome:
            raise Violation(f"{self.name}: ends twice: {self.outcome}, then {outcome}")
        self.outcome, self.ended_at = outcome, now
        self.world.ended(self)


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
        self.hub = Hub(self.core, lambda: world.clock.now, Counting(world.note))
        self.hub.connect(self._to_worker, self._sever)
        self.hub.adopt_with(self._revive)
        self.revived: dict[str, Revived] = {}
        self.outboxes: dict[str, Send] = {}
        self.pauses: dict[str, float] = {}
        self._links: dict[str, Link] = {}
        self._wanted: dict[str, tuple[str, PeerAddress]] = {}

    def start(self) -> None:
        self.process.later(TICK_S, self._tick)

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """As `router.dispatch.Links`."""
        lives = [(peer.name, peer.incarnation) for peer in (*prefill, *decode) if peer.incarnation]
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

    def check(self) -> None:
        if not self.world.is_checked():
            return
        try:
            self.core.check()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{self.process}: {type(error).__name__}: {error}") from error

    def submit(self, client: Client) -> None:
        self.hub.submit(client.record, client.deadline_s, client)
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
        """The decode worker that runs its request, for all this router knows; empty if it is not running."""
        call = self.core._calls.get(client.record.request)
        running = call is not None and call.state in (State.RUNNING, State.FINISHING)
        return call.decode if call is not None and running else ""

    def _revive(self, orphan: Orphan, now: float) -> Revived:
        name = orphan.record.request
        self.world.note("orphan adopted" if name not in self.revived else "orphan: a higher placement")
        client = next(c for c in self.world.clients if c.name == name)
        revived = self.revived[name] = Revived(client)
        return revived

    def _dial(self, name: str) -> None:
        role, peer = self._wanted[name]

        def accept(send: Send) -> Session:
            link = self._links[name] = Link(self, role, peer, send)
            return link

        method = ATTACH if role == "decode" else WATCH
        self.world.wire.connect(self.process, peer.address, method, accept)

    def _dial_later(self, name: str, pause_s: float) -> None:
        """Unless it is not wanted by then, or has been dialled."""
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
        self.outboxes[worker](encode([record]))

    def _tick(self) -> None:
        self.hub.tick()
        if self.core.open:
            self.check()
        self.process.later(TICK_S, self._tick)
