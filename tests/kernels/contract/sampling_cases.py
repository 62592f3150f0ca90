"""The launches of one draw as cases of the contract, for a vocabulary of 128k."""

from typing import Any

from kernels import configs, sample, sample_slices
from tests.kernels.contract.measure import Case
from tests.kernels.contract.shapes import case_name

VOCAB = 128_256
FILTERS = {"temperature_ptr": "*fp64", "top_k_ptr": "*i64", "top_p_ptr": "*fp64"}
FOUND = {"logits_ptr": "*fp32", "tops_ptr": "*fp32", "masses_ptr": "*i64"}
BINS = {"BINS": sample_slices.BINS, "FIRST_BIN": sample_slices.FIRST_BIN, "ONE": sample.one_of(VOCAB)}


def tops_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types = {"logits_ptr": "*fp32", "tops_ptr": "*fp32", "bests_ptr": "*i32"}
    return _case(key, config, sample_slices.tops_kernel, types)


def weigh_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types = {**FOUND, **FILTERS, "counts_ptr": "*i32", "min_p_ptr": "*fp64"}
    return _case(key, config, sample_slices.weigh_kernel, types, **BINS)


def gather_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types = {**FOUND, **FILTERS, **dict.fromkeys(("counts_ptr", "listed_ptr", "ids_ptr"), "*i32")}
    constants = {**BINS, "SLACK": sample_slices.SLACK, "STEP": sample_slices.gather_step(config)}
    return _case(key, config, sample_slices.gather_kernel, types, **constants)


def choose_case(key: configs.ConfigKey, config: configs.KernelConfig) -> Case:
    types = {
        **FOUND,
        **FILTERS,
        **dict.fromkeys(("bests_ptr", "listed_ptr", "ids_ptr"), "*i32"),
        **dict.fromkeys(("tokens_ptr", "seed_ptr", "sample_index_ptr", "position_ptr"), "*i64"),
        "min_p_ptr": "*fp64",
    }
    slicing = configs.DEFAULTS["sample"]
    return _case(key, slicing, sample.choose_kernel, types, config, ONE=sample.one_of(VOCAB))


def _case(
    key: configs.ConfigKey,
    config: configs.KernelConfig,
    kernel: Any,
    types: dict[str, str],
    launch: configs.KernelConfig | None = None,
    **constants: Any,
) -> Case:
    """`config` says how a row is sliced, and, unless `launch` does, how the kernel is launched."""
    launch = launch or config
    share = -(-VOCAB // config.rows)
    sizes = {"VOCAB": VOCAB, "SLICES": config.rows, "SLICE": -(-share // config.tile) * config.tile}
    return Case(
        name=f"{case_name(key)} {kernel.__name__}",
        kernel=kernel,
        types=types,
        constants={**sizes, "TILE": launch.tile, **constants},
        warps=launch.warps,
        stages=launch.stages,
    )
