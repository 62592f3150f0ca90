"""A receive in virtual time: bytes land by halves of blocks, in place or through a buffer, and are compared."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.types import BlockId
from tests.sim.faults import Fault
from tests.sim.fence import readable, writable
from tests.sim.pipes import Pipe
from tests.sim.shadow import ShadowKV, block_digest
from transfer.handoff.commands import IncomingBlock, PostRecv, PostScrap

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
    buffer: list[int] = field(default_factory=list)  # one block of another size than ours
    wrong: int = 0


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
        size = memory.block_size
        first, last = (0, size // 2) if recv.half == 0 else (size // 2, size)
        into[first:last] = rows[source if self._remote else at][first:last]
        recv.half ^= 1
        if recv.half == 0:
            if recv.flip is not None and at == 0:
                into[0] ^= 1
                self._world.faults.strikes(recv.flip)
            recv.done += 1
            self._check(recv, block, into)
            if not in_place and not recv.wrong:
                self._scatter(recv, block, into)
        return recv.done == len(command.blocks)

    def _writable(self, recv: Recv, target: BlockId) -> None:
        who = recv.command.move.handoff.request
        writable(self._memory, target, recv.targets[target], who)

    def _check(self, recv: Recv, block: IncomingBlock, rows: list[int]) -> None:
        name = recv.command.move.handoff
        found = block_digest(rows, block.tokens, block.identity, block.generation, name)
        if found != block.digest:
            self._world.note("digest mismatch")
            recv.wrong += 1

    def _scatter(self, recv: Recv, block: IncomingBlock, source: list[int]) -> None:
        """Write a block as `transfer.host.landing.Repacked` does."""
        for rows in block.rows:
            self._writable(recv, rows.target)
            mine = self._memory.rows[rows.target]
            mine[rows.at : rows.at + rows.count] = source[rows.first : rows.first + rows.count]
