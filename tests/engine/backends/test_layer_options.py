"""Layers with windows, caps, sinks, other scales and other rotations: one model on every backend, in mixed steps."""

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from engine.backends.attention import TorchAttention
from engine.backends.determinism import deviations
from engine.backends.gpu.attention import PLAIN, SHARED, TritonAttention
from engine.backends.gpu.pool import DeviceKV
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import estimate_workspace
from engine.batch import ForwardBatch
from engine.config import StepLimits
from engine.model.config import LayerOptions, ModelConfig, RopeTable
from engine.model.families import FAMILIES, layer_key
from engine.model.llama import Llama
from engine.step import Row
from engine.storage.paged import KVTensors, PagedKV
from kernels.linear import Weight
from kernels.native import native
from kernels.panels import pack_plain
from tests.engine.backends.gpu.test_step import row
from tests.kernels.cases import DEVICE

BLOCK, BLOCKS, VOCAB = 16, 40, 50
LAYERS = (
    LayerOptions(window=12, rope=1),
    LayerOptions(window=0, rope=0),
    LayerOptions(window=40, rope=None),
    LayerOptions(window=12, rope=0),
)
SHAPE = ModelConfig(
    family="qwen3",
    layers=len(LAYERS),
    hidden=24,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=40,
    vocab=VOCAB,
    context_tokens=256,
    norm_eps=1e-5,
    ropes=(RopeTable(theta=10000.0), RopeTable(theta=100.0, dims=24)),
    layer_options=LAYERS,
    qk_norm="head",
    activation="gelu_tanh",
    attention_scale=0.4,
    attention_softcap=3.0,
    sinks=True,
)


def weights_of(shape: ModelConfig) -> dict[str, Tensor]:
    generator, family = torch.Generator().manual_seed(8), FAMILIES[shape.family]
    named = [(weight.name, weight) for weight in family.weights]
    for layer in range(shape.layers):
        named += [(layer_key(layer, weight.name), weight) for weight in family.layer_weights]
    found = {}
    for name, weight in named:
        if weight.present(shape):
            size = weight.shape(shape)
            found[name] = torch.randn(size, generator=generator) * 0.3 + (len(size) == 1)
    for layer in range(shape.layers):
        found[layer_key(layer, "sinks")] = torch.randn(shape.heads, generator=generator) * 2
    return found


class OneBackend:
    """The model on one backend, over a pool whose bytes are NaN wherever nothing was written."""

    def __init__(self, backend: str, kv_dtype: str = "float32", share_tokens: int = 256) -> None:
        self.model = Llama(SHAPE, {name: placed(name, weight, backend) for name, weight in WEIGHTS.items()})
        layout = SHAPE.kv_layout(BLOCK, kv_dtype)
        self.kv: KVTensors
        self.attention: TorchAttention | TritonAttention
        if backend == "triton":
            self.kv = DeviceKV(layout, BLOCKS, DEVICE)
            self.attention = TritonAttention(
                SHAPE, layout, DEVICE, max_batch=4, programs=3, share_tokens=share_tokens
            )
        else:
            self.kv = PagedKV(layout, BLOCKS)
            self.attention = attention_of(backend)
        self.kv.memory.fill_(0x7F)

    def step(self, *rows: Row) -> Tensor:
        """Logits of the rows, in the order in which the batch has them: those of one token first."""
        device = DEVICE if isinstance(self.attention, TritonAttention) else "cpu"
        ordered = sorted(rows, key=lambda one: one.end - one.start > 1)
        batch = ForwardBatch.build(ordered, BLOCK, device=device, row_multiple=self.attention.row_multiple)
        self.attention.begin(batch, self.kv)
        return self.model.forward(batch, self.kv, self.attention)[: len(rows)].cpu()


def placed(name: str, weight: Tensor, backend: str) -> Weight:
    if backend == "native" and weight.dim() == 2 and name != "embedding":
        return pack_plain(weight)
    return weight.to(DEVICE) if backend == "triton" else weight


def attention_of(backend: str) -> TorchAttention:
    if backend == "torch":
        return TorchAttention(SHAPE.heads, dtype=torch.float32)
    kernels = native()
    if kernels is None:
        pytest.skip("the native kernels are not built here")
    return NativeAttention(SHAPE.heads, kernels)


def prompt(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


WEIGHTS = weights_of(SHAPE)
FIRST, SECOND, THIRD = [31, 2, 17, 5, 23], [8, 30, 1, 12, 19], [0, 39, 7, 3, 11]


def steps() -> Sequence[Sequence[Row]]:
    """Chunks that begin within windows and beyond them, and rows of one token between."""
    a, b, c = prompt(1, 50), prompt(2, 75), prompt(3, 17)
    return [
        [row(1, a[:21], 0, FIRST), row(2, b[:33], 0, SECOND)],
        [row(2, b[:74], 33, SECOND), row(1, a[:22], 21, FIRST), row(3, c, 0, THIRD)],
        [row(1, a, 22, FIRST), row(2, b, 74, SECOND), row(3, [*c, 1], 17, THIRD)],
        [row(1, [*a, 4], 50, FIRST), row(2, [*b, 5], 75, SECOND), row(3, [*c, 1, 2], 18, THIRD)],
    ]


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "tolerance"),
    [
        ("native", "float32", 1e-4),
        ("native", "int8", 5e-2),
        ("native", "fp8", 2e-1),
        ("triton", "float32", 2e-4),
    ],
)
def test_every_backend_obeys_each_layers_options(backend: str, kv_dtype: str, tolerance: float) -> None:
    """Guards an option that one backend leaves out, or takes from another layer: windows, rotation of some columns or
    none, head norms, scale, cap, sinks."""
    ours, reference = OneBackend(backend, kv_dtype), OneBackend("torch", kv_dtype)
    for plan in steps():
        wanted = reference.step(*plan)
        torch.testing.assert_close(ours.step(*plan), wanted, atol=tolerance, rtol=0)
        assert wanted.std() > 0.5, "a flat reference would prove nothing"


