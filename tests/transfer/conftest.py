"""Two workers joined by one transport: in this process, or with the sender in another one."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, Handoff
from engine.types import BlockId, Incarnation, RequestId
from tests.transfer.fake_device import ONE_SIDED_VARIABLE, count, fake
from tests.transfer.nccl.ends import Ends
from tests.transfer.wire import WAYS, get, into, open_any, open_pool, put, whole
from transfer.host.loopback import LoopbackHub
from transfer.nccl.library import ONE_SIDED
from transfer.transport import BlockSlice, Completion, Move, Outcome, Ticket, Transport

ROOT = Path(__file__).parents[2]
SMALL = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=8)
LARGE = KVLayout(kv_heads=3, layers=30, block_size=16, head_dim=64)
RECEIVER = Incarnation(2**64 - 5)
POISON = 0xA5


def content(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class LocalPeer:
    """The sending worker, in this process."""

    def __init__(
        self, kind: str, me: Incarnation, layout: KVLayout, blocks: int, hub: LoopbackHub
    ) -> None:
        self.me = me
        self.pool = open_pool(layout, blocks, "cpu")
        self.transport = open_any(kind, self.pool, me, hub)
        self.details = self.transport.describe(RECEIVER).details
        self.kind = kind
        self.completions: list[Completion] = []

    def connect(
        self, peer: Incarnation, details: dict[str, object], spans: tuple[BlockSlice, BlockSlice] | None = None
    ) -> None:
        """`spans` of each block are sent and received; all, if there are none."""
        every = whole(self.pool.layout)
        endpoint = Endpoint(transport=self.kind, details=details)
        self.transport.connect(peer, endpoint, *(spans or (every, every)))

    def fill(self, seeds: dict[int, int]) -> None:
        for block, seed in seeds.items():
            put(self.pool, block, content(seed, self.pool.block_bytes))

    def send(self, peer: Incarnation, request: str, seq: int, sources: list[int]) -> None:
        handoff = Handoff(RequestId(request), 1, 1, peer, self.me)
        self.transport.send(peer, Move(handoff, seq, tuple(BlockId(b) for b in sources)))

    def advance(self, blocks: list[int]) -> None:
        self.pool.advance([BlockId(block) for block in blocks])

    def pump(self) -> None:
        self.completions += self.transport.poll(0.0)

    def close(self) -> None:
        self.transport.close()
        self.pool.close()


Process = subprocess.Popen[bytes]


def spawn() -> Process:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "transfer" / "peer_process.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def end(process: Process) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class ProcessPeer:
    """The sending worker, in a process of its own (`peer_process.py`), which polls by itself.

    Processes are used again (`spares`), since most of a start is the import of torch.
    """

    def __init__(
        self,
        kind: str,
        me: Incarnation,
        layout: KVLayout,
        blocks: int,
        spares: list[Process],
        device: str,
    ) -> None:
        self.me = me
        self._spares = spares
        self.process = spares.pop() if spares else spawn()
        self.pid = self.process.pid
        self.details = self._ask("setup", kind, me, layout.describe(), blocks, device, RECEIVER)

    def _ask(self, *command: object) -> dict[str, object]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the peer process ended"
        found: dict[str, object] = json.loads(line)
        return found

    def connect(
        self, peer: Incarnation, details: dict[str, object], spans: tuple[BlockSlice, BlockSlice] | None = None
    ) -> None:
        self._ask("connect", peer, details, [list(msgspec.structs.asdict(s).values()) for s in spans or ()])

    def fill(self, seeds: dict[int, int]) -> None:
        self._ask("fill", list(seeds.items()))

    def send(self, peer: Incarnation, request: str, seq: int, sources: list[int]) -> None:
        self._ask("send", peer, request, seq, sources)

    def advance(self, blocks: list[int]) -> None:
        self._ask("advance", blocks)

    def pump(self) -> None:
        pass

    def close(self) -> None:
        if self.process.poll() is None:
            self._ask("close")
            self._spares.append(self.process)
        else:
            end(self.process)


Peer = LocalPeer | ProcessPeer


class Rig:
    """The receiving worker with its transport, and the peers it is connected to."""

    def __init__(
        self,
        kind: str,
        layout: KVLayout,
        blocks: int,
        in_process: bool,
        spares: list[Process],
        device: str,
    ) -> None:
        self.spares = spares
        self.device = device
        self.kind = kind
        self.layout = layout
        self.blocks = blocks
        self.in_process = in_process
        self.hub = LoopbackHub()
        self.pool = open_pool(layout, blocks, device)
        self.transport: Transport = open_any(kind, self.pool, RECEIVER, self.hub)
        self.peers: list[Peer] = []
        self.ended: dict[Ticket, Completion] = {}

    def peer(self, layout: KVLayout | None = None, span: BlockSlice | None = None) -> Peer:
        """One more sending worker, connected in both directions; `span` of each of its blocks travels."""
        me = Incarnation(1000 + len(self.peers))
        layout = layout or self.layout
        peer: Peer
        if self.in_process:
            peer = LocalPeer(self.kind, me, layout, self.blocks, self.hub)
        else:
            peer = ProcessPeer(self.kind, me, layout, self.blocks, self.spares, self.device)
        self.peers.append(peer)
        span = span or whole(layout)
        self.connect(me, Endpoint(transport=self.kind, details=peer.details), span)
        peer.connect(RECEIVER, dict(self.transport.describe(me).details), (span, whole(self.layout)))
        return peer

    def connect(self, peer: int, endpoint: Endpoint, span: BlockSlice | None = None) -> None:
        every = whole(self.layout)
        self.transport.connect(Incarnation(peer), endpoint, every, span or every)

    def handoff(self, peer: Peer, request: str) -> Handoff:
        return Handoff(RequestId(request), 1, 1, RECEIVER, peer.me)

    def recv(
        self,
        peer: Peer,
        request: str,
        seq: int,
        sources: list[tuple[int, int]],
        targets: list[int],
        span: BlockSlice | None = None,
    ) -> Ticket:
        """Post a receive. `sources` are (block, generation) pairs; no `targets` means scrap. What comes goes to `span`
        of each."""
        remote = tuple((BlockId(block), generation) for block, generation in sources)
        move = Move(self.handoff(peer, request), seq, remote=remote)
        landing = into(self.transport, self.pool, targets, span) if targets else None
        return self.transport.recv(peer.me, move, landing)

    def poison(self) -> None:
        for block in range(self.blocks):
            put(self.pool, block, bytes([POISON]) * self.layout.block_bytes)

    def bytes_of(self, block: int) -> bytes:
        return get(self.pool, block)

    def is_poisoned(self, block: int) -> bool:
        return self.bytes_of(block) == bytes([POISON]) * self.layout.block_bytes

    def turn(self, wait_s: float = 0.002) -> None:
        """Poll once at every end."""
        for peer in self.peers:
            peer.pump()
        for completion in self.transport.poll(wait_s):
            assert completion.ticket not in self.ended, "a transfer ended twice"
            self.ended[completion.ticket] = completion

    def until(self, holds: Callable[[], bool], timeout_s: float = 40.0) -> None:
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, f"not within {timeout_s} s; ended: {self.ended}"
            self.turn()

    def outcome(self, ticket: Ticket) -> Outcome:
        self.until(lambda: ticket in self.ended)
        return self.ended[ticket].outcome

    def close(self) -> None:
        self.transport.close()
        for peer in self.peers:
            peer.close()
        self.pool.close()


class RigFactory:
    def __init__(self, spares: list[Process], device: str = "cpu") -> None:
        self.spares = spares
        self.device = device
        self.rigs: list[Rig] = []

    def __call__(
        self, kind: str, layout: KVLayout = SMALL, blocks: int = 64, in_process: bool = True
    ) -> Rig:
        rig = Rig(kind, layout, blocks, in_process, self.spares, self.device)
        self.rigs.append(rig)
        return rig


@pytest.fixture(scope="session")
def spare_processes() -> Iterator[list[Process]]:
    spares: list[Process] = []
    yield spares
    for process in spares:
        end(process)


@pytest.fixture
def make_rig(spare_processes: list[Process]) -> Iterator[RigFactory]:
    factory = RigFactory(spare_processes)
    yield factory
    for rig in factory.rigs:
        rig.close()


APART = [f"{kind}-process" for kind in WAYS[1:]]


@pytest.fixture(params=[*WAYS, *APART, "nccl-put"])
def rig(
    request: pytest.FixtureRequest, make_rig: RigFactory, monkeypatch: pytest.MonkeyPatch
) -> Rig:
    kind, _, how = request.param.partition("-")
    if how == "put":
        monkeypatch.setenv(ONE_SIDED_VARIABLE, "1")
        monkeypatch.setenv("FAKE_NCCL_VERSION", str(ONE_SIDED))
    return make_rig(kind, in_process=how != "process")


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Workers of the nccl transport in this process, on fake devices."""
    found = Ends()
    fake().fake_reset()
    yield found
    fake().fake_reset()
    found.close()
    assert count("live") == 0, "a communicator was never aborted"


@pytest.fixture
def large_layout() -> KVLayout:
    """The demo model's layout: 720 KiB a block."""
    return LARGE


@pytest.fixture
def pattern() -> Callable[[int, int], bytes]:
    """`pattern(seed, nbytes)`: what a peer's `fill` writes."""
    return content
