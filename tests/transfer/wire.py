"""What tests need in order to drive a transport by hand: whole blocks, landed where the test says."""

from collections.abc import Sequence

from engine.kv.layout import KVLayout
from engine.kv.paged import PagedKV
from engine.types import BlockId
from transfer.transport import Span


def whole(layout: KVLayout) -> Span:
    return Span(0, layout.block_bytes, layout.block_bytes)


class Into:
    """A landing in blocks of a pool, or in `span` of each; `order` are the blocks that are said to be there."""

    def __init__(self, pool: PagedKV, targets: Sequence[int], span: Span | None = None) -> None:
        self.order: list[int] = []
        self._pool = pool
        self._targets = targets
        self._span = span or whole(pool.layout)

    def place(self, at: int) -> memoryview:
        assert at == len(self.order), "a block is begun before the one before it has ended"
        block = self._pool.block(BlockId(self._targets[at]))
        return block[self._span.offset : self._span.offset + self._span.nbytes]

    def landed(self, at: int) -> None:
        self.order.append(at)
