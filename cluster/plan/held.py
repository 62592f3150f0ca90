"""What a model's weights take in a worker's memory, by how they are kept (`engine.model.prepared.weights`).

    CPU, native kernels    matrices in panels, as small as they came; the embedding's rows, norms and biases as kept
    CPU, PyTorch's         matrices in the type that it computes in
    GPU                    matrices in codes, but for routers, or in that type

Rotary tables are each process's own. Nothing is read but headers, and of some quantized files scales.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from cluster.plan.planner import rank_shape, table_bytes
from engine.kv.layout import DTYPE_BYTES
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, layer_key

_PLAIN = tuple(DTYPE_BYTES)


def kinds_at_hand(named: str, dtype: str) -> dict[str, str]:
    """Return what each weight of a GGUF file, a directory or the demo model ("") is kept as in a model in `dtype`; none
    of a config.json or a prepared model. Raises ModelError, for a tensor that nothing reads too."""
    from engine.model.prepared.cache import find_demo_model, opened
    from engine.model.prepared.weights import prepared_weights, stored_kind

    path = Path(named).expanduser() if named else find_demo_model()
    if path.suffix != ".gguf" and not any(path.glob("*.safetensors")):
        return {}
    source = opened(path)
    found = {key: stored_kind(source, weight, layer, dtype) for key, weight, layer in prepared_weights(source)}
    source.check_all_read()
    return found


def held_bytes(
    model: ModelConfig, dtype: str, kinds: Mapping[str, str], device: str, native: bool, ranks: int = 1
) -> int:
    """Return the bytes that weights and rotary tables take on each rank. `kinds` as of
    `kinds_at_hand`; `native`: the CPU's kernels are, where they were built."""
    shape = rank_shape(model, ranks)
    from kernels.native import native as find_native

    on_gpu = device != "cpu"
    in_panels = native and find_native() is not None
    total = table_bytes(model, dtype)
    for key, sizes, stays in _weights(shape):
        kind = kinds[key] if kinds[key] not in _PLAIN or not on_gpu else dtype
        is_matrix = len(sizes) > 1 and not key.endswith("_bias")
        if key == "embedding":
            total += _kept(sizes, kind)
            if not model.tied or on_gpu:
                continue  # a head of its own comes by itself; a GPU multiplies with the embedding
        if not is_matrix:
            total += _kept(sizes, kind)
        elif in_panels:
            total += _panels(sizes, kind)
        else:
            is_coded = on_gpu and dtype != "float32" and stays and kind not in _PLAIN
            total += _kept(sizes, kind if is_coded else dtype)
    return total


def _weights(shape: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield names and shapes, and whether a GPU multiplies with the codes of each, where it has some."""
    family = FAMILIES[shape.family]
    for weight in family.weights:
        if weight.present(shape):
            yield weight.name, weight.shape(shape), True
    for layer in range(shape.layers):
        for weight in family.layer_weights:
            if weight.present(shape, layer):
                yield layer_key(layer, weight.name), weight.shape(shape), weight.name != "router"


def _kept(sizes: tuple[int, ...], kind: str) -> int:
    """Return the bytes of codes and their factors, or of numbers."""
    if kind in _PLAIN:
        return prod(sizes) * DTYPE_BYTES[kind]
    from kernels.panels import FACTORS, GROUP

    parts, factors = FACTORS[kind]
    codes = prod(sizes) // 2 if kind == "q4" else prod(sizes)
    return codes + prod(sizes) // GROUP * parts * factors * 4


def _panels(sizes: tuple[int, ...], kind: str) -> int:
    """Numbers of 16 bits that are none of bfloat16 are multiplied in 32."""
    from kernels.panels import panel_bytes

    *counts, rows, columns = sizes
    held = {"bfloat16": "bf16", "float16": "f32", "float32": "f32"}.get(kind, kind)
    return prod(counts) * panel_bytes(rows, columns, held)  # type: ignore[arg-type]
