"""Handoffs between workers whose ranks have a device each, which pretends: a mover for each rank, over `cuda_ipc` and
`nccl`, at equal and unequal degrees; and what becomes of one when a rank is stopped or killed amid it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.device import EngineDevice
from engine.messages import Handoff
from engine.model.prepared.cache import prepare
from engine.ranks.sums import RankError
from engine.step import StepPlan
from engine.types import BlockId, RequestId
from tests.chaos import faults
from tests.engine.model.checkpoints import build, save_hf
from tests.engine.ranks.pretended import PretendedDevices, open_pretended
from tests.engine.ranks.test_device_ranks import PROMPTS, SIZE, TABLES, opened, row
from tests.transfer.fake_device import library_path
from tests.transfer.handoff.test_degrees import POISON, Blocks
from tests.transfer.pair import DECODE, PREFILL, Opened, Pair
from transfer.config import TransferConfig
from transfer.handoff.commands import Arrived, MoverEvent, Received, Settled
from transfer.registry import LOOPBACK
from worker.opening import open_movers

PROMPT = PROMPTS[0]
SOURCES = [BlockId(block) for block in TABLES[1]]
"""Where the prefill worker has the prompt; the decode worker has it at `TABLES[0]`."""
TARGETS = [BlockId(block) for block in TABLES[0]]
FULL = -(-len(PROMPT) // SIZE)
ANSWER_TOKENS = 4


class Degrees(NamedTuple):
    kv_heads: int
    prefill: int
    decode: int


TRIED = (Degrees(2, 1, 2), Degrees(2, 2, 1), Degrees(2, 2, 2), Degrees(6, 3, 1), Degrees(6, 2, 3))


class Devices:
    """Workers of ranks with a device each, opened when first asked for."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder = folder
        self._closing = closing
        self._models: dict[int, Path] = {}
        self._opened: dict[tuple[int, int, str, str], tuple[EngineDevice, Opened]] = {}

    def model(self, kv_heads: int) -> Path:
        if kv_heads not in self._models:
            heads = {"num_attention_heads": max(4, kv_heads), "num_key_value_heads": kv_heads}
            sizes = {"hidden_size": 96, "intermediate_size": 96}
            built = build("qwen2", num_hidden_layers=1, **sizes, **heads)
            source = save_hf(built, self._folder / f"model-{kv_heads}")
            self._models[kv_heads] = prepare(source, self._folder / f"cache-{kv_heads}")
        return self._models[kv_heads]

    def alone(self, kv_heads: int) -> EngineDevice:
        options = {"tensor_parallel": 1, "device": "cpu", "attention": "triton", "dtype": "float32"}
        return self._closing.enter_context(opened(self.model(kv_heads), **options))

    def of(self, kv_heads: int, ranks: int, role: str, kind: str, fresh: bool = False) -> tuple[EngineDevice, Opened]:
        key = kv_heads, ranks, role, kind
        if key not in self._opened or fresh:
            if ranks == 1:
                device = self.alone(kv_heads)
            else:
                options = {"tensor_parallel": ranks, "rank_wait_s": 20.0}
                own = opened(self.model(kv_heads), PretendedDevices(), **options)
                device = self._closing.enter_context(own)
            me = PREFILL if role == "p" else DECODE
            inbox: list[MoverEvent] = []
            config = TransferConfig(transport=kind)
            ways = open_pretended(device.kv, me, config, LOOPBACK)
            movers, told = open_movers(device, ways, inbox.append, me, config, LOOPBACK)
            self._closing.callback(lambda: movers.stop())
            found = device, Opened(movers, told, inbox, device.layout)
            if fresh:
                return found
            self._opened[key] = found
        return self._opened[key]


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    library_path()  # compiled once, for all of them
    with ExitStack() as closing:
        yield Devices(tmp_path_factory.mktemp("devices"), closing)


def read(device: EngineDevice, blocks: list[BlockId]) -> list[int]:
    """Compute the prompt in two chunks. Return it with the first token of the answer."""
    first = row(0, PROMPT[:9], 0, draw=False, blocks=blocks)
    device.runner.launch(StepPlan((first,))).wait()
    return [*PROMPT, *drawn(device, row(0, list(PROMPT), 9, blocks=blocks))]


def answer(device: EngineDevice, tokens: list[int]) -> list[int]:
    tokens = list(tokens)
    while len(tokens) < len(PROMPT) + ANSWER_TOKENS:
        tokens += drawn(device, row(0, tokens, len(tokens) - 1, blocks=TARGETS))
    return tokens[len(PROMPT) :]


def drawn(device: EngineDevice, one: object) -> list[int]:
    return [int(str(token)) for token in device.runner.launch(StepPlan((one,))).wait()]  # type: ignore[arg-type]


