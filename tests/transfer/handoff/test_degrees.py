"""Handoffs between workers of unequal numbers of ranks, over every transport of hosts: models of two and of six KV
heads, real processes as ranks, real transfer threads; and ranks that are killed or stopped at each step of a
handoff."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.messages import Handoff
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.model.split import Share
from engine.ranks.sums import RankError, bytes_of
from engine.step import StepPlan
from engine.storage.paged import PagedKV, header_bytes
from engine.types import BlockId, Incarnation, RequestId, SamplingParams
from tests.chaos import faults
from tests.engine.model.checkpoints import build, save_hf
from tests.transfer.pair import DECODE, PREFILL, Opened, Pair
from transfer.config import TransferConfig
from transfer.handoff.commands import (
    Arrived,
    Fenced,
    MoverEvent,
    Received,
    Settled,
)
from transfer.registry import LOOPBACK, open_transports
from worker.opening import open_movers
from worker.rank import PROGRAM as RANK_PROGRAM

SIZE, POOL = 4, 16
PROMPT = [30 + 7 * at % 61 for at in range(18)]
ANSWER_TOKENS = 10
SOURCES = [BlockId(block) for block in (3, 9, 0, 12, 5, 7, 14, 2)]
"""Where the prefill worker has a sequence; the decode worker has it elsewhere."""
TARGETS = [BlockId(block) for block in (8, 1, 15, 4, 11, 6, 0, 10)]
FULL = -(-len(PROMPT) // SIZE)
HEADS = {2: 4, 6: 6}
WIDTH = 96
RANK_WAIT_S = 1.0
POISON = b"\xa5"
GREEDY = SamplingParams(temperature=0.0)


class Degrees(NamedTuple):
    kv_heads: int
    prefill: int
    decode: int


TRIED = (
    Degrees(2, 1, 2),
    Degrees(2, 2, 1),
    Degrees(2, 2, 2),
    Degrees(2, 2, 4),
    Degrees(6, 3, 1),
    Degrees(6, 2, 3),
)


class Blocks:
    """The blocks of a device, with the heads of all its pools, whichever process has them."""

    def __init__(self, device: EngineDevice) -> None:
        self._layout = device.layout
        group, blocks = device.ranks, device.blocks
        self._pools = [(device.kv.layout.heads, device.kv.memory)]
        for pid, heads in zip(group.pids, group.heads[1:], strict=True) if group and group.moves else ():
            fd = next(fd for fd in Path(f"/proc/{pid}/fd").iterdir() if "headrace-kv" in str(fd.readlink()))
            each = len(heads) * device.layout.head_bytes
            with fd.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), header_bytes(blocks) + blocks * each)
            self._pools.append((heads, bytes_of(memory, header_bytes(blocks)).view(blocks, each)))

    def read(self, block: BlockId) -> list[bytes]:
        """Return what each pool has of a block, in the order of the ranks."""
        return [memory[block].numpy().tobytes() for _, memory in self._pools]

    def whole(self, block: BlockId) -> bytes:
        """Return a block with all heads. Pools that have the same heads must have the same bytes."""
        size, found = self._layout.head_bytes, dict[int, bytes]()
        for (heads, _), raw in zip(self._pools, self.read(block), strict=True):
            for at, head in enumerate(heads):
                assert found.setdefault(head, own := raw[at * size : (at + 1) * size]) == own
        return b"".join(found[head] for head in self._layout.heads)

    def write(self, block: BlockId, whole: bytes) -> None:
        size = self._layout.head_bytes
        for heads, memory in self._pools:
            part = bytearray(whole[heads.start * size : heads.stop * size])
            memory[block].copy_(torch.frombuffer(part, dtype=torch.uint8))

    @property
    def nbytes(self) -> int:
        return self._layout.block_bytes


class Devices:
    """Devices of ranks, each opened when first asked for, and answers of single processes that sum up in slices."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[int, Path] = {}
        self._devices: dict[tuple[int, int, str, str], EngineDevice] = {}
        self._opened: dict[int, tuple[EngineDevice, Opened]] = {}
        self._answers: dict[Degrees, list[int]] = {}

    def model(self, kv_heads: int) -> Path:
        if kv_heads not in self._models:
            heads = {"num_attention_heads": HEADS[kv_heads], "num_key_value_heads": kv_heads}
            built = build("qwen2", hidden_size=WIDTH, intermediate_size=2 * WIDTH, **heads)
            source = save_hf(built, self._folder / f"model-{kv_heads}")
            self._models[kv_heads] = prepare(source, self._folder / f"cache-{kv_heads}")
        return self._models[kv_heads]

    def opened(self, kv_heads: int, **options: object) -> EngineDevice:
        folder = self.model(kv_heads)
        block_bytes = ModelConfig.load(folder).kv_layout(SIZE, "float32").block_bytes
        base = EngineConfig(
            model_dir=str(folder),
            block_size=SIZE,
            pool_bytes=POOL * block_bytes,
            deterministic="off",
            rank_wait_s=RANK_WAIT_S,
        )
        config = msgspec.structs.replace(base, **options)
        if config.has_rank_pools:
            share = Share(0, config.tensor_parallel).kv_heads(ModelConfig.load(folder))
            pool_bytes = POOL * block_bytes * len(share) * config.tensor_parallel // kv_heads
            config = msgspec.structs.replace(config, pool_bytes=pool_bytes)
        return open_device(config, rank_program=RANK_PROGRAM)

    def of(self, kv_heads: int, ranks: int, role: str, pools: str = "shared") -> EngineDevice:
        key = kv_heads, ranks, role, pools
        if key not in self._devices:
            self._devices[key] = self.opened(kv_heads, tensor_parallel=ranks, rank_pools=pools)
        return self._devices[key]

    def moving(self, device: EngineDevice, me: Incarnation) -> Opened:
        """Return the movers of a device, as a worker opens them."""
        if id(device) not in self._opened:
            inbox: list[MoverEvent] = []
            config = TransferConfig()
            ways = open_transports(device.kv, me, config, LOOPBACK)
            movers, told = open_movers(device, ways, inbox.append, me, config, LOOPBACK)
            self._opened[id(device)] = device, Opened(movers, told, inbox, device.layout)
        return self._opened[id(device)][1]

    def answer(self, degrees: Degrees) -> list[int]:
        """Return what one process after the other answers, which copy the prompt's blocks."""
        if degrees not in self._answers:
            reader, writer = (self.opened(degrees.kv_heads, sum_slices=ranks) for ranks in degrees[1:])
            tokens = read(reader)
            for source, target in zip(SOURCES, TARGETS, strict=True):
                writer.kv.block(target)[:] = reader.kv.block(source)
            self._answers[degrees] = answer(writer, tokens)
            close(reader)
            close(writer)
        return self._answers[degrees]

    def joined(self, kind: str, prefill: EngineDevice, decode: EngineDevice) -> Pair:
        assert isinstance(prefill.kv, PagedKV) and isinstance(decode.kv, PagedKV)
        return Pair(
            kind,
            layouts=(prefill.layout, decode.layout),
            pools=(prefill.kv, decode.kv),
            opened=(self.moving(prefill, PREFILL), self.moving(decode, DECODE)),
        )

    def close(self) -> None:
        for _, opened in self._opened.values():
            opened.mover.stop()
        for device in self._devices.values():
            close(device)


