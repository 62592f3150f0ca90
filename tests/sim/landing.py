"""A receive in virtual time: bytes land by halves of blocks, in place or through a buffer, and are compared."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.types import BlockId
from tests.sim.clock import Violation
from tests.sim.faults import Fault
from tests.sim.fence import readable, writable
from tests.sim.pipes import Pipe
from tests.sim.shadow import ShadowKV, block_digest
from transfer.handoff.commands import IncomingBlock, PostRecv, PostScrap
from transfer.host.pull import HostPullTransport, Pull
from transfer.transport import StaleBlockError, Ticket

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True, eq=False)
class Recv:
    """One receive that was posted and has not ended."""

    command: PostRecv | PostScrap
    targets: dict[BlockId, int]  # generations of the target blocks when the receive was posted
    pipe: Pipe | None
    done: int = 0
    half: int = 0
    cancelled: bool = False
    flip: Fault | None = None
    overwrite: Fault | None = None
    error: str = ""
    buffer: list[int] = field(default_factory=list)  # one block of another size than ours
    wrong: int = 0


class _Overwritten:
    """A peer's pool whose blocks are written anew while they are read."""

    def __init__(self, generation: int) -> None:
        self._generation = generation

    def generation(self, block: BlockId) -> int:
        return self._generation

    def read(self, block: BlockId) -> npt.NDArray[np.uint8]:
        self._generation += 1
        return np.zeros(8, dtype=np.uint8)


class _Nowhere:
    """Stands in for a block that nobody reads any more."""

    def place(self, at: int) -> memoryview:
        return memoryview(bytearray(8))

    def landed(self, at: int) -> None:
        """Note nothing."""


class Landing:
    """Writes to the memory of one process, and to nothing else. Where `remote`, it reads the sender's."""

    def __init__(self, world: "World", memory: ShadowKV, remote: bool) -> None:
        self._world = world
        self._memory = memory
        self._remote = remote

    def half(self, recv: Recv, memory: ShadowKV, rows: list[list[int]]) -> bool:
        """Copy half a block of what `memory` sends; the other half comes in a later turn. True: that was all."""
        command, mine, at = recv.command, self._memory, recv.done
        assert isinstance(command, PostRecv)
        block = command.blocks[at]
        source, generation = command.move.remote[at]
        if self._remote:
            readable(memory, source, generation, f"is read by {mine.process}")
        in_place = memory.block_size == mine.block_size
        if in_place:
            self._writable(recv, block.rows[0].target)
            into = mine.rows[block.rows[0].target]
        else:
            self._world.note("converted")
            into = recv.buffer = recv.buffer or [0] * memory.block_size
        if recv.overwrite is not None and recv.half:
            recv.error = self._overwritten(recv, source, generation)
            return True
        size = memory.block_size
        first, last = (0, size // 2) if recv.half == 0 else (size // 2, size)
        into[first:last] = rows[source if self._remote else at][first:last]
        recv.half ^= 1
        if recv.half == 0:
            if recv.flip is not None and at == 0:
                rng = self._world.rng  # any valid row, and in it a bit of any head's key or value
                into[rng.randrange(block.tokens)] ^= 1 << 16 * rng.choice(mine.quarters)
                self._world.faults.strikes(recv.flip)
            recv.done += 1
            self._check(recv, block, memory, into)
            if not in_place and not recv.wrong:
                self._scatter(recv, block, into)
        return recv.done == len(command.blocks)

    def _overwritten(self, recv: Recv, source: BlockId, generation: int) -> str:
        """Let the product's own copy read a block that is written anew meanwhile. Return its error: what it has read
        may be anything, and a digest may not be relied on, since not every block need have one."""
        assert recv.overwrite is not None
        self._world.faults.strikes(recv.overwrite)
        move = recv.command.move
        pull: Pull[Any, Any] = Pull(Ticket(0), move.handoff.prefill, _Overwritten(generation), move, _Nowhere())
        try:
            HostPullTransport._copy(pull, [(source, generation)])
        except StaleBlockError as error:
            return f"StaleBlockError: {error}"
        raise Violation(f"{self._memory.process}: block {source} was written anew while it was read, and has landed")

    def _writable(self, recv: Recv, target: BlockId) -> None:
        who = recv.command.move.handoff.request
        writable(self._memory, target, recv.targets[target], who)

    def _check(self, recv: Recv, block: IncomingBlock, memory: ShadowKV, rows: list[int]) -> None:
        name = recv.command.move.handoff
        found = block_digest(rows, memory.layout, block.tokens, block.identity, block.generation, name)
        if found != block.digest:
            self._world.note("digest mismatch")
            recv.wrong += 1

    def _scatter(self, recv: Recv, block: IncomingBlock, source: list[int]) -> None:
        """Write a block as `transfer.host.landing.Repacked` does."""
        for rows in block.rows:
            self._writable(recv, rows.target)
            mine = self._memory.rows[rows.target]
            mine[rows.at : rows.at + rows.count] = source[rows.first : rows.first + rows.count]
