"""The process of a rank that has a device, a pool and a runner of its own: it opens what rank 0 opens, and carries out
the same steps, of which it draws nothing. Nothing here waits for the device: rank 0 does, with all of them."""

import logging
import mmap
import socket
from pathlib import Path

import msgspec
import torch

from engine.backends.gpu.memory import Trial, auto_pool_bytes
from engine.batch import Followed
from engine.config import EngineConfig
from engine.device import arithmetic_of
from engine.model.config import ModelConfig
from engine.ranks.device_opening import DevicePart, of_each, open_device_part
from engine.ranks.device_orders import DeviceOrder
from engine.ranks.devices import Devices
from engine.ranks.follower import Serve, moves_blocks, orders_of, say, say_opened
from engine.ranks.orders import ORDER_BYTES, PoolMapped, RankReady, RankRoom, RankSetup
from engine.ranks.sums import RankError, places_bytes
from engine.runner import Opened

log = logging.getLogger(__name__)


class DeviceFollower:
    """Opens its part; `run` does what it is told. `serve` moves the blocks of its pool. Raises RankError, and what
    opening raises. Mutable state: the pool with its runner, and the trial under way, if its size is one that a trial
    decides."""

    def __init__(
        self, setup: RankSetup, orders: socket.socket, devices: Devices, serve: Serve | None = None
    ) -> None:
        self._rank, self._orders, self._kept_bytes = setup.rank, orders, setup.kept_bytes
        self._setup, self._serve, self._devices = setup, serve, devices
        self._memory = mmap.mmap(setup.memory_fd, ORDER_BYTES + places_bytes(setup.ranks))
        config = msgspec.msgpack.decode(setup.config, type=EngineConfig)
        self._config = of_each(config)
        links = {rank: socket.socket(fileno=fd) for rank, fd in setup.sums_fds.items()}
        self._part: DevicePart = open_device_part(config, setup.rank, setup.link, setup.limits, devices, links)
        self._links = links  # as long as they are open, the others do not take this rank for ended
        whole = ModelConfig.load(Path(config.model_dir))
        layout = whole.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
        arithmetic = arithmetic_of(config, None, self._part.model, layout)
        fingerprint = f"{self._part.fingerprint}/{layout.dtype}"
        say(orders, RankReady(fingerprint, arithmetic, self._part.weights_bytes, False))
        self._opened: Opened | None = None
        self._trial: Trial | None = None
        self._trial_bytes = 0

    def run(self) -> None:
        for raw, read in orders_of(self._rank, self._orders, self._memory):
            say(self._orders, read)
            order = msgspec.msgpack.decode(raw, type=DeviceOrder)
            match order.kind:
                case "open":
                    self._open(order.blocks)
                case "room":
                    say(self._orders, RankRoom(self._room()))
                case "move":
                    self._move()
                case "step":
                    self._carry_out(order)

    def _open(self, blocks: int) -> None:
        self._opened = None
        self._trial = Trial(self._part.memory)
        self._trial_bytes = blocks * self._part.layout.block_bytes
        with torch.inference_mode(False):  # the transfer thread writes to it too
            self._opened = self._part.opener.open(blocks, warmed=False)
        say(self._orders, PoolMapped(self._opened.kv.blocks))

    def _move(self) -> None:
        if self._opened is None:
            raise RankError(self._rank, "is to move blocks before it has a pool")
        kv = self._opened.kv
        say_opened(self._orders, kv, self._devices.export(kv))
        if self._serve is not None:
            moves_blocks(self._serve, self._setup, self._orders, kv, self._part.layout)

    def _room(self) -> int:
        config, room_bytes = self._config, self._config.pool_bytes
        if room_bytes == "auto":
            if self._trial is None:
                raise RankError(self._rank, "is asked for its room before a trial")
            peak = self._trial.peak(self._let_go, self._trial_bytes)
            kept_bytes = self._kept_bytes + config.reserve_bytes
            room_bytes = auto_pool_bytes(peak, config.device_share, self._part.weights_bytes, kept_bytes)
        self._let_go()
        blocks = config.blocks_in(room_bytes, self._part.layout.block_bytes)
        log.info("has room for %d blocks", blocks)
        return blocks

    def _let_go(self) -> None:
        self._opened = None

    def _carry_out(self, order: DeviceOrder) -> None:
        if self._opened is None:
            raise RankError(self._rank, "is told of a step before it has a pool")
        if self._part.one_shot is not None:
            self._part.one_shot.check()
        followed = None
        if order.places is not None:
            tokens = torch.empty(order.drawn, dtype=torch.int64, device=self._part.model.device)
            if order.drawn:
                self._part.link.exchange([], [(0, tokens)])
            followed = Followed(tokens, order.places)
        self._opened.runner.follow(order.plan(), followed)
