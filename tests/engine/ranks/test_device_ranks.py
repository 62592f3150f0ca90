"""Workers whose ranks have a device, a pool and a runner each, opened as on GPUs: the kernels are interpreted, the
recordings are of host memory, libnccl is the fake one, and each rank is a process."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from engine.backends.gpu.runner import TRIAL_BLOCKS
from engine.backends.workspace import trial_row
from engine.config import EngineConfig, StepLimits, TierConfig
from engine.device import EngineDevice, open_device
from engine.kv.tiers.commands import Store, TierLoad, TierSlot
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.ranks.device_orders import DeviceOrder
from engine.ranks.group import RankGroup
from engine.ranks.sums import RankError
from engine.step import Row, StepPlan
from engine.storage.tiers.opening import open_tiers
from engine.types import BlockId, SamplingParams
from tests.engine.model.checkpoints import build, save_hf
from tests.engine.ranks.pretended import (
    CARD,
    SMALL_VARIABLE,
    STEPS_VARIABLE,
    UNMAPPED_VARIABLE,
    PretendedDevices,
)
from tests.engine.ranks.test_processes import announce, differing
from tests.transfer.fake_device import library_path

SIZE, POOL, RANKS = 16, 12, 2
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
LIMITS = StepLimits(chunk_tokens=20, batch=2, context_tokens=64)
CONFIG = EngineConfig(device="cuda", block_size=SIZE, rank_wait_s=30.0, speculation="off", one_shot_bytes=0)
"""Ranks that wait in an interpreted kernel take all the time that there is: only where that is what is tried."""
ONE_SHOT_BYTES = EngineConfig().one_shot_bytes
TABLES = ([3, 7, 1], [5, 0, 9])
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([20 + 3 * at % 70 for at in range(21)], [30 + 7 * at % 60 for at in range(18)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library_path()  # compiled once, for all of them
    made = tmp_path_factory.mktemp("devices")
    return prepare(save_hf(build("qwen2", num_hidden_layers=1, **SIZES), made / "model"), made / "cache")


@contextmanager
def opened(folder: Path, devices: PretendedDevices | None = None, **options: object) -> Iterator[EngineDevice]:
    layout = ModelConfig.load(folder).kv_layout(SIZE, "float32")
    own = {"tensor_parallel": RANKS, "pool_bytes": POOL * layout.block_bytes, "model_dir": str(folder)} | options
    device = open_device(msgspec.structs.replace(CONFIG, **own), LIMITS, devices=devices or PretendedDevices())
    try:
        yield device
    finally:
        if device.ranks is not None:
            device.ranks.close()
        if device.matchers is not None:
            device.matchers.close()
        device.kv.close()


def row(at: int, tokens: list[int], start: int, **more: object) -> Row:
    found = trial_row(tokens, start, [BlockId(block) for block in TABLES[at]])
    record = msgspec.structs.replace(found.record, sampling=GREEDY, request=f"r{at}", prompt_tokens=len(PROMPTS[at]))
    return msgspec.structs.replace(found, request=record.request, record=record, **more)


def behind(at: int, tokens: list[int], known: bool) -> Row:
    """The row that computes the token after `tokens`: known, as the last of them, or still to be drawn."""
    if known:
        return row(at, tokens, len(tokens) - 1)
    held = row(at, tokens, len(tokens))
    return msgspec.structs.replace(held, end=len(tokens) + 1, follows=True)


STEPS = [[0], [0, 1], [1, 0], [1], [0, 1]]
"""Rows that decode in each step: they change their places, join late, and pause."""


def read(device: EngineDevice) -> list[list[int]]:
    """Read both prompts but for their last token: the first in two chunks, the second beside the end of that."""
    first, second = PROMPTS
    device.runner.launch(StepPlan((row(0, first[:9], 0, draw=False),))).wait()
    chunks = row(0, first[:-1], 9, draw=False), row(1, second[:-1], 0, draw=False)
    device.runner.launch(StepPlan(chunks)).wait()
    return [list(first), list(second)]


def answered(device: EngineDevice) -> list[list[int]]:
    """Return both prompts with answers, of which each step is queued before the one before it is waited for."""
    texts, before, step = read(device), list[int](), None
    for names in [*STEPS, []]:
        rows = tuple(behind(at, texts[at], known=at not in before) for at in names)
        launched = device.runner.launch(StepPlan(rows)) if rows else None
        if step is not None:
            for at, token in zip(before, step.wait(), strict=True):
                texts[at].append(int(str(token)))
        before, step = names, launched
    return texts


def scores(device: EngineDevice) -> list[float]:
    """Return the log probabilities of the first prompt's tokens."""
    first = PROMPTS[0]
    asking = row(0, first[:20], 0, scored=19)
    asking = msgspec.structs.replace(asking, record=msgspec.structs.replace(asking.record, prompt_logprobs=1))
    step = device.runner.launch(StepPlan((asking,), is_scored=True))
    step.wait()
    (told,) = step.scores()
    return [one.logprob for one in told]


