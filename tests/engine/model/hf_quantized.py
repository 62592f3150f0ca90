"""Tiny checkpoints in the formats of others, packed here by hand from their published layouts, each with the values
that it stands for: computed from the numbers before they were packed, so that no unpacking is believed twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.model.test_families import Reference, save_hf

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class Packed(NamedTuple):
    """The tensors of a linear by what follows its name, and the weight that they stand for, in 32 bits."""

    tensors: dict[str, Tensor]
    weight: Tensor


Pack = Callable[[Tensor], Packed]


class Format(NamedTuple):
    """What config.json says, how a linear is packed, and the form that panels of it have."""

    config: dict[str, Any]
    pack: Pack
    kind: str


def scale_of(weight: Tensor, group: int, most: float, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return scales `[rows, groups]` by which the largest of a group is about `most`."""
    grouped = weight.view(len(weight), -1, group).abs().amax(-1)
    return (grouped / most).clamp(min=1e-3).to(dtype)


def spread(item: Tensor, group: int) -> Tensor:
    return item.repeat_interleave(group, 1)


def asymmetric(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales in 16 bits, and zeros that differ from group to group, some of them the ends."""
    scales = scale_of(weight, group, (1 << bits - 1) - 1)
    zeros = torch.randint(1, 1 << bits, scales.shape, generator=torch.Generator().manual_seed(3))
    zeros[0, 0], zeros[-1, -1] = 1, (1 << bits) - 1
    codes = (weight / spread(scales.float(), group)).round() + spread(zeros, group)
    return codes.clamp(0, (1 << bits) - 1).int(), scales, zeros.int()


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last axis, the first in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each))
    parts = padded.unflatten(-1, (-1, each)) << torch.arange(0, 32, bits)
    total = parts.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def gptq(bits: int = 4, group: int = 64, v1: bool = True, shuffled: bool = False) -> Format:
    def pack(weight: Tensor) -> Packed:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = torch.arange(columns) // size
        if shuffled:
            order = order[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        back = torch.argsort(order, stable=True)
        codes, scales, zeros = asymmetric(weight[:, back], size, bits)
        plain = (codes - spread(zeros, size)).float() * spread(scales.float(), size)
        undone = torch.argsort(back)
        tensors = {
            "qweight": words(codes[:, undone], bits).T.contiguous(),
            "qzeros": words((zeros - int(v1)).T.contiguous(), bits),
            "scales": scales.T.contiguous(),
            "g_idx": order.int(),
        }
        return Packed(tensors, plain[:, undone])

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled, "sym": False}
    if not v1:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, pack, "bf16" if shuffled else "q4" if bits == 4 else "a8")


def awq(group: int = 64) -> Format:
    def interleaved(codes: Tensor) -> Tensor:
        """Half byte n of a word has column `order[n]` of its eight."""
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return words(codes.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    def pack(weight: Tensor) -> Packed:
        codes, scales, zeros = asymmetric(weight, group, 4)
        plain = (codes - spread(zeros, group)).float() * spread(scales.float(), group)
        tensors = {
            "qweight": interleaved(codes.T.contiguous()),
            "qzeros": interleaved(zeros.T.contiguous()),
            "scales": scales.T.contiguous(),
        }
        return Packed(tensors, plain)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, pack, "q4")


def float8(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return 8-bit floats, a scale for each block, and what they stand for."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(2)).to(dtype) * 0.01 + 0.001
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * wide


def fp8_blocks(block: tuple[int, int] = (128, 128)) -> Format:
    def pack(weight: Tensor) -> Packed:
        numbers, scales, plain = float8(weight, block, torch.float32)
        return Packed({"weight": numbers, "weight_scale_inv": scales}, plain)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Format(config, pack, "f8")


def fp8_whole() -> Format:
    def pack(weight: Tensor) -> Packed:
        numbers, scales, plain = float8(weight, tuple(weight.shape), torch.float32)  # type: ignore[arg-type]
        return Packed({"weight": numbers, "weight_scale": scales.reshape(()), "input_scale": torch.ones(())}, plain)

    return Format({"quant_method": "fp8", "activation_scheme": "static"}, pack, "f8")


def fp8_rows() -> Format:
    def pack(weight: Tensor) -> Packed:
        numbers, scales, plain = float8(weight, (1, weight.shape[1]), torch.bfloat16)
        return Packed({"weight": numbers, "weight_scale": scales}, plain)

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return Format(compressed("float-quantized", weights, {"num_bits": 8, "type": "float"}), pack, "f8")


def mxfp4() -> Format:
    def pack(weight: Tensor) -> Packed:
        noise = torch.Generator().manual_seed(4)
        exponents = torch.randint(119, 126, (len(weight), weight.shape[1] // 32), generator=noise)
        wide = spread(2.0 ** (exponents.float() - 127), 32)
        values = torch.tensor(E2M1)
        codes = ((weight / wide).abs()[..., None] - values).abs().argmin(-1)
        plain = values[codes] * wide * torch.where(weight < 0, -1.0, 1.0)
        codes = codes | torch.where(weight < 0, 8, 0)
        blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).unflatten(1, (-1, 16))
        return Packed({"weight_blocks": blocks, "weight_scales": exponents.to(torch.uint8)}, plain)

    return Format({"quant_method": "mxfp4"}, pack, "q8")


def compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None, targets: Any = ("Linear",)
) -> dict[str, Any]:
    targets = list(targets) if isinstance(targets, tuple) else targets
    group = {"targets": targets, "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def by_its_owner(form: str, **weights: Any) -> Format:
    """Pack by the package that the format is named after; the weight is what it unpacks, from scales in 32 bits."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)
    bits = weights["num_bits"]

    def pack(weight: Tensor) -> Packed:
        group = weights.get("group_size") or weight.shape[1]
        # In 32 bits, since with scales in 16 it computes in 16.
        scales = scale_of(weight, group, 6.0 if weights["type"] == "float" else (1 << bits - 1) - 1).float()
        if form.startswith("mxfp4"):
            scales = 2.0 ** scales.log2().floor()
        given = {"weight": weight, "weight_scale": scales}
        if not weights["symmetric"]:
            noise = torch.Generator().manual_seed(3)
            given["weight_zero_point"] = torch.randint(
                -(1 << bits - 1), 1 << bits - 1, scales.shape, generator=noise, dtype=torch.int8
            )
        tensors = compressor.compress(given, scheme)
        plain = compressor.decompress({**tensors}, scheme)["weight"].float()
        if not form.startswith("mxfp4"):
            tensors["weight_scale"] = scales.half()
        return Packed({name: tensor.contiguous() for name, tensor in tensors.items()}, plain)

    said = {key: value for key, value in weights.items() if not isinstance(value, torch.dtype)}
    is_byte = form.startswith("mxfp4") or (weights["symmetric"] and bits == 8)
    kind = "q8" if is_byte else "q4" if bits == 4 else "a8"
    return Format(compressed(form, said), pack, kind)


def save_quantized(model: Reference, folder: Path, form: Format) -> str:
    """Write `model` with its layers' linears packed; `model` takes on what they stand for, and stays the reference."""
    source = save_hf(model, folder)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 2 or not name.startswith("model.layers."):
                continue
            del stored[name]
            packed = form.pack(parameter.detach().clone())
            parameter.copy_(packed.weight)
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{leaf}": tensor for leaf, tensor in packed.tensors.items()}
    save_file(stored, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = form.config
    (folder / "config.json").write_text(json.dumps(said))
    return source