def close(device: EngineDevice) -> None:
    if device.ranks is not None:
        device.ranks.close()
    if device.matchers is not None:
        device.matchers.close()
    device.kv.close()


def drawn(device: EngineDevice, tokens: list[int], start: int, blocks: list[BlockId]) -> int:
    row = trial_row(tokens, start, blocks)
    row = msgspec.structs.replace(row, record=msgspec.structs.replace(row.record, sampling=GREEDY))
    (token,) = device.runner.launch(StepPlan((row,))).wait()
    assert isinstance(token, int)
    return token


def read(device: EngineDevice) -> list[int]:
    """Compute the prompt in two chunks. Return it with the first token of the answer."""
    drawn(device, PROMPT[:7], 0, SOURCES)
    return [*PROMPT, drawn(device, PROMPT, 7, SOURCES)]


def answer(device: EngineDevice, tokens: list[int]) -> list[int]:
    """Answer behind blocks that have come from elsewhere."""
    tokens = list(tokens)
    while len(tokens) < len(PROMPT) + ANSWER_TOKENS:
        tokens.append(drawn(device, tokens, len(tokens) - 1, TARGETS))
    return tokens[len(PROMPT) :]


class Story:
    """A handoff of the prompt's blocks, step by step."""

    STEPS = ("before", "offered", "reading", "landed", "released")
    _numbers = count()

    def __init__(self, pair: Pair, decode_blocks: Blocks) -> None:
        self.pair = pair
        self._decode = decode_blocks
        self.handoff = Handoff(RequestId(f"r{next(self._numbers)}"), 1, 1, DECODE, PREFILL)
        for block in range(POOL):
            decode_blocks.write(BlockId(block), POISON * decode_blocks.nbytes)
        self._blocks = pair.begin(self.handoff, len(PROMPT), SIZE, SOURCES, TARGETS)

    def run(self, at: Callable[[str], None] = lambda step: None) -> None:
        """Carry it out; `at` each step before it is taken."""
        pair = self.pair
        at("before")
        half = FULL // 2
        pair.at_prefill(pair.sender.offer(self.handoff, self._blocks[:half]))
        at("offered")
        pair.turn()
        at("reading")
        pair.at_prefill(pair.sender.offer(self.handoff, self._blocks[half:]))
        pair.until(lambda: Arrived(self.handoff) in pair.told)
        at("landed")
        pair.at_prefill(pair.sender.close(self.handoff))
        pair.until(lambda: Settled(self.handoff) in pair.told)
        at("released")
        untouched = set(range(POOL)) - set(TARGETS[:FULL])
        decode = self._decode
        assert all(decode.whole(BlockId(b)) == POISON * decode.nbytes for b in untouched)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    devices = Devices(tmp_path_factory.mktemp("degrees"))
    yield devices
    devices.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("degrees", TRIED, ids=lambda degrees: "{}-heads-{}-{}".format(*degrees))
