"""The lane of a worker's operations on communicators: one operation at a time, whoever the peer is.

Operations of several communicators that wait in kernels on one device may wait for each other across workers, and
freeing the memory of one communicator waits for the kernels of another. With one at a time neither can happen: a
follower launches only what its leader has launched already, and leaders are ordered by incarnation, so no chain of
workers that wait for each other closes. Every operation has a limit; one that passes it costs its communicator.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from transfer.gpu.device import Device, Event, Peek, StuckStreamError
from transfer.nccl.library import Comm, LateError, NcclLibrary
from transfer.nccl.ring import Ring

WORD_BYTES = 8


class OperationKind(Enum):
    SEND = "send"
    RECEIVE = "receive"
    WARM = "warm up"
    PUT = "put"
    TAKE = "put of the peer"


@dataclass(slots=True, eq=False)
class Operation:
    """One operation. `slot` int64 words is what it sends, or fills; `packed` is when it has left the pool. With a ring,
    `at` is the receiver's slot, -1 while it was not granted, and `number` what its flag will say."""

    deed: OperationKind
    comm: Comm
    rank: int  # the peer's
    slot: Tensor
    nbytes: int
    limit_s: float
    ring: Ring | None = None
    at: int = -1
    packed: Event | None = None
    number: int = field(init=False)
    peek: Peek | None = None
    enqueued: Event | None = None
    began_s: float = 0.0

    def __post_init__(self) -> None:
        self.number = self.ring.taken if self.ring is not None else 0


class Lane:
    """Owner of the communication stream. Used by the transfer thread alone."""

    # Mutable state: the job under way, or since when an aborted one is drained.

    def __init__(self, device: Device, library: NcclLibrary, drain_s: float) -> None:
        self._library = library
        self._drain_s = drain_s
        self._device = device
        self._stream = device.stream()
        self.job: Operation | None = None
        self._drain: Event | None = None
        self._drain_until_s = 0.0

    @property
    def is_free(self) -> bool:
        return self.job is None and self._drain is None

    def launch(self, job: Operation, now: float) -> None:
        """Raises NcclError."""
        assert self.is_free, "two operations at once"
        job.began_s = now
        self.job = job
        if job.packed is not None:
            self._stream.wait(job.packed)
        if job.deed is OperationKind.PUT and job.at < 0:
            return  # `granted` goes on
        self._begin(job)

    def granted(self, slot: int) -> None:
        """The put under way may land there. Raises NcclError."""
        assert self.job is not None and self.job.deed is OperationKind.PUT
        self.job.at = slot
        self._begin(self.job)

    def _begin(self, job: Operation) -> None:
        address, stream = job.slot.data_ptr(), self._stream.handle
        with self._stream.use():
            match job.deed:
                case OperationKind.SEND:
                    self._library.send(job.comm, address, job.nbytes, job.rank, stream)
                case OperationKind.RECEIVE:
                    self._library.recv(job.comm, address, job.nbytes, job.rank, stream)
                case OperationKind.PUT:
                    assert job.ring is not None
                    job.ring.send(job.comm, job.slot, job.nbytes, job.at, job.rank, stream)
                case OperationKind.TAKE:
                    pass
                case OperationKind.WARM if job.ring is not None:
                    job.ring.warm(job.comm, job.rank, stream)
                case OperationKind.WARM:
                    self._library.exchange(job.comm, address, address + WORD_BYTES, WORD_BYTES, job.rank, stream)

    def poll(self, now: float) -> Operation | None:
        """The job, when it has ended well. Raises NcclError when it failed or takes too long: abort it."""
        if self._drain is not None:
            self._check_drained(now)
        job = self.job
        if job is None:
            return None
        settled = self._library.async_state(job.comm)
        if job.deed is OperationKind.TAKE:
            if self._is_flagged(job):
                self.job = None
                return job
        elif job.deed is not OperationKind.PUT or job.at >= 0:
            if job.enqueued is None and settled:
                job.enqueued = self._stream.record()
            if job.enqueued is not None and job.enqueued.done():
                self.job = None
                return job
        if now - job.began_s > job.limit_s:
            raise LateError(f"the peer did not take part in a {job.deed.value} for {job.limit_s:g} s")
        return None

    def abort(self, abort: Callable[[], None], now: float) -> Operation | None:
        """`abort` ends the communicator of the job under way, if any: nothing is launched before its kernels have
        ended. Returns the job."""
        job, self.job = self.job, None
        abort()
        if job is not None:
            self._drain = self._stream.record()
            self._drain_until_s = now + self._drain_s
        return job

    def _is_flagged(self, job: Operation) -> bool:
        """Look at the flag of a slot; the look itself takes until a later call. Never waits."""
        assert job.ring is not None
        if job.peek is None:
            job.peek = self._device.peek(job.ring.flag(job.at), self._stream)
        if not job.peek.done():
            return False
        found, job.peek = job.peek.words, None
        return found[0] == job.number

    def _check_drained(self, now: float) -> None:
        assert self._drain is not None
        if self._drain.done():
            self._drain = None
        elif now > self._drain_until_s:
            raise StuckStreamError(f"kernels of an aborted communicator are still running after {self._drain_s:g} s")
