"""The kernels and configurations whose machine code is watched: those of `kernels.configs`, not every product."""

from typing import Any

import triton

from kernels import configs, decode_attention
from tests.kernels.contract.measure import Case

POINTER = {"float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "float8_e4m3fn": "*u8"}
FORMAT = {"int8": "int8", "float8_e4m3fn": "e4m3"}
LAYERS = 32
KV_HEADS = 8


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


def decode_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=f"decode d{key.head_dim} g{key.group} b{key.block_size} {key.dtype}",
        kernel=decode_attention.decode_kernel,
        types={
            "q_ptr": "*bf16",
            "payload": POINTER[key.dtype],
            "scales": "*fp32" if key.dtype in FORMAT else POINTER[key.dtype],
            "out_ptr": "*bf16",
            "lse_ptr": "*fp32",
            "partial_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            **dict.fromkeys(
                ("items_ptr", "ranges_ptr", "rows_ptr", "tables_ptr", "lengths_ptr", "slots_ptr"),
                "*i32",
            ),
            "scale": "fp32",
        },
        constants={
            **pool_constants(key.head_dim, key.block_size, key.dtype),
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "HEADS": key.group * KV_HEADS,
            "GROUP": key.group,
            "TABLE_BLOCKS": 1024,
            "WINDOW": 0,
            "TILE": config.tile,
            "STAGES": config.stages,
            "M": decode_attention.packed_rows(key.group, config.rows or 1),
        },
        warps=config.warps,
        stages=config.stages,
    )
