"""Sums of small tensors over ranks that have a device each: one launch of `kernels.rank_sum`, over memory that the
devices of all ranks map.

When they open, each rank makes such memory and tells the others its name, over the sockets between ranks; maps what
they have named, and tells whether it could. So all know the same of each other, and all use it or none does. The bits
are those of `engine.ranks.device_sums` without it.
"""

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engine.model.split import Share
from engine.ranks.sums import RankError
from kernels.configs import ConfigKey, config_for
from kernels.launch import arch_of
from kernels.rank_sum import POLLS, buffer_bytes, programs_of, rank_sum

log = logging.getLogger(__name__)

_WORD_BYTES = 64 * 1024


class MappedMemory(Protocol):
    """Memory of devices that ranks map from each other."""

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        """Return uint8 `[nbytes]` of this rank's device, zero, and a name by which the other ranks can `map` it. Raises
        ValueError where they cannot, or cannot set a word of it."""

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        """Return another rank's pool, uint8 `[blocks, block_bytes]`, or what it has `shared`, as one block. Raises
        ValueError where it cannot be had."""


class OneShotSums:
    """One rank's end. `buffers`: by rank, memory of `buffer_bytes` of each, mapped here. Any thread may `abort`.

    Mutable state: what the device counts, and the two notes that it and the host write to each other."""

    def __init__(self, rank: int, buffers: Sequence[Tensor], most_bytes: int, device: torch.device) -> None:
        self.most_bytes = most_bytes
        """The size of the largest tensor that it adds up."""
        self._rank = rank
        self._buffers = buffers
        addresses = [buffer.data_ptr() for buffer in buffers]
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._steps = torch.zeros(programs_of(most_bytes), dtype=torch.int64, device=device)
        self._notes = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = self._notes.numpy()
        self._arch = arch_of(device)

    def sum(self, x: Tensor) -> None:
        """Enqueue the sum of `x`, contiguous, into it."""
        config = config_for(ConfigKey("rank_sum", 0, 0, 0, str(x.dtype).removeprefix("torch."), self._arch))
        rank_sum(x, self._addresses, self._steps, self._notes, self._rank, config, POLLS)

    def abort(self) -> None:
        """Let whatever waits on the device for another rank give up, now and from now on."""
        self._words[0] = 1

    def check(self) -> None:
        """Raise RankError for a rank that a sum which has ended has given up on."""
        if missing := int(self._words[1]):
            raise RankError(missing - 1, "does not answer")


def open_one_shot(
    share: Share, most_bytes: int, devices: MappedMemory, device: torch.device, links: Mapping[int, socket.socket]
) -> tuple[OneShotSums | None, str]:
    """Agree with the others, over a socket to each. Return what adds up tensors of up to `most_bytes`, None if NCCL
    shall for all; and which of both, in words, with the reason. Raises RankError for a rank that ends meanwhile."""
    nbytes, name, problem, own = buffer_bytes(share.ranks, max(most_bytes, 0)), b"", "", None
    if most_bytes <= 0:
        problem = f"engine.one_shot_bytes is {most_bytes}"
    else:
        try:
            own, name = devices.shared(nbytes, share.ranks)
        except ValueError as error:
            problem = str(error)
    named = _told(links, share.rank, (name, problem))
    buffers = []
    if not any(problem for _, problem in named.values()):
        try:
            buffers = [
                own if rank == share.rank and own is not None else devices.map(named[rank][0], 1, nbytes).view(-1)
                for rank in range(share.ranks)
            ]
        except ValueError as error:
            problem = str(error)
    mapped = _told(links, share.rank, (b"", problem))
    for rank in range(share.ranks):
        if why := named[rank][1] or mapped[rank][1]:
            log.warning("sums over ranks by NCCL alone: rank %d: %s", rank, why)
            return None, f"by NCCL alone: rank {rank}: {why}"
    by = f"up to {most_bytes >> 10} KiB in one kernel, else by NCCL"
    return OneShotSums(share.rank, buffers, most_bytes, device), by


def _told(links: Mapping[int, socket.socket], own: int, word: tuple[bytes, str]) -> dict[int, tuple[bytes, str]]:
    """Tell the other ranks a name and a problem; return those of all, by rank. Raises RankError."""
    raw, heard = msgspec.msgpack.encode(word), {own: word}
    for rank, link in links.items():
        try:
            link.send(raw)
        except OSError as error:
            raise RankError(rank, "has ended") from error
    for rank, link in links.items():
        try:
            heard[rank] = msgspec.msgpack.decode(link.recv(_WORD_BYTES), type=tuple[bytes, str])
        except (OSError, msgspec.MsgspecError) as error:
            raise RankError(rank, "has ended") from error
    return heard
