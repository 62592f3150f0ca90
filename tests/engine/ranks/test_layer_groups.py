"""Ranks whose layers are kept in groups: each is told every group's tables, and has its heads of all. Processes, with a
small random Gemma 3 whose windows are shorter than prompts and answers."""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.kv.groups import GONE
from engine.model.prepared.cache import prepare
from engine.ranks.orders import RankOrder
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from kernels.native import native
from tests.engine.model.checkpoints import VOCAB, build, save_hf
from worker.config import PrefillConfig

SIZE, ANSWER_TOKENS, CHUNK_TOKENS = 4, 40, 24
LENGTHS = (61, 22)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    return prepare(save_hf(build("gemma3"), folder / "model"), folder / "cache")


def records() -> list[RequestRecord]:
    generator = torch.Generator().manual_seed(6)
    return [
        RequestRecord(
            request=RequestId(str(length)),
            tokens=torch.randint(VOCAB, (length,), generator=generator).tolist(),
            prompt_tokens=length,
            max_tokens=ANSWER_TOKENS,
            seed=0,
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        for length in LENGTHS
    ]


def answers(folder: Path, groups: str, ranks: str, degrees: tuple[int, int]) -> tuple[list[list[int]], int]:
    """Return what two devices answer, the first of which prefills, and the bytes of the blocks that went over."""
    base = EngineConfig(model_dir=str(folder), block_size=SIZE, pool_bytes=4 << 20, deterministic="off")
    devices = [open_device(msgspec.structs.replace(base, layer_groups=groups, **{ranks: degree})) for degree in degrees]
    engine = Colocated(*devices, prefill_config=PrefillConfig(chunk_tokens=CHUNK_TOKENS), check=True)
    try:
        told = engine.run(records())
        moved = sum(one.ended.stats.migrated_blocks for one in told if one.ended is not None)
        return [answer.tokens for answer in told], moved * devices[0].layout.block_bytes
    finally:
        engine.close()
        for device in devices:
            close(device)


def close(device: EngineDevice) -> None:
    if device.ranks is not None:
        device.ranks.close()
    if device.matchers is not None:
        device.matchers.close()
    device.kv.close()


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_ranks_with_groups_answer_as_one_process_without(gemma: Path, degrees: tuple[int, int]) -> None:
    """Guards a rank that reads, or writes, its heads by another group's table, in chunks, in decode steps, and behind
    blocks that came from a worker of another degree."""
    if native() is None:
        pytest.skip("the same bits need the native kernels")
    ours, moved = answers(gemma, "on", "tensor_parallel", degrees)
    theirs, all_moved = answers(gemma, "off", "sum_slices", degrees)
    assert ours == theirs and all(len(answer) == ANSWER_TOKENS for answer in ours)
    assert 0 < moved < 0.8 * all_moved, "the windows' blocks went over in full"


def test_an_order_has_every_group_s_tables() -> None:
    """Guards a step that reaches other ranks without its windows, or with those of another group."""
    row = trial_row(list(range(11)), 9, [BlockId(block) for block in (3, 1, 6)])
    windows = ([GONE, BlockId(2), BlockId(7)], [GONE, GONE, BlockId(5)])
    batch = ForwardBatch.build([msgspec.structs.replace(row, windows=windows)], SIZE)
    raw = msgspec.msgpack.encode(RankOrder.of_batch("forward", batch))
    told = msgspec.msgpack.decode(raw, type=RankOrder).batch()
    assert len(told.groups) == 3
    for ours, theirs in zip(batch.groups, told.groups, strict=True):
        assert torch.equal(ours.slots, theirs.slots)
        assert all(map(torch.equal, ours.block_tables, theirs.block_tables))
    assert [tables.slots.tolist() for tables in told.groups] == [[25, 26], [29, 30], [21, 22]]
