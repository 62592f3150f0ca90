"""The process of a tensor-parallel rank other than rank 0: it loads its part of the model, maps the worker's pool or
opens one of its own, and computes what it is told, until it is told to end, the worker's process is gone, or a rank
fails."""

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from engine.backends.attention import AttentionBackend
from engine.config import EngineConfig
from engine.cores import process_cores
from engine.device import arithmetic_of, open_part
from engine.kv.layout import KVLayout
from engine.model.config import ModelConfig
from engine.model.split import Share
from engine.ranks.heads import HeadBlocks, HeadsAttention
from engine.ranks.orders import (
    ANNOUNCEMENT,
    ORDER_BYTES,
    OrderRead,
    PoolMapped,
    RankFailed,
    RankOrder,
    RankReady,
    RankSetup,
    Said,
    digest_of,
)
from engine.ranks.sums import RankError, RankSums, bytes_of, places_bytes
from engine.storage.paged import KVTensors, PagedKV, PoolFile, header_bytes, map_blocks

_PR_SET_PDEATHSIG = 1


Serve = Callable[[socket.socket, KVTensors, KVLayout, Callable[[str], None]], None]
"""Moves blocks of the rank's pool as it is told over a socket; calls back with why the rank must end."""


class Follows(Protocol):
    """A rank that was opened, from its setup and its socket for orders."""

    def run(self) -> None:
        """Do what it is told, until it is told to end."""


def main(serve: Serve | None = None, opened: Callable[[RankSetup, socket.socket], Follows] | None = None) -> None:
    """`serve`: what moves the blocks of a rank's own pool, in a thread of its own. `opened`: opens the rank; a
    `Follower` unless another is given."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSetup)
    _end_with_rank_0()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {setup.rank} %(levelname)s %(name)s: %(message)s")
    orders = socket.socket(fileno=setup.orders_fd)
    try:
        with torch.inference_mode():
            (opened or partial(Follower, serve=serve))(setup, orders).run()
    except RankError as error:
        say(orders, RankFailed(error.rank, error.problem))
        raise SystemExit(1) from error
    except Exception as error:
        say(orders, RankFailed(setup.rank, f"failed: {type(error).__name__}: {error}"))
        raise


class Follower:
    """Opens its part; `run` does what it is told. Raises RankError where another rank fails, and what opening
    raises."""

    def __init__(self, setup: RankSetup, orders: socket.socket, serve: Serve | None = None) -> None:
        config = msgspec.msgpack.decode(setup.config, type=EngineConfig)
        self._rank, self._orders = setup.rank, orders
        whole = ModelConfig.load(Path(config.model_dir))
        links = {rank: socket.socket(fileno=fd) for rank, fd in setup.sums_fds.items()}
        self._memory = mmap.mmap(setup.memory_fd, ORDER_BYTES + places_bytes(setup.ranks))
        share = Share(setup.rank, setup.ranks)
        memory = bytes_of(self._memory, ORDER_BYTES)
        self._sums = RankSums(share, (whole.heads, whole.kv_heads), whole.vocab, links, memory)
        part = open_part(config, self._sums)
        self._model = part.model
        layout = whole.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
        fingerprint = f"{part.fingerprint}/{layout.dtype}"
        arithmetic = arithmetic_of(config, part.native, part.model, layout)
        ready = RankReady(fingerprint, arithmetic, part.weights_bytes, part.is_stable)
        say(orders, ready)
        blocks = HeadBlocks(layout, share.kv_heads(whole))
        self._attention: AttentionBackend
        if setup.moves_fd < 0:
            pool = self._map_pool(layout)
            # Generations are rank 0's: nobody looks for them here.
            self._kv = blocks.view(pool, PoolFile("headrace-rank", 1))
            self._attention = HeadsAttention(part.attention, blocks, self._kv)
            say(orders, PoolMapped(len(pool)))
        else:
            self._kv, self._attention = self._open_pool(blocks.layout), part.attention
            if serve is not None:
                moves_blocks(serve, setup, orders, self._kv, blocks.layout)
        cores = process_cores(config.threads) if part.native is not None and config.lend_cores else None
        if part.native is not None and cores is not None:
            part.native.threads = cores.threads
        self._at_work = nullcontext if cores is None else cores.at_work

    def _map_pool(self, layout: KVLayout) -> torch.Tensor:
        word, fds, _, _ = socket.recv_fds(self._orders, ANNOUNCEMENT.size, 1)
        if not word:
            raise SystemExit(0)
        blocks, block_bytes, _ = ANNOUNCEMENT.unpack(word)
        size = header_bytes(blocks) + blocks * block_bytes
        if block_bytes != layout.block_bytes:
            raise RankError(self._rank, f"has blocks of {layout.block_bytes} bytes, not of {block_bytes}")
        if (found := os.fstat(fds[0]).st_size) != size:
            raise RankError(self._rank, f"has a pool of {found} bytes, not of {size} for {blocks} blocks")
        memory = map_blocks(fds[0], blocks, block_bytes)
        os.close(fds[0])
        return memory

    def _open_pool(self, layout: KVLayout) -> KVTensors:
        """Open a pool of this rank's heads; rank 0 keeps its generations."""
        word = self._orders.recv(ANNOUNCEMENT.size)
        if not word:
            raise SystemExit(0)
        blocks, block_bytes, _ = ANNOUNCEMENT.unpack(word)
        if block_bytes != layout.block_bytes:
            raise RankError(self._rank, f"has blocks of {layout.block_bytes} bytes, not of {block_bytes}")
        kv = PagedKV(layout, blocks)
        say_opened(self._orders, kv)
        return kv

    def run(self) -> None:
        for raw, read in orders_of(self._rank, self._orders, self._memory):
            order = msgspec.msgpack.decode(raw, type=RankOrder)
            if order.kind == "copy":
                # Before it is said: no sum follows a copy, by which rank 0 would know that it is made.
                self._kv.copy(order.copies)
            say(self._orders, read)
            if order.kind != "copy":
                with self._at_work():
                    self._carry_out(order)

    def _carry_out(self, order: RankOrder) -> None:
        if order.rows is not None:
            self._model.logits(order.rows.tensor())
            return
        batch = order.batch()
        self._attention.begin(batch, self._kv)
        if order.kind == "forward":
            self._model.forward(batch, self._kv, self._attention)
        else:
            self._model.hidden(batch, self._kv, self._attention)


