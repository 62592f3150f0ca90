"""Mixtures of experts as whole models: on every kind of kernels, in any company, from every kind of file."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from engine.backends.attention import TorchAttention
from engine.backends.determinism import deviations
from engine.backends.gpu.attention import TritonAttention
from engine.backends.gpu.pool import DeviceKV
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import estimate_workspace, measure_workspace, trial_row
from engine.batch import ForwardBatch
from engine.config import StepLimits
from engine.model.config import ModelConfig, ModelError
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import map_weights
from engine.model.prepared.panels import panel_weights
from engine.storage.paged import PagedKV
from engine.types import BlockId
from kernels.coded_weight import CodedWeight
from kernels.launch import interpreted
from kernels.native import native
from kernels.panels import PanelStack, pack_stack, unpack
from tests.engine.model.checkpoints import BASE, VOCAB, build, randomized, save_gguf, save_hf
from tests.engine.model.test_every_family import greedy_gap, prompt_of
from tests.engine.model.test_families import Ours

NATIVE = native()
needs_native = pytest.mark.skipif(NATIVE is None, reason="the native kernels were not built here")


def opened(folder: Path, kernels: str) -> tuple[Llama, TorchAttention]:
    if kernels == "torch":
        model = load_model(folder)
        return model, TorchAttention(model.config.heads)
    assert NATIVE is not None
    model = load_model(folder, panels=True)
    return model, NativeAttention(model.config.heads, NATIVE)


def logits_of(model: Llama, attention: TorchAttention, steps: list[list[tuple[int, int, int]]]) -> dict[int, Any]:
    """Run steps of parts (sequence, start, end) and return, by sequence, the last logits of it."""
    tokens = [prompt_of(70, seed) for seed in range(3)]
    tables = [[BlockId(block) for block in range(at, 15, 3)] for at in range(3)]
    found: dict[int, Any] = {}
    kv = PagedKV(model.config.kv_layout(16), 15)
    kv.tensor.fill_(float("nan"))
    with torch.inference_mode():
        for parts in steps:
            rows = [trial_row(tokens[which][:end], start, tables[which]) for which, start, end in parts]
            batch = ForwardBatch.build(rows, 16, row_multiple=attention.row_multiple)
            attention.begin(batch, kv)
            logits = model.forward(batch, kv, attention)
            found |= {which: logits[at].clone() for at, (which, _, _) in enumerate(parts)}
    kv.close()
    return found


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("case", ["mixtral", "qwen3moe-unnormalised", "gpt-oss"])
def test_a_sequence_has_the_same_bits_in_any_company(case: str, kernels: str, tmp_path: Path) -> None:
    """Guards recovery and migration, which recompute tokens in other chunks and other company: with experts, which of
    their rows come together depends on everybody. Alone, in a batch, in chunks, and behind a cached prefix."""
    model = build(case)
    ours, attention = opened(prepare(save_hf(model, tmp_path / "m"), tmp_path / "c"), kernels)
    assert deviations(ours, 16, attention) == []
    alone = logits_of(ours, attention, [[(0, 0, 70)]])
    wanted = model(torch.tensor([prompt_of(70, 0)]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(alone[0], wanted.detach(), atol=1e-4, rtol=0)
    for steps in (
        [[(1, 0, 33), (0, 0, 70), (2, 0, 5)]],
        [[(0, 0, 19)], [(1, 0, 61), (0, 19, 50)], [(2, 0, 1), (0, 50, 69)], [(0, 69, 70), (1, 61, 62), (2, 1, 2)]],
        [[(2, 0, 64)], [(0, 0, 64)], [(0, 64, 70)]],
    ):
        assert torch.equal(logits_of(ours, attention, steps)[0], alone[0]), steps


@needs_native
@pytest.mark.parametrize("case", ["mixtral", "mixtral-window", "qwen3moe", "qwen3moe-sparse", "gpt-oss-clamped"])
def test_native_kernels_equal_transformers(case: str, tmp_path: Path) -> None:
    """Guards experts in panels: the wrong expert's, or rows that come back to another place."""
    model, prompt = build(case), prompt_of()
    ours = Ours(load_model(prepare(save_hf(model, tmp_path / "m"), tmp_path / "c"), panels=True))
    assert NATIVE is not None
    ours.attention = NativeAttention(ours.model.config.heads, NATIVE)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    last = ours.step(prompt)
    torch.testing.assert_close(last, wanted, atol=1e-4, rtol=0)
    answer = [int(last.argmax())]
    while len(answer) < 64:
        answer.append(int(ours.step(answer[-1:]).argmax()))
    ours.close()
    assert greedy_gap(model, prompt, answer) == 0.0


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss-clamped"])
def test_gpu_kernels_equal_transformers(case: str, tmp_path: Path) -> None:
    """Guards the same on a GPU's kernels, here in Triton's interpreter: a prompt, then a decode step."""
    if not interpreted():
        pytest.skip("for Triton's interpreter")
    model, prompt = build(case), prompt_of(41)
    ours = load_model(prepare(save_hf(model, tmp_path / "m"), tmp_path / "c"), packed=False)
    layout = ours.config.kv_layout(16)
    kv = DeviceKV(layout, 4, torch.device("cpu"))
    attention = TritonAttention(ours.config, layout, "cpu", max_batch=2, programs=2)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
        for start, end in ((0, 40), (40, 41)):
            row = trial_row(prompt[:end], start, [BlockId(at) for at in (3, 0, 2)])
            batch = ForwardBatch.build([row], 16, row_multiple=attention.row_multiple)
            attention.begin(batch, kv)
            logits = ours.forward(batch, kv, attention)[0]
            torch.testing.assert_close(logits, wanted[end - 1], atol=1e-4, rtol=0)


