"""One simulated cluster: real workers, real router, virtual time; it runs a plan to its end."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from engine.messages import Handoff
from tests.sim import shells
from tests.sim.audit import Audit
from tests.sim.client import Client, Searcher
from tests.sim.clock import Clock, Process, Violation
from tests.sim.faults import Faults
from tests.sim.forgeries import ROUTER_KINDS
from tests.sim.front import Front
from tests.sim.mover import SimMover
from tests.sim.network import KEEPALIVE_S, Stream, Wire
from tests.sim.pipes import Pipe
from tests.sim.plan import Ask, Going, Plan
from tests.sim.promises import Promises
from tests.sim.shadow import ShadowKV
from tests.sim.supervision import BOOT_S, Supervision
from tests.sim.witness import Witness

PATIENCE_S = 25.0
"""How long after the last fault everything must have come to rest."""
RANK_STUCK_S = 0.3
"""How long a stopped rank may be silent. Takes the place of `transfer.stuck_s` and `engine.rank_wait_s`."""
MAX_EVENTS = 400_000
MAX_PLACEMENTS, RETRY_RESERVE = 3, 128
"""Below these a single fault may end a request."""
ROLES = ("prefill", "decode")


class World:
    """One simulated cluster. Mutable state, all of it: the clock's heap, the processes and what belongs to each, pipes,
    clients, notes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = Random(plan.seed)
        self.clock = Clock(self.rng)
        self.wire = Wire(self.clock)
        self.notes: Counter[str] = Counter()
        self.say: Callable[[str, str], None] | None = None
        self.processes: dict[int, Process] = {}
        self.memories: dict[int, ShadowKV] = {}
        self.movers: dict[int, SimMover] = {}
        """Those of rank 0, or of the only one; `ranks` has all."""
        self.ranks: dict[int, list[SimMover]] = {}
        self.threads: dict[int, shells.SimThread] = {}
        self.workers: dict[int, Any] = {}
        self.live: dict[str, Process] = {}
        self.pauses: dict[int, float] = {}
        self.left_at: dict[int, float] = {}
        self.leave_by: dict[int, float] = {}
        self.starting: Process = None  # type: ignore[assignment]
        self.front: Front = None  # type: ignore[assignment]
        self.clients: list[Client] = []
        self.overlap = 0
        self.breaks = 0
        self.failure = ""
        self.to_come = 0
        self.witness, self.audit, self.promises = Witness(self), Audit(self), Promises(self)
        self.supervision = Supervision(self)
        self.faults = Faults(self, plan.faults)
        self.wire.meddle = self.faults.meddle
        if any(fault.kind in ROUTER_KINDS for fault in plan.faults):
            self.wire.forge = self.faults.forgeries.meddle
        self.wire.on_cut = self._broke

    # ---- processes

    def boot(self, name: str, role: str) -> None:
        """Start a new life of `name`. That the old one is gone is told before."""
        if role != "router" and "router" in self.live:
            self.supervision.tell()
        pid = len(self.processes) + 1
        process = Process(self.clock, name, role, pid, self.rng.getrandbits(64) | 1)
        self.processes[pid] = process
        self.live[name] = process
        if self.say is not None and self.clock.now > 0:
            self.say(name, "starts again, as a new life")
        if role == "router":
            self.witness.router_begins()
            self.promises.router_begins()
            self.front = Front(self, process, self.plan.router, self.plan.seed)
            self.supervision.tell()
            self.front.start()
            return
        address = next(p.address for p in self.supervision.addresses(role) if p.name == name)
        self.workers[pid] = shells.start_worker(process, int(address.partition(":")[2]))
        if "router" in self.live:
            self.supervision.tell()

    def kill(self, process: Process) -> None:
        """Kill a process as SIGKILL does: its state is gone, its streams break, nothing of it runs any more."""
        if process.pid not in self.workers or not self.threads[process.pid].in_turn:
            self.audit.recompute(process)
        if process.pid in self.workers:
            self.witness.collect(process)
            self.witness.kills(process)
        self._bury(process)

    def ask_to_leave(self, going: Going) -> None:
        """Ask a worker of the role to leave: it takes no new work from now on, and is replaced when it has left."""
        able = [
            p
            for p in self.live.values()
            if p.role == going.role and p.alive and not (p.frozen or self.workers[p.pid].is_leaving)
        ]
        busy = [p for p in able if not self.workers[p.pid].scheduler.is_idle]
        if not able:
            return
        process = self.rng.choice(busy or able)
        if self.say is not None:
            self.say(process.name, "is asked to leave")
        self.pauses[process.pid] = going.pause_s
        self.leave_by[process.pid] = self.clock.now + going.grace_s
        self.workers[process.pid].leave(going.grace_s)

    def left(self, process: Process) -> None:
        """End a process by itself, as it was asked to."""
        if self.say is not None:
            self.say(process.name, "has left")
        self.witness.collect(process)
        self.audit.recompute(process)
        in_time = self.clock.now < self.leave_by[process.pid] - 1e-9
        if in_time and (owed := self.audit.owes(process)):
            raise Violation(f"{process} leaves before its grace is over, and {owed}")
        self.note("leave completed" if in_time else "leave cut short by its grace")
        self._bury(process)
        self.left_at[process.pid] = self.clock.now
        self.clock.at(self.pauses[process.pid], lambda: self.boot(process.name, process.role))

    def _bury(self, process: Process) -> None:
        process.kill()
        for stream in self.wire.of(process):
            stream.cut("the process died")
        for mover in self.ranks.get(process.pid, ()):
            mover.connections.die()
        if process.role == "router":
            for client in self.clients:
                client.router_lost(self._keeper(client))
        else:
            for peer in self.live.values():
                for mover in self.ranks.get(peer.pid, ()) if peer.alive else ():
                    mover.wake()

    def _keeper(self, client: Client) -> Process | None:
        """Return the living decode worker that runs a request and is known to, at the moment when the router dies."""
        process = self.live.get(self.front.runs_on(client))
        if process is None or not process.alive or process.frozen:
            return None
        orphanage = self.workers[process.pid].scheduler
        name = client.record.request
        knows = name in orphanage._requests or name in orphanage.endings.orphans._ended
        return process if knows else None

    def freeze(self, process: Process, seconds: float) -> None:
        """Freeze a process as SIGSTOP does for a while: silent, its memory as it was, its streams open until their
        keepalive fails."""
        process.freeze()
        if seconds > KEEPALIVE_S:
            self.note("zombie: frozen beyond keepalive")
            for stream in self.wire.of(process):
                self.clock.at(
                    self.rng.uniform(KEEPALIVE_S / 2, KEEPALIVE_S),
                    lambda stream=stream: stream.cut("keepalive"),  # type: ignore[misc]
                )

        def thaw() -> None:
            if process.alive:
                if self.say is not None:
                    self.say(process.name, "goes on")
                process.resume()

        self.clock.at(seconds, thaw)

    def stop_rank(self, process: Process, seconds: float) -> None:
        """Stop the second rank of a worker. Its worker, whose steps go on here though they would wait for it, ends if
        nobody has heard of it for `RANK_STUCK_S`."""
        mover = self.ranks[process.pid][1]
        mover.stop_rank()

        def over() -> None:
            if not process.alive:
                return
            if seconds <= RANK_STUCK_S:
                mover.go_on()
                return
            self.note("a rank was stopped for too long")
            self.kill(process)
            self.clock.at(0.05, lambda: self.boot(process.name, process.role))

        self.clock.at(min(seconds, RANK_STUCK_S), over)

    def pick(self, role: str, rng: Random) -> Process | None:
        """Pick one living process of a role, those with open handoffs first."""
        alive = [p for p in self.live.values() if p.role == role and p.alive and not p.frozen]
        busy = [p for p in alive if self.has_handoffs(p)]
        return rng.choice(busy or alive) if alive else None

    def handoffs(self, process: Process) -> list[Handoff]:
        scheduler = self.workers[process.pid].scheduler
        received = scheduler.receiver.unfinished if process.role == "decode" else []
        return [*received, *scheduler.sender.unsettled]

    def has_handoffs(self, process: Process) -> bool:
        """Say whether it has a part in an open handoff. The router has one in every request that is under way."""
        if process.role == "router":
            return any(self.has_handoffs(p) for p in self.live.values() if p.role != "router")
        return process.alive and bool(self.handoffs(process))

    def data_connections(self) -> list[tuple[Process, Process, Pipe]]:
        """Return (who reads, whose blocks, over what) of each tcp connection that is open."""
        alive = [process for process in self.live.values() if process.alive]
        lives = {mover.life: process for process in alive for mover in self.ranks.get(process.pid, ())}
        return [
            (reader, lives[peer], pipe)
            for reader in alive
            for mover in self.ranks.get(reader.pid, ())
            for peer, pipe in mover.connections.incoming.items()
            if pipe.open and peer in lives
        ]

    def wake(self, peer: int) -> None:
        """Tell the transfer thread of this life that there is something to do."""
        for process in self.live.values():
            for mover in self.ranks.get(process.pid, ()):
                if mover.life == peer:
                    mover.wake()

    def _broke(self, stream: Stream) -> None:
        if stream.is_handoff and stream.client.alive and stream.server.alive:
            self.breaks += 1

    # ---- what is noted on the way

    def note(self, what: str) -> None:
        self.notes[what] += 1

    def saw_copy(self, reader: Process, owner: Process, name: Handoff) -> None:
        self.faults.saw_copy(reader, owner)

    def unavailable(self, client: Client, message: str) -> None:
        self.note("UNAVAILABLE")
        if self.plan.strict and not self._may_fail():
            raise Violation(f"{client.name}: UNAVAILABLE without need: {message}")

    def giant_failed(self, client: Client, message: str) -> None:
        """Note that the request which one worker alone could hold got no answer."""
        self.note("larger than all that are left")
        if not (self.faults.struck.total() or self.faults.unseen or self.plan.goings):
            raise Violation(f"{client.name}: refused without need: {message}")

    def lost(self, client: Client) -> None:
        """Note a client that came back for a request that the new router does not know."""
        self.note("client lost its request")
        keeper = client.kept_by
        if keeper is not None and keeper.alive and self.plan.decode.orphan_s > PATIENCE_S:
            raise Violation(f"{client.name}: {keeper} ran it, and the new router knows nothing of it")

    def _may_fail(self) -> bool:
        """Say whether there was, at some time, no prefill or no decode worker that the router could reach, or a request
        met more faults than its budget."""
        router = self.plan.router
        is_thrifty = router.max_placements < MAX_PLACEMENTS or router.retry_reserve < RETRY_RESERVE
        return sum(self.faults.struck.values()) + self.faults.unseen > (0 if is_thrifty else 1)

    def ended(self, client: Client) -> None:
        self.note(f"client: {client.outcome}")
        if self.say is not None:
            self.say("client", f"{client.name} ends: {client.outcome}")

    # ---- the run

    def run(self) -> None:
        """Run to the end of everything. Raises Violation."""
        with shells.inside(self):
            self._run()

    def _run(self) -> None:
        clock = self.clock
        for role in ROLES:
            for peer in self.supervision.addresses(role):
                self.boot(peer.name, role)
        self.boot("router", "router")
        self.supervision.start()
        self.to_come = len(self.plan.asks)
        for ask in self.plan.asks:
            clock.at(BOOT_S + ask.at_s, lambda ask=ask: self._ask(ask))  # type: ignore[misc]
        for going in self.plan.goings:
            clock.at(BOOT_S + going.at_s, lambda going=going: self.ask_to_leave(going))  # type: ignore[misc]
        clock.at(BOOT_S + self.plan.disarm_s, self.faults.disarm)
        looks_at, pause_s, healed_at = 0.0, 0.01, None
        while clock.step():
            if clock.now < looks_at:
                continue
            looks_at = clock.now + pause_s
            if clock.events > MAX_EVENTS:
                raise Violation(f"no end in sight after {clock.events} events: {self.audit.rest()}")
            if not self.faults.over or self.to_come:
                continue
            if healed_at is None:
                healed_at = clock.now
            pause_s = min(0.5, pause_s * 1.3)
            why = self.audit.rest()
            if not why:
                break
            if clock.now > healed_at + PATIENCE_S:
                raise Violation(f"{PATIENCE_S} s after the last fault: {why}")
        self.audit.recompute_all()
        for process in self.live.values():
            if process.pid in self.workers:
                self.witness.collect(process)

    def _ask(self, ask: Ask) -> None:
        router = self.live["router"]
        if not router.alive or router.frozen or not self.front.hub.ready():
            self.clock.at(0.05, lambda: self._ask(ask))
            return
        self.to_come -= 1
        now = self.clock.now
        kind = Client if ask.record.beams is None else Searcher
        client = kind(self, ask.record, stop_after=ask.stop_after)
        client.deadline_s = None if ask.deadline_s is None else now + ask.deadline_s
        self.clients.append(client)
        self.overlap = max(self.overlap, sum(not c.outcome for c in self.clients))
        front = self.front
        if ask.cancel_s is not None:
            self.clock.at(
                ask.cancel_s,
                lambda: router.run(lambda: None if client.outcome else front.leave(client)),
            )
        self.promises.submitted(client)
        front.submit(client)
