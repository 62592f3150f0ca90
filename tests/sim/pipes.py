"""What the simulated wires are made of: frames on pipes for tcp, an endpoint by pid for both."""

from collections import deque
from dataclasses import dataclass, field

from engine.messages import Endpoint, Handoff
from engine.types import Incarnation
from tests.sim.shadow import ShadowKV


@dataclass(slots=True, eq=False)
class Frame:
    """tcp: one chunk on its way: rows by block, complete once vouched for."""

    name: Handoff
    seq: int
    blocks: list[list[int]] = field(default_factory=list)
    vouched: bool | None = None


class Pipe:
    """tcp: what one process sends another. It waits at the sender until the receiver dials, at its first receive."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.open = True
        self.dialled = False
        self.deaf = False
        """It is not open any more, and the receiver has not been told."""
        self.taken = 0
        """Pieces that the receiver has read off it."""


class SimTransport:
    """The part of `transfer.transport.Transport` that a worker sees outside of its transfer thread."""

    def __init__(self, name: str, memory: ShadowKV) -> None:
        self.name = name
        self.reads_remotely = name == "shm"
        self._memory = memory

    def describe(self, peer: Incarnation, ranks: int = 0) -> Endpoint:
        return Endpoint(transport=self.name, details={"pid": self._memory.process.pid})
