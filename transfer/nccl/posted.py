"""What the nccl transport keeps of a chunk that has not ended."""

import msgspec

from transfer.gpu.landing import DeviceLanding
from transfer.gpu.narrow import DevicePacked
from transfer.nccl.pair import Chunk
from transfer.nccl.peer import Peer
from transfer.transport import Move


class Posted(msgspec.Struct, frozen=True):
    """A chunk, with what it takes to carry it out: a `landing` for a receive, `packed` for a send in 8 bits."""

    peer: Peer
    chunk: Chunk
    move: Move
    landing: DeviceLanding | None
    packed: DevicePacked | None
