"""Decides which process is started again, when, and when to give up. Pure: no clock, no process.

A slot (`prefill-0`) outlives its processes; each new one draws a new incarnation.

    STARTING --Up--> UP --ProcessEnded--> PAUSING --pause over--> STARTING
    STARTING --ProcessEnded, or too slow--> PAUSING
    UP --LeaveWanted--> LEAVING --ended by itself--> STARTING, or forgotten
    any --more than `limit` deaths within `window_s`--> FAILED --window over--> STARTING
    the same, and nobody is up who does its work (a decode worker can do a prefill worker's, a router another
    router's): the cluster ends

The pause doubles with each death inside the window, so a worker that dies as it starts costs little, and one that has
been well for a window starts anew at once. When many die together, at most `at_once` workers start at a time: loading
weights side by side is how a host that was short of memory loses them all again. A worker that the router has given
up (`router.core.escalation`) is killed, and then has died like any other; so is a router that owes an answer for
`router_hung_s`. Workers leave one at a time, and only while all others are up (or FAILED); who has left as it was
asked to has not died, and is replaced without a pause. The router hears of an end before the replacement exists: the
old port may soon be somebody else's. A router that is up again is told all workers: what it was told before died with
it.
"""

from collections import Counter, deque
from collections.abc import Mapping

import msgspec

from cluster.processes.deaths import cause_of
from cluster.processes.events import (
    Accused,
    Announce,
    AskToLeave,
    Command,
    Discard,
    EndCluster,
    Event,
    KillProcess,
    Launch,
    LeaveWanted,
    ProcessEnded,
    Refuse,
    Resize,
    RouterProbed,
    TimePassed,
    Up,
)
from cluster.processes.slots import Slot, SlotState, SlotView
from cluster.processes.spec import ChildReady, Kind
from engine.messages import PeerAddress


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How dead workers, and a dead router, are replaced."""

    limit: int = 5
    """Deaths of one process within `window_s` that are made good. After the next one it stays down for as long again,
    if another one of its pool is up, or, for a prefill worker, a decode worker, which reads prompts itself; else the
    cluster ends. 0: the first death ends it."""
    window_s: float = 300.0
    """The time after which a death no longer counts."""
    first_pause_s: float = 0.25
    """The pause before a dead process is started again; twice as long after each further death."""
    longest_pause_s: float = 15.0
    """The longest that this pause becomes."""
    at_once: int = 4
    """Workers that may be starting again at the same time."""
    router_hung_s: float = 30.0
    """A router that answers nothing for this long is killed."""


AWAY_S = 1.0
"""The launcher looks many times a second. If this long has passed since the last look, the launcher itself slept."""
LEAVE_MARGIN_S = 5.0
"""How much longer than its grace a leaving worker's process may live."""

NO_REASON = "it ended, and nobody knows why"

_DOWN = (SlotState.PAUSING, SlotState.FAILED)
_SETTLED = (SlotState.UP, SlotState.FAILED)


