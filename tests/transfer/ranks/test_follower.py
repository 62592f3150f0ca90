"""What a rank other than rank 0 says while it moves blocks, and what becomes of one whose transfer thread is stuck."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.device import open_device
from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.model.prepared.cache import prepare
from engine.ranks.sums import RankError
from engine.storage.paged import PagedKV
from engine.types import BlockId, Incarnation, RequestId
from tests.engine.model.checkpoints import build, save_hf
from tests.transfer.ranks.stuck_rank import PROGRAM
from transfer.config import TransferConfig
from transfer.handoff.commands import CancelRecv, Connect, IncomingBlock, MoverEvent, PostRecv, Rows
from transfer.handoff.negotiation import Agreement
from transfer.host.loopback import FaultKind, LoopbackHub, LoopbackTransport, ScriptedFault
from transfer.mover import Mover
from transfer.ranks import follower
from transfer.ranks.links import Alive, DescribeTo, FromMover, MoveLink, MoverOpened, OpenMover
from transfer.registry import LOOPBACK, open_transports
from transfer.transport import KVMemory, Move, Transport
from worker.opening import open_movers

LAYOUT = KVLayout(kv_heads=2, layers=1, block_size=4, head_dim=8)
ME, PEER = Incarnation(5), Incarnation(9)
LOOK_S, STUCK_S = 0.2, 0.5


class Rank:
    """A rank's end in threads of this process, over loopback from a peer whose first chunk never comes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, open_ways: Callable[[KVMemory], dict[str, Transport]]
    ) -> None:
        movers = self._movers = list[Mover]()

        class Kept(Mover):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                movers.append(self)

        monkeypatch.setattr(follower, "Mover", Kept)
        self.memory = PagedKV(LAYOUT, 4)
        here, self._there = socket.socketpair()
        self.why: list[str] = []

        def opened(memory: KVMemory, *rest: object) -> dict[str, Transport]:
            return open_ways(memory)

        args = (self._there, self.memory, LAYOUT, self.why.append, opened)
        self._thread = threading.Thread(target=follower.serve, args=args, daemon=True)
        self._thread.start()
        self._here = here
        self.link: MoveLink[FromMover] = MoveLink(here, FromMover)
        self.link.say(OpenMover(ME, TransferConfig(stuck_s=STUCK_S), LOOPBACK))
        assert isinstance(self.link.hear(), MoverOpened)

    def close(self) -> None:
        self._here.shutdown(socket.SHUT_RDWR)
        self._thread.join(5.0)
        assert not self._thread.is_alive()
        for mover in self._movers:  # which ends with its process outside of tests
            mover.stop()
        self._here.close()
        self._there.close()
        self.memory.close()


def test_a_rank_says_that_it_lives_also_amid_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker that ends since a rank with parts to move is silent: nothing of them has ended, and commands come
    faster than it would be asked to speak."""
    monkeypatch.setattr(follower, "LOOK_S", LOOK_S)
    hub = LoopbackHub()
    there = PagedKV(LAYOUT, 4)
    LoopbackTransport(there, PEER, hub)
    hub.faults.append(ScriptedFault(FaultKind.STALL))
    rank = Rank(monkeypatch, lambda memory: {"loopback": LoopbackTransport(memory, ME, hub)})
    try:
        handoff = Handoff(RequestId("r"), 1, 1, ME, PEER)
        rank.link.say(Connect(PEER, Endpoint(transport="loopback"), Agreement(LAYOUT)))
        block = IncomingBlock((Rows(0, BlockId(1), 0, 4),), 0, 4, b"i", 0)
        rank.link.say(PostRecv(PEER, Move(handoff, 0, remote=((BlockId(2), 0),)), (block,)))
        until_s = time.monotonic() + 5 * LOOK_S

        def ask_on() -> None:
            while time.monotonic() < until_s:
                rank.link.say(CancelRecv(handoff, 7))  # nothing comes of it
                time.sleep(LOOK_S / 10)

        asking = threading.Thread(target=ask_on)
        asking.start()
        words = 0
        while time.monotonic() < until_s - LOOK_S:
            assert isinstance(rank.link.hear(), Alive)
            words += time.monotonic() < until_s
        asking.join()
        assert hub.faults[0].applied, "the chunk has come"
        assert words >= 3, "it was silent while it was told of something"
    finally:
        rank.close()
        there.close()


def test_a_rank_whose_transfer_thread_is_stuck_says_why_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a thread that is stuck in one call, which nobody else sees: the rank itself answers as ever."""
    called, go_on = threading.Event(), threading.Event()

    class Stuck(LoopbackTransport):
        def connect(self, *rest: object) -> None:
            called.set()
            go_on.wait(60.0)

    rank = Rank(monkeypatch, lambda memory: {"loopback": Stuck(memory, ME, LoopbackHub())})
    try:
        rank.link.say(Connect(PEER, Endpoint(transport="loopback"), Agreement(LAYOUT)))
        assert called.wait(5.0)
        until_s = time.monotonic() + 10.0
        while not rank.why:
            assert time.monotonic() < until_s, "nobody has noticed"
            time.sleep(0.01)
        assert "the transfer thread is stuck in one call" in rank.why[0]
    finally:
        go_on.set()
        rank.close()


def test_a_rank_that_cannot_do_what_it_is_told_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a thread that ends without a word, whose rank goes on computing: nobody moves its blocks any more."""
    rank = Rank(monkeypatch, lambda memory: {"loopback": LoopbackTransport(memory, ME, LoopbackHub())})
    try:
        rank.link.say(DescribeTo(1, "tcp", (PEER,)))
        until_s = time.monotonic() + 5.0
        while not rank.why and time.monotonic() < until_s:
            time.sleep(0.01)
        assert rank.why == ["moves no blocks any more: KeyError: 'tcp'"]
    finally:
        rank.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 1}
    yield prepare(save_hf(build("qwen2", **sizes), tmp_path / "model"), tmp_path / "cache")


def test_a_stuck_transfer_thread_of_another_rank_ends_the_worker(model_dir: Path) -> None:
    """Guards a worker that waits on for parts of a rank whose transfer thread moves nothing any more; and its error,
    which says which rank, and why."""
    config = EngineConfig(
        model_dir=str(model_dir), tensor_parallel=2, rank_pools="own", pool_bytes=1 << 20, deterministic="off"
    )
    device = open_device(config, rank_program=PROGRAM)
    assert device.ranks is not None
    transfer, told, events = TransferConfig(stuck_s=STUCK_S), list[RankError](), list[MoverEvent]()
    device.ranks.watch(told.append)
    ways = open_transports(device.kv, ME, transfer, LOOPBACK)
    movers, own = open_movers(device, ways, events.append, ME, transfer, LOOPBACK)
    try:
        movers.start()
        endpoint = own["shm"].describe(PEER, 2)
        movers.submit(Connect(PEER, endpoint, Agreement(device.layout)))
        until_s = time.monotonic() + 20.0
        while not told:
            assert time.monotonic() < until_s, "nobody has noticed"
            time.sleep(0.01)
        assert told[0].rank == 1
        assert "the transfer thread is stuck in one call" in str(device.ranks.explained(told[0]))
    finally:
        movers.stop()
        device.ranks.close()
        if device.matchers is not None:
            device.matchers.close()
        device.kv.close()
