"""Decides which process is started again, when, and when to give up. Pure: no clock, no process.

A slot (`prefill-0`) outlives its processes; each new one draws a new incarnation.

    STARTING --Up--> UP --Ended--> PAUSING --pause over--> STARTING
    STARTING --Ended, or too slow--> PAUSING
    any --more than `limit` deaths within `window_s`--> the cluster ends

The pause doubles with each death inside the window, so a worker that dies as it starts costs little, and one that has
been well for a window starts anew at once. A worker that the router has given up (`router.escalation`) is killed, and
then has died like any other. The router hears of a death before the replacement exists: the dead worker's port may soon
be somebody else's. A router that is up again is told all workers: what it was told before died with it.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from cluster.spec import ChildReady
from engine.messages import PeerAddress
from engine.types import Incarnation


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How dead workers, and a dead router, are replaced."""

    limit: int = 5
    """Deaths of one process within `window_s` that are made good; the next one ends the cluster. 0: the first does."""
    window_s: float = 300.0
    first_pause_s: float = 0.25
    longest_pause_s: float = 15.0


# events


@dataclass(frozen=True, slots=True)
class Up:
    """A process that was asked for is reached at this address."""

    ready: ChildReady


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended, or could not start."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Accused:
    """The router has given up a life of a worker. Said again until its process has ended."""

    name: str
    incarnation: Incarnation
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Up | Ended | Accused | Tick


# commands


@dataclass(frozen=True, slots=True)
class Discard:
    """Stop and reap whatever is left of this slot's process: of it nothing may live on beside its replacement."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End this worker's process by its pid, whatever state it is in; answered by Ended."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process for this slot; answered by Up or Ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the router that these are all its workers."""

    prefill: tuple[PeerAddress, ...]
    decode: tuple[PeerAddress, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the cluster, for this reason."""

    reason: str


Command = Discard | Kill | Launch | Announce | GiveUp


class State(StrEnum):
    STARTING = "starting"
    UP = "up"
    PAUSING = "pausing"


@dataclass(slots=True)
class _Slot:
    """One worker, or the router. `due_s`: when the pause ends, or by when its process must be up. `accused`: why the
    life that is up is being killed."""

    kind: str
    address: PeerAddress
    incarnation: Incarnation
    state: State = State.UP
    due_s: float = 0.0
    accused: str = ""
    deaths: list[float] = field(default_factory=list)


class Supervisor:
    """Keeps the pools at their sizes, and one router before them.

    Mutable state: the slots. Owner: the thread that watches the cluster."""

    def __init__(
        self,
        config: RestartConfig,
        start_timeout_s: float,
        children: dict[str, tuple[str, ChildReady]],
    ) -> None:
        """`children` are up: kind (prefill, decode or router) and address by name."""
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._slots = {
            name: _Slot(kind, PeerAddress(name, ready.address), ready.incarnation)
            for name, (kind, ready) in children.items()
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what is to be done, in order."""
        match event:
            case Up(ready):
                return self._up(ready)
            case Ended(name, why):
                return self._ended(name, why, now)
            case Accused():
                return self._accused(event)
            case Tick():
                return self._tick(now)
        raise TypeError(f"not an event: {event!r}")

    def state(self, name: str) -> State:
        return self._slots[name].state

    def __repr__(self) -> str:
        slots = (f"{name}={slot.state}({len(slot.deaths)})" for name, slot in self._slots.items())
        return f"Supervisor({', '.join(slots)})"

    def _up(self, ready: ChildReady) -> list[Command]:
        slot = self._slots.get(ready.name)
        if slot is None or slot.state is not State.STARTING:
            return []
        slot.state, slot.address = State.UP, PeerAddress(ready.name, ready.address)
        slot.incarnation, slot.accused = ready.incarnation, ""
        return self._tell()

    def _accused(self, event: Accused) -> list[Command]:
        """Kill the life that is meant, once, and no newer one."""
        slot = self._slots.get(event.name)
        if slot is None or slot.state is not State.UP or slot.incarnation != event.incarnation:
            return []
        if slot.accused:
            return []
        slot.accused = event.why
        return [Kill(event.name, event.why)]

    def _ended(self, name: str, why: str, now: float) -> list[Command]:
        slot = self._slots.get(name)
        if slot is None or slot.state is State.PAUSING:
            return []
        was_up = slot.state is State.UP
        if was_up and slot.accused:
            why = f"{why} ({slot.accused})"
        config = self._config
        slot.deaths = [at for at in slot.deaths if at > now - config.window_s] + [now]
        deaths = len(slot.deaths)
        if deaths > config.limit:
            often = f" ({deaths} times in {config.window_s:.0f} s)" if deaths > 1 else ""
            return [GiveUp(f"{name}: {why}{often}")]
        pause_s = config.first_pause_s * 2.0 ** (deaths - 1)
        slot.state, slot.due_s = State.PAUSING, now + min(pause_s, config.longest_pause_s)
        return [Discard(name), *(self._tell() if was_up else [])]

    def _tick(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for name, slot in self._slots.items():
            if slot.state is State.UP or now < slot.due_s:
                continue
            if slot.state is State.STARTING:
                commands += self._ended(name, f"not started in {self._start_timeout_s:.0f} s", now)
            else:
                slot.state, slot.due_s = State.STARTING, now + self._start_timeout_s
                commands.append(Launch(name))
        return commands

    def _tell(self) -> list[Command]:
        """The router learns of a change; one that is not up will learn all when it is."""
        routers = [slot for slot in self._slots.values() if slot.kind == "router"]
        return [self.announcement()] if all(s.state is State.UP for s in routers) else []

    def announcement(self) -> Announce:
        """The workers that are up."""

        def up(kind: str) -> tuple[PeerAddress, ...]:
            slots = self._slots.values()
            return tuple(s.address for s in slots if s.kind == kind and s.state is State.UP)

        return Announce(up("prefill"), up("decode"))

    def check(self) -> None:
        """Recompute the invariants."""
        for slot in self._slots.values():
            assert len(slot.deaths) <= self._config.limit + 1
            assert slot.deaths == sorted(slot.deaths)
