"""Handoffs between workers of unequal numbers of ranks, over every transport of hosts: models of two and of six KV
heads, real processes as ranks, real transfer threads; and ranks that are killed or stopped at each step of a
handoff."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.messages import Handoff
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.ranks.sums import RankError
from engine.step import StepPlan
from engine.storage.paged import PagedKV
from engine.types import BlockId, RequestId, SamplingParams
from tests.chaos import faults
from tests.engine.model.checkpoints import build, save_hf
from tests.transfer.pair import DECODE, PREFILL, Pair
from transfer.handoff.commands import Arrived, ExpectedBlock, OutgoingBlock, Rows, Settled

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


class Devices:
    """Devices of ranks, each opened when first asked for, and answers of single processes that sum up in slices."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[int, Path] = {}
        self._devices: dict[tuple[int, int, str], EngineDevice] = {}
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
        return open_device(msgspec.structs.replace(base, **options))

    def of(self, kv_heads: int, ranks: int, role: str) -> EngineDevice:
        key = kv_heads, ranks, role
        if key not in self._devices:
            self._devices[key] = self.opened(kv_heads, tensor_parallel=ranks)
        return self._devices[key]

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

    def close(self) -> None:
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

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.handoff = Handoff(RequestId(f"r{next(self._numbers)}"), 1, 1, DECODE, PREFILL)
        decode, prefill = pair.decode.pool, pair.prefill.pool
        for block in range(POOL):
            decode.block(BlockId(block))[:] = POISON * decode.block_bytes
        self._blocks, expected = [], {}
        for at in range(FULL):
            tokens, identity = min(SIZE, len(PROMPT) - SIZE * at), bytes([at]) * 16
            generation = prefill.generation(SOURCES[at])
            self._blocks.append(OutgoingBlock(SOURCES[at], generation, at, tokens, identity))
            expected[at] = ExpectedBlock((Rows(0, TARGETS[at], 0, tokens),), identity, tokens)
        pair.told.clear()
        pair.events.clear()
        pair.receiver.expect(self.handoff, expected)
        pair.sender.open(self.handoff, pair.prefill.transport.reads_remotely)

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
        decode = pair.decode.pool
        assert all(bytes(decode.block(BlockId(b))) == POISON * decode.block_bytes for b in untouched)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    devices = Devices(tmp_path_factory.mktemp("degrees"))
    yield devices
    devices.close()


def joined(kind: str, prefill: EngineDevice, decode: EngineDevice) -> Pair:
    assert isinstance(prefill.kv, PagedKV) and isinstance(decode.kv, PagedKV)
    return Pair(kind, layouts=(prefill.layout, decode.layout), pools=(prefill.kv, decode.kv))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("degrees", TRIED, ids=lambda degrees: "{}-heads-{}-{}".format(*degrees))
@pytest.mark.slow
def test_any_degree_hands_over_to_any(devices: Devices, degrees: Degrees, kind: str) -> None:
    """Guards against heads in the wrong place of a block, blocks that are offered before every rank has written them,
    and ranks that do not see what has landed."""
    wanted = devices.answer(degrees)
    prefill = devices.of(degrees.kv_heads, degrees.prefill, "p")
    decode = devices.of(degrees.kv_heads, degrees.decode, "d")
    for device, ranks in ((prefill, degrees.prefill), (decode, degrees.decode)):
        assert (len(device.ranks.pids) if device.ranks else 0) == ranks - 1
    tokens = read(prefill)
    pair = joined(kind, prefill, decode)
    try:
        Story(pair).run()
        for source, target in zip(SOURCES[: FULL - 1], TARGETS, strict=False):
            assert bytes(decode.kv.block(target)) == bytes(prefill.kv.block(source))
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
    pair = joined(kind, prefill, decode)
    try:
        for step in Story.STEPS:
            tokens = read(prefill)
            try:
                Story(pair).run(lambda now, step=step: faults.freeze(rank) if now == step else None)  # type: ignore[misc]
                assert faults.process_state(rank) == "T"
            finally:
                faults.thaw(rank)
            assert answer(decode, tokens) == wanted, step
    finally:
        pair.close()


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
    pair = joined("shm", prefill, decode)
    try:
        strike = faults.kill if how == "kill" else faults.freeze
        Story(pair).run(lambda now: strike(rank) if now == step else None)
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
