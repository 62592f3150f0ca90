"""What three ranks may cost beside one process, with the demo model. A machine that does other work distorts it."""

import time
from pathlib import Path
from statistics import median

import msgspec
import pytest

from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.step import StepPlan
from engine.types import BlockId

ENGINE = EngineConfig(pool_bytes=96 * 1024 * 1024)
PROMPT, ANSWER, PAIRS, BOUND = 256, 32, 5, 3.0
BLOCKS = [BlockId(block) for block in range((PROMPT + ANSWER) // ENGINE.block_size + 1)]


def opened(demo_model: Path, ranks: int) -> EngineDevice:
    return open_device(msgspec.structs.replace(ENGINE, model_dir=str(demo_model), tensor_parallel=ranks))


def answer_s(device: EngineDevice) -> float:
    """Return how long a prompt, read in chunks of 64, and an answer after it take."""
    tokens = list(range(1000, 1000 + PROMPT))
    began_s = time.perf_counter()
    for start in range(0, PROMPT, 64):
        row = trial_row(tokens[: start + 64], start, BLOCKS)
        drawn = device.runner.launch(StepPlan((msgspec.structs.replace(row, draw=True),))).wait()
    for _ in range(ANSWER):
        tokens.append(int(str(drawn[0])))
        row = msgspec.structs.replace(trial_row(tokens, len(tokens) - 1, BLOCKS), draw=True)
        drawn = device.runner.launch(StepPlan((row,))).wait()
    return time.perf_counter() - began_s


@pytest.mark.slow
def test_three_ranks_take_at_most_three_times_as_long_as_one(demo_model: Path) -> None:
    """Guards against sums that cost more than the work that they divide: in pairs, of which the median counts."""
    devices: list[EngineDevice] = []
    try:
        devices += [opened(demo_model, 1), opened(demo_model, 3)]
        for device in devices:
            answer_s(device)
        ratios = []
        for _ in range(PAIRS):
            alone_s, together_s = (answer_s(device) for device in devices)
            ratios.append(together_s / alone_s)
        print("three ranks / one:", *(f"{ratio:.2f}" for ratio in ratios))
        assert median(ratios) <= BOUND
    finally:
        for device in devices:
            if device.ranks is not None:
                device.ranks.close()
            if device.matchers is not None:
                device.matchers.close()
            device.kv.close()