@pytest.mark.slow
@pytest.mark.parametrize("one_shot_bytes", [ONE_SHOT_BYTES, 1024, 0])
def test_ranks_with_a_pool_each_answer_as_one_process_does(folder: Path, one_shot_bytes: int) -> None:
    """Guards the way from a plan to other devices: rows in another order than the plan's, tokens that are not drawn yet
    when a step is told, recorded steps and steps as they are, blocks that are copied on every device, logits of a
    prompt's tokens; and sums that are opened, not only there, all in one kernel, or only those of few rows, or none."""
    devices = PretendedDevices()
    with (
        opened(folder, devices, one_shot_bytes=one_shot_bytes) as ranks,
        opened(folder, tensor_parallel=1, device="cpu", attention="triton", dtype="float32") as alone,
    ):
        assert devices.link is not None and ranks.ranks is not None
        assert ranks.ranks.sums_by.startswith("up to" if one_shot_bytes else "by NCCL alone: rank 0")
        assert ranks.blocks == alone.blocks == POOL and ranks.plans_ahead
        assert ranks.kv.layout.kv_heads == 1 and ranks.layout.kv_heads == 2, "a pool of the rank's own heads"
        wanted, before = answered(alone), devices.link.count
        assert answered(ranks) == wanted
        assert devices.link.count > before, "nothing was sent while steps were computed"
        block, other = BlockId(TABLES[1][0]), BlockId(2)
        copied = ((block, other), (BlockId(4), block), (other, block))
        text = [*PROMPTS[1], wanted[1][len(PROMPTS[1])]]
        step = StepPlan((row(1, text, len(text) - 1),), copied)
        told, known = (list(one.runner.launch(step).wait()) for one in (ranks, alone))
        assert told == known
        assert scores(ranks) == pytest.approx(scores(alone), abs=1e-4)
        (pid,) = ranks.ranks.pids
        torch.testing.assert_close(ranks.kv.tensor[block][0], alone.kv.tensor[block][0], atol=1e-4, rtol=0)
    assert not Path(f"/proc/{pid}").exists(), "a rank has outlived its group"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy's: a sum that was given up goes on as NaN
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_waits_on_for_a_rank_that_does_not_come(folder: Path, how: signal.Signals) -> None:
    """Guards against a device that waits for ever for another one, whose rank was killed or stopped when it had heard
    of a step: the link is aborted, the wait ends, and the error names the rank."""
    devices = PretendedDevices()
    with opened(folder, devices, rank_wait_s=20.0, one_shot_bytes=ONE_SHOT_BYTES) as device:
        assert device.ranks is not None and devices.link is not None
        (pid,) = device.ranks.pids
        texts = read(device)
        group, plain = device.ranks, device.ranks.order
        group.wait_s = 3.0  # now that all that is slow under other work has been done

        def struck(order: object) -> None:
            plain(order)  # type: ignore[arg-type]
            os.kill(pid, how)

        group.order = struck  # type: ignore[method-assign, assignment]
        began_s = time.monotonic()
        with pytest.raises(RankError) as found:
            for _ in range(3):  # the first may have been computed before the signal came
                device.runner.launch(StepPlan((row(0, texts[0], len(texts[0]) - 1),))).wait()
        assert found.value.rank == 1 and devices.link.aborted
        assert ("SIGKILL" if how == signal.SIGKILL else "does not answer") in str(found.value)
        assert time.monotonic() - began_s < 40.0


@pytest.mark.slow
def test_a_pool_is_as_large_as_the_smallest_rank_has_room_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards block numbers that a rank with less room does not have."""
    monkeypatch.setenv(SMALL_VARIABLE, "1")
    with opened(folder, pool_bytes="auto", reserve_bytes=CARD // 4) as device:
        each = device.kv.layout.block_bytes
        # A card that pretends does not fill: it gives back the trial's blocks, which it never took.
        assert device.blocks == (CARD // 4) // each + TRIAL_BLOCKS
        assert answered(device)


@pytest.mark.slow
def test_a_rank_with_another_pool_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against steps over pools of unequal size."""
    monkeypatch.setenv(STEPS_VARIABLE, "1")
    with pytest.raises(RankError, match="a pool of 11 blocks, not of 12") as found, opened(folder):
        pass
    assert found.value.rank == 1


