"""What the cases share: names, the strides of a pool, the bytes of a tile."""

from typing import Any

import triton

from kernels import configs

POINTER = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "float8_e4m3fn": "*u8"}
FORMAT = {"int8": "int8", "float8_e4m3fn": "e4m3"}
LAYERS = 32
KV_HEADS = 8
LARGEST = "largest: "
"""So begin the names of cases that are there for their shared memory alone."""


def pool_constants(head_dim: int, block_size: int, dtype: str) -> dict[str, Any]:
    """Strides of a pool `[blocks, kv_heads, layers, 2, block_size, head_dim]`, as `kernels.pool` gives them."""
    eight = dtype in FORMAT
    rows = LAYERS * 2 * block_size
    head = rows * (head_dim + 4) if eight else rows * head_dim
    return {
        "STRIDE_BLOCK": KV_HEADS * head,
        "STRIDE_HEAD": head,
        "STRIDE_KV": block_size * head_dim,
        "STRIDE_TOKEN": head_dim,
        "SCALE_BLOCK": KV_HEADS * head // 4 if eight else 0,
        "SCALE_HEAD": head // 4 if eight else 0,
        "SCALE_KV": block_size if eight else 0,
        "SCALE_TOKEN": 1 if eight else 0,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "FORMAT": FORMAT.get(dtype, "native"),
    }


def case_name(key: configs.ConfigKey) -> str:
    numbers = (("d", key.head_dim), ("g", key.group), ("b", key.block_size))
    return " ".join([key.kernel, *(f"{sign}{n}" for sign, n in numbers if n), key.dtype])


def pool_types(key: configs.ConfigKey, *, paired: bool = False) -> dict[str, str]:
    payload = "*i16" if paired and key.dtype in FORMAT else POINTER[key.dtype]
    return {"payload": payload, "scales": "*fp32" if key.dtype in FORMAT else payload}


def tile_bytes(key: configs.ConfigKey, config: configs.KernelConfig) -> int:
    value_bytes = 1 if key.dtype in FORMAT else 4 if key.dtype == "float32" else 2
    return 2 * config.tile * triton.next_power_of_2(key.head_dim) * value_bytes


def query_type(key: configs.ConfigKey) -> str:
    return POINTER["float32" if key.dtype == "float32" else "bfloat16"]
