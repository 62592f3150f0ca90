"""The device of a worker with an NVIDIA GPU: torch's memory and streams, CuPy's events, ids and IPC handles.

Both libraries use the process's one CUDA context of the device, and the `libnccl` that CuPy has loaded is the one that
`transfer.nccl.library` binds.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import cupy
import msgspec
import torch
import torch.utils.dlpack
from cupy.cuda import nccl, runtime
from torch import Tensor

from kernels.configs import table_arch
from transfer.gpu.device import DeviceMemory, Event, Stream
from transfer.gpu.kernels import DeviceKernels
from transfer.transport import TransferError

_SUCCESS = 0
_REACH = {2: "cannot map memory of", 3: "has no atomics over its link with"}
"""`CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`, `.._NATIVE_ATOMIC_SUPPORTED`; and what is without."""
_PAGE_BYTES = 2 << 20
"""What `cudaMalloc` gives out small pieces of, and CUDA's IPC shares as a whole."""


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.done)


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._torch = torch.cuda.Stream(device)
        self.handle = int(self._torch.cuda_stream)
        with self.use():
            self._cupy = cupy.cuda.Stream.from_external(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return what CuPy takes a stream of torch's by: version of the protocol, and handle."""
        return 0, self.handle

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._torch)

    def record(self) -> _CudaEvent:
        with self.use():
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self._cupy)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with self.use():
            self._cupy.wait_event(event.event)


class _CudaPeek(_CudaEvent):
    def __init__(self, event: Any, host: Tensor) -> None:
        super().__init__(event)
        self._host = host

    @property
    def words(self) -> list[int]:
        return [int(word) for word in self._host]


class _Handle(msgspec.Struct):
    """An allocation of another process, and where the pool begins in it."""

    ipc: bytes
    offset: int


class CudaDevice:
    """`transfer.gpu.device.Device`. Raises TransferError where `name`, such as `cuda:0`, is no device of this
    process."""

    def __init__(self, name: str) -> None:
        self._device = torch.device(name)
        try:
            if self._device.index is None:
                self._device = torch.device(name, torch.cuda.current_device())
            properties = torch.cuda.get_device_properties(self._device)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise TransferError(f"no device {name}: {error}") from error
        self.name = str(properties.uuid)
        kernels = DeviceKernels(self._device, table_arch(properties.major))
        self.numbers, self.copy, self.convert = kernels.numbers, kernels.copy, kernels.convert
        self._mapped: dict[bytes, int] = {}

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    @cached_property
    def digest_stream(self) -> CudaStream:
        return self.stream()

    def words(self, count: int) -> Tensor:
        # Of memory that only this thread's stream had before: the engine may have given some back that its kernels,
        # on the stream that is current here, have yet to write.
        with self.digest_stream.use():
            return torch.empty(count, dtype=torch.int64, device=self._device)

    def view(self, address: int, nbytes: int) -> Tensor:
        return self._bytes(address, nbytes).view(torch.int64)

    def fetch(self, words: Tensor) -> Tensor:
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        return host.copy_(words, non_blocking=True)

    def peek(self, words: Tensor, stream: Stream) -> _CudaPeek:
        with stream.use():
            host = self.fetch(words)
        event = stream.record()
        assert isinstance(event, _CudaEvent)
        return _CudaPeek(event.event, host)

    def _bytes(self, address: int, nbytes: int) -> Tensor:
        """uint8 `[nbytes]`; whoever allocated it keeps it."""
        with torch.cuda.device(self._device):
            memory = cupy.cuda.UnownedMemory(address, nbytes, owner=None, device_id=self._device.index)
            array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            return torch.utils.dlpack.from_dlpack(array)

    def export(self, memory: DeviceMemory) -> bytes:
        pointer = memory.memory.data_ptr()
        base = _allocation(pointer)
        with torch.cuda.device(self._device), _translated("export the pool"):
            handle = _Handle(bytes(runtime.ipcGetMemHandle(base)), pointer - base)
        return msgspec.msgpack.encode(handle)

    def shared(self, nbytes: int) -> tuple[Tensor, bytes]:
        """Return uint8 `[nbytes]`, zero, for as long as this process lives, and a name by which others `open` it.
        Raises TransferError."""
        with torch.cuda.device(self._device), _translated("share memory of this device"):
            # Others map all that lies in the same page: so nothing else does.
            address = runtime.malloc(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)
            memory = self._bytes(address, nbytes)
            memory.zero_()
            runtime.deviceSynchronize()  # another process is about to write to it
            handle = _Handle(bytes(runtime.ipcGetMemHandle(address)), 0)
        return memory, msgspec.msgpack.encode(handle)

    def check_reach(self, other: int) -> None:
        """Raise TransferError where kernels here cannot map memory of GPU `other`, or cannot exchange a word of it."""
        if other == self._device.index:
            return
        driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        pair = [ctypes.c_int(), ctypes.c_int()]
        for found, number in zip(pair, (self._device.index, other), strict=True):
            driver.cuDeviceGet(ctypes.byref(found), number)
        for attribute, what in _REACH.items():
            status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, *pair)
            if status != _SUCCESS or not value.value:
                raise TransferError(f"GPU {self._device.index} {what} GPU {other}")

    def open(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        try:
            handle = msgspec.msgpack.decode(name, type=_Handle)
        except msgspec.MsgspecError as error:
            raise TransferError(f"not a handle of device memory: {error}") from error
        with torch.cuda.device(self._device), _translated("map the peer's pool"):
            base = runtime.ipcOpenMemHandle(handle.ipc)
            self._mapped[name] = base
            found = self._bytes(base + handle.offset, blocks * block_bytes)
            return found.view(blocks, block_bytes)

    def shut(self, name: bytes) -> None:
        base = self._mapped.pop(name, None)
        if base is not None:
            with torch.cuda.device(self._device), _translated("unmap the peer's pool"):
                runtime.ipcCloseMemHandle(base)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def unique_id(self) -> bytes:
        try:
            return bytes(nccl.get_unique_id())
        except nccl.NcclError as error:
            raise TransferError(f"no id for a communicator: {error}") from error


def loaded_nccl() -> Path:
    """The libnccl that this process has loaded with CuPy. Raises TransferError if there is none."""
    if not nccl.available:
        raise TransferError("CuPy found no NCCL: install headrace[cuda12] or headrace[cuda13]")
    nccl.get_version()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libnccl.so" in path:
            return Path(path)
    raise TransferError("no libnccl is loaded in this process")


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise TransferError(f"cannot {what}: {error}") from error


def _allocation(pointer: int) -> int:
    """Return where the allocation begins that `pointer` lies in: a handle names a whole one."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    if status != _SUCCESS:
        raise TransferError(f"the pool is not in an allocation of CUDA's: error {status}")
    return base.value
