"""Moves tensors between the devices of a worker's tensor-parallel ranks, by sends and receives on one communicator of
all of them: work on the current stream, which is recorded with a decode step."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from transfer.nccl.library import Comm, LateError, NcclLibrary

_CHANNELS = 4
_LOOK_S = 20e-6


class NcclExchange:
    """Fulfils `engine.ranks.device_sums.Exchange` on one communicator of all ranks. `stream`: the handle of the current
    one. Made off the request path: it waits for the other ranks. Raises NcclError, LateError after `limit_s`."""

    def __init__(
        self,
        library: NcclLibrary,
        unique_id: bytes,
        rank: int,
        ranks: int,
        stream: Callable[[], int],
        limit_s: float,
    ) -> None:
        self._library = library
        self._stream = stream
        self._limit_s = limit_s
        self._comm: Comm = library.join(unique_id, rank, _CHANNELS, "headrace-ranks", ranks)
        self._settle("no communicator of all ranks")

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        sends, receives = (
            [(part.data_ptr(), part.nbytes, peer) for peer, part in side] for side in (outgoing, incoming)
        )
        self._library.exchange_all(self._comm, sends, receives, self._stream())
        self._settle("parts were not enqueued")

    def close(self) -> None:
        self._library.abort(self._comm)

    def _settle(self, problem: str) -> None:
        """Wait until what was called is in the stream, which may be in moments, never for what the stream does."""
        deadline_s = time.monotonic() + self._limit_s
        while not self._library.async_state(self._comm):
            if time.monotonic() > deadline_s:
                raise LateError(f"{problem} within {self._limit_s:g} s")
            time.sleep(_LOOK_S)
