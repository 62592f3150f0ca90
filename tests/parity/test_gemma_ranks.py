"""Gemma 3 270M (base) in tensor-parallel ranks: one KV head, which every rank has, under four heads, of a real model
with windows and four norms a layer. Logits against one process; answers across handoffs between degrees."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.text.bundle import TextModel
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from kernels.native import native
from tests.engine.model.test_families import Ours
from tests.engine.ranks.lockstep import Lockstep
from tests.parity.prompts import TEXTS
from tests.parity.real_files import gemma_file

pytestmark = pytest.mark.parity

OUTPUT_TOKENS = 24
PROMPTS = 3
LOGIT_TOLERANCE = 1e-3
"""Sums of up to 2,048 columns in 32 bits, which round in another order, through 18 layers."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    return prepare(str(gemma_file(folder)), folder / "models")


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    text = TextModel.load(model_dir)
    return [text.encode(words, add_special=True) for words in TEXTS[:PROMPTS]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def logits_alone(model_dir: Path, steps: list[list[int]], sum_slices: int) -> list[torch.Tensor]:
    kernels = native()
    model = load_model(model_dir, packed=False, panels=kernels is not None, sum_slices=sum_slices)
    heads = model.config.heads
    ours = Ours(model, TorchAttention(heads) if kernels is None else NativeAttention(heads, kernels))
    found = [ours.step(tokens) for tokens in steps]
    ours.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_of_ranks_that_share_one_kv_head(model_dir: Path, prompts: list[list[int]], ranks: int) -> None:
    """Guards a KV head that is with every rank: written by each to the same place, and read with each one's queries."""
    prompt = prompts[0]
    steps = [prompt[:-2], prompt[-2:-1], prompt[-1:]]
    group = Lockstep(model_dir, ranks, native())
    ours = [group.step(tokens) for tokens in steps]
    group.close()
    for own, theirs in zip(ours, logits_alone(model_dir, steps, 1), strict=True):
        torch.testing.assert_close(own, theirs, atol=LOGIT_TOLERANCE, rtol=0)
    if native() is not None:
        assert all(map(torch.equal, ours, logits_alone(model_dir, steps, ranks)))


def opened(model_dir: Path, **options: int) -> EngineDevice:
    return open_device(EngineConfig(model_dir=str(model_dir), deterministic="off", pool_bytes=96 << 20, **options))


def close(device: EngineDevice) -> None:
    if device.ranks is not None:
        device.ranks.close()
    if device.matchers is not None:
        device.matchers.close()
    device.kv.close()


def answers(prefill: EngineDevice, decode: EngineDevice, prompts: list[list[int]]) -> list[list[int]]:
    engine = Colocated(prefill, decode)
    try:
        records = [
            RequestRecord(
                request=RequestId(str(number)),
                tokens=prompt,
                prompt_tokens=len(prompt),
                max_tokens=OUTPUT_TOKENS,
                seed=0,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
            for number, prompt in enumerate(prompts)
        ]
        return [answer.tokens for answer in engine.run(records)]
    finally:
        engine.close()
        close(prefill)
        close(decode)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 1)])
def test_answers_across_degrees(model_dir: Path, prompts: list[list[int]], prefill: int, decode: int) -> None:
    """Guards handoffs between ranks of which all have the one head: prompts are read by so many processes and answered
    by so many others, and come out as from processes of one that compute in the same slices."""
    if native() is None:
        pytest.skip("the same bits need the native kernels")
    ours = answers(
        opened(model_dir, tensor_parallel=prefill), opened(model_dir, tensor_parallel=decode), prompts
    )
    theirs = answers(opened(model_dir, sum_slices=prefill), opened(model_dir, sum_slices=decode), prompts)
    assert ours == theirs and all(len(answer) == OUTPUT_TOKENS for answer in ours)


def test_three_ranks_are_refused(model_dir: Path) -> None:
    """Guards a split of four heads into three, which would leave a head to nobody."""
    with pytest.raises(ValueError, match=r"4 heads of .* do not divide by 3"):
        opened(model_dir, tensor_parallel=3)
