"""Where received blocks go: straight into their targets.

A block's digest is checked as soon as its bytes are there. A transport calls a landing while it works on a receive, in
the transfer thread, and no more once the receive has ended or its cancel is confirmed: so the fence that holds for the
transport's own writes holds for these. It keeps what it finds in `wrong`; `transfer.mover` turns that into the error of
the receive. Blocks that must be converted land by way of a buffer (`transfer.host.repacked`), which builds on this, and
`transfer.route` chooses among the two: in one file they would make a circle.
"""

from collections.abc import Callable, Sequence

from transfer.handoff.commands import IncomingBlock
from transfer.transport import KVMemory

Check = Callable[[memoryview, IncomingBlock], bool]
"""True if what has come of a block has the digest that was offered, or none was agreed on."""


class InPlace:
    """Equal layouts: a block lands where it stays."""

    def __init__(self, memory: KVMemory, blocks: Sequence[IncomingBlock], check: Check) -> None:
        self.wrong = 0
        self._memory = memory
        self._blocks = blocks
        self._check = check

    def place(self, at: int) -> memoryview:
        return self._memory.block(self._blocks[at].rows[0].target)

    def landed(self, at: int) -> None:
        self.wrong += not self._check(self.place(at), self._blocks[at])