class Supervisor:
    """Keeps the pools at their sizes, and the routers before them.

    Mutable state: the slots, who is still to leave, what was died of, and the last look. Owner: the thread that watches
    the cluster."""

    def __init__(
        self,
        config: RestartConfig,
        start_timeout_s: float,
        children: Mapping[str, tuple[Kind, ChildReady]],
    ) -> None:
        """Begin with these processes up. `children`: kind (prefill, decode or router) and address by name."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._slots = {
            name: Slot(kind, _address(ready), ready.incarnation)
            for name, (kind, ready) in children.items()
        }
        self._to_leave: deque[tuple[str, LeaveWanted | Resize]] = deque()
        self._looked_s: float | None = None
        self.deaths: Counter[tuple[str, str]] = Counter()
        """How many died, by kind of process and cause."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns the commands to carry out, in order."""
        match event:
            case Up(ready):
                return self._up(ready)
            case ProcessEnded(name, why, left):
                return self._ended(name, why, now, left)
            case LeaveWanted(names):
                self._to_leave.extend((name, event) for name in names)
                return []
            case Resize():
                return self._resize(event)
            case Accused():
                return self._accused(event)
            case RouterProbed(name, answered):
                return self._asked(name, answered, now)
            case TimePassed():
                self._looked_s = now
                return self._tick(now)
        raise TypeError(f"not an event: {event!r}")

    @property
    def is_steady(self) -> bool:
        """True when every worker is up, or has been given up for now, and none is to leave."""
        return not self._to_leave and all(s.state in _SETTLED for s in self._slots.values())

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def state(self, name: str) -> SlotState:
        return self._slots[name].state

    def kind(self, name: str) -> Kind:
        return self._slots[name].kind

    def pool(self, kind: Kind) -> list[str]:
        """Return the workers of a kind that are to stay."""
        leaving = {name for name, order in self._to_leave if not _is_back(order)}
        return [
            name
            for name, slot in self._slots.items()
            if slot.kind == kind and slot.again and name not in leaving
        ]

    def view(self) -> list[SlotView]:
        """Return all slots, in the order in which they came. May be called from any thread."""
        return [
            SlotView(
                name=name,
                kind=slot.kind,
                state=slot.state,
                deaths=len(slot.deaths),
                why=slot.why,
            )
            for name, slot in list(self._slots.items())
        ]

    def __repr__(self) -> str:
        slots = (f"{name}={slot.state}({len(slot.deaths)})" for name, slot in self._slots.items())
        return f"Supervisor({', '.join(slots)})"

    def _up(self, ready: ChildReady) -> list[Command]:
        slot = self._slots.get(ready.name)
        if slot is None or slot.state is not SlotState.STARTING:
            return []
        slot.state = SlotState.UP
        slot.address = _address(ready)
        slot.incarnation, slot.accused, slot.silent_since_s = ready.incarnation, "", None
        return self._tell()

    def _resize(self, event: Resize) -> list[Command]:
        names = self.pool(event.kind)
        for number in range(event.count + len(self._slots)):
            name = f"{event.kind}-{number}"
            if len(names) < event.count and name not in self._slots:
                address = PeerAddress(name, "")
                due_s = float("-inf")
                self._slots[name] = Slot(
                    event.kind, address, address.incarnation, SlotState.PAUSING, due_s
                )
                names.append(name)
        surplus = sorted(names, key=lambda name: (self._slots[name].state in _DOWN, _number(name)))[event.count :]
        self._to_leave.extend((name, event) for name in reversed(surplus))
        return []

    def _accused(self, event: Accused) -> list[Command]:
        """Kill the life that the router named, once, and no newer one."""
        slot = self._slots.get(event.name)
        alive = (SlotState.UP, SlotState.LEAVING)
        if slot is None or slot.state not in alive or slot.incarnation != event.incarnation:
            return []
        if slot.accused:
            return []
        slot.accused = event.why
        return [KillProcess(event.name, event.why)]

    def _asked(self, name: str, answered: bool, now: float) -> list[Command]:
        """Kill a router that says nothing, once. A launcher that slept itself begins to wait anew."""
        slot = self._slots.get(name)
        if slot is None or slot.state is not SlotState.UP or slot.accused:
            return []
        slept = self._looked_s is not None and now - self._looked_s > AWAY_S
        if answered:
            slot.silent_since_s = None
        elif slot.silent_since_s is None or slept:
            slot.silent_since_s = now
        elif now - slot.silent_since_s >= self._config.router_hung_s:
            slot.accused = f"no answer for {self._config.router_hung_s:.1f} s"
            return [KillProcess(name, slot.accused)]
        return []

    def _ended(self, name: str, why: str, now: float, left: bool = False) -> list[Command]:
        slot = self._slots.get(name)
        if slot is None or slot.state in _DOWN:
            return []
        if slot.state is SlotState.LEAVING and (left or not slot.again):
            return self._left(name, slot)
        was_up = slot.state in (SlotState.UP, SlotState.LEAVING)
        self.deaths[slot.kind, cause_of(why, was_up=was_up, was_accused=was_up and bool(slot.accused))] += 1
        if was_up and slot.accused:
            why = f"{why} ({slot.accused})"
        slot.why = why = why or NO_REASON
        config = self._config
        slot.deaths = [at for at in slot.deaths if at > now - config.window_s] + [now]
        deaths = len(slot.deaths)
        if deaths > config.limit:
            if config.limit and self._has_company(name, slot):
                slot.state, slot.due_s = SlotState.FAILED, now + config.window_s
                return [Discard(name), *(self._tell() if was_up else [])]
            often = f" ({deaths} times in {config.window_s:.0f} s)" if deaths > 1 else ""
            return [EndCluster(f"{name}: {why}{often}")]
        pause_s = config.first_pause_s * 2.0 ** (deaths - 1)
        slot.state, slot.due_s = SlotState.PAUSING, now + min(pause_s, config.longest_pause_s)
        return [Discard(name), *(self._tell() if was_up else [])]

    def _has_company(self, name: str, slot: Slot) -> bool:
        """Say whether another worker is up that does its work: one of its pool, or for a prefill worker a decode
        worker, which reads prompts itself."""
        kinds = {slot.kind, "decode"} if slot.kind == "prefill" else {slot.kind}
        return any(
            other.kind in kinds and other.state is SlotState.UP
            for others_name, other in self._slots.items()
            if others_name != name
        )

    def _left(self, name: str, slot: Slot) -> list[Command]:
        """Take note that a worker left as it was asked to, which is no death. The next tick starts its replacement."""
        if slot.again:
            slot.state, slot.due_s = SlotState.PAUSING, float("-inf")
        else:
            del self._slots[name]
        return [Discard(name), *self._tell()]

    def _next_to_leave(self, now: float) -> list[Command]:
        commands: list[Command] = []
        while self._to_leave:
            name, order = self._to_leave[0]
            slot, again = self._slots.get(name), _is_back(order)
            if slot is not None:
                is_down = slot.state in _DOWN
                if not is_down and any(other.state not in _SETTLED for other in self._slots.values()):
                    break
                if not again and self._is_last(name, slot) and not (isinstance(order, Resize) and not order.count):
                    is_up = "" if is_down else " that is up"
                    commands.append(Refuse(order, f"{name} is the last {slot.kind} worker{is_up}: it stays"))
                elif not is_down:
                    slot.state, slot.due_s = SlotState.LEAVING, now + order.grace_s + LEAVE_MARGIN_S
                    slot.again = again
                    commands.append(AskToLeave(name, order.grace_s))
                else:
                    # Nothing of it runs: there is nobody to ask, nor to wait for.
                    if slot.state is SlotState.FAILED:
                        slot.deaths, slot.due_s = [], float("-inf")
                    if not again:
                        del self._slots[name]
                        commands += [Discard(name), *self._tell()]
            self._to_leave.popleft()
        return commands

    def _is_last(self, name: str, slot: Slot) -> bool:
        """Say whether its pool would be left without a worker: of one that is up, without another one that is."""
        kept = (SlotState.UP,) if slot.state not in _DOWN else tuple(SlotState)
        others = (other for others_name, other in self._slots.items() if others_name != name)
        return not any(other.kind == slot.kind and other.again and other.state in kept for other in others)

    def _tick(self, now: float) -> list[Command]:
        commands = self._next_to_leave(now)
        starting = sum(slot.state is SlotState.STARTING for slot in self._slots.values())
        for name, slot in list(self._slots.items()):
            if slot.state is SlotState.UP or now < slot.due_s:
                continue
            if slot.state is SlotState.STARTING:
                commands += self._ended(name, f"not started in {self._start_timeout_s:.0f} s", now)
            elif slot.state is SlotState.LEAVING:
                commands += self._ended(name, "did not end when it was to leave", now)
            elif slot.kind == "router" or starting < self._config.at_once:
                starting += 1
                slot.state, slot.due_s = SlotState.STARTING, now + self._start_timeout_s
                commands.append(Launch(name))
        return commands

    def _tell(self) -> list[Command]:
        """Announce the workers to the routers that are up; one that is not will learn all when it is."""
        return [self.announcement()] if self.routers() else []

    def routers(self) -> list[str]:
        """Return the routers that are up."""
        return [n for n, slot in self._slots.items() if slot.kind == "router" and slot.state is SlotState.UP]

    def announcement(self) -> Announce:
        """Return the workers, with the addresses of those that can be reached; one that is leaving still has requests
        to finish."""

        def pool(kind: str) -> tuple[PeerAddress, ...]:
            reached = (SlotState.UP, SlotState.LEAVING)
            return tuple(
                slot.address if slot.state in reached else PeerAddress(name, "")
                for name, slot in self._slots.items()
                if slot.kind == kind
            )

        routers = tuple(slot.address for slot in self._slots.values() if slot.kind == "router")
        return Announce(pool("prefill"), pool("decode"), routers)

    def check(self) -> None:
        """Recompute the invariants."""
        for slot in self._slots.values():
            assert len(slot.deaths) <= self._config.limit + 1
            assert slot.deaths == sorted(slot.deaths)
        assert sum(slot.state is SlotState.LEAVING for slot in self._slots.values()) <= 1


def _address(up: ChildReady) -> PeerAddress:
    return PeerAddress(up.name, up.own or up.address, up.incarnation, up.pid, up.host)


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


def _is_back(order: LeaveWanted | Resize) -> bool:
    """Return True if who leaves by this order is replaced."""
    return isinstance(order, LeaveWanted) and order.again
