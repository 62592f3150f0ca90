"""A slot: the place of a worker or router in its cluster, and what the supervisor knows of its process. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from cluster.processes.spec import Kind
from engine.messages import PeerAddress
from engine.types import Incarnation


class SlotState(StrEnum):
    STARTING = "starting"
    UP = "up"
    LEAVING = "leaving"
    PAUSING = "pausing"
    FAILED = "failed"


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace status` shows of a slot. `why`: the cause of the last death."""

    name: str
    kind: Kind
    state: SlotState
    deaths: int
    why: str


@dataclass(slots=True)
class Slot:
    """One worker's place, or the router's. `due_s`: when the pause ends, or by when its process must be up, or gone.
    `again`: whether it is replaced once it has left. `accused`: why the life that is up is being killed.
    `silent_since_s`: since when the router owes an answer. `why`: the cause of its last death."""

    kind: Kind
    address: PeerAddress
    incarnation: Incarnation
    state: SlotState = SlotState.UP
    due_s: float = 0.0
    again: bool = True
    accused: str = ""
    silent_since_s: float | None = None
    why: str = ""
    deaths: list[float] = field(default_factory=list)
