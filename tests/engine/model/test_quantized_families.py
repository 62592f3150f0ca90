"""Quantized checkpoints of families other than Llama, and of every format on the way that a GPU's worker takes: the
logits of the dequantized weights, which transformers loads from a directory of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.backends.gpu.attention import TritonAttention
from engine.backends.native_attention import NativeAttention
from engine.model.config import ModelConfig
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights, map_weights
from kernels.coded_weight import CodedStack, CodedWeight
from kernels.launch import interpreted
from kernels.native import native
from tests.engine.model import hf_quantized as packing
from tests.engine.model.checkpoints import build, save_hf
from tests.engine.model.hf_quantized import SIZES, Format, save_quantized
from tests.engine.model.test_every_family import greedy_gap, prompt_of
from tests.engine.model.test_experts import save_mxfp4
from tests.engine.model.test_families import Ours, reference
from tests.engine.model.test_hf_quantized import FORMATS

GROUPS: dict[str, Any] = {
    "awq": lambda: packing.awq(group=32),
    "fp8-rows": packing.fp8_rows,
    "w4a16": lambda: packing.by_its_owner(
        "pack-quantized", num_bits=4, symmetric=True, group_size=32, type="int", strategy="group"
    ),
}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {}, "phi3-longrope": {}, "olmo2": {}, "granite-biases": {}, "mixtral": {},
    "qwen3moe": {"moe_intermediate_size": 64},
}


WITH_KERNELS = (
    "gptq", "gptq-8", "gptq-desc-act", "awq", "fp8-blocks", "fp8-rows", "mxfp4", "w4a16-asymmetric", "w8a16"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    """Routers stay as they are in everybody's files."""
    return "layers." in name and name.endswith(".weight") and tensor.dim() == 2 and not name.endswith(".gate.weight")


