"""Copies into the pool that a stream carries out, and the slots that bytes of the wire wait in.

A copy has two phases, since what is to be stored may depend on digests that the first one makes. Where nothing is left
to be stored, one event ends both:

    land .. (event) .. landed .. [more .. (event)] .. over

A copy waits for nobody but the device, so its end can be waited for: that is what makes a cancel a proof.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from transfer.gpu.device import Device, Event, settle
from transfer.gpu.landing import DeviceLanding
from transfer.transport import TransferError


class Slots:
    """`count` buffers of at least `words` int64 words; one grows where a peer's blocks need it."""

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._count = count
        self._free: list[Tensor] = []
        self._made = 0

    def __repr__(self) -> str:
        return f"{len(self._free)} of {self._made} slots free"

    @property
    def has_free(self) -> bool:
        return bool(self._free) or self._made < self._count

    def reserve(self, words: int) -> None:
        """Make all that are free, or not made yet, large enough."""
        self._free = [slot if len(slot) >= words else self._device.words(words) for slot in self._free]
        while self._made < self._count:
            self._made += 1
            self._free.append(self._device.words(words))

    def take(self, words: int) -> Tensor:
        """Return a free slot; to be asked while `has_free`."""
        if not self._free:
            self._made += 1
            return self._device.words(words)
        slot = self._free.pop()
        return slot if len(slot) >= words else self._device.words(words)

    def give_back(self, slot: Tensor) -> None:
        self._free.append(slot)

    @property
    def nbytes(self) -> int:
        """The size of the free slots together."""
        return sum(slot.nbytes for slot in self._free)


@dataclass(slots=True, eq=False)
class Copy:
    """Blocks `first ..` of the receive `owner`: `source[blocks]`, int64 `[.., words]`, go where `landing` says. `check`
    raises TransferError if, once they are copied, they turn out to be others. `over` is called at the end, or when the
    copy is dropped."""

    owner: object
    landing: DeviceLanding
    first: int
    source: Tensor
    blocks: Tensor
    over: Callable[[], None] = lambda: None
    check: Callable[[], None] = lambda: None
    error: str = ""
    stored: bool = False
    event: Event | None = None


class Scatter:
    """The copies under way, in order, on a stream of their own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._copies: list[Copy] = []
        self._order = self.numbers([])

    def numbers(self, blocks: Sequence[int]) -> Tensor:
        """Numbers of blocks, int32 `[n]`, for copies to come."""
        with self._stream.use():
            return self._device.numbers(blocks)[0]

    def order(self, count: int) -> Tensor:
        """The numbers 0 .. `count` - 1, brought over anew only where there are more than ever."""
        if count > len(self._order):
            self._order = self.numbers(range(count))
        return self._order[:count]

    def __len__(self) -> int:
        return len(self._copies)

    def begin(self, copy: Copy) -> None:
        with self._stream.use():
            copy.landing.land(copy.first, copy.source, copy.blocks)
            copy.event = self._stream.record()
        self._copies.append(copy)

    def poll(self) -> list[Copy]:
        """Return the copies that have ended; `error` tells which did not go well."""
        ended: list[Copy] = []
        for copy in self._copies:
            assert copy.event is not None
            if not copy.event.done():
                break
            if not copy.stored:
                copy.stored = True
                try:
                    copy.check()
                except TransferError as error:
                    copy.error = f"{type(error).__name__}: {error}"
                else:
                    with self._stream.use():
                        if copy.landing.landed():
                            copy.event = self._stream.record()
            if not copy.event.done():
                break
            ended.append(copy)
        del self._copies[: len(ended)]
        for copy in ended:
            copy.over()
        return ended

    def drop(self, owner: object) -> None:
        """Copy nothing of `owner` any more; waits for what is on the device."""
        mine = [copy for copy in self._copies if copy.owner is owner]
        for copy in mine:
            assert copy.event is not None
            settle(copy.event)
            self._copies.remove(copy)
            copy.over()
