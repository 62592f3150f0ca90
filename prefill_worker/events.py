"""What can happen to a prefill scheduler. Plain records, dispatched by type.

What the transfer thread reports (`transfer.mover`) is an event as well, and what a scheduler asks of its shell are the
commands of `transfer.migration`.
"""

from dataclasses import dataclass

from engine.messages import Handoff, Landed, StartPrefill, Stop
from engine.types import Incarnation


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A decode worker said something."""

    peer: Incarnation
    message: StartPrefill | Landed | Stop


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A decode worker has said hello. `reads_remotely`: it reads our memory itself (`transfer.transport`)."""

    peer: Incarnation
    reads_remotely: bool
    unfinished: tuple[Handoff, ...] = ()
    """The handoffs it still reads for: it has nothing to do with any other."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The stream to a decode worker is gone; the process may still live, and read."""

    peer: Incarnation


@dataclass(frozen=True, slots=True)
class PeerDead:
    """Proof that the process behind `peer` has ended: it reads nothing any more."""

    peer: Incarnation
