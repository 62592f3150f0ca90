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
from engine.model.prepared.loading import map_weights, widened
from engine.model.prepared.sliced import PartWeights
from engine.model.split import Share
from kernels.coded_weight import CodedWeight
from kernels.native import Native, native
from kernels.panels import IntegerBits
from tests.engine.model.checkpoints import CASES, VOCAB, build, save_hf
from tests.engine.model.test_families import Ours
from tests.engine.model.test_quantized_families import GROUPS, save_both
from tests.engine.ranks.lockstep import Lockstep

PROMPT = torch.randint(0, VOCAB, (75,), generator=torch.Generator().manual_seed(7)).tolist()
STEPS = (PROMPT[:41], PROMPT[41:74], PROMPT[74:])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(
    folder: Path, kernels: Native | None, sum_slices: int = 1, integer: IntegerBits = 0
) -> list[torch.Tensor]:
    model = load_model(
        folder, packed=False, panels=kernels is not None, integer=integer, sum_slices=sum_slices
    )
    assert model.integer == integer
    heads = model.config.heads
    ours = Ours(model, TorchAttention(heads) if kernels is None else NativeAttention(heads, kernels))
    with torch.inference_mode():
        found = [ours.step(tokens) for tokens in STEPS]
    ours.close()
    return found


def together(folder: Path, ranks: int, kernels: Native | None, integer: IntegerBits = 0) -> list[torch.Tensor]:
    group = Lockstep(folder, ranks, kernels, integer)
    assert all(model.integer == integer for model in group.models)
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


def test_parts_of_three_ranks_add_up(tmp_path: Path) -> None:
    """Guards a third part of every size: of heads, widths and a vocabulary that does not divide by three, with a KV
    head for each rank and with one that all have."""
    assert VOCAB % 3
    for kv_heads in (3, 1):
        sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": kv_heads}
        folder = tmp_path / str(kv_heads)
        compare(prepare(save_hf(build("qwen2", **sizes), folder / "model"), folder / "cache"), 3, native())


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Codes in groups of 32 columns. Two ranks cut the feed-forward layer where a group ends (160 columns each), four
    cut groups (80 each)."""
    folder = tmp_path_factory.mktemp("coded")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4}
    source, _ = save_both(build("qwen2", **sizes), folder, GROUPS["w4a16"]())
    return prepare(source, folder / "cache")


def test_a_group_of_columns_that_is_cut_is_kept_as_values(coded: Path) -> None:
    """Guards a scale that is taken for the columns of another group: of the last rank, whose slice begins in one."""
    whole = map_weights(coded).stored["layers.1.down"]
    assert isinstance(whole, CodedWeight)
    values = widened(whole, torch.float32)
    for ranks, kind in ((2, CodedWeight), (4, torch.Tensor)):
        share = Share(ranks - 1, ranks)
        part = PartWeights(coded, share).stored["layers.1.down"]
        assert isinstance(part, kind)
        own = widened(part, torch.float32) if isinstance(part, CodedWeight) else part
        assert torch.equal(own, values[:, 320 - 320 // ranks :])
    for ranks in (2, 4):
        compare(coded, ranks, native())


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_in_integers_have_the_bits_of_slices(coded: Path, ranks: int) -> None:
    """Guards activations that a rank rounds in other groups than one process with the same slices; with four ranks, one
    product of a layer is in values and the others are in integers."""
    if (kernels := native()) is None:
        pytest.skip("integers need the native kernels")
    theirs, ours = alone(coded, kernels, ranks, integer=23), together(coded, ranks, kernels, integer=23)
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))
    in_floats = alone(coded, kernels, ranks)
    assert not all(torch.equal(own, other) for own, other in zip(ours, in_floats, strict=True)), "nothing was rounded"
    for own, other in zip(ours, in_floats, strict=True):
        torch.testing.assert_close(own, other, atol=5e-3, rtol=0)