def orders_of(rank: int, orders: socket.socket, memory: mmap.mmap) -> Iterator[tuple[bytes, OrderRead]]:
    """Yield what rank 0 orders, with what it is to be told of that; ends with the group. Raises RankError."""
    number = 0
    while word := orders.recv(ANNOUNCEMENT.size):
        told, size, announced = ANNOUNCEMENT.unpack(word)
        number += 1
        raw = bytes(memory[:size])
        read = OrderRead(number, digest_of(raw, number))
        if (told, announced) != (read.number, read.digest):
            say(orders, read)
            raise RankError(rank, f"has read another order than {told}, which rank 0 wrote")
        yield raw, read


def say(orders: socket.socket, said: Said) -> None:
    with suppress(OSError):  # nobody listens any more: the next receive says so
        orders.send(msgspec.msgpack.encode(said))


def say_opened(orders: socket.socket, kv: KVTensors, name: bytes = b"") -> None:
    """Send rank 0 the file of a pool of this rank's own, whose generations it advances; and, where the blocks are not
    in that file, the name by which it may map them."""
    with suppress(OSError):
        socket.send_fds(orders, [msgspec.msgpack.encode(PoolMapped(kv.blocks, name))], [kv.fd])


def moves_blocks(serve: Serve, setup: RankSetup, orders: socket.socket, kv: KVTensors, layout: KVLayout) -> None:
    """Have `serve` move the blocks of this rank's pool, in a thread of its own, which ends the process if it must."""

    def fail(why: str) -> None:
        say(orders, RankFailed(setup.rank, why))
        os._exit(1)

    args = (socket.socket(fileno=setup.moves_fd), kv, layout, fail)
    threading.Thread(target=serve, args=args, name="moves", daemon=True).start()


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, if it is there still: at once, also while it
    is stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_rank_0() -> None:
    """End this process when the one that started it does; where that was gone before, by the pipe that has ended."""
    end_with_parent()

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="life", daemon=True).start()


if __name__ == "__main__":
    main()
