"""The kernels and configurations whose machine code is watched: those of `kernels.configs`, not every product."""

from typing import Any

import triton

from kernels import configs, decode_attention, prefill_attention, rms_norm, rope_kv_write, silu_mul
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
        name=_name(key),
        kernel=decode_attention.decode_kernel,
        types={
            "q_ptr": "*bf16",
            **_pool_types(key),
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


def prefill_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=_name(key),
        kernel=prefill_attention.prefill_kernel,
        types={
            "q_ptr": "*bf16",
            **_pool_types(key),
            "out_ptr": "*bf16",
            "lse_ptr": "*fp32",
            "tiles_ptr": "*i32",
            "tables_ptr": "*i32",
            "table_blocks": "i32",
            "scale": "fp32",
        },
        constants={
            **pool_constants(key.head_dim, key.block_size, key.dtype),
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "HEADS": key.group * KV_HEADS,
            "GROUP": key.group,
            "WINDOW": 0,
            "WITH_LSE": False,
            "TILE": config.tile,
            "STAGES": config.stages,
            "M": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
    )


def rope_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=_name(key),
        kernel=rope_kv_write.rope_kv_write_kernel,
        types={
            **dict.fromkeys(("qkv_ptr", "q_out_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16"),
            **_pool_types(key),
            **dict.fromkeys(("slots_ptr", "positions_ptr"), "*i64"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*bf16"),
            "tokens": "i32",
            "eps": "fp32",
        },
        constants={
            **pool_constants(key.head_dim, key.block_size, key.dtype),
            "HEADS": key.group * KV_HEADS,
            "KV_HEADS": KV_HEADS,
            "HALF_PAD": triton.next_power_of_2(key.head_dim // 2),
            "NORM": True,
            "ROWS": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
    )


def norm_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    hidden = 4096
    return Case(
        name=_name(key),
        kernel=rms_norm.rms_norm_kernel,
        types={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            "eps": "fp32",
        },
        constants={"HIDDEN": hidden, "PAD": triton.next_power_of_2(hidden), "RESIDUAL": True},
        warps=config.warps,
        stages=config.stages,
    )


def silu_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=_name(key),
        kernel=silu_mul.silu_mul_kernel,
        types={"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        constants={"WIDTH": 14336, "TILE": config.tile},
        warps=config.warps,
        stages=config.stages,
    )


def _name(key: configs.ConfigKey) -> str:
    parts = [key.kernel]
    parts += [f"{sign}{value}" for sign, value in zip("dgb", (key.head_dim, key.group, key.block_size), strict=True) if value]
    return " ".join([*parts, key.dtype])


def _pool_types(key: configs.ConfigKey) -> dict[str, str]:
    payload = POINTER[key.dtype]
    return {"payload": payload, "scales": "*fp32" if key.dtype in FORMAT else payload}
