"""Moves tensors between the devices of a worker's tensor-parallel ranks, by sends and receives on one communicator of
all of them: work on the current stream, which is recorded with a decode step."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from transfer.nccl.library import Comm, LateError, NcclError, NcclLibrary

_CHANNELS = 4
_LOOK_S = 20e-6
_GIVES_WAY_S = 1.0


class NcclExchange:
    """Fulfils `engine.ranks.device_sums.Exchange` on one communicator of all ranks. `stream`: the handle of the current
    one. Made off the request path: it waits for the other ranks, unless one `is_lost`. Raises NcclError, LateError
    after `limit_s`.

    Mutable state: whether it was aborted, which any thread may do: the lock keeps that out of a call, which gives way.
    """

    def __init__(
        self,
        library: NcclLibrary,
        unique_id: bytes,
        rank: int,
        ranks: int,
        stream: Callable[[], int],
        limit_s: float,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._library = library
        self._stream = stream
        self._limit_s = limit_s
        self._is_lost = is_lost
        self._calls = threading.RLock()
        self._is_aborted = False
        self._comm: Comm = library.join(unique_id, rank, _CHANNELS, "headrace-ranks", ranks)
        try:
            self._settle("no communicator of all ranks")
        except NcclError:
            self.abort()
            raise

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        sends, receives = (
            [(part.data_ptr(), part.nbytes, peer) for peer, part in side] for side in (outgoing, incoming)
        )
        with self._calls:
            self._go_on()
            self._library.exchange_all(self._comm, sends, receives, self._stream())
            self._settle("parts were not enqueued")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no abort come between the calls of what replays recorded exchanges. Raises NcclError after one."""
        with self._calls:
            self._go_on()
            yield

    def abort(self) -> None:
        """End what is in the stream, without the other ranks: whoever waits for the stream comes back, and finds
        garbage in it. Twice is as good as once."""
        self._is_aborted, had = True, self._is_aborted
        if had:
            return
        # A thread that launches more than the device takes is in there until the device goes on: by this abort.
        is_alone = self._calls.acquire(timeout=_GIVES_WAY_S)
        try:
            self._library.abort(self._comm)
        finally:
            if is_alone:
                self._calls.release()

    def _go_on(self) -> None:
        if self._is_aborted:
            raise NcclError("the communicator of the ranks was aborted")

    def _settle(self, problem: str) -> None:
        """Wait until what was called is in the stream, which may be in moments, never for what the stream does."""
        deadline_s = time.monotonic() + self._limit_s
        while not self._library.async_state(self._comm):
            self._go_on()
            if time.monotonic() > deadline_s:
                raise LateError(f"{problem} within {self._limit_s:g} s")
            if self._is_lost():
                raise NcclError(f"{problem}: one of them has ended")
            time.sleep(_LOOK_S)
