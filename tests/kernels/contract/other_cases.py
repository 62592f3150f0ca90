"""The row and block kernels as cases of the contract."""

from dataclasses import replace

import triton

from kernels import (
    block_convert,
    block_copy,
    coded_linear,
    configs,
    float8_linear,
    mask_logits,
    rank_sum,
    rms_norm,
    rope_kv_write,
    scaled_linear,
    silu_mul,
)
from kernels.block_shape import BlockShape
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import (
    FORMAT,
    KV_HEADS,
    LAYERS,
    POINTER,
    case_name,
    pool_constants,
    pool_types,
)


def rope_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=rope_kv_write.rope_kv_write_kernel,
        types={
            **dict.fromkeys(("qkv_ptr", "q_out_ptr", "q_norm_ptr", "k_norm_ptr"), "*bf16"),
            **pool_types(key),
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
            "TURNED": key.head_dim // 2,
            "ROWS": config.rows,
        },
        warps=config.warps,
        stages=config.stages,
    )


def norm_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    hidden = 4096
    return Case(
        name=case_name(key),
        kernel=rms_norm.rms_norm_kernel,
        types={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
            "eps": "fp32",
        },
        constants={"HIDDEN": hidden, "PAD": triton.next_power_of_2(hidden), "RESIDUAL": True},
        warps=config.warps,
        stages=config.stages,
    )


def rank_sum_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """Four ranks, and as much of each as the default of `engine.one_shot_bytes`."""
    size = 2 if key.dtype == "bfloat16" else 4
    return Case(
        name=case_name(key),
        kernel=rank_sum.rank_sum_kernel,
        types={
            "x_ptr": "*bf16" if size == 2 else "*fp32",
            **dict.fromkeys(("buffers_ptr", "steps_ptr"), "*i64"),
            "notes_ptr": "*i32",
            **dict.fromkeys(("count", "limit"), "i32"),
        },
        constants={
            "FLAGS": rank_sum.flag_bytes(4, rank_sum.programs_of(256 << 10)),
            "RANK": 1,
            "RANKS": 4,
            "PAD": 4,
            "PROGRAMS": rank_sum.programs_of(256 << 10),
            "TILE": rank_sum.PART_BYTES // size,
            "PART": rank_sum.PART_BYTES,
            "UNIT": 16,
        },
        warps=config.warps,
        stages=config.stages,
    )


def coded_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A decode step's product, of at most 16 rows, without a bias."""
    offsets = {"offsets_ptr": "*fp32"} if key.dtype == "q4" else {}
    absent = {} if offsets else {"offsets_ptr": None}
    return Case(
        name=case_name(key),
        kernel=coded_linear.coded_linear_kernel,
        types={
            "x_ptr": "*bf16",
            "codes_ptr": "*i8" if key.dtype == "q8" else "*u8",
            "scales_ptr": "*fp32",
            **offsets,
            "out_ptr": "*fp32",
            "count": "i32",
        },
        constants={
            **absent,
            "bias_ptr": None,
            "WIDTH": 4096,
            "COLUMNS": 4096,
            "LENGTH": coded_linear.parts_of(4096, 4096)[1],
            "KIND": key.dtype,
            "PART": 32,
            "OFFSETS": bool(offsets),
            "BIAS": False,
            "SPLIT": True,
            "ROWS": coded_linear.FEW_ROWS,
            "TILE": config.tile,
            "STEP": coded_linear.STEP,
        },
        warps=config.warps,
        stages=config.stages,
    )


def coded_some_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A larger decode step's product, in tiles of the table's height."""
    return _some(coded_case(key, config), config)


def coded_many_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A prompt's product, in tiles of the table's height, which go through all parts."""
    return _many(coded_case(key, config), config)


