"""The attention kernels as cases of the contract."""

import triton

from kernels import configs, decode_attention, prefill_attention
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import (
    KV_HEADS,
    case_name,
    pool_constants,
    pool_types,
    query_type,
    tile_bytes,
)


def decode_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=decode_attention.decode_kernel,
        types={
            "q_ptr": query_type(key),
            **pool_types(key, paired=True),
            "out_ptr": query_type(key),
            "lse_ptr": "*fp32",
            "partial_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            **dict.fromkeys(
                ("items_ptr", "ranges_ptr", "rows_ptr", "tables_ptr", "lengths_ptr", "slots_ptr"),
                "*i32",
            ),
            "sinks_ptr": "*fp32",
            "scale": "fp32",
        },
        constants={
            **pool_constants(key.head_dim, key.block_size, key.dtype),
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "HEADS": key.group * KV_HEADS,
            "GROUP": key.group,
            "TABLE_BLOCKS": 1024,
            "WINDOW": 0,
            "ROW_WINDOWS": False,
            "SOFTCAP": 0.0,
            "SINKS": False,
            "DEPENDENT": key.arch >= 90,
            "TILE": config.tile,
            "M": decode_attention.packed_rows(key.group, max(1, config.rows // key.group)),
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=tile_bytes(key, config),
    )


def merge_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=decode_attention.merge_kernel,
        types={
            "out_ptr": "*bf16",
            **dict.fromkeys(("lse_ptr", "partial_ptr", "partial_lse_ptr"), "*fp32"),
            "slots_ptr": "*i32",
            "sinks_ptr": "*fp32",
        },
        constants={
            "HEADS": key.group * KV_HEADS,
            "HEAD_DIM": key.head_dim,
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "SPLITS": config.tile,
            "WINDOWED": False,
            "SINKS": False,
            "DEPENDENT": key.arch >= 90,
        },
        warps=config.warps,
        stages=config.stages,
    )


def prefill_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=prefill_attention.prefill_kernel,
        types={
            "q_ptr": query_type(key),
            **pool_types(key, paired=True),
            "out_ptr": query_type(key),
            "lse_ptr": "*fp32",
            "tiles_ptr": "*i32",
            "tables_ptr": "*i32",
            "sinks_ptr": query_type(key),
            "table_blocks": "i32",
            "scale": "fp32",
        },
        constants={
            **pool_constants(key.head_dim, key.block_size, key.dtype),
            "DIM_PAD": triton.next_power_of_2(key.head_dim),
            "HEADS": key.group * KV_HEADS,
            "GROUP": key.group,
            "WINDOW": 0,
            "SOFTCAP": 0.0,
            "SINKS": False,
            "WITH_LSE": False,
            "TILE": config.tile,
            "M": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=tile_bytes(key, config),
        loops=2,
    )
