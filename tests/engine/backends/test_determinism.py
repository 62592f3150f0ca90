"""`engine.deterministic`: the same bits however a sequence is cut and whoever is in its batch; and what else is."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import device
from engine.backends.attention import TorchAttention
from engine.backends.determinism import deviations
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.storage.paged import PagedKV
from engine.types import BlockId
from kernels.native import native
from tests.engine.model.test_families import BASE, save_hf

NEAR_TIE = 1e-4
"""A difference between logits whose spread is about one: rounding moves them by a tenth of this at most."""
TOKENS = 230
BLOCKS = 15  # of 16 tokens, per sequence


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a near tie at every position: each odd id's output row is its even neighbour's, all but rounding."""
    source = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    dtype, _, heads = request.param.partition(", heads ")
    options = {"num_attention_heads": int(heads or 8), "num_key_value_heads": 2, "tie_word_embeddings": False}
    reference = LlamaForCausalLM(LlamaConfig(**{**BASE, **options}))
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(4.0)
        head = reference.lm_head.weight
        head[1::2] = head[0::2] * (1 + torch.randn(len(head) // 2, 1) * 3e-8)
    save_hf(reference, source)
    return prepare(str(source), tmp_path_factory.mktemp("cache"), dtype)


@dataclass
class Result:
    """For each position, the logits of the token that follows."""

    logits: torch.Tensor
    kv: torch.Tensor


def _run(
    model: Llama, attention: TorchAttention, seed: int, longest: int, company: int, kv_dtype: str | None = None
) -> Result:
    """The watched sequence in random chunks of up to `longest` tokens, beside up to `company` others in every batch."""
    random = Random(seed)
    shape = model.config
    layout = shape.kv_layout(16, kv_dtype)
    kv = PagedKV(layout, BLOCKS * 6)
    free = [BlockId(block) for block in range(kv.blocks)]
    random.shuffle(free)
    tables = [free[at * BLOCKS : (at + 1) * BLOCKS] for at in range(6)]
    tokens = [[Random(at).randrange(shape.vocab) for _ in range(TOKENS)] for at in range(6)]
    done, rows = [0] * 6, []
    while done[0] < TOKENS:
        members = [0, *random.sample(range(1, 6), random.randint(0, company))]
        random.shuffle(members)
        slices, ends = [], []
        for at in members:
            start = done[at] if done[at] < TOKENS else 0
            end = min(TOKENS, start + random.randint(1, longest))
            done[at] = end
            slices.append(trial_row(tokens[at][:end], start, tables[at]))
            ends.append(end - start)
        batch = ForwardBatch.build(slices, 16, row_multiple=attention.row_multiple)
        attention.begin(batch, kv)
        with torch.inference_mode():
            hidden = model.hidden(batch, kv, attention)
            first = sum(ends[: members.index(0)])
            rows.append(hidden[first : first + ends[members.index(0)]].clone())
    with torch.inference_mode():
        got = torch.cat(rows)
        logits = model.logits(torch.cat([got, got[-1:].expand(-len(got) % 4, -1)]))[: len(got)]
        own = kv.memory[tables[0]].clone()
    kv.close()
    return Result(logits, own)


def _opened(folder: Path, kernels: str) -> tuple[Llama, TorchAttention]:
    model = load_model(folder)
    if kernels == "torch":
        return model, TorchAttention(model.config.heads)
    found = native()
    if found is None:
        pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
    return load_model(folder, panels=True), NativeAttention(model.config.heads, found)


WAYS = [(seed, longest, company) for seed in range(2) for longest, company in ((1, 5), (7, 3), (64, 5), (230, 2))]


HEADS_OF_16 = "float32, heads 4"
"""A model whose heads the native kernels attend to; PyTorch's attend to heads of 8, between native products."""


@pytest.mark.parametrize(
    ("folder", "kernels", "kv_dtype"),
    [
        ("float32", "torch", "float32"),
        ("bfloat16", "torch", "bfloat16"),
        ("float32", "native", "float32"),
        (HEADS_OF_16, "native", "float32"),
        (HEADS_OF_16, "native", "int8"),
        (HEADS_OF_16, "native", "fp8"),
    ],
    indirect=["folder"],
)
def test_bits_are_the_same_however_computed(folder: Path, kernels: str, kv_dtype: str) -> None:
    """Guards recovery and migration: they recompute tokens in other chunks and other company."""
    model, attention = _opened(folder, kernels)
    assert deviations(model, 16, attention, kv_dtype) == []
    control = _run(model, attention, 0, TOKENS, 0, kv_dtype)
    assert control.kv.float().std() > 0
    for way in WAYS:
        got = _run(model, attention, *way, kv_dtype)
        assert torch.equal(got.logits, control.logits), way
        assert torch.equal(got.kv, control.kv), way


@pytest.mark.parametrize("folder", ["float32"], indirect=True)
def test_otherwise_tokens_differ_only_in_near_ties(folder: Path) -> None:
    """The other mode: bits do differ (so the test above can fail), tokens too, and those only in near ties. The control
    runs twice undisturbed and differs in nothing."""
    model = load_model(folder)
    attention = TorchAttention(model.config.heads, stable=False)
    control, again = _run(model, attention, 0, TOKENS, 0), _run(model, attention, 0, TOKENS, 0)
    assert torch.equal(control.logits, again.logits)
    others = [_run(model, attention, *way) for way in WAYS]
    assert any(not torch.equal(other.logits, control.logits) for other in others)
    flipped = 0
    best = control.logits.topk(2, dim=-1).values
    for other in others:
        differs = other.logits.argmax(-1) != control.logits.argmax(-1)
        flipped += int(differs.sum())
        assert bool(((best[:, 0] - best[:, 1])[differs] <= NEAR_TIE).all())
    assert flipped > 0, "no token differed: the rule was not put to the test"


def test_the_check_at_start_finds_what_it_is_for(folder: Path) -> None:
    """Guards a check that always says yes: without stable plans it must name what differs."""
    model = load_model(folder)
    heads = model.config.heads
    assert deviations(model, 16, TorchAttention(heads)) == []
    found = deviations(model, 16, TorchAttention(heads, stable=False))
    if not found and model.config.dtype == "bfloat16" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("PyTorch adds bfloat16 in one order whatever the batch on a processor without AVX-512")
    assert found


@pytest.mark.parametrize("folder", [HEADS_OF_16, "float32"], indirect=True)
def test_the_check_at_start_is_of_the_kernels_that_attend(folder: Path) -> None:
    """Guards heads of 8 beside native kernels: PyTorch's attend with them, and went untried."""
    model, attention = _opened(folder, "native")
    for kv_dtype in ("float32", "bfloat16", "int8", "fp8"):
        assert deviations(model, 16, attention, kv_dtype) == []
    attention._stable = False  # of PyTorch's kernels
    config = EngineConfig(model_dir=str(folder), kv_dtype="int8", deterministic="on")
    if model.config.head_dim == 16:
        assert device._holds(model, config, attention)
    else:
        with pytest.raises(ValueError, match="chunks of 50"):
            device._holds(model, config, attention)


def test_a_machine_that_cannot_keep_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`on` refuses with the setting's name, `auto` warns, `off` does not even look."""
    monkeypatch.setattr(device, "deviations", lambda *_: ["one token alone"])
    dtype = load_model(folder).config.dtype
    config = {"model_dir": str(folder), "pool_bytes": 1 << 20, "dtype": dtype}
    model = load_model(folder)
    attention = TorchAttention(model.config.heads)
    with pytest.raises(ValueError, match=r"engine\.deterministic: .*one token alone"):
        device._holds(model, EngineConfig(**config, deterministic="on"), attention)  # type: ignore[arg-type]
    assert not device._holds(model, EngineConfig(**config), attention)  # type: ignore[arg-type]
    assert "near ties" in caplog.text
