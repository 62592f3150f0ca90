"""What can happen to a cluster's processes, and what its supervisor wants done about it. Pure."""

from dataclasses import dataclass

from cluster.processes.spec import ChildReady, Kind
from engine.messages import PeerAddress
from engine.types import Incarnation

# events


@dataclass(frozen=True, slots=True)
class Up:
    """A process that was asked for is up and reached at this address."""

    ready: ChildReady


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process has ended, or could not start. `left`: it ended because it was asked to."""

    name: str
    why: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class LeaveWanted:
    """These workers are to leave, one after the other, each within `grace_s`; with `again`, they are replaced."""

    names: tuple[str, ...]
    grace_s: float
    again: bool


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool (`kind`) is to have `count` workers. New ones take the lowest free numbers; of those that are there, the
    highest leave, those that are down before others."""

    kind: Kind
    count: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Accused:
    """The router has given up one life of a worker. Said again until its process has ended."""

    name: str
    incarnation: Incarnation
    why: str


@dataclass(frozen=True, slots=True)
class RouterProbed:
    """The supervisor has looked at the router; `answered`: it owes no answer from before."""

    name: str
    answered: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


Event = Up | ProcessEnded | Accused | RouterProbed | LeaveWanted | Resize | TimePassed


# commands


@dataclass(frozen=True, slots=True)
class Discard:
    """Stop and reap whatever is left of this slot's process: nothing of it may live on beside its replacement."""

    name: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    """End this process by its pid, whatever state it is in; answered by ProcessEnded."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process for this slot; answered by Up or ProcessEnded."""

    name: str


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """Ask this worker to leave; answered by ProcessEnded."""

    name: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell every router that is up that these are all its workers: one without an address is down, and there will be it
    again. `routers` are all that there were ever, by where each serves alone."""

    prefill: tuple[PeerAddress, ...]
    decode: tuple[PeerAddress, ...]
    routers: tuple[PeerAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class Refuse:
    """An order cannot be carried out, or no further."""

    order: LeaveWanted | Resize
    why: str


@dataclass(frozen=True, slots=True)
class EndCluster:
    """End the cluster, for this reason."""

    reason: str


Command = Discard | KillProcess | Launch | AskToLeave | Announce | Refuse | EndCluster
