"""Sums over the ranks of one host: each writes its part into memory that all have mapped, tells the others, waits until
all have told, and adds up all parts in the order of the ranks. So the bits are the same on every rank and every time.

    memory   [ rank 0's place, even | rank 0's place, odd | rank 1's place, even | .. ]
    word     one message of a socket per pair of ranks: (how many sums before this one, its bytes)

Two places take turns: whoever writes the even one has heard from all ranks in an odd sum, so all have read the even one
before. A rank that waits is asleep in the kernel, in a receive of a socket, until it hears, until the other rank has
ended (its end of the socket goes with it), or, at rank 0 alone, until a time has passed: it is the one that judges who
is late, and the others end with it.
"""

import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from engine.model.split import Share

PLACE_BYTES = 4 * 1024 * 1024
_WORD = struct.Struct("<QQ")


class RankError(Exception):
    """A rank that has ended, does not answer, or differs from rank 0."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"tensor-parallel rank {rank} {problem}")
        self.rank = rank
        self.problem = problem


def bytes_of(memory: mmap.mmap, first: int = 0) -> Tensor:
    """Return mapped memory from `first` on as uint8; it stays mapped as long as that is held."""
    return torch.frombuffer(memory, dtype=torch.uint8, offset=first)


def memory_file(name: str, size: int) -> int:
    """Return the descriptor of so many bytes of memory without a name that others could open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def places_bytes(ranks: int) -> int:
    return 2 * ranks * PLACE_BYTES


def set_wait(link: socket.socket, wait_s: float, which: int = socket.SO_RCVTIMEO) -> None:
    """Let receives, or sends, end after `wait_s`; 0: never."""
    link.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", *divmod(math.ceil(wait_s * 1e6), 10**6)))


class RankSums:
    """One rank's end. `links`: a socket to each other rank. Raises RankError wherever a rank fails. Mutable state: how
    many sums there have been, how long they were waited for, and what the socket and the memory hold."""

    def __init__(
        self, share: Share, heads: tuple[int, int], vocab: int, links: Mapping[int, socket.socket], memory: Tensor
    ) -> None:
        self.share = share
        self.heads = heads
        self._columns = [Share(rank, share.ranks).even(vocab) for rank in range(share.ranks)]
        self._links = sorted(links.items())
        self._memory = memory
        self._count = 0
        self.waited_s = 0.0
        """How long this rank has waited for others, in all sums."""
        self._place = cache(self._place_of)

    def wait_at_most(self, wait_s: float) -> None:
        for _, link in self._links:
            set_wait(link, wait_s)

    def close(self) -> None:
        for _, link in self._links:
            link.close()

    def sum(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("a sum over ranks is of contiguous rows")
        flat = x.view(-1)
        at_once = PLACE_BYTES // x.element_size()
        for at in range(0, len(flat), at_once):
            self._sum_piece(flat[at : at + at_once])
        return x

    def _sum_piece(self, piece: Tensor) -> None:
        turn = self._count % 2
        parts = [self._place(rank, turn, piece.dtype)[: len(piece)] for rank in range(self.share.ranks)]
        parts[self.share.rank].copy_(piece)
        self._meet(piece.nbytes)
        if piece.dtype is torch.float32:
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece += part
            return
        total = parts[0].float() + parts[1].float()
        for part in parts[2:]:
            total += part.float()
        piece.copy_(total)

    def gathered(self, x: Tensor) -> Tensor:
        rows = len(x)
        at_once = PLACE_BYTES // (4 * max(map(len, self._columns)))
        if not at_once:
            raise ValueError(f"a row of {x.shape[1]} logits does not fit {PLACE_BYTES} bytes")
        whole = torch.empty(rows, self._columns[-1].stop) if self.share.rank == 0 else x
        for at in range(0, rows, at_once):
            piece = x[at : at + at_once]
            turn = self._count % 2
            self._place(self.share.rank, turn, torch.float32)[: piece.numel()].view(piece.shape).copy_(piece)
            self._meet(4 * len(piece))
            if self.share.rank == 0:
                for rank, columns in enumerate(self._columns):
                    part = self._place(rank, turn, torch.float32)[: len(piece) * len(columns)]
                    whole[at : at + at_once, columns.start : columns.stop] = part.view(len(piece), -1)
        return whole

    def _place_of(self, rank: int, turn: int, dtype: torch.dtype) -> Tensor:
        at = (2 * rank + turn) * PLACE_BYTES
        return self._memory[at : at + PLACE_BYTES].view(dtype)

    def _meet(self, size: int) -> None:
        """Return when all ranks have written their parts of this sum."""
        word = _WORD.pack(self._count, size)
        self._count += 1
        for rank, link in self._links:
            try:
                link.send(word)
            except OSError as error:
                raise RankError(rank, "has ended") from error
        began_s = time.perf_counter()
        for rank, link in self._links:
            try:
                heard = link.recv(_WORD.size)
            except BlockingIOError:
                raise RankError(rank, "does not answer") from None
            except OSError as error:
                raise RankError(rank, "has ended") from error
            if not heard:
                raise RankError(rank, "has ended")
            if heard != word:
                raise RankError(
                    rank, f"computes another step: it is at sum, bytes {_WORD.unpack(heard)}, not {_WORD.unpack(word)}"
                )
        self.waited_s += time.perf_counter() - began_s