class Story:
    """A handoff of the prompt's blocks."""

    _numbers = count()

    def __init__(self, pair: Pair, here: Blocks) -> None:
        self.pair, self.here = pair, here
        self.handoff = Handoff(RequestId(f"r{next(self._numbers)}"), 1, 1, DECODE, PREFILL)
        for block in TARGETS:
            here.write(block, POISON * here.nbytes)
        self._blocks = pair.begin(self.handoff, len(PROMPT), SIZE, SOURCES, TARGETS)

    def offer(self) -> None:
        self.pair.at_prefill(self.pair.sender.offer(self.handoff, self._blocks))

    def end(self) -> None:
        pair = self.pair
        pair.until(lambda: Arrived(self.handoff) in pair.told, 60.0)
        pair.at_prefill(pair.sender.close(self.handoff))
        pair.until(lambda: Settled(self.handoff) in pair.told, 60.0)


def joined(kind: str, prefill: tuple[EngineDevice, Opened], decode: tuple[EngineDevice, Opened]) -> Pair:
    (one, _), (other, _) = prefill, decode
    return Pair(
        kind, layouts=(one.layout, other.layout), pools=(one.kv, other.kv), opened=(prefill[1], decode[1])
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
@pytest.mark.parametrize("degrees", TRIED, ids=lambda degrees: "{}-heads-{}-{}".format(*degrees))
def test_ranks_on_devices_hand_over_to_any_degree(devices: Devices, degrees: Degrees, kind: str) -> None:
    """Guards a block of which only rank 0's heads travel, heads that land at another rank or in another place, and what
    is read after its block was handed out anew."""
    prefill = devices.of(degrees.kv_heads, degrees.prefill, "p", kind)
    decode = devices.of(degrees.kv_heads, degrees.decode, "d", kind)
    alone = devices.alone(degrees.kv_heads)
    tokens = read(alone, TARGETS)
    wanted = answer(alone, tokens)
    assert read(prefill[0], SOURCES) == tokens
    pair = joined(kind, prefill, decode)
    try:
        there, here = Blocks(prefill[0]), Blocks(decode[0])
        story = Story(pair, here)
        story.offer()
        story.end()
        assert here.whole(TARGETS[0]) == there.whole(SOURCES[0]) != POISON * here.nbytes
        assert answer(decode[0], tokens) == wanted
    finally:
        pair.close()


@pytest.mark.slow
def test_nothing_lands_on_devices_before_every_rank_has_its_heads(devices: Devices) -> None:
    """Guards a chunk that counts as landed when rank 0 has its part."""
    prefill, decode = devices.of(2, 2, "p", "cuda_ipc"), devices.of(2, 2, "d", "cuda_ipc")
    assert decode[0].ranks is not None
    (rank,) = decode[0].ranks.pids
    tokens = read(prefill[0], SOURCES)
    pair = joined("cuda_ipc", prefill, decode)
    here = Blocks(decode[0])
    poison = POISON * (here.nbytes // 2)
    try:
        story = Story(pair, here)
        faults.freeze(rank)
        story.offer()
        pair.until(lambda: here.read(TARGETS[0])[0] != poison)
        for _ in range(40):
            pair.turn()
            time.sleep(0.005)
        assert faults.process_state(rank) == "T" and here.read(TARGETS[0])[1] == poison
        assert not any(isinstance(one, Received) for one in pair.events)
        faults.thaw(rank)
        story.end()
        assert here.read(TARGETS[0])[1] != poison
        alone = devices.alone(2)
        assert tokens == read(alone, TARGETS)
        assert answer(decode[0], tokens) == answer(alone, tokens)
    finally:
        faults.thaw(rank)
        pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl"])
def test_a_sender_on_devices_that_loses_a_rank_lands_no_block(devices: Devices, kind: str) -> None:
    """Guards a block that lands with the heads of the ranks that are left, a receiver that goes with the sender, and a
    sender that goes on."""
    lost, decode = devices.of(2, 2, "p", kind, fresh=True), devices.of(2, 2, "d", kind)
    assert lost[0].ranks is not None
    (rank,) = lost[0].ranks.pids
    heard: list[RankError] = []
    lost[0].ranks.watch(heard.append)
    read(lost[0], SOURCES)
    pair = joined(kind, lost, decode)
    try:
        story = Story(pair, Blocks(decode[0]))
        faults.kill(rank)
        story.offer()
        pair.until(lambda: [error.rank for error in heard] == [1])
        with suppress(AssertionError):
            pair.until(lambda: Arrived(story.handoff) in pair.told, 3.0)
        assert Arrived(story.handoff) not in pair.told
        assert not [one for one in pair.events if isinstance(one, Received) and not one.error]
        with pytest.raises(RankError, match="SIGKILL"):
            read(lost[0], SOURCES)
    finally:
        pair.close()
    assert read(decode[0], TARGETS) == read(devices.alone(2), TARGETS)
