"""Rank 0's side of a tensor-parallel group: it starts the other ranks, tells them what to compute, and knows when one
of them has ended.

    rank 0 (the worker's process)                        rank r (engine.ranks.follower)
      engine thread    orders, sums   <-- sockets -->      main thread: orders, sums
      watching thread  its processes  --- pipe ----->      a thread that ends the process with the pipe

The watching thread starts the processes and stays: the kernel kills them when that thread is no more, whatever ends it.
"""

import logging
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from engine.backends.attention import AttentionBackend
from engine.batch import ForwardBatch
from engine.config import EngineConfig, StepLimits
from engine.model.config import ModelConfig
from engine.model.llama import Llama
from engine.model.split import Share
from engine.ranks.device_orders import DeviceOrder
from engine.ranks.orders import (
    ANNOUNCEMENT,
    ORDER_BYTES,
    PROGRAM,
    OrderRead,
    PackedTensor,
    PoolMapped,
    RankFailed,
    RankOrder,
    RankReady,
    RankRoom,
    RankSetup,
    Said,
    digest_of,
)
from engine.ranks.sums import RankError, RankSums, bytes_of, memory_file, places_bytes, set_wait
from engine.storage.paged import KVTensors, map_blocks

if TYPE_CHECKING:
    from engine.ranks.devices import Devices

log = logging.getLogger(__name__)

S = TypeVar("S", RankReady, PoolMapped, RankRoom, OrderRead)

_END_S = 0.5
"""How long the reason of a rank's end is waited for."""
_SAID_BYTES = 64 * 1024

_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


