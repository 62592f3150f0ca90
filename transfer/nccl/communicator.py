"""One communicator of two ranks, from its first call to its abort.

    joining --(both ranks are there)--> joined --(warmed up)--> warm
       |    `-- with a ring: registering --^         |
       |________________|__________________|_________|___ abort: gone

A communicator is never destroyed in peace: what a clean end would wait for is what a dead peer never does. By
`DropCommunicator` and `CommunicatorDropped`, nobody aborts while the other end is still reading.
"""

from enum import Enum

from transfer.nccl.library import Comm, LateError, NcclLibrary
from transfer.nccl.ring import Ring


class Stage(Enum):
    JOINING = "joining"
    REGISTERING = "registering"
    JOINED = "joined"
    WARM = "warm"
    DROPPING = "dropping"  # leader: the follower has been told, and has not answered


class Communicator:
    """Raises NcclError where the library refuses. `rank` is 0 for the leader."""

    # Mutable state: the stage, and when it was last used.

    def __init__(
        self,
        library: NcclLibrary,
        epoch: int,
        unique_id: bytes,
        rank: int,
        channels: int,
        name: str,
        now: float,
        ring: Ring | None = None,
    ) -> None:
        self._library = library
        self.ring = ring
        """The ring that the peer puts into, and the memory that this end puts out of; None where both send and
        receive."""
        self.epoch = epoch
        self.rank = rank
        self.stage = Stage.JOINING
        self.peer_joined = False
        self.began_s = self.used_s = now
        self.comm: Comm = library.join(unique_id, rank, channels, name)

    def __repr__(self) -> str:
        return f"Communicator({self.epoch}, rank {self.rank}, {self.stage.value})"

    def poll(self, now: float, limit_s: float) -> bool:
        """True once, when this rank has joined. Raises NcclError, also if warming up takes longer than `limit_s`."""
        if self.stage not in (Stage.WARM, Stage.DROPPING) and now - self.began_s > limit_s:
            raise LateError(f"no communicator within {limit_s:g} s: {self!r}")
        if self.stage not in (Stage.JOINING, Stage.REGISTERING) or not self._library.async_state(self.comm):
            return False
        if self.stage is Stage.JOINING and self.ring is not None:
            self.stage = Stage.REGISTERING
            self.ring.register(self.comm)
            return False
        self.stage = Stage.JOINED
        return True

    @property
    def puts(self) -> Ring | None:
        """The ring, where the two devices can put into each other's memory; both ends come to the same."""
        return self.ring if self.ring is not None and self.ring.is_window else None

    def memory_bytes(self) -> int | None:
        found = self._library.memory_bytes(self.comm)
        return None if found is None else found + (self.ring.nbytes if self.ring is not None else 0)

    def abort(self) -> None:
        self._library.abort(self.comm)