@pytest.mark.parametrize("pools", [("shared", "shared"), ("own", "own"), ("own", "shared"), ("shared", "own")])
@pytest.mark.slow
def test_any_degree_hands_over_to_any(devices: Devices, degrees: Degrees, kind: str, pools: tuple[str, str]) -> None:
    """Guards against heads in the wrong place of a block, blocks that are offered before every rank has written them,
    and ranks that do not see what has landed."""
    wanted = devices.answer(degrees)
    prefill = devices.of(degrees.kv_heads, degrees.prefill, "p", pools[0])
    decode = devices.of(degrees.kv_heads, degrees.decode, "d", pools[1])
    for device, ranks in ((prefill, degrees.prefill), (decode, degrees.decode)):
        assert (len(device.ranks.pids) if device.ranks else 0) == ranks - 1
    tokens = read(prefill)
    pair = devices.joined(kind, prefill, decode)
    try:
        there, here = Blocks(prefill), Blocks(decode)
        Story(pair, here).run()
        for source, target in zip(SOURCES[: FULL - 1], TARGETS, strict=False):
            assert here.whole(target) == there.whole(source)
        assert answer(decode, tokens) == wanted
    finally:
        pair.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stopped_rank_does_not_hold_up_a_handoff(devices: Devices, role: str, kind: str) -> None:
    """Guards against a handoff that waits for, or is changed by, a rank that is stopped at any of its steps: whatever
    is offered was written before. Stopped for less than `engine.rank_wait_s`, it goes on as if nothing had been."""
    degrees = Degrees(2, 2, 2)
    wanted = devices.answer(degrees)
    prefill, decode = devices.of(2, 2, "p"), devices.of(2, 2, "d")
    device = prefill if role == "prefill" else decode
    assert device.ranks is not None
    (rank,) = device.ranks.pids
    pair = devices.joined(kind, prefill, decode)
    try:
        for step in Story.STEPS:
            tokens = read(prefill)
            try:
                Story(pair, Blocks(decode)).run(lambda now, step=step: faults.freeze(rank) if now == step else None)  # type: ignore[misc]
                assert faults.process_state(rank) == "T"
            finally:
                faults.thaw(rank)
            assert answer(decode, tokens) == wanted, step
    finally:
        pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("end", ["landed", "fenced"])
