"""The verbs of libnccl on one communicator, by ctypes: every one of them through this binding of one library.

CuPy's class cannot be used for them: it has no non-blocking communicators and breaks on the code for "in progress" (its
ids, versions and constants are used, by `transfer.gpu.cuda`). A communicator here is never blocking, so a call says
IN_PROGRESS instead of waiting for the peer, and `async_state` tells what has become of it. Calls release the GIL. A
handle is used by one thread, and never again after `abort`.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NewType

from transfer.transport import TransferError

Comm = NewType("Comm", int)
"""An `ncclComm_t`."""

ID_BYTES = 128
OLDEST = 22700
"""2.27: the first whose aborts were tried with many threads and non-blocking communicators."""
UINT8 = 1
"""`ncclUint8`; tests compare it with CuPy's."""
IN_PROGRESS = 7
_SUCCESS = 0
_MAGIC = 0xCAFEBEEF
_UNSET = -(2**31)
_MEMORY_TOTAL = 3
_SYMMETRIC = 1
ONE_SIDED = 22902
"""2.29.2: the first with `ncclPutSignal`."""
RANKS_ON_A_DEVICE = 23000
"""2.30.0: the first that makes a communicator of two ranks on one device."""


class NcclError(TransferError):
    """A call failed, or the communicator did: it is good for nothing but `abort`."""


