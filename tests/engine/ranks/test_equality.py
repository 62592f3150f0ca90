"""Every family in parts: logits of two and of four ranks against those of one, and to the bit against one process that
adds up the same slices. Four ranks over two KV heads have each head twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from kernels.native import Native, native
from tests.engine.model.checkpoints import CASES, VOCAB, build, save_hf
from tests.engine.model.test_families import Ours
from tests.engine.ranks.lockstep import Lockstep

PROMPT = torch.randint(0, VOCAB, (75,), generator=torch.Generator().manual_seed(7)).tolist()
STEPS = (PROMPT[:41], PROMPT[41:74], PROMPT[74:])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(folder: Path, kernels: Native | None, sum_slices: int = 1) -> list[torch.Tensor]:
    model = load_model(folder, packed=False, panels=kernels is not None, sum_slices=sum_slices)
    heads = model.config.heads
    ours = Ours(model, TorchAttention(heads) if kernels is None else NativeAttention(heads, kernels))
    with torch.inference_mode():
        found = [ours.step(tokens) for tokens in STEPS]
    ours.close()
    return found


def together(folder: Path, ranks: int, kernels: Native | None) -> list[torch.Tensor]:
    group = Lockstep(folder, ranks, kernels)
    found = [group.step(tokens) for tokens in STEPS]
    group.close()
    return found


def compare(folder: Path, ranks: int, kernels: Native | None) -> None:
    wanted, ours = alone(folder, kernels), together(folder, ranks, kernels)
    for theirs, own in zip(wanted, ours, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=0)
    if kernels is not None:
        for theirs, own in zip(alone(folder, kernels, ranks), ours, strict=True):
            assert torch.equal(own, theirs)


@pytest.mark.parametrize("case", CASES)
def test_parts_of_every_family_add_up(case: str, tmp_path: Path) -> None:
    """Guards each weight's division: one that is cut at the wrong place, or a bias that is added by every rank."""
    folder = prepare(save_hf(build(case), tmp_path / "model"), tmp_path / "cache")
    for ranks in (2, 4):
        compare(folder, ranks, native())
    compare(folder, 2, None)
