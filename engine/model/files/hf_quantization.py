"""What config.json says of quantized weights (`quantization_config`), and the matrices that a directory has for it.

    quant_method         tensors of a linear, for `<name>.weight`
    compressed-tensors   weight_packed, weight_scale, weight_shape, perhaps weight_zero_point, weight_g_idx; or weight
                         (int8, FP8) and weight_scale; or weight_packed (MXFP4) and weight_scale
    fp8                  weight (FP8), and weight_scale_inv per block or weight_scale of the whole
    gptq                 qweight, qzeros, scales, perhaps g_idx
    awq                  qweight, qzeros, scales
    mxfp4                weight_blocks, weight_scales

Which modules are quantized, their tensors say; what is stored as floating point is left as it is. Activations are not
quantized by what a file says: a checkpoint that was made for that runs with its weights, and activations in full
(`engine.arithmetic` may ask for others).
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.codes import FloatArray
from engine.model.config import ModelError
from engine.model.files.floats import Floats8, stored_mxfp4
from engine.model.files.integers import Integers, awq_rows, unpack_awq, unpack_words
from engine.model.files.safetensors_reader import SafetensorsFile
from engine.model.files.stored import StoredRows

log = logging.getLogger(__name__)

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
FORMATS = ("float-quantized", "int-quantized", "mxfp4-pack-quantized", "naive-quantized", "pack-quantized")
"""Those of compressed-tensors; `mixed-precision` has one of these in each group."""
BITS = (4, 8)
_F8 = "F8_E4M3"


class Weights(msgspec.Struct, frozen=True):
    """How a group of modules is quantized."""

    format: str
    bits: int
    group_size: int | None
    """Columns of a group; None: all."""
    symmetric: bool
    block: tuple[int, int] | None
    targets: tuple[str, ...] = ()


class Quantization:
    """The quantized matrices of a directory whose tensors are in these files. Raises ModelError naming file and tensor,
    or config.json and its field."""

    def __init__(
        self, config: Path, said: Mapping[str, Any], where: Mapping[str, SafetensorsFile], asked: set[str]
    ) -> None:
        """The names of tensors that are asked for are put into `asked`."""
        self._config, self._where, self._asked = config, where, asked
        if not isinstance(said, dict):
            raise ModelError(config, f"quantization_config is {said!r}, not a table")
        method = said.get("quant_method")
        if method not in METHODS:
            raise ModelError(config, f"quant_method {method!r} is not supported; known: {', '.join(METHODS)}")
        self._method: str = method
        self._plus_one = said.get("checkpoint_format") != "gptq_v2"
        read: dict[str, Callable[[Mapping[str, Any]], list[Weights]]] = {
            "compressed-tensors": self._compressed, "fp8": self._fp8, "gptq": self._gptq, "awq": self._awq
        }
        self._groups = read[method](said) if method in read else []

    def find(self, name: str) -> StoredRows | None:
        """Return the matrix that a directory has in place of the plain tensor `name`, or None where that is plain. Its
        scales are read, its codes are not."""
        stem = name.removesuffix(".weight")
        match self._method:
            case "gptq" | "awq" if f"{stem}.qweight" in self._where:
                found = self._gptq_matrix(stem) if self._method == "gptq" else self._awq_matrix(stem)
                return found.stored()
            case "mxfp4" if f"{name}_blocks" in self._where:
                return self._mxfp4(f"{name}_blocks", f"{name}_scales")
            case "compressed-tensors" if f"{name}_packed" in self._where:
                group = self._group(stem)
                if group.format == "mxfp4-pack-quantized":
                    return self._mxfp4(f"{name}_packed", f"{name}_scale")
                return self._packed(name, group).stored()
            case "compressed-tensors" | "fp8" if name in self._where:
                kind = self._where[name].tensors[name].dtype
                if kind == _F8:
                    return self._float8(name, self._group(stem))
                if kind == "I8" and self._method == "compressed-tensors":
                    return self._int8(name, self._group(stem)).stored()
        return None

    # config.json

    def _compressed(self, said: Mapping[str, Any]) -> list[Weights]:
        groups = said.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
            raise ModelError(self._config, "quantization_config.config_groups is not a table of groups")
        if said.get("transform_config"):
            raise ModelError(self._config, "quantization_config.transform_config: rotations are not supported")
        if said.get("kv_cache_scheme"):
            log.warning("%s: kv_cache_scheme is not applied; the type of KV is `engine.kv_dtype`", self._config)
        found = []
        for name, group in groups.items():
            where = f"quantization_config.config_groups.{name}"
            form, weights = group.get("format") or said.get("format"), group.get("weights")
            if form not in FORMATS:
                problem = f"{where}: format {form!r} is not supported; known: {', '.join(FORMATS)}"
                raise ModelError(self._config, problem)
            if not isinstance(weights, dict):
                raise ModelError(self._config, f"{where}.weights is {weights!r}, not a table")
            for quantized in ("input_activations", "output_activations"):
                if group.get(quantized):
                    log.warning("%s: %s.%s: activations are not quantized here", self._config, where, quantized)
            strategy, size = weights.get("strategy"), weights.get("group_size")
            if strategy not in ("tensor", "channel", "group", "block", None):
                raise ModelError(self._config, f"{where}.weights.strategy {strategy!r} is not supported")
            block = weights.get("block_structure")
            found.append(
                Weights(
                    form,
                    self._bits(weights.get("num_bits"), f"{where}.weights.num_bits"),
                    self._group_size(size if strategy in ("group", None) else None, f"{where}.weights.group_size"),
                    bool(weights.get("symmetric", True)),
                    self._block(block, f"{where}.weights.block_structure") if strategy == "block" else None,
                    self._targets(group.get("targets") or [], f"{where}.targets"),
                )
            )
        return found

    def _fp8(self, said: Mapping[str, Any]) -> list[Weights]:
        if (kind := said.get("fmt", "e4m3")) != "e4m3":
            raise ModelError(self._config, f"quantization_config.fmt {kind!r} is not supported, only e4m3")
        block = said.get("weight_block_size")
        found = None if block is None else self._block(block, "quantization_config.weight_block_size")
        log.warning("%s: activation_scheme: only engine.arithmetic = fp8 quantizes activations", self._config)
        return [Weights("float-quantized", 8, None, True, found)]

    def _gptq(self, said: Mapping[str, Any]) -> list[Weights]:
        bits = self._bits(said.get("bits"), "quantization_config.bits")
        size = self._group_size(said.get("group_size"), "quantization_config.group_size")
        if said.get("dynamic"):
            raise ModelError(self._config, "quantization_config.dynamic: settings per module are not supported")
        if (form := said.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            raise ModelError(self._config, f"quantization_config.checkpoint_format {form!r} is not supported")
        return [Weights("gptq", bits, size, bool(said.get("sym", True)), None)]

    def _awq(self, said: Mapping[str, Any]) -> list[Weights]:
        if str(version := said.get("version", "gemm")).lower() != "gemm":
            raise ModelError(self._config, f"quantization_config.version {version!r} is not supported, only gemm")
        if (bits := said.get("bits", said.get("w_bit"))) != 4:
            raise ModelError(self._config, f"quantization_config.bits {bits!r} is not supported, only 4")
        if not said.get("zero_point", True):
            raise ModelError(self._config, "quantization_config.zero_point is false, which is not supported")
        size = said.get("group_size", said.get("q_group_size"))
        return [Weights("awq", 4, self._group_size(size, "quantization_config.group_size"), False, None)]

    def _bits(self, bits: object, where: str) -> int:
        if not isinstance(bits, int) or bits not in BITS:
            raise ModelError(self._config, f"{where} {bits!r} is not supported, only 4 and 8")
        return bits

    def _group_size(self, size: object, where: str) -> int | None:
        if size is None or size == -1:
            return None
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ModelError(self._config, f"{where} is {size!r}, not a number of columns")
        return size

    def _block(self, block: object, where: str) -> tuple[int, int]:
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise ModelError(self._config, f"{where} is {block!r}, not rows and columns")
        return block[0], block[1]

    def _targets(self, targets: object, where: str) -> tuple[str, ...]:
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise ModelError(self._config, f"{where} is {targets!r}, not a list of names")
        for pattern in (one for one in targets if one.startswith("re:")):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as error:
                raise ModelError(self._config, f"{where}: {pattern!r} is no pattern: {error}") from error
        return tuple(targets)

    def _group(self, stem: str) -> Weights:
        """Return how a module is quantized: by a group that names it, or else by one for all linears."""
        for group in self._groups:
            if any(_names(target, stem) for target in group.targets):
                return group
        for group in self._groups:
            if not group.targets or "Linear" in group.targets:
                return group
        raise ModelError(self._config, f"quantization_config: no group of config_groups is for {stem}")

    # the tensors

    def _packed(self, name: str, group: Weights) -> Integers:
        path, shape = self._where[f"{name}_packed"].path, self._words(f"{name}_shape", "I64")
        if shape.shape != (2,) or min(shape) < 1:
            raise ModelError(path, f"tensor {name}_shape is {shape.tolist()}, not rows and columns")
        rows, columns = (int(size) for size in shape)
        words = self._words(f"{name}_packed")
        self._shaped(f"{name}_packed", words, (rows, -(-columns * group.bits // 32)))
        groups = 1 if group.group_size is None else -(-columns // group.group_size)
        scales = self._scales(f"{name}_scale", rows, groups)
        zeros: NDArray[np.int16] = np.full(scales.shape, 1 << group.bits - 1, np.int16)
        if not group.symmetric:
            stored = self._words(f"{name}_zero_point")
            self._shaped(f"{name}_zero_point", stored, (-(-rows * group.bits // 32), groups))
            zeros = unpack_words(stored.T, group.bits, rows).T.astype(np.int16)
        order = self._order(f"{name}_g_idx", columns, groups)

        def unpack(first: int, end: int) -> NDArray[np.uint8]:
            return unpack_words(words[first:end], group.bits, columns)

        return Integers((rows, columns), unpack, scales, zeros, group.bits, group.group_size or columns, order)

    def _int8(self, name: str, group: Weights) -> Integers:
        codes = self._array(name)
        rows, columns = codes.shape if codes.ndim == 2 else (0, 0)
        groups = 1 if group.group_size is None else -(-columns // group.group_size)
        scales = self._scales(f"{name}_scale", rows, groups)
        zeros: NDArray[np.int16] = np.full(scales.shape, 128, np.int16)
        if not group.symmetric:
            stored = self._array(f"{name}_zero_point").view(np.int8)
            if stored.size > 1:
                self._shaped(f"{name}_zero_point", stored, scales.shape)
            zeros += stored.astype(np.int16)

        def unpack(first: int, end: int) -> NDArray[np.uint8]:
            return codes[first:end].view(np.uint8) ^ np.uint8(128)

        return Integers((rows, columns), unpack, scales, zeros, 8, group.group_size or columns)

    def _gptq_matrix(self, stem: str) -> Integers:
        (group,) = self._groups
        words, zeros = self._words(f"{stem}.qweight"), self._words(f"{stem}.qzeros")
        if words.ndim != 2 or words.size == 0:
            raise ModelError(self._path(f"{stem}.qweight"), f"tensor {stem}.qweight has shape {words.shape}")
        columns, rows = words.shape[0] * 32 // group.bits, words.shape[1]
        groups = 1 if group.group_size is None else -(-columns // group.group_size)
        self._shaped(f"{stem}.qzeros", zeros, (groups, -(-rows * group.bits // 32)))
        scales = self._floats(f"{stem}.scales")
        self._shaped(f"{stem}.scales", scales, (groups, rows))
        stored = unpack_words(zeros, group.bits, rows).astype(np.int16) + np.int16(self._plus_one)
        order = self._order(f"{stem}.g_idx", columns, groups)
        by_row, zero = np.ascontiguousarray(scales.T), np.ascontiguousarray(stored.T)

        def unpack(first: int, end: int) -> NDArray[np.uint8]:
            return unpack_words(words[:, first:end].T, group.bits, columns)

        return Integers((rows, columns), unpack, by_row, zero, group.bits, group.group_size or columns, order)

    def _awq_matrix(self, stem: str) -> Integers:
        (group,) = self._groups
        words, zeros = self._words(f"{stem}.qweight"), self._words(f"{stem}.qzeros")
        if words.ndim != 2 or words.size == 0:
            raise ModelError(self._path(f"{stem}.qweight"), f"tensor {stem}.qweight has shape {words.shape}")
        columns, rows = words.shape[0], words.shape[1] * 8
        groups = 1 if group.group_size is None else -(-columns // group.group_size)
        self._shaped(f"{stem}.qzeros", zeros, (groups, words.shape[1]))
        scales = self._floats(f"{stem}.scales")
        self._shaped(f"{stem}.scales", scales, (groups, rows))
        zero, by_row = unpack_awq(zeros.T).astype(np.int16), np.ascontiguousarray(scales.T)

        def unpack(first: int, end: int) -> NDArray[np.uint8]:
            return awq_rows(words, first, end)

        return Integers((rows, columns), unpack, by_row, zero, 4, group.group_size or columns)

    def _float8(self, name: str, group: Weights) -> StoredRows:
        codes = self._array(name).view(np.uint8)
        if codes.ndim != 2:
            raise ModelError(self._path(name), f"tensor {name} has shape {codes.shape}, not rows and columns")

        def check(read: NDArray[np.uint8]) -> None:
            if bool(((read & 127) == 127).any()):
                raise ModelError(self._path(name), f"tensor {name}: a value is not a number")

        rows, columns = codes.shape
        inverse = f"{name}_scale_inv"  # which multiplies all the same
        scale = inverse if inverse in self._where else f"{name}_scale"
        scales = self._floats(scale)
        if group.block is not None:
            self._shaped(scale, scales, (-(-rows // group.block[0]), -(-columns // group.block[1])))
            return Floats8(codes, scales, group.block).stored(check)
        if scales.size == 1:
            return Floats8(codes, scales.reshape(1, 1), (rows, columns)).stored(check)
        groups = 1 if group.group_size is None else -(-columns // group.group_size)
        return Floats8(codes, self._scales(scale, rows, groups), (1, group.group_size or columns)).stored(check)

    def _mxfp4(self, blocks: str, scales: str) -> StoredRows:
        packed, exponents = self._array(blocks), self._array(scales)
        if packed.ndim > 2:
            packed = packed.reshape(*packed.shape[:-2], -1)  # [.., groups, 16]
        packed = packed.reshape(-1, packed.shape[-1]).view(np.uint8)
        exponents = exponents.reshape(-1, exponents.shape[-1]).view(np.uint8)
        self._shaped(scales, exponents, (len(packed), packed.shape[1] // 16))
        if packed.shape[1] % 16:
            problem = f"tensor {blocks} has {2 * packed.shape[1]} columns, no multiple of 32"
            raise ModelError(self._path(blocks), problem)

        def check(read: NDArray[np.uint8]) -> None:
            if bool((read == 255).any()):
                raise ModelError(self._path(scales), f"tensor {scales}: a scale is not a finite number")

        return stored_mxfp4(packed, exponents, check)

    def _order(self, name: str, columns: int, groups: int) -> NDArray[np.int32] | None:
        if name not in self._where:
            return None
        order = self._words(name)
        self._shaped(name, order, (columns,))
        if order.min() < 0 or order.max() >= groups:
            raise ModelError(self._path(name), f"tensor {name} names a group that is not among {groups}")
        return order

    def _scales(self, name: str, rows: int, groups: int) -> FloatArray:
        scales = self._floats(name)
        if scales.size == 1:
            return np.full((rows, groups), scales.reshape(()), np.float32)
        if scales.ndim == 1 and groups == 1:
            scales = scales[:, None]
        self._shaped(name, scales, (rows, groups))
        return scales

    def _floats(self, name: str) -> FloatArray:
        """Read scales: numbers, none of them without an end."""
        values = self._file(name).read(name)
        if not np.isfinite(values).all():
            raise ModelError(self._path(name), f"tensor {name}: a scale is not a finite number")
        return values

    def _words(self, name: str, dtype: str = "I32") -> NDArray[np.int32]:
        file = self._file(name)
        if (kind := file.tensors[name].dtype) != dtype:
            raise ModelError(file.path, f"tensor {name} is of {kind}, not {dtype}")
        return self._array(name)

    def _array(self, name: str) -> NDArray[Any]:
        return self._file(name).array(name)

    def _shaped(self, name: str, found: NDArray[Any], wanted: tuple[int, ...]) -> None:
        if found.shape != wanted:
            raise ModelError(self._path(name), f"tensor {name} has shape {found.shape}, expected {wanted}")

    def _path(self, name: str) -> Path:
        return self._file(name).path

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise ModelError(self._config.parent, f"tensor {name} is missing")
        self._asked.add(name)
        return self._where[name]


def _names(target: str, stem: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), stem) is not None
    return target == stem or stem.endswith(f".{target}")