def save_both(model: Any, folder: Path, form: Format) -> tuple[str, Any]:
    """Write a model with all its linears packed, experts too, and load another of what they stand for."""
    source, plain = folder / "packed", folder / "plain"
    save_hf(model, source)
    stored = load_file(source / "model.safetensors")
    packed, widened = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in stored.items():
        if not is_packed(name, tensor):
            packed[name] = widened[name] = tensor
            continue
        item = form.pack(tensor)
        widened[name] = item.weight.contiguous()
        packed |= {f"{name.removesuffix('.weight')}.{leaf}": part.contiguous() for leaf, part in item.tensors.items()}
    assert len(packed) > len(stored)
    plain.mkdir()
    save_file(widened, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(packed, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    again = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()
    again.generation_config.eos_token_id = None
    return str(source), again


@pytest.mark.parametrize("form", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_a_family_in_a_format(case: str, form: str, tmp_path: Path) -> None:
    """Guards fused matrices, which are packed as one; experts, packed one by one; and names that a family has
    otherwise. On the CPU all of them stay codes."""
    source, model = save_both(build(case, **CASES[case]), tmp_path, GROUPS[form]())
    folder = prepare(source, tmp_path / "cache")
    kept = map_weights(folder)
    coded = {name for name, weight in kept.stored.items() if isinstance(weight, CodedWeight)}
    names = {name for name in kept.matrices().values() if name.startswith("layers.") and not name.endswith(".router")}
    assert coded == names and coded
    kernels, prompt = native(), prompt_of()
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
    assert wanted[-1].std() > 0.1
    attention = None if kernels is None else NativeAttention(model.config.num_attention_heads, kernels)
    ours = Ours(load_model(folder, panels=kernels is not None), attention)
    with torch.inference_mode():
        torch.testing.assert_close(ours.step(prompt[:41]), wanted[40], atol=1e-4, rtol=0)
        last = ours.step(prompt[41:])
        torch.testing.assert_close(last, wanted[-1], atol=1e-4, rtol=0)
        answer = [int(last.argmax())]
        while len(answer) < 24:
            answer.append(int(ours.step(answer[-1:]).argmax()))
    ours.close()
    assert greedy_gap(model, prompt, answer) == 0.0


@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize("form", WITH_KERNELS)
def test_a_format_through_the_kernels_of_a_gpu(form: str, tmp_path: Path) -> None:
    """Guards what the loader hands to a device: codes of one matrix, factors of another, or what was to be widened."""
    model = reference(**SIZES)
    source = save_quantized(model, tmp_path / "model", FORMATS[form]())
    # 1. The bytes, streamed as to a device: codes, and what widens to the values in the type of the model.
    half = prepare(source, tmp_path / "cache", "float16", mapped=False)
    wanted, found = map_weights(half), load_weights(half, torch.device("cpu")).weights
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        wide = weight.widen(torch.float16) if isinstance(weight, CodedWeight) else weight
        assert wide.dtype == torch.float16 and torch.equal(wide, wanted[name]), name
    coded = [weight for weight in found.values() if isinstance(weight, CodedWeight)]
    kind = FORMATS[form]().kind
    assert bool(coded) == (kind != "bf16")
    loaded = Llama(ModelConfig.load(half), found)
    most = {"q4": 6, "q8": 9, "a8": 10, "f8": 9, "bf16": 0}[kind] / 8
    matrices = sum(weight.shape[0] * weight.shape[1] for weight in coded)
    assert sum(weight.nbytes for weight in coded) <= most * matrices
    assert loaded.weights_bytes == sum(
        weight.nbytes if isinstance(weight, CodedWeight) else weight.numel() * 2 for weight in found.values()
    )
    # 2. The logits, in 32 bits, which the interpreter computes exactly.
    prompt = prompt_of(40)
    ours = load_model(prepare(source, tmp_path / "cache"), coded=True)
    assert isinstance(ours._layers[0].qkv, CodedWeight) == bool(coded)
    layout = ours.config.kv_layout(16)
    step = Ours(ours, TritonAttention(ours.config, layout, "cpu", max_batch=2, programs=2))  # type: ignore[arg-type]
    step.kv.tensor.zero_()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(step.step(prompt[:33]), logits[32], atol=1e-4, rtol=0)
        torch.testing.assert_close(step.step(prompt[33:34]), logits[33], atol=1e-4, rtol=0)
    step.close()


MIXTURES: dict[str, tuple[str, Any]] = {
    "mixtral": ("awq", {}), "qwen3moe": ("fp8-rows", {"moe_intermediate_size": 64}), "gpt-oss": ("", {})
}


@pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")
@pytest.mark.parametrize("case", MIXTURES)
def test_experts_stay_codes_on_a_gpu(case: str, tmp_path: Path) -> None:
    """Guards a mixture that would be widened when it is loaded, and codes of one expert that another multiplies."""
    form, sizes = MIXTURES[case]
    model = build(case, **sizes)
    source = save_mxfp4(model, tmp_path / "packed") if not form else ""
    if form:
        source, model = save_both(model, tmp_path, GROUPS[form]())
    half = prepare(source, tmp_path / "cache", "float16", mapped=False)
    wanted, found = map_weights(half), load_weights(half, torch.device("cpu")).weights
    stacks = {name: weight for name, weight in found.items() if isinstance(weight, CodedStack)}
    assert len(stacks) >= 4 and all(name.rpartition(".")[2].startswith("experts_") for name in stacks)
    for name, stack in stacks.items():
        assert torch.equal(stack.widen(torch.float16), wanted[name]), name
        assert stack.nbytes * 8 <= {"q4": 6, "q8": 9, "f8": 9}[stack.weight.kind] * wanted[name].numel()
    prompt = prompt_of(40)
    ours = load_model(prepare(source, tmp_path / "cache"), coded=True)
    mixture = next(layer.mixture for layer in ours._layers if layer.mixture is not None)
    assert isinstance(mixture.experts.gate_up, CodedStack)  # type: ignore[union-attr]
    layout = ours.config.kv_layout(16)
    step = Ours(ours, TritonAttention(ours.config, layout, "cpu", max_batch=2, programs=2))  # type: ignore[arg-type]
    step.kv.tensor.zero_()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(step.step(prompt[:33]), logits[32], atol=1e-4, rtol=0)
        for at in range(33, 35):
            torch.testing.assert_close(step.step(prompt[at : at + 1]), logits[at], atol=1e-4, rtol=0)
    step.close()
