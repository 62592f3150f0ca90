"""A mixture of experts as cases of the contract: the sizes of Qwen3-30B-A3B, with the biases and clamps of gpt-oss."""

import triton

from kernels import configs, grouped_experts
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import case_name

HIDDEN, WIDTH, EXPERTS, CHOSEN = 2048, 768, 128, 8
_PLAN = {"pairs_ptr": "*i32", "tile_experts_ptr": "*i32"}


def route_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=grouped_experts.route_kernel,
        types={"logits_ptr": "*fp32", "experts_ptr": "*i32", "weights_ptr": "*fp32"},
        constants={
            "EXPERTS": EXPERTS,
            "PAD": triton.next_power_of_2(EXPERTS),
            "CHOSEN": CHOSEN,
            "OVER_CHOSEN": False,
            "NORMALISE": True,
        },
        warps=config.warps,
        stages=config.stages,
    )


def count_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=grouped_experts.count_kernel,
        types={"experts_ptr": "*i32", "counts_ptr": "*i32", "pairs": "i32"},
        constants={"SCANNED": config.tile},
        warps=config.warps,
        stages=config.stages,
    )


def place_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=f"{case_name(key)} place",
        kernel=grouped_experts.place_kernel,
        types={"experts_ptr": "*i32", "counts_ptr": "*i32", **_PLAN, "pairs": "i32", "tiles": "i32"},
        constants={
            "EXPERTS": EXPERTS,
            "PAD": triton.next_power_of_2(EXPERTS),
            "ROWS": configs.DEFAULTS["gate_up_experts"].rows,
            "SCANNED": config.tile,
        },
        warps=config.warps,
        stages=config.stages,
    )


def gate_up_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=grouped_experts.gate_up_kernel,
        types={
            **dict.fromkeys(("x_ptr", "weights_ptr", "bias_ptr", "out_ptr"), "*bf16"),
            **_PLAN,
            **dict.fromkeys(("alpha", "limit"), "fp32"),
        },
        constants={
            "HIDDEN": HIDDEN,
            "WIDTH": WIDTH,
            "CHOSEN": CHOSEN,
            "BIAS": True,
            "CLAMP": True,
            "ROWS": config.rows,
            "TILE": config.tile,
            "COLUMNS": grouped_experts.COLUMNS,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=2 * grouped_experts.COLUMNS * (config.rows + 2 * config.tile),
    )


def down_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=grouped_experts.down_kernel,
        types={**dict.fromkeys(("x_ptr", "weights_ptr", "bias_ptr", "out_ptr"), "*bf16"), **_PLAN},
        constants={
            "HIDDEN": HIDDEN,
            "WIDTH": WIDTH,
            "BIAS": True,
            "ROWS": config.rows,
            "TILE": config.tile,
            "COLUMNS": grouped_experts.COLUMNS,
        },
        warps=config.warps,
        stages=config.stages,
        tile_bytes=2 * grouped_experts.COLUMNS * (config.rows + config.tile),
    )


def combine_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    return Case(
        name=case_name(key),
        kernel=grouped_experts.combine_kernel,
        types={"answers_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
        constants={"HIDDEN": HIDDEN, "CHOSEN": CHOSEN, "TILE": config.tile},
        warps=config.warps,
        stages=config.stages,
    )
