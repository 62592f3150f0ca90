"""`engine.arithmetic = "fp8"`: checkpoints in FP8 whose products round activations too, by whatever kernels attend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.backends.gpu.attention import TritonAttention
from engine.config import EngineConfig
from engine.device import open_device
from engine.model import llama
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights
from kernels import scaled_linear
from kernels.coded_weight import CodedWeight
from kernels.launch import interpreted
from kernels.native import native
from kernels.scaled_linear import Float8Weight, rounded
from tests.engine.model import hf_quantized as packing
from tests.engine.model.hf_quantized import SIZES, Format, save_quantized
from tests.engine.model.test_every_family import prompt_of
from tests.engine.model.test_families import Ours, reference

FORMATS: dict[str, Callable[[], Format]] = {
    "rows": packing.fp8_rows,
    "whole": packing.fp8_whole,
    "blocks": packing.fp8_blocks,
}


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_dir=str(folder), threads=1, pool_bytes=8 << 20, arithmetic="fp8", **options)


def round_inputs(model: Any, part: int) -> None:
    """Let the layers' linears of a reference multiply what activations are rounded to."""

    def hook(linear: torch.nn.Linear, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        rows = given[0].flatten(0, -2)
        codes, scales = rounded(rows, part or rows.shape[1])
        wide = codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        return (wide.view_as(given[0]),)

    for layer in model.model.layers:
        for linear in (one for one in layer.modules() if isinstance(one, torch.nn.Linear)):
            linear.register_forward_pre_hook(hook)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(
            "native", marks=pytest.mark.skipif(native() is None, reason="the native kernels were not built here")
        ),
        "torch",
        pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="for Triton's interpreter")),
    ],
)
def test_logits_are_those_of_rounded_activations(form: str, kernels: str, tmp_path: Path) -> None:
    """Guards matrices that stay as they were, scales of blocks, and who says so: peers compare `arithmetic`. A number
    that is rounded to the other side is a sixteenth of itself off, so the logits are near, and much nearer than those
    of activations in full."""
    model = reference(**SIZES)
    source = save_quantized(model, tmp_path / "model", FORMATS[form]())
    folder, prompt = prepare(source, tmp_path / "cache"), prompt_of(40)
    with torch.inference_mode():
        full = model(torch.tensor([prompt])).logits[0, 32]
        round_inputs(model, 128 if form == "blocks" else 0)
        wanted = model(torch.tensor([prompt])).logits[0, 32]
    apart = float((full - wanted).abs().max())
    assert apart > 0.01, "rounding that nobody sees would prove nothing"
    device = open_device(config_of(folder, attention=kernels))
    assert "activations in 8-bit floats" in device.arithmetic
    assert torch.__version__ in device.arithmetic  # whose product it is
    if kernels != "triton":
        assert device.is_deterministic
    device.kv.close()
    ours = load_model(folder, panels=kernels == "native", coded=kernels == "triton", float8=True)
    assert isinstance(ours._layers[1].down, Float8Weight)
    attention = None
    if kernels == "triton":
        attention = TritonAttention(ours.config, ours.config.kv_layout(16), "cpu", max_batch=2, programs=2)
    step = Ours(ours, attention)  # type: ignore[arg-type]
    step.kv.tensor.zero_()
    got = step.step(prompt[:33])
    step.close()
    assert float((got - wanted).abs().max()) < apart / 4


def test_a_gpus_loader_makes_them_of_the_codes_it_copied(tmp_path: Path) -> None:
    """Guards memory: no scales of 32 columns beside those of rows."""
    source = save_quantized(reference(**SIZES), tmp_path / "model", packing.fp8_rows())
    folder = prepare(source, tmp_path / "cache", "bfloat16", mapped=False)
    loaded = load_weights(folder, torch.device("cpu")).weights["layers.0.down"]
    assert isinstance(loaded, CodedWeight)
    made = scaled_linear.from_codes(loaded, "rows")
    assert made is not None and made.codes.data_ptr() == loaded.codes.data_ptr()
    assert made.nbytes == 256 * 384 + 4 * 256 < loaded.nbytes


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpus_embedding_in_codes_is_read_and_its_head_multiplied(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a loader that would make of the embedding what no row can be read from. `by_reference` leads to what a
    GPU's worker loads with, in memory of the CPU."""
    model = reference(**{**SIZES, "tie_word_embeddings": tied})
    source = save_quantized(model, tmp_path / "model", packing.fp8_whole())
    stored, name = load_file(tmp_path / "model" / "model.safetensors"), "model.embed_tokens.weight"
    packed = packing.fp8_whole().pack(stored[name])
    stored |= {name: packed.tensors["weight"], f"{name}_scale": packed.tensors["weight_scale"]}
    save_file(stored, tmp_path / "model" / "model.safetensors")
    folder = prepare(source, tmp_path / "cache", "bfloat16", mapped=False)
    monkeypatch.setattr(llama, "by_reference", lambda _: True)
    ours = load_model(folder, float8=True)
    assert isinstance(ours._head, Float8Weight) == tied
    rows = torch.tensor([3, 0, 17])
    assert torch.equal(ours._rows(rows), packed.weight[rows].to(torch.bfloat16))


def test_what_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a setting that would be ignored: the model, the division and the device each say no at start."""
    model = reference(**SIZES)
    plain = prepare(save_quantized(model, tmp_path / "plain", packing.awq()), tmp_path / "cache")
    with pytest.raises(ValueError, match="arithmetic: fp8 is for checkpoints in FP8, and this model has no"):
        open_device(config_of(plain))
    narrow = prepare(save_quantized(model, tmp_path / "narrow", packing.fp8_blocks((48, 32))), tmp_path / "cache")
    with pytest.raises(ValueError, match="arithmetic: fp8 is for scales of a matrix, of rows, or of blocks"):
        open_device(config_of(narrow))
    folder = prepare(save_quantized(model, tmp_path / "model", packing.fp8_rows()), tmp_path / "cache")
    for ranks in ({"tensor_parallel": 2}, {"sum_slices": 2}):
        with pytest.raises(ValueError, match="arithmetic: fp8 rounds whole rows"):
            open_device(config_of(folder, **ranks))

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("needs compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(ValueError, match=r"arithmetic: fp8 cannot be had on cpu: torch\._scaled_mm: needs compute"):
        open_device(config_of(folder))
    device = open_device(msgspec.structs.replace(config_of(folder), arithmetic="auto"))  # never chosen, never asked
    assert "8-bit" not in device.arithmetic
    device.kv.close()