def coded_more_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A short chunk's product, in tiles that are lower than the table's where those are higher."""
    more = _many(coded_case(key, config), config)
    rows = min(config.rows, coded_linear.SOME_ROWS)
    return replace(more, name=f"{more.name}, up to {rows} rows", constants={**more.constants, "ROWS": rows})


def float8_some_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return _some(float8_case(key, config), config)


def float8_many_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return _many(float8_case(key, config), config)


def _some(few: Case, config: configs.KernelConfig) -> Case:
    return replace(few, name=f"{few.name}, some rows", constants={**few.constants, "ROWS": config.rows})


def _many(few: Case, config: configs.KernelConfig) -> Case:
    types = {**few.types, "out_ptr": "*bf16"}
    return replace(few, types=types, constants={**few.constants, "SPLIT": False, "ROWS": config.rows})


def float8_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A decode step's product with scales of blocks, of at most 16 rows."""
    return Case(
        name=case_name(key),
        kernel=float8_linear.float8_linear_kernel,
        types={
            **dict.fromkeys(("x_ptr", "codes_ptr"), "*fp8e4nv"),
            **dict.fromkeys(("x_scales_ptr", "scales_ptr", "out_ptr"), "*fp32"),
            "count": "i32",
        },
        constants={
            "bias_ptr": None,
            "WIDTH": 4096,
            "COLUMNS": 4096,
            "LENGTH": coded_linear.parts_of(4096, 4096)[1],
            "SCALED": 128,
            "BIAS": False,
            "SPLIT": True,
            "ROWS": coded_linear.FEW_ROWS,
            "TILE": config.tile,
            "STEP": coded_linear.STEP,
        },
        warps=config.warps,
        stages=config.stages,
    )


def round_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=f"{case_name(key)}, rounding",
        kernel=float8_linear.round_rows_kernel,
        types={"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"},
        constants={"COLUMNS": 14336, "PART": 14336, "PAD": 16384, "LEAST": scaled_linear._LEAST, "MOST": 448.0},
        warps=8,
        stages=config.stages,
    )


def merge_parts_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=f"{case_name(key)}, parts",
        kernel=coded_linear.merge_parts_kernel,
        types={"parts_ptr": "*fp32", "out_ptr": "*bf16", "count": "i32"},
        constants={"bias_ptr": None, "WIDTH": 4096, "PARTS": 8, "BIAS": False, "TILE": coded_linear.MERGE_TILE},
        warps=4,
        stages=config.stages,
    )


def silu_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=silu_mul.silu_mul_kernel,
        types={"gate_up_ptr": "*bf16", "out_ptr": "*bf16"},
        constants={"WIDTH": 14336, "GELU": False, "TILE": config.tile},
        warps=config.warps,
        stages=config.stages,
    )


def copy_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    shape = BlockShape(layers=LAYERS, block_size=64, row_bytes=256)
    words = shape.words
    return Case(
        name=case_name(key),
        kernel=block_copy.copy_blocks_kernel,
        types={
            **dict.fromkeys(("source_ptr", "target_ptr", "digests_ptr"), "*i64"),
            **dict.fromkeys(("source_blocks_ptr", "target_blocks_ptr", "tokens_ptr"), "*i32"),
            "units": "i32",
            "parts": "i32",
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
            "TILE": config.tile,
            "STAGES": config.stages,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=8 * config.tile,
    )


def convert_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A conversion from bfloat16 to the key's type."""
    head_dim, block_size = key.head_dim, key.block_size
    half = LAYERS * 2 * block_size * head_dim
    source = (KV_HEADS * half, half, 2 * block_size * head_dim, block_size * head_dim, head_dim)
    rows = LAYERS * 2 * block_size
    target = (KV_HEADS * rows * (head_dim + 4), rows * (head_dim + 4), *source[2:])
    scales = (target[0] // 4, target[1] // 4, 2 * block_size, block_size, 1)
    return Case(
        name=case_name(key),
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


def widen_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    """A conversion from the key's type to bfloat16."""
    there = convert_case(key, config)
    types, constants = dict(there.types), dict(there.constants)
    for side in ("ptr", "scales_ptr"):
        types[f"source_{side}"], types[f"target_{side}"] = (
            there.types[f"target_{side}"],
            there.types[f"source_{side}"],
        )
    for part in ("", "_SCALES", "_FORMAT"):
        constants[f"SOURCE{part}"] = there.constants[f"TARGET{part}"]
        constants[f"TARGET{part}"] = there.constants[f"SOURCE{part}"]
    return replace(there, name=f"{there.name} back", types=types, constants=constants)


def mask_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=mask_logits.mask_logits_kernel,
        types={
            **dict.fromkeys(("logits_ptr", "plain_ptr"), "*fp32"),
            "masks_ptr": "*i32",
            "places_ptr": "*i64",
        },
        constants={"VOCAB": 128256, "WORDS": 4008, "TILE": config.tile},
        warps=config.warps,
        stages=config.stages,
    )
