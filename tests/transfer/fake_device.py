"""A device of host memory, and a libnccl for it (`nccl/fake_nccl.c`, built once): for tests of the GPU transports.

Streams and events are the C file's: operations run in their own thread, in order. Copies are the specification of the
copy kernel, carried out at once, or, on a `LateDevice`, when their stream comes to them; so what these tests show is
the order of calls, the bytes, and the state machines, and nothing about speed.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from engine.storage.paged import header_bytes
from engine.types import Incarnation
from kernels.block_shape import BlockShape
from kernels.pool import KVPool
from kernels.reference_blocks import convert_blocks, wp64
from transfer.config import NcclConfig, TransferConfig
from transfer.gpu.cuda_ipc import CudaIpcTransport
from transfer.gpu.device import DeviceMemory, Event, Stream
from transfer.nccl.library import NcclLibrary
from transfer.nccl.transport import NcclTransport
from transfer.transport import TransferError, Transport

SOURCE = Path(__file__).parent / "nccl" / "fake_nccl.c"
FAIL, HANG, DIE, STALL, ASYNC = range(1, 6)
CALL = ctypes.CFUNCTYPE(None)
LIBRARY_VARIABLE = "FAKE_NCCL_LIBRARY"
ONE_SIDED_VARIABLE = "FAKE_NCCL_ONE_SIDED"
"""Set: workers, also those in processes of their own, put into rings."""


@functools.cache
def library_path() -> Path:
    """Compiled once per session, and passed on to the processes that it starts."""
    if LIBRARY_VARIABLE in os.environ:
        return Path(os.environ[LIBRARY_VARIABLE])
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the fake libnccl needs a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="fake-nccl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "libnccl-fake.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    os.environ[LIBRARY_VARIABLE] = str(path)
    os.environ["FAKE_NCCL_DIR"] = str(folder)
    return path


@functools.cache
def fake() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(library_path()))
    for name in ("fake_stream", "fake_record"):
        getattr(lib, name).restype = ctypes.c_void_p
    for name in ("fake_record", "fake_done"):
        getattr(lib, name).argtypes = (ctypes.c_void_p,)
    lib.fake_stall_stream.argtypes = (ctypes.c_void_p, ctypes.c_int)
    lib.fake_wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    lib.fake_call.argtypes = (ctypes.c_void_p, CALL)
    return lib


class Fault:
    """The next call of `verb` by `rank` (-1: any), after `skip` more, does `action`."""

    def __init__(self, verb: str, action: int, code: int = 6, rank: int = -1, skip: int = 0) -> None:
        self._number = fake().fake_script(verb.encode(), rank, skip, action, code)

    @property
    def taken(self) -> bool:
        return bool(fake().fake_taken(self._number))


def count(what: str) -> int:
    """`made`, `live`, `aborts`: communicators of this process; `running`: operations."""
    return int(fake().fake_count(what.encode()))


class FakeEvent:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def done(self) -> bool:
        return bool(fake().fake_done(self.handle))


class FakePeek(FakeEvent):
    """Reads when its stream has come to it."""

    def __init__(self, handle: int, words: Tensor) -> None:
        super().__init__(handle)
        self._words = words

    @property
    def words(self) -> list[int]:
        return [int(word) for word in self._words]


class FakeStream:
    def __init__(self) -> None:
        self.handle = int(fake().fake_stream())

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def record(self) -> FakeEvent:
        return FakeEvent(int(fake().fake_record(self.handle)))

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        fake().fake_wait(self.handle, event.handle)


class FakeDevice:
    """A device without a GPU. Fulfils `transfer.gpu.device.Device`."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.streams: list[FakeStream] = []
        self.uploads = 0

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    @functools.cached_property
    def digest_stream(self) -> FakeStream:
        return self.stream()

    def words(self, count: int) -> Tensor:
        return torch.full((count,), -1, dtype=torch.int64)

    def numbers(self, *rows: Sequence[int]) -> Tensor:
        self.uploads += 1
        return torch.tensor([list(row) for row in rows], dtype=torch.int32)

    def fetch(self, words: Tensor) -> Tensor:
        return words.clone()

    def copy(
        self,
        source: Tensor,
        target: Tensor | None,
        source_blocks: Tensor,
        target_blocks: Tensor,
        shape: BlockShape,
        tokens: Tensor | None = None,
    ) -> Tensor | None:
        assert source.shape[2] == shape.words
        digests = []
        for at, (old, new) in enumerate(zip(source_blocks.tolist(), target_blocks.tolist(), strict=True)):
            if target is not None:
                target[new].copy_(source[old])
            if tokens is not None:
                digests.append(wp64(source[old], shape, int(tokens[at])))
        return torch.stack(digests) if tokens is not None else None

    def convert(self, source: KVPool, target: KVPool, source_blocks: Tensor, target_blocks: Tensor) -> None:
        convert_blocks(source, target, source_blocks.tolist(), target_blocks.tolist())

    def view(self, address: int, nbytes: int) -> Tensor:
        memory = (ctypes.c_char * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.int64)

    def peek(self, words: Tensor, stream: Stream) -> "FakePeek":
        event = stream.record()
        assert isinstance(event, FakeEvent)
        return FakePeek(event.handle, words)

    def export(self, memory: DeviceMemory) -> bytes:
        return json.dumps([os.getpid(), memory.fd, memory.blocks]).encode()

    def open(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        try:
            pid, fd, _ = json.loads(name)
            with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
                size = header_bytes(blocks) + blocks * block_bytes
                view = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the peer's pool: {error}") from error
        raw = torch.frombuffer(view, dtype=torch.uint8, offset=header_bytes(blocks))
        return raw.view(blocks, block_bytes)

    def shut(self, name: bytes) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def unique_id(self) -> bytes:
        found = ctypes.create_string_buffer(128)
        status = fake().ncclGetUniqueId(found)
        if status:
            raise TransferError(f"no id for a communicator: {status}")
        return found.raw


class LateStream(FakeStream):
    """The current stream of its device while it is in use."""

    def __init__(self, device: "LateDevice") -> None:
        super().__init__()
        self._device = device

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        before, self._device.current = self._device.current, self
        try:
            yield
        finally:
            self._device.current = before


class LateDevice(FakeDevice):
    """A device that is late: copies take `copy_s` each and are carried out by the stream that was in use, so who does
    not wait for one finds that nothing was copied. `copies`: when each began and ended (`time.monotonic`), and the
    address it went to."""

    def __init__(self, copy_s: float) -> None:
        super().__init__("late")
        self.copy_s = copy_s
        self.copies: list[tuple[float, float, int]] = []
        self.current: LateStream | None = None
        self._calls: list[object] = []

    def stream(self) -> LateStream:
        found = LateStream(self)
        self.streams.append(found)
        return found

    def copy(
        self,
        source: Tensor,
        target: Tensor | None,
        source_blocks: Tensor,
        target_blocks: Tensor,
        shape: BlockShape,
        tokens: Tensor | None = None,
    ) -> Tensor | None:
        assert self.current is not None, "a copy on no stream"
        assert target is not None and tokens is None, "not needed by any test"

        def carry_out() -> None:
            began_s = time.monotonic()
            time.sleep(self.copy_s)
            super(LateDevice, self).copy(source, target, source_blocks, target_blocks, shape)
            self.copies.append((began_s, time.monotonic(), target.data_ptr()))

        self._calls.append(call := CALL(carry_out))
        fake().fake_call(self.current.handle, call)
        return None


TESTS = NcclConfig(share_gpu="two_hosts", piece_bytes=1 << 20, limit_s=2.0, join_s=30.0)


def open_fake(
    kind: str,
    memory: DeviceMemory,
    incarnation: Incarnation,
    config: TransferConfig,
    device: FakeDevice | None = None,
) -> Transport:
    """Open `cuda_ipc` or `nccl` on the fake device."""
    device = device or FakeDevice()
    if kind == "cuda_ipc":
        return CudaIpcTransport(memory, device)
    library = NcclLibrary(library_path())
    nccl = config.nccl if config.nccl != NcclConfig() else TESTS
    if ONE_SIDED_VARIABLE in os.environ:
        nccl = msgspec.structs.replace(nccl, one_sided=True, put_bytes=1 << 20)
    return NcclTransport(
        memory, incarnation, "127.0.0.1", config.stall_s, nccl, device, library
    )
