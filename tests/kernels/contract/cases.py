"""The kernels and configurations whose machine code is watched: those of `kernels.configs`, not every product."""

from typing import Any

import triton

from kernels import (
    block_convert,
    block_copy,
    configs,
    decode_attention,
    prefill_attention,
    rms_norm,
    rope_kv_write,
    sample,
    silu_mul,
)
from kernels.block_copy import BlockShape
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
            "M": decode_attention.packed_rows(key.group, max(1, config.rows // key.group)),
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=_tile_bytes(key, config),
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
            "M": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=_tile_bytes(key, config),
        loops=2,
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
    numbers = (("d", key.head_dim), ("g", key.group), ("b", key.block_size))
    return " ".join([key.kernel, *(f"{sign}{n}" for sign, n in numbers if n), key.dtype])


def _tile_bytes(key: configs.ConfigKey, config: configs.KernelConfig) -> int:
    return (
        2 * config.tile * triton.next_power_of_2(key.head_dim) * (1 if key.dtype in FORMAT else 2)
    )


def _pool_types(key: configs.ConfigKey) -> dict[str, str]:
    payload = POINTER[key.dtype]
    return {"payload": payload, "scales": "*fp32" if key.dtype in FORMAT else payload}


def copy_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    shape = BlockShape(layers=LAYERS, block_size=64, row_bytes=256)
    words = shape.words
    return Case(
        name=_name(key),
        kernel=block_copy.copy_blocks_kernel,
        types={
            **dict.fromkeys(("source_ptr", "target_ptr", "digests_ptr"), "*i64"),
            **dict.fromkeys(("source_blocks_ptr", "target_blocks_ptr", "tokens_ptr"), "*i32"),
            "units": "i32",
        },
        constants={
            "SOURCE_BLOCK": KV_HEADS * words,
            "SOURCE_HEAD": words,
            "TARGET_BLOCK": KV_HEADS * words,
            "TARGET_HEAD": words,
            "HEADS": KV_HEADS,
            "WORDS": words,
            "PAYLOAD_WORDS": shape.payload_words,
            "ROW_WORDS": shape.row_bytes // 8,
            "BLOCK_SIZE": shape.block_size,
            "COPY": True,
            "DIGEST": True,
            "PARTS": 1,
            "TILE": config.tile,
            "STAGES": config.stages,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=8 * config.tile,
    )


def convert_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """From bfloat16 to the key's type."""
    head_dim, block_size = key.head_dim, key.block_size
    half = LAYERS * 2 * block_size * head_dim
    source = (KV_HEADS * half, half, 2 * block_size * head_dim, block_size * head_dim, head_dim)
    rows = LAYERS * 2 * block_size
    target = (KV_HEADS * rows * (head_dim + 4), rows * (head_dim + 4), *source[2:])
    scales = (target[0] // 4, target[1] // 4, 2 * block_size, block_size, 1)
    return Case(
        name=_name(key),
        kernel=block_convert.convert_blocks_kernel,
        types={
            **dict.fromkeys(("source_ptr", "source_scales_ptr"), "*bf16"),
            "target_ptr": POINTER[key.dtype],
            "target_scales_ptr": "*fp32",
            **dict.fromkeys(("source_blocks_ptr", "target_blocks_ptr"), "*i32"),
            "units": "i32",
        },
        constants={
            "SOURCE": source,
            "SOURCE_SCALES": (0,) * 5,
            "SOURCE_FORMAT": "native",
            "TARGET": target,
            "TARGET_SCALES": scales,
            "TARGET_FORMAT": FORMAT[key.dtype],
            "KV_HEADS": KV_HEADS,
            "LAYERS": LAYERS,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": head_dim,
            "HALF_PAD": triton.next_power_of_2(head_dim // 2),
            "ROWS": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
    )


def sample_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=_name(key),
        kernel=sample.sample_kernel,
        types={
            "logits_ptr": "*fp32",
            **dict.fromkeys(("weights_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr"), "*fp64"),
            **dict.fromkeys(("tokens_ptr", "seed_ptr", "sample_index_ptr", "position_ptr"), "*i64"),
            "top_k_ptr": "*i32",
        },
        constants={"VOCAB": 128256, "TILE": config.tile},
        warps=config.warps,
        stages=config.stages,
    )


def merge_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=_name(key),
        kernel=decode_attention.merge_kernel,
        types={
            "out_ptr": "*bf16",
            **dict.fromkeys(("lse_ptr", "partial_ptr", "partial_lse_ptr"), "*fp32"),
            "slots_ptr": "*i32",
        },
        constants={
            "HEADS": key.group * KV_HEADS,
            "HEAD_DIM": key.head_dim,
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "SPLITS": config.tile,
        },
        warps=config.warps,
        stages=config.stages,
    )


BUILDERS = {
    "decode": decode_case,
    "decode_shared": decode_case,
    "merge": merge_case,
    "prefill": prefill_case,
    "rope_kv_write": rope_case,
    "rms_norm": norm_case,
    "silu_mul": silu_case,
    "copy_blocks": copy_case,
    "convert_blocks": convert_case,
    "sample": sample_case,
}


def cases(arch: int) -> list[Case]:
    """One case for each entry of the configuration table for this compute capability."""
    return [
        BUILDERS[key.kernel](key, config)
        for key, config in configs.TABLE.items()
        if key.arch == arch
    ]