def dense_and_split(experts: int) -> tuple[Any, Any]:
    """A dense model, and the same as a mixture: each expert has a part of the rows of gate and up, all are chosen with
    equal weights, which the rows of down make good."""
    options = {**BASE, "intermediate_size": 96}
    torch.manual_seed(4)
    dense = randomized(LlamaForCausalLM(LlamaConfig(**options)))
    width = 96 // experts
    more = {"num_local_experts": experts, "num_experts_per_tok": experts, "intermediate_size": width}
    split = randomized(MixtralForCausalLM(MixtralConfig(**{**options, **more}, sliding_window=None)))
    split.config.rope_parameters = dense.config.rope_parameters
    state = dense.state_dict()
    target = split.state_dict()
    with torch.no_grad():
        for name, weight in target.items():
            if name in state:
                weight.copy_(state[name])
                continue
            stem = ".".join(name.split(".")[:3])
            gate, up, down = (state[f"{stem}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            if name.endswith("gate_up_proj"):
                weight.copy_(torch.cat([part.view(experts, width, -1) for part in (gate, up)], 1))
            elif name.endswith("down_proj"):
                weight.copy_(experts * down.view(len(down), experts, width).transpose(0, 1))
            else:
                weight.zero_()
    return dense, split


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_a_dense_model_split_into_experts_is_the_dense_model(kernels: str, tmp_path: Path) -> None:
    """Guards weights and sums without leaning on another's mixture: every logit of the dense model, by its experts."""
    found = []
    for name, model in zip(("dense", "split"), dense_and_split(4), strict=True):
        folder = prepare(save_hf(model, tmp_path / name), tmp_path / "cache")
        found.append(logits_of(*opened(folder, kernels), [[(0, 0, 70), (1, 0, 20)]]))
    for which in (0, 1):
        assert found[0][which].std() > 0.1
        torch.testing.assert_close(found[1][which], found[0][which], atol=2e-5, rtol=0)


def quantized(path: Path, kind: gguf.GGMLQuantizationType, model: Any = None) -> str:
    """A mixture, Mixtral where none is given, whose experts' matrices are quantized, and nothing else."""
    model = build("mixtral", intermediate_size=64) if model is None else model
    plain = gguf.GGUFWriter.add_tensor

    def add(writer: Any, name: str, values: np.ndarray, **more: Any) -> None:
        if "_exps.weight" in name:
            plain(writer, name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            plain(writer, name, values, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return save_gguf(model, path)


@needs_native
@pytest.mark.parametrize(("kind", "stored"), [("Q8_0", "q8"), ("Q4_1", "q4"), ("F16", "f32")])
def test_experts_stay_as_small_as_they_came(kind: str, stored: str, tmp_path: Path) -> None:
    """Guards codes: those of another expert or of up for gate. Answers have the bits of the widened weights."""
    folder = prepare(quantized(tmp_path / "m.gguf", gguf.GGMLQuantizationType[kind]), tmp_path / "c")
    coded, attention = opened(folder, "native")
    wide = load_model(folder, packed=False)
    plain = map_weights(folder)
    for number, (layer, other) in enumerate(zip(coded._layers, wide._layers, strict=True)):
        assert layer.mixture is not None and other.mixture is not None
        stacks = []
        for name in ("gate_up", "down"):
            stack = getattr(layer.mixture.experts, name)
            assert isinstance(stack, PanelStack) and stack.kind == stored
            weight = plain[f"layers.{number}.experts_{name}"]
            assert torch.equal(torch.stack([unpack(stack[at]) for at in range(stack.count)]), weight)
            stacks.append(pack_stack(weight))
        widened = layer.mixture.experts._replace(gate_up=stacks[0], down=stacks[1])
        x = torch.randn(9, 64)
        again = layer.mixture._replace(experts=widened)
        assert torch.equal(attention.mix(x, layer.mixture), attention.mix(x, again))
        torch.testing.assert_close(
            attention.mix(x, layer.mixture), TorchAttention(4).mix(x, other.mixture), atol=1e-4, rtol=1e-4
        )


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks `[.., columns / 32, 16]`, their scales, and the values `[.., columns]` that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    values = torch.where(codes & 8 > 0, -1.0, 1.0) * E2M1[codes & 7]
    return blocks, scales, (values * (2.0 ** (scales.float() - 127))[..., None]).flatten(-2)


def save_mxfp4(model: Any, folder: Path) -> str:
    """Write gpt-oss with its experts packed; `model` takes on what they stand for."""
    packed: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for seed, (name, weight) in enumerate(model.named_parameters()):
            if name.endswith(("gate_up_proj", "down_proj")):
                experts, columns, rows = weight.shape
                blocks, scales, values = mxfp4((experts, rows, columns), seed)
                weight.copy_(values.transpose(1, 2))
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    source = save_hf(model, folder)
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in packed}
    assert len(packed) == 4 * model.config.num_hidden_layers and len(kept) < len(load_file(file))
    save_file(kept | packed, file)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return source


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Guards gpt-oss's own files: blocks of rows of gate and up in turns, all experts in one tensor, where a plain file
    has them transposed. What is prepared of both is the same, and on the CPU it stays in 8 bits."""
    model = build("gpt-oss")
    source = save_mxfp4(model, tmp_path / "packed")
    plain = prepare(save_hf(model, tmp_path / "plain"), tmp_path / "c")
    folder = prepare(source, tmp_path / "c")
    found, wanted = map_weights(folder), map_weights(plain)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    panels = panel_weights(folder, found)
    for name in ("experts_gate_up", "experts_down"):
        stack = panels[f"layers.2.{name}"]
        assert isinstance(stack, PanelStack) and stack.kind == "q8"
        assert torch.equal(torch.stack([unpack(stack[at]) for at in range(stack.count)]), found[f"layers.2.{name}"])
    gate, up = (model.model.layers[2].mlp.experts.gate_up_proj[..., at::2].transpose(1, 2) for at in (0, 1))
    assert torch.equal(found["layers.2.experts_gate_up"], torch.cat([gate, up], 1))


def test_experts_in_mxfp4_of_a_gguf_file(tmp_path: Path) -> None:
    """Guards the GGUF files of gpt-oss that everybody has, in whose blocks a byte's halves are columns 16 apart, from
    being widened: they come to the very codes of a directory in MXFP4."""
    model = build("gpt-oss")
    folder = prepare(save_mxfp4(model, tmp_path / "packed"), tmp_path / "c")
    again = prepare(quantized(tmp_path / "model.gguf", gguf.GGMLQuantizationType.MXFP4, model), tmp_path / "c")
    wanted, found = map_weights(folder), map_weights(again)
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name
    codes = {name for name, stored in wanted.stored.items() if isinstance(stored, CodedWeight)}
    assert len(codes) == 2 * model.config.num_hidden_layers
    assert {name for name, stored in found.stored.items() if isinstance(stored, CodedWeight)} == codes


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe-unnormalised"])
def test_a_sharded_directory_by_reference(case: str, tmp_path: Path) -> None:
    """Guards loading for a GPU, which reads each expert's tensors from their shards straight to their place."""
    model = build(case).bfloat16()
    source = save_hf(model, tmp_path / "m", max_shard_size="60KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    mapped = load_model(prepare(source, tmp_path / "c", "bfloat16"), packed=False)
    folder = prepare(source, tmp_path / "r", "bfloat16", mapped=False)
    assert (folder / "shards.json").exists()
    referred = load_model(folder, packed=False)
    seen = 0
    for one, other in zip(mapped._layers, referred._layers, strict=True):
        if one.mixture is None or other.mixture is None:
            assert one.mixture is other.mixture is None
            continue
        for got, want in zip(other.mixture.experts[:2], one.mixture.experts[:2], strict=True):
            assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and torch.equal(got, want)
            seen += 1
    assert seen >= 6


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_experts_per_tok", 9, "9 of 5 experts"),
        ("num_local_experts", None, "num_local_experts is missing"),
        ("num_local_experts", 6, r"block_sparse_moe.gate.weight has shape \(5, 64\), expected \(6, 64\)"),
        ("intermediate_size", 95, r"experts.0.w1.weight has shape \(96, 64\), expected \(95, 64\)"),
        ("model_type", "llama", "num_local_experts: a mixture of experts is not known of family llama"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, value: object, said: str, tmp_path: Path) -> None:
    """Guards bad files: the message names the field or the tensor, before any worker serves."""
    source = save_hf(build("mixtral"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text())
    raw[field] = value
    if value is None:
        del raw[field]
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=said):
        prepare(source, tmp_path / "c")


def test_the_workspace_of_a_mixture(tmp_path: Path) -> None:
    """Guards the plan of a pool: what is estimated from sizes alone is no less than half, and no more than three times
    what a step takes, whichever experts its rows choose."""
    folder = prepare(save_hf(build("mixtral"), tmp_path / "m"), tmp_path / "c")
    limits = StepLimits(chunk_tokens=128, batch=4)
    measured = measure_workspace(folder, 16, limits)
    shape = ModelConfig.load(folder)
    assert measured / 2 <= estimate_workspace(shape, "float32", 16, limits) <= 3 * measured
    assert estimate_workspace(shape, "float32", 16, limits, in_place=True) > 0
    assert shape.vocab == VOCAB