def test_with_pools_of_their_own_nothing_lands_or_is_fenced_until_every_rank_has_its_heads(
    devices: Devices, end: str, kind: str
) -> None:
    """Guards against a chunk that counts as landed, or targets that are freed, when some of the ranks are ready."""
    prefill, decode = devices.of(2, 2, "p", "own"), devices.of(2, 2, "d", "own")
    assert decode.ranks is not None
    (rank,) = decode.ranks.pids
    wanted, tokens = devices.answer(Degrees(2, 2, 2)), read(prefill)
    pair = devices.joined(kind, prefill, decode)
    here = Blocks(decode)
    story, poison = Story(pair, here), POISON * (here.nbytes // 2)

    def stop_a_rank(now: str) -> None:
        if now != "offered":
            return
        faults.freeze(rank)
        pair.until(lambda: here.read(TARGETS[0])[0] != poison)
        if end == "fenced":
            pair.at_decode(pair.receiver.stop(story.handoff))
        for _ in range(40):
            pair.turn()
            time.sleep(0.005)
        assert faults.process_state(rank) == "T" and here.read(TARGETS[0])[1] == poison
        assert not any(isinstance(one, Received | Fenced) for one in (*pair.events, *pair.told))
        faults.thaw(rank)
        if end == "fenced":
            # Ended at both ends: what a mover has still to say of it would be heard by the next test's pair.
            pair.until(lambda: {Fenced, Settled} <= {type(one) for one in pair.told})
            raise _StoppedError

    try:
        with suppress(_StoppedError):
            story.run(stop_a_rank)
            assert answer(decode, tokens) == wanted
    finally:
        faults.thaw(rank)
        pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_with_its_own_pool_that_is_frozen_for_a_while_is_waited_for(
    devices: Devices, role: str, kind: str
) -> None:
    """Guards a part that is lost, or lands twice, where its rank is stopped at any step of a handoff and goes on."""
    wanted = devices.answer(Degrees(2, 2, 2))
    prefill, decode = devices.of(2, 2, "p", "own"), devices.of(2, 2, "d", "own")
    device = prefill if role == "prefill" else decode
    assert device.ranks is not None
    (rank,) = device.ranks.pids
    pair, states = devices.joined(kind, prefill, decode), list[str]()

    def freeze(now: str) -> None:
        if now == step:
            faults.freeze(rank)
            states.append(faults.process_state(rank))
            thaw.start()

    try:
        for step in Story.STEPS:
            tokens, thaw = read(prefill), threading.Timer(0.3, faults.thaw, (rank,))
            Story(pair, Blocks(decode)).run(freeze)
            thaw.join()
            assert answer(decode, tokens) == wanted, step
        assert states == ["T"] * len(Story.STEPS)
    finally:
        faults.thaw(rank)
        pair.close()


@pytest.mark.chaos
@pytest.mark.parametrize("step", Story.STEPS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_killed_rank_has_not_moved_never_lands(devices: Devices, role: str, step: str) -> None:
    """Guards a chunk that counts as landed without the parts of a rank that is gone: before all has landed, nothing
    does any more, and after that every block is whole. Its worker ends by that rank's name."""
    prefill, decode = (devices.opened(2, tensor_parallel=2, rank_pools="own") for _ in range(2))
    lost = prefill if role == "prefill" else decode
    assert lost.ranks is not None
    (rank,) = lost.ranks.pids
    tokens = read(prefill)
    pair, here = devices.joined("tcp", prefill, decode), Blocks(decode)

    def kill(now: str) -> None:
        if now == step:
            faults.kill(rank)
            if now not in ("landed", "released"):
                raise _StoppedError

    try:
        story, blocks = Story(pair, here), FULL // 2
        with suppress(_StoppedError):
            story.run(kill)
        if step in ("before", "offered", "reading"):
            pair.at_prefill(pair.sender.offer(story.handoff, story._blocks[0 if step == "before" else blocks :]))
            for _ in range(60):
                pair.turn()
                time.sleep(0.005)
            assert Arrived(story.handoff) not in pair.told
        elif role == "prefill":
            assert answer(decode, tokens) == devices.answer(Degrees(2, 2, 2))
        with pytest.raises(RankError, match="SIGKILL") as found:
            drawn(lost, PROMPT, 0, SOURCES)
        assert found.value.rank == 1
    finally:
        pair.close()
        close(prefill)
        close(decode)


class _StoppedError(Exception):
    """The story has ended early."""


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("step", Story.STEPS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rank_lost_at_a_step_ends_its_worker_and_spoils_no_block(
    devices: Devices, role: str, step: str, how: str
) -> None:
    """Guards against a worker that goes on with a part of its model, and against blocks of the other side, or those
    that have landed already, that its end spoils: another worker of any degree may answer with them."""
    wanted = devices.answer(Degrees(2, 2, 2))
    lost, other = devices.opened(2, tensor_parallel=2), devices.of(2, 2, "d" if role == "prefill" else "p")
    prefill, decode = (lost, other) if role == "prefill" else (other, lost)
    assert lost.ranks is not None
    (rank,) = lost.ranks.pids
    heard: list[RankError] = []
    lost.ranks.watch(heard.append)
    tokens = read(prefill)
    pair = devices.joined("shm", prefill, decode)
    try:
        strike = faults.kill if how == "kill" else faults.freeze
        Story(pair, Blocks(decode)).run(lambda now: strike(rank) if now == step else None)
        if role == "prefill":
            assert answer(decode, tokens) == wanted
        with pytest.raises(RankError, match="SIGKILL" if how == "kill" else "does not answer") as found:
            drawn(lost, PROMPT, 0, SOURCES)
        assert found.value.rank == 1
        if how == "kill":
            pair.until(lambda: [error.rank for error in heard] == [1])
        else:
            assert not heard
        if role == "decode":  # what has landed is whole, and a worker of another degree answers with it
            third = devices.of(2, 1, "d")
            for target in TARGETS[:FULL]:
                third.kv.block(target)[:] = decode.kv.block(target)
            assert answer(third, tokens) == devices.answer(Degrees(2, 2, 1))
    finally:
        pair.close()
        close(lost)
    assert faults.process_state(rank) == ""