class LateError(NcclError):
    """Nothing failed, but it took longer than it may."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` as it was in 2.27. Its size says so to later libraries, which take their defaults for the rest."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
    )


_int, _pointer, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_PROTOTYPES: dict[str, tuple[object, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_int),),
    "ncclGetUniqueId": (ctypes.POINTER(_Id),),
    "ncclCommInitRankConfig": (ctypes.POINTER(_pointer), _int, _Id, _int, ctypes.POINTER(_Config)),
    "ncclCommGetAsyncError": (_pointer, ctypes.POINTER(_int)),
    "ncclSend": (_pointer, _size, _int, _int, _pointer, _pointer),
    "ncclRecv": (_pointer, _size, _int, _int, _pointer, _pointer),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclCommAbort": (_pointer,),
}
ONE_SIDED_PROTOTYPES: dict[str, tuple[object, ...]] = {
    "ncclMemAlloc": (ctypes.POINTER(_pointer), _size),
    "ncclMemFree": (_pointer,),
    "ncclCommWindowRegister": (_pointer, _pointer, _size, ctypes.POINTER(_pointer), _int),
    "ncclPutSignal": (_pointer, _size, _int, _int, _pointer, _size, _int, _int, ctypes.c_uint, _pointer, _pointer),
}
Window = ctypes.c_void_p
"""An `ncclWindow_t`; null until its registration has ended, and for good where the devices cannot have one."""


class NcclLibrary:
    """Opens the library at `path`. Raises TransferError where it cannot be opened, or is too old."""

    def __init__(self, path: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path))
            self._bind(_PROTOTYPES)
        except (OSError, AttributeError) as error:
            raise TransferError(f"{path} is no NCCL: {error}") from error
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        self._lib.ncclGetLastError.restype = ctypes.c_char_p
        self._lib.ncclGetLastError.argtypes = (_pointer,)
        found = _int()
        self._must("ncclGetVersion", ctypes.byref(found))
        self.version = found.value
        """20000-odd: 2.28.9 is 22809."""
        if self.version < OLDEST:
            raise TransferError(f"NCCL {dotted(self.version)} is older than {dotted(OLDEST)}")

        self._names: list[bytes] = []
        """The names of all communicators: the library keeps their addresses, not their text, for profilers."""
        self.can_put = self.version >= ONE_SIDED
        """True if it has one-sided verbs; if they work between two devices is known later."""
        if self.can_put:
            self._bind(ONE_SIDED_PROTOTYPES)

    def unique_id(self) -> bytes:
        """Return what the ranks of one communicator, to be made, are joined by. Raises NcclError."""
        found = _Id()
        self._must("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)

    def join(self, unique_id: bytes, rank: int, channels: int, name: str, ranks: int = 2) -> Comm:
        """Begin to make a communicator of so many ranks; `async_state` tells when it is made. It uses at most
        `channels` thread blocks. Raises NcclError."""
        self._names.append(name.encode())
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, self.version, 0, _UNSET, 1, channels, None, _UNSET,
            _UNSET, self._names[-1], _UNSET, _UNSET, _UNSET, _UNSET,
        )
        comm = _pointer()
        status = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm), ranks, _Id.from_buffer_copy(unique_id), rank, ctypes.byref(config)
        )
        if status not in (_SUCCESS, IN_PROGRESS) or not comm.value:
            raise self._error("ncclCommInitRankConfig", status)
        return Comm(comm.value)

    def async_state(self, comm: Comm) -> bool:
        """True: whatever was called has been carried out (what it enqueued may still run). False: still in progress.
        Raises NcclError."""
        found = _int()
        self._must("ncclCommGetAsyncError", comm, ctypes.byref(found))
        if found.value not in (_SUCCESS, IN_PROGRESS):
            raise self._error("the communicator", found.value, comm)
        return found.value == _SUCCESS

    def send(self, comm: Comm, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Enqueue `nbytes` at `address` of the device to rank `peer`; ask `async_state`. Raises NcclError."""
        self._start("ncclSend", comm, address, nbytes, UINT8, peer, comm, stream)

    def recv(self, comm: Comm, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._start("ncclRecv", comm, address, nbytes, UINT8, peer, comm, stream)

    def exchange(self, comm: Comm, outgoing: int, incoming: int, nbytes: int, peer: int, stream: int) -> None:
        """Both at once, as one group. Raises NcclError."""
        self.exchange_all(comm, [(outgoing, nbytes, peer)], [(incoming, nbytes, peer)], stream)

    def exchange_all(
        self,
        comm: Comm,
        outgoing: Sequence[tuple[int, int, int]],
        incoming: Sequence[tuple[int, int, int]],
        stream: int,
    ) -> None:
        """Enqueue sends and receives of (address, bytes, peer), all as one group. Raises NcclError."""
        self._must("ncclGroupStart")
        try:
            for piece in outgoing:
                self.send(comm, *piece, stream)
            for piece in incoming:
                self.recv(comm, *piece, stream)
        finally:
            self._start("ncclGroupEnd", comm)

    def allocate(self, nbytes: int) -> int:
        """The address of memory of the current device that can be a window. Raises NcclError."""
        found = _pointer()
        self._must("ncclMemAlloc", ctypes.byref(found), nbytes)
        assert found.value is not None
        return found.value

    def free(self, address: int) -> None:
        self._must("ncclMemFree", address)

    def register(self, comm: Comm, address: int, nbytes: int) -> Window:
        """Begin to make memory a window of both ranks; ask `async_state`. Raises NcclError."""
        window = Window()
        self._start("ncclCommWindowRegister", comm, comm, address, nbytes, ctypes.byref(window), _SYMMETRIC)
        return window

    def put(self, comm: Comm, window: Window, pieces: Sequence[tuple[int, int, int]], peer: int, stream: int) -> None:
        """Enqueue copies of (address, bytes, offset in the peer's window) in this order, as one group; ask
        `async_state`. Each address lies in a window of this rank. Raises NcclError."""
        self._must("ncclGroupStart")
        try:
            for address, nbytes, offset in pieces:
                self._start("ncclPutSignal", comm, address, nbytes, UINT8, peer, window, offset, 0, 0, 0, comm, stream)
        finally:
            self._start("ncclGroupEnd", comm)

    def memory_bytes(self, comm: Comm) -> int | None:
        """Return what the communicator has allocated on the device, or None before 2.29.7."""
        ask = getattr(self._lib, "ncclCommMemStats", None)
        found = ctypes.c_uint64()
        if ask is None or ask(_pointer(comm), _int(_MEMORY_TOTAL), ctypes.byref(found)) != _SUCCESS:
            return None
        return int(found.value)

    def abort(self, comm: Comm) -> None:
        """End everything on the communicator, without the peer, and free it. Its kernels stop by themselves soon after:
        the stream tells. Raises NcclError."""
        status = self._lib.ncclCommAbort(comm)
        if status not in (_SUCCESS, IN_PROGRESS):
            raise self._error("ncclCommAbort", status)

    def _bind(self, prototypes: Mapping[str, tuple[object, ...]]) -> None:
        for name, types in prototypes.items():
            verb = getattr(self._lib, name)
            verb.restype, verb.argtypes = _int, types

    def _start(self, name: str, comm: Comm, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status not in (_SUCCESS, IN_PROGRESS):
            raise self._error(name, status, comm)

    def _must(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != _SUCCESS:
            raise self._error(name, status)

    def _error(self, what: str, status: int, comm: Comm | None = None) -> NcclError:
        kind = self._lib.ncclGetErrorString(_int(status)).decode(errors="replace")
        detail = (self._lib.ncclGetLastError(comm) or b"").decode(errors="replace").strip()
        return NcclError(f"{what}: {kind}{': ' if detail else ''}{detail}")


def dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