class RankGroup:
    """Starts the ranks from 1 on; `close` ends them. All but `close` raises RankError for the rank that has ended, does
    not answer or differs. Owner: the thread that opened it, then the engine's.

    Mutable state: the number of the last order, how long orders were waited for, which ranks have ended and why,
    whether the group is closing, and until when a device must have ended what is waited for."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        program: str = PROGRAM,
        link: bytes = b"",
        limits: StepLimits | None = None,
        kept_bytes: int = 0,
    ) -> None:
        """`program`: the module that another rank's process runs. The last three are for ranks that have a device each:
        `RankSetup` says what they are."""
        ranks = config.tensor_parallel
        self.heads = [Share(rank, ranks).kv_heads(model) for rank in range(ranks)]
        """The KV heads that each rank computes with."""
        self.wait_s = config.rank_wait_s
        self.sums_by = ""
        """In words, how ranks with a device each add up; empty where they do in memory of the host."""
        self.weights_bytes: list[int] = []
        """By rank, once they are ready."""
        self.pools: list[Callable[[], Tensor]] = []
        """Calls that map those of the ranks from 1 on, where each has its own: uint8 `[blocks, bytes]`. Each raises
        ValueError."""
        self._on_death: Callable[[RankError], None] = lambda error: None
        self._interrupt: Callable[[], None] = lambda: None
        self._is_timed = self._is_late = False
        self._due_s = math.inf
        self._look_s: float | None = None
        self._number = 0
        self._orders_waited_s = 0.0
        self._closing = False
        self._ended: dict[int, str] = {}
        self._said: dict[int, RankFailed] = {}
        self._others = range(1, ranks)
        memory_fd = memory_file("headrace-ranks", ORDER_BYTES + places_bytes(ranks))
        orders = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in self._others}
        sums = {
            (low, high): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for high in self._others
            for low in range(high)
        }
        self._orders = {rank: ends[0] for rank, ends in orders.items()}
        moves = {rank: socket.socketpair() for rank in self._others} if config.has_rank_pools else {}
        self.moves = {rank: ends[0] for rank, ends in moves.items()}
        """By rank, where each that has a pool of its own is told which of its blocks to move."""
        for ends in moves.values():
            # Whoever gives a command waits for no stopped rank for longer.
            set_wait(ends[0], self.wait_s, socket.SO_SNDTIMEO)
        self.links = own = {rank: sums[0, rank][0] for rank in self._others}
        """By rank, the sockets for sums."""
        self._memory = mmap.mmap(memory_fd, ORDER_BYTES + places_bytes(ranks))
        heads = (model.heads, model.kv_heads)
        self.sums = RankSums(Share(0, ranks), heads, model.vocab, own, bytes_of(self._memory, ORDER_BYTES))
        self._links = [*self._orders.values(), *own.values(), *self.moves.values()]
        setups = {}
        for rank in self._others:
            links = {other: _end(sums, rank, other) for other in range(ranks) if other != rank}
            setups[rank] = RankSetup(
                config=msgspec.msgpack.encode(config),
                rank=rank,
                ranks=ranks,
                memory_fd=memory_fd,
                orders_fd=orders[rank][1].fileno(),
                sums_fds={other: own.fileno() for other, own in links.items()},
                link=link,
                limits=limits,
                kept_bytes=kept_bytes,
                moves_fd=moves[rank][1].fileno() if rank in moves else -1,
            )
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._wake_fd, self._waked_fd = os.pipe()[::-1]
        started = threading.Event()
        failure: list[OSError] = []

        def run() -> None:
            try:
                for rank, setup in setups.items():
                    self._processes[rank] = _start(setup, program)
            except OSError as error:
                failure.append(error)
            finally:
                started.set()
            self._wait_for_ends()

        self._thread = threading.Thread(target=run, name="ranks", daemon=True)
        self._thread.start()
        started.wait()
        os.close(memory_fd)
        for pair in [*orders.values(), *sums.values(), *moves.values()]:
            pair[1].close()
        for (low, _), ends in sums.items():
            if low:
                ends[0].close()
        if failure:
            self.close()
            raise failure[0]

    def watch(self, on_death: Callable[[RankError], None]) -> None:
        """Call `on_death`, from the watching thread, for each rank that ends, and at once for those that have ended."""
        self._on_death = on_death
        for rank in list(self._ended):
            on_death(RankError(rank, "has ended"))

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks from 1 on."""
        return [process.pid for process in self._processes.values()]

    @property
    def has_lost(self) -> bool:
        """True if a rank has ended. Any thread may ask."""
        return bool(self._ended)

    @property
    def waited_s(self) -> dict[str, float]:
        """How long rank 0 has waited for the others: for their parts of sums, and for their word that they have read an
        order. Any thread may ask."""
        return {"sums": self.sums.waited_s, "orders": self._orders_waited_s}

    def ready(self, own: RankReady) -> tuple[bool, int]:
        """Wait until all have loaded the model, and compare. Return whether every rank's kernels are stable, and the
        bytes of all ranks' weights."""
        stable, self.weights_bytes = own.is_stable, [own.weights_bytes]
        for rank in self._others:
            told = self._hear(rank, RankReady)
            for name in ("fingerprint", "arithmetic"):
                if getattr(told, name) != getattr(own, name):
                    raise RankError(rank, f"differs in {name}: {getattr(told, name)}, not {getattr(own, name)}")
            stable &= told.is_stable
            self.weights_bytes.append(told.weights_bytes)
        return stable, sum(self.weights_bytes)

    def share_pool(self, kv: KVTensors) -> None:
        """Let all map the pool. From then on no rank may take longer than `engine.rank_wait_s` over anything."""
        word = ANNOUNCEMENT.pack(kv.blocks, kv.block_bytes, 0)
        for rank in self._others:
            self._send(rank, lambda link: socket.send_fds(link, [word], [kv.fd]))
        for rank in self._others:
            if (mapped := self._hear(rank, PoolMapped).blocks) != kv.blocks:
                raise RankError(rank, f"has a pool of {mapped} blocks, not of {kv.blocks}")
        self._limit_waits()

    def open_pools(self, kv: KVTensors) -> None:
        """Let each of the others open a pool of its own heads, of as many blocks as rank 0's, `kv`, which counts their
        generations and has its copies made there too. From then on as above."""
        heads = zip(self._others, self.heads[1:], strict=True)
        words = {rank: ANNOUNCEMENT.pack(kv.blocks, kv.layout.head_bytes * len(held), 1) for rank, held in heads}
        for rank, word in words.items():
            self._send(rank, lambda link, word=word: link.send(word))  # type: ignore[misc]
        self._lead(kv)
        kv.copied = lambda pairs: self.order(RankOrder("copy", copies=pairs))
        self._limit_waits()

    def move_blocks(self, kv: KVTensors, devices: "Devices") -> None:
        """Let each of the others, which have a device and have opened their last pool on it, move its blocks, whose
        generations rank 0's pool, `kv`, counts from then on. Copies are told with steps."""
        self.order(DeviceOrder("move"))
        self._lead(kv, devices)

    def _lead(self, kv: KVTensors, devices: "Devices | None" = None) -> None:
        for rank in self._others:
            files: list[int] = []
            try:
                mapped = self._hear(rank, PoolMapped, files)
                if mapped.blocks != kv.blocks or len(files) != 1:
                    raise RankError(rank, f"has a pool of {mapped.blocks} blocks, not of {kv.blocks}")
                size = kv.blocks, kv.layout.head_bytes * len(self.heads[rank])
                kv.file.lead(files[0])
                if devices is not None:
                    self.pools.append(partial(devices.map, mapped.name, *size))
                else:
                    memory = map_blocks(files[0], *size)
                    self.pools.append(lambda memory=memory: memory)  # type: ignore[misc]
            except ValueError as error:
                raise RankError(rank, f"has another pool than it says: {error}") from error
            finally:
                for fd in files:
                    os.close(fd)

    def _limit_waits(self) -> None:
        self.sums.wait_at_most(self.wait_s)
        self.timed()

    def timed(self) -> None:
        """From now on the group ends where a rank takes longer than `engine.rank_wait_s` to read an order, or devices
        that are `waited` for to carry one out."""
        self._is_timed = True
        for link in self._orders.values():
            set_wait(link, self.wait_s)

    def rooms(self) -> list[int]:
        """Return what each of the others says to an order that asks how large its pool may be, in blocks."""
        return [self._hear(rank, RankRoom).blocks for rank in self._others]

    def have_opened(self, blocks: int) -> None:
        """Wait until the others have opened pools of their own."""
        for rank in self._others:
            if (found := self._hear(rank, PoolMapped).blocks) != blocks:
                raise RankError(rank, f"has a pool of {found} blocks, not of {blocks}")

    def interrupted_by(self, interrupt: Callable[[], None]) -> None:
        """Call `interrupt`, from the watching thread, where a rank has ended, or is late: rank 0 may be waiting for its
        device, which waits for that rank's."""
        self._interrupt, self._look_s = interrupt, self.wait_s / 4
        os.write(self._wake_fd, b"0")

    @contextmanager
    def waited(self) -> Iterator[None]:
        """Within, devices compute together. Raises RankError, for the rank that is known to have ended or to be
        stopped, where they came back without having done so."""
        if self._is_timed:
            self._due_s = time.monotonic() + self.wait_s
        try:
            yield
        except RankError as error:
            # What is said of the link comes from an abort, or from a rank whose end is about to be noticed.
            deadline_s = time.monotonic() + _END_S
            while self._interruption() is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            raise self._interruption() or self.explained(error) from error
        finally:
            self._due_s = math.inf
        if (found := self._interruption()) is not None:
            raise found

    def _interruption(self) -> RankError | None:
        """Return why devices were interrupted, if they were."""
        if self._ended:
            return self.explained(RankError(next(iter(self._ended)), "has ended"))
        return self.explained(RankError(self._others[0], "does not answer")) if self._is_late else None

    def order(self, order: RankOrder | DeviceOrder) -> None:
        """Tell all ranks to compute; returns when they have read what, and not when they have done it."""
        raw = msgspec.msgpack.encode(order)
        if len(raw) > ORDER_BYTES:
            raise ValueError(f"a step of {len(raw)} bytes is larger than {ORDER_BYTES}")
        self._memory[: len(raw)] = raw
        self._number += 1
        digest = digest_of(raw, self._number)
        word = ANNOUNCEMENT.pack(self._number, len(raw), digest)
        for rank in self._others:
            self._send(rank, lambda link: link.send(word))
        began_s = time.perf_counter()
        for rank in self._others:
            read = self._hear(rank, OrderRead)
            if read != OrderRead(self._number, digest):
                raise RankError(
                    rank,
                    f"is at order {read.number} of digest {read.digest:016x}, not at {self._number} of {digest:016x}",
                )
        self._orders_waited_s += time.perf_counter() - began_s

    def explained(self, error: RankError) -> RankError:
        """Return the error with what is known of why the rank has ended; others may only have noticed."""
        deadline_s = time.monotonic() + _END_S
        while not self._ended and time.monotonic() < deadline_s and error.problem == "has ended":
            time.sleep(0.01)
        for rank in self._others:
            self._take_failure(rank)
        for rank, told in sorted(self._said.items(), key=lambda said: said[1].problem == "has ended"):
            if told.rank:
                return RankError(told.rank, f"{told.problem}{self._how(told.rank)}")
            return RankError(rank, f"says that rank 0 {told.problem}{self._how(rank)}")  # which decides who differs
        # Who waits for a stopped rank is as silent as that one.
        stopped = [rank for rank in self._others if self._is_stopped(rank)]
        rank = stopped[0] if stopped and error.problem == "does not answer" else error.rank
        return RankError(rank, f"{error.problem}{self._how(rank)}")

    def _is_stopped(self, rank: int) -> bool:
        with suppress(OSError):
            stat = Path(f"/proc/{self._processes[rank].pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] in "tT"
        return False

    def close(self) -> None:
        """End all ranks, whatever they do, and give everything back. Twice is as good as once."""
        if self._closing:
            return
        self._closing = True
        os.write(self._wake_fd, b"0")
        self._thread.join()
        self._interrupt()
        for link in self._links:
            link.close()
        os.close(self._wake_fd)
        os.close(self._waked_fd)

    def _how(self, rank: int) -> str:
        if rank not in self._processes:
            return ""
        ended = self._ended.get(rank)
        return f" (pid {self._processes[rank].pid}{'' if ended is None else f', {ended}'})"

    def _send(self, rank: int, send: Callable[[socket.socket], object]) -> None:
        try:
            send(self._orders[rank])
        except OSError as error:
            raise self.explained(RankError(rank, "has ended")) from error

    def _hear(self, rank: int, kind: type[S], files: list[int] | None = None) -> S:
        """`files`: takes the descriptors that come with what is said."""
        try:
            if files is None:
                raw = self._orders[rank].recv(_SAID_BYTES)
            else:
                raw, fds, _, _ = socket.recv_fds(self._orders[rank], _SAID_BYTES, 1)
                files += fds
        except BlockingIOError:
            raise self.explained(RankError(rank, "does not answer")) from None
        except OSError as error:
            raise self.explained(RankError(rank, "has ended")) from error
        if not raw:
            raise self.explained(RankError(rank, "has ended"))
        try:
            said = _decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise RankError(rank, f"says what is not understood: {error}") from error
        if isinstance(said, RankFailed):
            self._said[rank] = said
            raise self.explained(RankError(rank, "has ended"))
        if not isinstance(said, kind):
            raise RankError(rank, f"says {type(said).__name__} where {kind.__name__} is due")
        return said

    def _take_failure(self, rank: int) -> None:
        """Read what a rank may have said at its end, if it is there and is understood."""
        with suppress(OSError, msgspec.MsgspecError):
            while raw := self._orders[rank].recv(_SAID_BYTES, socket.MSG_DONTWAIT):
                if isinstance(said := _decoder.decode(raw), RankFailed):
                    self._said.setdefault(rank, said)

    def _wait_for_ends(self) -> None:
        """Wait for the end of any process, then of the group."""
        poll, fds = select.poll(), dict[int, int]()
        poll.register(self._waked_fd, select.POLLIN)
        for rank, process in self._processes.items():
            fds[fd := os.pidfd_open(process.pid)] = rank
            poll.register(fd, select.POLLIN)
        while not self._closing:
            if time.monotonic() > self._due_s and not self._is_late:
                self._is_late = True
                self._interrupt()
            for fd, _ in poll.poll(None if self._look_s is None else 1e3 * self._look_s):
                if fd == self._waked_fd:
                    os.read(fd, 4096)
                    continue
                rank = fds[fd]
                poll.unregister(fd)
                code = self._processes[rank].wait()
                self._ended[rank] = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                if not self._closing:
                    self._interrupt()
                    self._on_death(RankError(rank, "has ended"))
        for process in self._processes.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for fd in fds:
            os.close(fd)


class GroupModel:
    """A rank's part of a model whose other parts compute with it: what a runner takes for a model. Raises RankError."""

    def __init__(self, model: Llama, group: RankGroup) -> None:
        self._model = model
        self._group = group

    @property
    def device(self) -> torch.device:
        return self._model.device

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend, out: Tensor | None = None
    ) -> Tensor:
        return self._do(RankOrder.of_batch("forward", batch), lambda: self._model.forward(batch, kv, attention, out))

    def hidden(self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend) -> Tensor:
        return self._do(RankOrder.of_batch("hidden", batch), lambda: self._model.hidden(batch, kv, attention))

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self._do(RankOrder("logits", rows=PackedTensor.of(rows)), lambda: self._model.logits(rows, out))

    def _do(self, order: RankOrder, compute: Callable[[], Tensor]) -> Tensor:
        self._group.order(order)
        try:
            return compute()
        except RankError as error:
            raise self._group.explained(error) from error


def _end(sums: dict[tuple[int, int], tuple[socket.socket, socket.socket]], rank: int, other: int) -> socket.socket:
    """Return `rank`'s end of its socket to `other`."""
    return sums[min(rank, other), max(rank, other)][int(rank > other)]


def _start(setup: RankSetup, program: str) -> subprocess.Popen[bytes]:
    """Start a rank; its standard input is how it learns what it is, and that this process is gone."""
    moves = () if setup.moves_fd < 0 else (setup.moves_fd,)
    process = subprocess.Popen(
        [sys.executable, "-m", program],
        stdin=subprocess.PIPE,
        pass_fds=(setup.memory_fd, setup.orders_fd, *setup.sums_fds.values(), *moves),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(setup) + b"\n")
    process.stdin.flush()
    return process
