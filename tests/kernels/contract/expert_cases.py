"""A mixture of experts as cases of the contract: the sizes of Qwen3-30B-A3B, with the biases and clamps of gpt-oss."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton

from kernels import coded_experts, coded_linear, configs, grouped_experts
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import LARGEST, case_name

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


def _coded(key: configs.ConfigKey, config: configs.KernelConfig) -> tuple[dict[str, str], dict[str, object]]:
    """The arguments that both products of experts in codes have, and their constants."""
    offsets = {"offsets_ptr": "*fp32"} if key.dtype == "q4" else {}
    types = {
        "x_ptr": "*bf16",
        "codes_ptr": "*i8" if key.dtype == "q8" else "*u8",
        "scales_ptr": "*fp32",
        **offsets,
        **dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16"),
        **_PLAN,
    }
    constants = {
        **({} if offsets else {"offsets_ptr": None}),
        "HIDDEN": HIDDEN,
        "WIDTH": WIDTH,
        "KIND": key.dtype,
        "PART": 32,
        "OFFSETS": bool(offsets),
        "BIAS": True,
        "ROWS": config.rows,
        "TILE": config.tile,
        "STEP": coded_linear.STEP,
    }
    return types, constants


def coded_gate_up_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types, constants = _coded(key, config)
    return Case(
        name=case_name(key),
        kernel=coded_experts.coded_gate_up_kernel,
        types={**types, **dict.fromkeys(("alpha", "limit"), "fp32")},
        constants={**constants, "CHOSEN": CHOSEN, "CLAMP": True},
        warps=config.warps,
        stages=config.stages,
    )


def coded_down_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types, constants = _coded(key, config)
    return Case(
        name=case_name(key),
        kernel=coded_experts.coded_down_kernel,
        types=types,
        constants=constants,
        warps=config.warps,
        stages=config.stages,
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


def wide_cases(arch: int) -> list[Case]:
    """The products with rows of 32 bits, the most that a step's tiles take: for their shared memory alone."""
    found = []
    for key, config in configs.TABLE.items():
        if key.arch != arch or key.kernel not in _PRODUCTS:
            continue
        case = _PRODUCTS[key.kernel](key, config)
        types = {name: type_.replace("bf16", "fp32") for name, type_ in case.types.items()}
        stages = coded_experts.stages_of(config, torch.float32) if key.kernel.startswith("coded") else config.stages
        found.append(replace(case, name=f"{LARGEST}{case.name} float32", types=types, stages=stages))
    return found


_PRODUCTS: dict[str, Callable[[configs.ConfigKey, configs.KernelConfig], Case]] = {
    "gate_up_experts": gate_up_case,
    "down_experts": down_case,
    "coded_gate_up_experts": coded_gate_up_case,
    "coded_down_experts": coded_down_case,
}
