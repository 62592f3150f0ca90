"""One of several ranks, each a process: sums of `engine.ranks.one_shot`, against what all ranks' parts come to.
`python -m tests.engine.ranks.one_shot_rank SETUP`, a `Setup` as JSON, prints a digest of all sums of this rank.
On the CPU the kernel is interpreted, over memory of this host that all have mapped."""

import atexit
import importlib.util
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import torch
import triton.language as tl
import xxhash
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import engine.ranks.one_shot
import kernels.rank_sum
from engine.model.reduction import add_in_order
from engine.model.split import Share
from engine.ranks.one_shot import OneShotSums, open_one_shot
from engine.storage.paged import PoolFile, map_blocks
from tests.engine.backends.gpu.recording import FakeRecorder

MOST_BYTES = 16 << 10
SHAPES = ((1, 1), (3, 11), (1, 2048), (5, 515), (2, 2047), (4, 1024))
"""The elements of one to three programs, in 16 bits and in 32; some do not fill the last vector."""
PLANTS = {
    "one slot": ("(step % 2 * PROGRAMS + program)", "(step * 0 + program)"),
    "own part first": ("buffer = tl.load(buffers_ptr + rank)", "buffer = tl.load(buffers_ptr + (rank + RANK) % RANKS)"),
    "nobody is waited for": ("polls = tl.where(before < 0, limit, 0)", "polls = tl.where(before < 0, limit, limit)"),
}
"""What the kernel says, and a wrong thing in its place."""


class Setup(msgspec.Struct):
    rank: int
    ranks: int
    links: dict[int, int]
    """By rank, the descriptor of a socket to it."""
    steps: int
    seed: int = 0
    device: str = "cpu"
    recorded: bool = False
    plant: str = ""


class HostDevices:
    """The part of `engine.ranks.devices.Devices` that sums take; memory is of this host."""

    def __init__(self) -> None:
        self._files: list[PoolFile] = []

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        self._files.append(file := PoolFile("headrace-sums", 1, nbytes))
        return map_blocks(file.fd, 1, nbytes).view(-1), f"/proc/{os.getpid()}/fd/{file.fd}".encode()

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        with open(name, "r+b") as file:
            return map_blocks(file.fileno(), blocks, block_bytes)


class OneCard:
    """The same on one GPU for all ranks."""

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        from transfer.gpu.cuda import CudaDevice

        return CudaDevice("cuda:0").shared(nbytes)

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        from transfer.gpu.cuda import CudaDevice

        return CudaDevice("cuda:0").open(name, blocks, block_bytes)


def take_bfloat16() -> None:
    """Let the interpreter convert bfloat16 as torch does: its own conversion to it cuts off. Nothing else is done with
    the type in this kernel, so what refuses it there may let it pass."""
    plain = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        pair = source.dtype.scalar, to.scalar
        if pair == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), to.scalar)
        if pair == (tl.bfloat16, tl.float32):
            bits = torch.from_numpy(np.ascontiguousarray(source.data))
            return TensorHandle(bits.view(torch.bfloat16).float().numpy(), to.scalar)
        return plain(self, source, to)

    InterpreterBuilder.cast_impl = cast
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(InterpreterBuilder, name, cast)
    kernels.rank_sum.check_interpretable = lambda *tensors: None


def delay_barriers(draws: random.Random) -> None:
    """Let each barrier of the kernel, before the flags are set and before the slots are read, take a while now and
    then: where a thread of a device may be late."""

    def wait(self: Any) -> None:
        if draws.random() < 0.3:
            time.sleep(draws.uniform(0.0, 0.02))

    InterpreterBuilder.create_barrier = wait


def planted(name: str) -> ModuleType:
    """Return the kernel's module with something wrong in it."""
    source = Path(kernels.rank_sum.__file__).read_text(encoding="utf-8")
    right, wrong = PLANTS[name]
    assert source.count(right) == 1, f"the kernel does not say {right!r}"
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)  # the interpreter reads the source when it is first launched
    (folder / "planted.py").write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted", folder / "planted.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.check_interpretable = lambda *tensors: None  # type: ignore[attr-defined]
    return found


def parts_of(setup: Setup, step: int) -> list[Tensor]:
    """Return the parts of all ranks."""
    draws = torch.Generator().manual_seed(1000 * setup.seed + step)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[step % 3]
    shape = SHAPES[step // 3 % len(SHAPES)]
    return [
        torch.randn(shape, generator=draws).mul_(10.0 ** (rank % 3)).to(dtype) for rank in range(setup.ranks)
    ]


def checked(setup: Setup, step: int, found: Tensor) -> bytes:
    wanted = add_in_order(parts_of(setup, step))
    assert torch.equal(found.cpu(), wanted), f"rank {setup.rank}, step {step}: {found.flatten()[:4]}, not {wanted}"
    return bytes(found.cpu().view(torch.uint8).numpy().data)


def run(setup: Setup, sums: OneShotSums) -> str:
    """Add up step after step, each a while after the one before."""
    seen, draws = xxhash.xxh3_64(), random.Random(10 * setup.seed + setup.rank)
    for step in range(setup.steps):
        x = parts_of(setup, step)[setup.rank].to(setup.device)
        if draws.random() < 0.2:
            time.sleep(draws.uniform(0.0, 0.05))
        sums.sum(x.view(-1))
        seen.update(checked(setup, step, x))
    sums.check()
    return seen.hexdigest()


def run_recorded(setup: Setup, sums: OneShotSums) -> str:
    """Record a few sums of one shape and type once, and replay them over other numbers."""
    seen, each = xxhash.xxh3_64(), 8
    of_one_shape = [9 + 18 * at for at in range(setup.steps * each)]
    held = [parts_of(setup, 9)[setup.rank] for _ in range(each)]

    def work() -> Tensor:
        for x in held:
            x.mul_(2.0).mul_(0.5)
            sums.sum(x.view(-1))
        return held[0]

    recording = FakeRecorder().record(work)
    for at in range(setup.steps):
        steps = of_one_shape[at * each :][:each]
        for x, step in zip(held, steps, strict=True):
            x.copy_(parts_of(setup, step)[setup.rank])
        recording.replay()
        for x, step in zip(held, steps, strict=True):
            seen.update(checked(setup, step, x))
    return seen.hexdigest()


def main(raw: str) -> None:
    setup = msgspec.json.decode(raw, type=Setup)
    torch.set_num_threads(1)
    links = {rank: socket.socket(fileno=fd) for rank, fd in setup.links.items()}
    if setup.device == "cpu":
        take_bfloat16()
        delay_barriers(random.Random(100 + 10 * setup.seed + setup.rank))
    if setup.plant:
        engine.ranks.one_shot.rank_sum = planted(setup.plant).rank_sum
    devices: Any = HostDevices() if setup.device == "cpu" else OneCard()
    share = Share(setup.rank, setup.ranks)
    sums, by = open_one_shot(share, MOST_BYTES, devices, torch.device(setup.device), links)
    assert sums is not None, by
    print((run_recorded if setup.recorded else run)(setup, sums), flush=True)
    for link in links.values():  # nobody's memory goes before all have ended
        link.shutdown(socket.SHUT_WR)
        link.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