@pytest.mark.slow
def test_a_rank_with_another_model_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against sums of parts of two models."""
    other = build("qwen2", num_hidden_layers=2, **SIZES)
    source = save_hf(other, tmp_path / "model")
    monkeypatch.setattr(RankGroup, "__init__", differing(model_dir=str(prepare(source, tmp_path / "cache"))))
    with pytest.raises(RankError, match="differs in fingerprint") as found, opened(folder):
        pass
    assert found.value.rank == 1


@pytest.mark.slow
@pytest.mark.parametrize("differs", ["number", "digest"])
def test_a_rank_with_a_device_that_reads_another_order_says_so(folder: Path, differs: str) -> None:
    """Guards against devices that go on with different steps."""
    with opened(folder) as device:
        assert device.ranks is not None
        read(device)
        announce(device.ranks, DeviceOrder("step"), differs)
        began_s = time.monotonic()
        with pytest.raises(RankError, match="order") as found:
            read(device)
        assert found.value.rank == 1
        assert time.monotonic() - began_s < CONFIG.rank_wait_s / 2, "it was not noticed at once"


@pytest.mark.slow
def test_blocks_of_all_devices_go_to_lower_tiers_and_come_back(folder: Path, tmp_path: Path) -> None:
    """Guards tiers that keep the heads of rank 0 for the whole block, and ranks that have none of it back."""
    events: list[object] = []
    with opened(folder) as device:
        tokens, size = answered(device), device.layout.block_bytes
        tiers = open_tiers(TierConfig(host_bytes=8 * size), device, "worker", events.append)
        assert tiers is not None and device.ranks is not None
        (other,) = (mapped() for mapped in device.ranks.pools)
        blocks, idents = [BlockId(block) for block in TABLES[0]], [bytes([at]) * 16 for at in range(3)]
        slots, targets = [TierSlot(at) for at in range(3)], [BlockId(block) for block in (2, 4, 6)]
        held = [other[block].clone() for block in blocks]
        assert len({bytes(one.numpy().data) for one in held}) == 3, "the other rank has written nothing"
        tiers.mover.submit([Store(1, tuple(idents), tuple(blocks), tuple(slots))])
        tiers.mover.run_once()
        tiers.mover.submit([TierLoad(1, tuple(idents), tuple(slots), tuple(targets))])
        tiers.mover.run_once()
        assert [type(event).__name__ for event in events] == ["Stored", "Loaded"]
        for block, target, was in zip(blocks, targets, held, strict=True):
            assert torch.equal(device.kv.memory[target], device.kv.memory[block])
            assert torch.equal(other[target], was) and torch.equal(other[block], was)
            device.kv.memory[block].fill_(255)
            other[block].fill_(255)
        text = tokens[0]
        step = row(0, text, len(text) - 2)
        table = msgspec.structs.replace(step, blocks=targets, end=len(text) - 1)
        assert [*device.runner.launch(StepPlan((table,))).wait()] == text[-1:], "computed behind other KV"
        tiers.mover.stop()


@pytest.mark.slow
def test_without_maps_of_the_others_there_are_no_lower_tiers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a worker that keeps a part of its blocks, or does not start, where devices cannot be mapped."""
    monkeypatch.setenv(UNMAPPED_VARIABLE, "1")
    with opened(folder, one_shot_bytes=ONE_SHOT_BYTES) as device:
        assert device.ranks is not None
        assert device.ranks.sums_by == "by NCCL alone: rank 0: devices that cannot map each other"
        tiers = TierConfig(host_bytes=1 << 20)
        assert open_tiers(tiers, device, "worker", lambda event: None) is None
        with pytest.raises(ValueError, match=r"preemption: swap takes a host tier.* a pool without a name"):
            open_tiers(tiers, device, "worker", lambda event: None, needed_by="decode.preemption: swap")
    assert "no lower tiers: a pool without a name" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 3}, "4 heads .* do not divide by 3"),
        ({"sum_slices": 2}, "sum_slices"),
        ({"attention": "torch"}, "torch kernels do not run on cuda"),
        ({"speculation": "model"}, "draft model"),
    ],
)
def test_what_ranks_on_devices_cannot_do_is_refused_by_name(
    folder: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said), opened(folder, **options):
        pass


def test_without_links_ranks_on_devices_are_refused(folder: Path) -> None:
    config = msgspec.structs.replace(CONFIG, model_dir=str(folder), tensor_parallel=RANKS)
    with pytest.raises(ValueError, match="nothing connects the ranks on cuda"):
        open_device(config, LIMITS)
