"""Checkpoints that others have quantized: the values they stand for to the bit, small in memory, and the tokens that
transformers makes of these values."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import ModelError
from engine.model.files.hf_model import HFModel
from engine.model.prepared.cache import prepare
from engine.model.prepared.codes_file import map_codes
from engine.model.prepared.loading import map_weights
from engine.model.prepared.panels import panel_weights
from kernels.panels import unpack
from tests.engine.model import hf_quantized as packing
from tests.engine.model.hf_quantized import SIZES, Format, save_quantized
from tests.engine.model.test_families import compare, qwen3_reference, reference

INT: dict[str, Any] = {"type": "int", "strategy": "group"}
FORMATS: dict[str, Callable[[], Format]] = {
    "gptq": packing.gptq,
    "gptq-128": lambda: packing.gptq(group=128),
    "gptq-columns": lambda: packing.gptq(group=-1),
    "gptq-8": lambda: packing.gptq(bits=8),
    "gptq-v2": lambda: packing.gptq(v1=False),
    "gptq-desc-act": lambda: packing.gptq(shuffled=True),
    "awq": packing.awq,
    "fp8-blocks": packing.fp8_blocks,
    "fp8-narrow-blocks": lambda: packing.fp8_blocks((48, 32)),
    "fp8-whole": packing.fp8_whole,
    "fp8-rows": packing.fp8_rows,
    "mxfp4": packing.mxfp4,
    "w4a16": lambda: packing.by_its_owner("pack-quantized", num_bits=4, symmetric=True, group_size=128, **INT),
    "w4a16-asymmetric": lambda: packing.by_its_owner(
        "pack-quantized", num_bits=4, symmetric=False, group_size=32, **INT
    ),
    "w4a16-columns": lambda: packing.by_its_owner(
        "pack-quantized", num_bits=4, symmetric=True, type="int", strategy="channel"
    ),
    "w8a16": lambda: packing.by_its_owner("pack-quantized", num_bits=8, symmetric=True, group_size=64, **INT),
    "w8a16-asymmetric": lambda: packing.by_its_owner(
        "pack-quantized", num_bits=8, symmetric=False, group_size=64, **INT
    ),
    "int8": lambda: packing.by_its_owner("int-quantized", num_bits=8, symmetric=True, type="int", strategy="channel"),
    "compressed-mxfp4": lambda: packing.by_its_owner(
        "mxfp4-pack-quantized",
        num_bits=4,
        symmetric=True,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_equals_transformers_on_the_same_weights(name: str, tmp_path: Path) -> None:
    """Guards every packing: a nibble out of place, a zero off by one, a scale of another group change each logit. And
    what is kept: small panels that stand for the values to the bit."""
    form = FORMATS[name]()
    model = reference(**SIZES)
    source = save_quantized(model, tmp_path / "model", form)
    compare(source, model, tmp_path / "cache")
    folder = prepare(source, tmp_path / "cache")
    weights, panels = map_weights(folder), panel_weights(folder, map_weights(folder))
    layer = model.model.layers[1]
    for prepared, wanted in (
        ("layers.1.qkv", [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
        ("layers.1.down", [layer.mlp.down_proj]),
    ):
        whole = torch.cat([linear.weight.detach() for linear in wanted])
        assert torch.equal(weights[prepared], whole), "values differ"
        assert torch.equal(unpack(panels[prepared]), whole), "panels differ"
        assert panels[prepared].kind in (form.kind, "f32"), name
    small = {"q4": 6, "q8": 9, "a8": 10, "f8": 9, "bf16": 32}[form.kind]
    assert panels["layers.1.down"].raw.numel() * 8 <= small * layer.mlp.down_proj.weight.numel()


def test_another_family_is_read_by_the_same_names(tmp_path: Path) -> None:
    model = qwen3_reference(**{**SIZES, "head_dim": 32})
    compare(save_quantized(model, tmp_path / "model", packing.awq()), model, tmp_path / "cache")


def test_scales_of_32_bits_are_exact_too(tmp_path: Path) -> None:
    """Guards an offset that would be rounded: codes of another form, or none, take its place."""
    for name, kind in (("w4a16-asymmetric", "q8"), ("w8a16-asymmetric", "f32")):
        form = FORMATS[name]()

        def pack(weight: torch.Tensor, form: Format = form) -> packing.Packed:
            tensors, plain = form.pack(weight)
            even = tensors["weight_scale"].float()
            odd, group = torch.nextafter(even, torch.tensor(9.0)), weight.shape[1] // even.shape[1]
            codes = (plain / packing.spread(even, group)).round()
            return packing.Packed({**tensors, "weight_scale": odd}, codes * packing.spread(odd, group))

        model = reference(**SIZES)
        source = save_quantized(model, tmp_path / name, Format(form.config, pack, kind))
        folder = prepare(source, tmp_path / "cache")
        panels = panel_weights(folder, map_weights(folder))["layers.0.down"]
        assert panels.kind == kind
        assert torch.equal(unpack(panels), model.model.layers[0].mlp.down_proj.weight.detach())


def test_what_is_ignored_stays_as_it_is(tmp_path: Path) -> None:
    model = reference(**SIZES)
    folder = prepare(save_quantized(model, tmp_path / "model", FORMATS["w4a16"]()), tmp_path / "cache")
    stored = map_codes(folder)
    assert "head" not in stored and "embedding" not in stored and "layers.0.output" in stored
    assert torch.equal(map_weights(folder)["head"], model.lm_head.weight.detach())


def test_groups_may_name_modules(tmp_path: Path) -> None:
    """Guards a checkpoint with two groups: 8 bits for one projection, 4 for the others."""
    four, eight = FORMATS["w4a16"](), FORMATS["w8a16"]()
    wide = {**eight.config["config_groups"]["group_0"], "targets": ["re:.*down_proj$"]}
    config = {**four.config, "config_groups": {**four.config["config_groups"], "group_1": wide}}

    def pack(weight: torch.Tensor) -> packing.Packed:
        return (eight if weight.shape[1] == SIZES["intermediate_size"] else four).pack(weight)

    model = reference(**SIZES)
    source = save_quantized(model, tmp_path / "model", Format(config, pack, "q4"))
    compare(source, model, tmp_path / "cache")


def test_for_16_bits_values_are_rounded_once(tmp_path: Path) -> None:
    model = reference(**SIZES)
    source = save_quantized(model, tmp_path / "model", packing.fp8_blocks())
    folder = prepare(source, tmp_path / "cache", "bfloat16", mapped=False)
    wanted = model.model.layers[0].mlp.down_proj.weight.detach().bfloat16()
    assert torch.equal(map_weights(folder)["layers.0.down"], wanted)


def test_activations_are_said_not_to_be_quantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HFModel(Path(save_quantized(reference(**SIZES), tmp_path / "model", packing.fp8_rows())))
    assert "group_0.input_activations: activations are not quantized here" in caplog.text


def spoil(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (full,) = [one for one in tensors if one.endswith(f"layers.0.mlp.down_proj.{name}")]
    changed = change(tensors.pop(full))
    save_file(tensors if changed is None else {**tensors, full: changed.contiguous()}, file)


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("gptq", "qzeros", lambda t: t[:-1], r"qzeros has shape \(5, 32\), expected \(6, 32\)"),
        ("gptq", "scales", nan, r"scales: a scale is not a finite number"),
        ("gptq", "g_idx", lambda t: t + 1, r"g_idx names a group that is not among 6"),
        ("gptq", "qweight", lambda t: t.float(), r"qweight is of F32, not I32"),
        ("gptq", "qweight", lambda t: t[:, :-8], r"down_proj\.qzeros has shape \(6, 32\), expected \(6, 31\)"),
        ("gptq", "scales", lambda t: None, r"down_proj\.scales is missing"),
        ("gptq", "qweight", lambda t: None, r"down_proj\.weight is missing"),
        ("awq", "qweight", lambda t: t[:-8], r"down_proj\.weight has shape \(256, 376\), expected \(256, 384\)"),
        ("awq", "scales", nan, "a scale is not a finite number"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:, :1], r"scale_inv has shape \(2, 1\), expected \(2, 3\)"),
        ("fp8-blocks", "weight_scale_inv", nan, "a scale is not a finite number"),
        ("fp8-blocks", "weight_scale_inv", lambda t: None, r"down_proj\.weight_scale is missing"),
        (
            "fp8-blocks",
            "weight",
            lambda t: t.view(torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn),
            "a value is not a number",
        ),
        ("mxfp4", "weight_scales", lambda t: t.fill_(255), "a scale is not a finite number"),
        ("mxfp4", "weight_scales", lambda t: t[:-1], r"weight_scales has shape \(255, 12\), expected \(256, 12\)"),
        ("w4a16", "weight_shape", lambda t: t * 2, r"weight_packed has shape \(256, 48\), expected \(512, 96\)"),
        ("w4a16", "weight_scale", lambda t: t[:, :2], r"weight_scale has shape \(256, 2\), expected \(256, 3\)"),
        ("w4a16-asymmetric", "weight_zero_point", lambda t: None, r"weight_zero_point is missing"),
        ("int8", "weight", lambda t: t[:100], r"weight_scale has shape \(256, 1\), expected \(100, 1\)"),
    ],
)
def test_tensors_that_are_wrong(
    name: str, tensor: str, change: Callable[[torch.Tensor], Any], message: str, tmp_path: Path
) -> None:
    source = save_quantized(reference(**SIZES), tmp_path / "model", FORMATS[name]())
    spoil(Path(source), tensor, change)
    with pytest.raises(ModelError, match=message):
        prepare(source, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; known: awq, compre"),
        ("gptq", {"bits": 3}, "quantization_config.bits 3 is not supported, only 4 and 8"),
        ("gptq", {"group_size": 0}, "quantization_config.group_size is 0, not a number of columns"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "quantization_config.dynamic: settings per module are not supported"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        ("awq", {"bits": 8}, "bits 8 is not supported, only 4"),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size is \[128\], not rows and columns"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ("w4a16", {"format": "nvfp4-pack-quantized"}, "group_0: format 'nvfp4-pack-quantized' is not supported"),
        ("w4a16", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config: rotations are not"),
        ("w4a16", {"config_groups": []}, "config_groups is not a table of groups"),
        ("w4a16", {"config_groups": {"g": {"weights": {"num_bits": 2}}}}, "g.weights.num_bits 2 is not supported"),
        (
            "w4a16",
            {"config_groups": {"g": {"targets": ["q_proj"], "weights": {"num_bits": 4, "group_size": 128}}}},
            "no group of config_groups is for model.layers.0",
        ),
    ],
)
def test_configs_that_are_not_taken(name: str, said: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = Path(save_quantized(reference(**SIZES), tmp_path / "model", FORMATS[name]()))
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= said
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        prepare(str(source), tmp_path / "cache")
    assert caught.value.args and "config.json" in str(caught.value)


MEASURE = """
import re, sys
from pathlib import Path
from engine.model.files.hf_model import HFModel
from engine.model.prepared.weights import write_weights

