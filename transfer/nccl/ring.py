"""One-sided transfers: a ring of staging memory per pair, into which the peer puts and which this end empties.

    window of each rank:   [ flags, one word a slot | warm | source of flags .. | slot 0 | slot 1 | two outgoing slots ]
                                    written by the peer                           put by the peer   packed here

Nobody puts before it was granted a slot: the receiver names a free one, the sender puts a piece into it and then, by a
second put, that piece's number into the slot's flag. Puts to one peer land in order, so the piece is whole when the
flag says its number. The receiver looks at the flag with small copies of its own. It does not wait with
`ncclWaitSignal`: within a node that is a wait of the stream itself, which no abort ends, so a dead peer would stop this
worker's stream for good. The pool is never in a window.

A ring lives as long as its communicator. A peer that was frozen and is thawed after this end gave the pair up puts into
memory that nothing else uses: its own mapping keeps that memory from being handed out again.
"""

from torch import Tensor

from transfer.gpu.device import Device, Stream, settle
from transfer.nccl.library import Comm, NcclLibrary, Window

SLOTS, OUTGOING_SLOTS = 2, 2
HEADER_BYTES = 4096
_WARM, _SOURCE = SLOTS, 64
_WORD = 8


class Ring:
    """This end's window. Used by the transfer thread alone. Raises NcclError where there is no such memory."""

    # Mutable state: the free slots, and how many pieces have been put, and were expected, so far.

    def __init__(self, library: NcclLibrary, device: Device, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.nbytes = HEADER_BYTES + (SLOTS + OUTGOING_SLOTS) * slot_bytes
        self._library = library
        self._address = library.allocate(self.nbytes)
        self._words = device.view(self._address, self.nbytes)
        self._words[: HEADER_BYTES // _WORD].zero_()
        self._window: Window | None = None
        self._free = list(range(SLOTS))
        self._outgoing = [self.slot(SLOTS + number) for number in range(OUTGOING_SLOTS)]
        self.put = 0
        self.taken = 0

    def __repr__(self) -> str:
        return f"Ring({self.nbytes} bytes, free {self._free}, put {self.put}, taken {self.taken})"

    def register(self, comm: Comm) -> None:
        """Make it a window of the communicator, as the other rank does; ask `async_state`. Raises NcclError."""
        self._window = self._library.register(comm, self._address, self.nbytes)

    @property
    def is_window(self) -> bool:
        """False where the two devices cannot put into each other's memory. To be asked once registering has ended."""
        return self._window is not None and bool(self._window.value)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        """A slot for the next piece; to be asked while `has_free`."""
        self.taken += 1
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def flag(self, slot: int) -> Tensor:
        return self._words[slot : slot + 1]

    def take_outgoing(self) -> Tensor:
        """A slot to put from: one is for the piece under way, and one for the next."""
        return self._outgoing.pop()

    def give_back_outgoing(self, slot: Tensor) -> None:
        self._outgoing.append(slot)

    def send(self, comm: Comm, source: Tensor, nbytes: int, slot: int, peer: int, stream: int) -> None:
        """Enqueue the put of what is in `source`, an outgoing slot, and then of the slot's flag. Raises NcclError."""
        self.put += 1
        self._words[_SOURCE].fill_(self.put)
        whole = (source.data_ptr(), nbytes, HEADER_BYTES + slot * self.slot_bytes)
        flag = (self._address + _SOURCE * _WORD, _WORD, slot * _WORD)
        self._put(comm, [whole, flag], peer, stream)

    def warm(self, comm: Comm, peer: int, stream: int) -> None:
        """The first put of a communicator, which both ranks must make: it connects them. Raises NcclError."""
        self._put(comm, [(self._address + _SOURCE * _WORD, _WORD, _WARM * _WORD)], peer, stream)

    def free(self) -> None:
        """After the communicator's abort, when nothing on the device touches it any more."""
        self._words = self._words[:0]
        self._outgoing.clear()
        self._library.free(self._address)

    def _put(self, comm: Comm, pieces: list[tuple[int, int, int]], peer: int, stream: int) -> None:
        assert self._window is not None
        self._library.put(comm, self._window, pieces, peer, stream)

    def slot(self, number: int) -> Tensor:
        first = (HEADER_BYTES + number * self.slot_bytes) // _WORD
        return self._words[first : first + self.slot_bytes // _WORD]


def open_ring(library: NcclLibrary, device: Device, slot_bytes: int, stream: Stream) -> Ring:
    """A ring whose flags are zero before anybody hears of it. Raises NcclError."""
    with stream.use():
        ring = Ring(library, device, slot_bytes)
    settle(stream.record())
    return ring