@pytest.mark.parametrize("left_out", ["window", "rope", "attention_scale", "attention_softcap", "sinks"])
def test_each_option_changes_what_the_model_says(left_out: str) -> None:
    """Guards the test above, which an option without effect would pass."""
    whole, without = OneBackend("torch"), OneBackend("torch")
    plain = {"attention_scale": None, "attention_softcap": 0.0}
    for layer in without.model._layers:
        if left_out == "rope":
            layer.rope = 0
        else:
            name = left_out.removeprefix("attention_")
            layer.options = layer.options._replace(**{name: 0 if name == "window" else plain.get(left_out)})
    assert not all(torch.allclose(whole.step(*plan), without.step(*plan), atol=1e-2) for plan in steps())


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_bits_depend_on_a_sequence_alone(backend: str, kv_dtype: str) -> None:
    """Guards recovery where layers differ: one of each kind is tried, at every width where a kernel changes."""
    assert deviations(OneBackend(backend).model, BLOCK, attention_of(backend), kv_dtype) == []


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(("first", "then"), [("native", "torch"), ("torch", "native")])
def test_one_backend_reads_what_another_wrote(first: str, then: str, kv_dtype: str) -> None:
    """Guards blocks of 8 bits that migrate as they are between workers of both kinds: scales and codes lie alike."""
    writer, reader = OneBackend(first, kv_dtype), OneBackend(then, kv_dtype)
    *before, last = steps()
    for plan in before:
        writer.step(*plan)
    reader.kv.memory.copy_(writer.kv.memory)
    got, wanted = reader.step(*last), writer.step(*last)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=0)
    reader.kv.memory.fill_(0x7F)
    assert not torch.allclose(reader.step(*last), wanted, atol=2e-2), "nothing of it was read"


def test_layers_that_see_all_share_prefixes_beside_those_that_do_not() -> None:
    """Guards a window's items, in which rows see different parts of what they share: a window of 12 shares nothing, one
    of 40 sees beyond the prefix in the longest row alone."""
    ours, reference = OneBackend("triton", share_tokens=BLOCK), OneBackend("torch")
    stem = prompt(4, 48)
    texts = [stem + prompt(10 + n, length) for n, length in enumerate((3, 5, 2, 45))]
    tables = [[4, 9, 1, *range(20 + 4 * n, 24 + 4 * n)] for n in range(4)]
    for side in (ours, reference):
        side.step(row(0, stem, 0, [4, 9, 1]))
        for n, (text, table) in enumerate(zip(texts, tables, strict=True)):
            side.step(row(n, text, 48, table))
    rows = [row(n, [*text, 3], len(text), table) for n, (text, table) in enumerate(zip(texts, tables, strict=True))]
    torch.testing.assert_close(ours.step(*rows), reference.step(*rows), atol=2e-4, rtol=0)
    attention = ours.attention
    assert isinstance(attention, TritonAttention) and attention._step is not None
    kinds = {window: launch.kind for window, launch in attention._step.launches.items()}
    assert kinds == {0: SHARED, 12: PLAIN, 40: SHARED}
    plans = attention._plans(attention._latest or ([], []))
    sharing = {
        window: {row for item in plan.items if item.size > 1 for row in plan.rows[item.first : item.first + item.size]}
        for window, plan in plans.items()
    }
    assert sharing[0] == {0, 1, 2, 3} and sharing[12] == set()


def test_a_step_plans_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a step's cost on the CPU: four layers, three windows, three plans."""
    from engine.backends import attention as module

    made = []
    real = module.plan_attention

    def counted(*given: object, **options: object) -> object:
        made.append(options["window"])
        return real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "plan_attention", counted)
    side = OneBackend("torch")
    side.step(row(1, prompt(1, 21), 0, FIRST))
    assert made == [12, 0, 40]


def test_a_workspace_has_room_for_the_layer_that_sees_all() -> None:
    """Guards a model whose first layers have windows, and the largest gather in a later one."""
    limits = StepLimits(chunk_tokens=16, batch=2)
    late = (LAYERS[0], LAYERS[3], LAYERS[0], LAYERS[1])
    sizes = []
    for options in (late, (LAYERS[0],) * 4, ()):
        shape = msgspec.structs.replace(SHAPE, context_tokens=4096, layer_options=options)
        sizes.append(estimate_workspace(shape, "float32", BLOCK, limits))
    assert sizes[0] >= sizes[2] > sizes[1]