def memory(name):
    return 1024 * int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

source = HFModel(Path(sys.argv[1]))
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the highest so far begins anew
write_weights(source, "bfloat16", Path(sys.argv[2]))
print(memory("VmHWM") - before)
"""


def test_no_matrix_is_unpacked_as_a_whole(tmp_path: Path) -> None:
    """Guards a host's memory while a large checkpoint is prepared: 48 M weights of 4 bits are 24 MB in their file and
    192 MB in 32 bits."""
    rows = 49152
    model = reference(hidden_size=1024, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8)
    source = Path(save_quantized(model, tmp_path / "model", packing.awq(32)))
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.0.mlp.{}_proj."
    for name in ("gate", "up", "down"):
        rest = {key: value for key, value in tensors.items() if not key.startswith(stem.format(name))}
        shape = (rows, 1024) if name == "down" else (1024, rows)
        noise = torch.Generator().manual_seed(1)
        rest[stem.format(name) + "qweight"] = torch.randint(
            -(1 << 31), 1 << 31, (shape[0], shape[1] // 8), generator=noise, dtype=torch.int64
        ).int()
        rest[stem.format(name) + "qzeros"] = torch.zeros(shape[0] // 32, shape[1] // 8, dtype=torch.int32)
        rest[stem.format(name) + "scales"] = torch.ones(shape[0] // 32, shape[1], dtype=torch.float16)
        tensors = rest
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": rows}))
    (tmp_path / "out").mkdir()
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    values = rows * 1024
    # What the file has of three matrices is mapped, half a byte a code; of one, scales of 32 bits wait to be written.
    assert int(told.stdout) < 3.5 * values


def test_codes_of_rows_are_the_codes_rows(tmp_path: Path) -> None:
    """Guards a shard that reads its own part: of every form, and of what has no codes."""
    for name in ("gptq", "gptq-desc-act", "fp8-narrow-blocks", "w8a16-asymmetric"):
        model = reference(**SIZES)
        source = HFModel(Path(save_quantized(model, tmp_path / name, FORMATS[name]())))
        whole = model.model.layers[0].self_attn.k_proj.weight.detach().numpy()
        rows = source.find(source.family.layer_weights[2].sources[1], 0)
        assert rows.shape == whole.shape
        assert np.array_equal(rows.values(40, 99), whole[40:99])
