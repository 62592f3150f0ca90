"""The kernels and configurations whose machine code is watched: those of `kernels.configs`, not every product; the
launches by which a card is first checked; the largest that the defaults come to; and the options of layers."""

from kernels import configs
from tests.kernels.contract.attention_cases import decode_case, merge_case, prefill_case
from tests.kernels.contract.expert_cases import (
    coded_down_case,
    coded_gate_up_case,
    combine_case,
    count_case,
    down_case,
    gate_up_case,
    place_case,
    route_case,
    wide_cases,
)
from tests.kernels.contract.largest_cases import largest_cases
from tests.kernels.contract.launched import launched_cases
from tests.kernels.contract.measure import Case, Watched
from tests.kernels.contract.other_cases import (
    coded_case,
    coded_many_case,
    coded_more_case,
    coded_some_case,
    convert_case,
    copy_case,
    float8_case,
    float8_many_case,
    float8_some_case,
    mask_case,
    merge_parts_case,
    norm_case,
    rank_sum_case,
    rope_case,
    round_case,
    silu_case,
    widen_case,
)
from tests.kernels.contract.sampling_cases import choose_case, gather_case, tops_case, weigh_case
from tests.kernels.contract.variant_cases import variant_cases

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
    "sample": tops_case,
    "choose": choose_case,
    "mask_logits": mask_case,
    "coded_linear": coded_case,
    "coded_linear_many": coded_many_case,
    "float8_linear": float8_case,
    "float8_linear_many": float8_many_case,
    "route_experts": route_case,
    "plan_experts": count_case,
    "gate_up_experts": gate_up_case,
    "down_experts": down_case,
    "coded_gate_up_experts": coded_gate_up_case,
    "coded_down_experts": coded_down_case,
    "combine_experts": combine_case,
    "rank_sum": rank_sum_case,
}

OF_HOPPER = ("float8_linear", "float8_linear_many")
"""Kernels that sm_80 has no instructions for."""

BESIDE = {
    "convert_blocks": (widen_case,),
    "coded_linear": (coded_some_case,),
    "coded_linear_many": (coded_more_case,),
    "float8_linear": (float8_some_case, round_case, merge_parts_case),
    "plan_experts": (place_case,),
    "sample": (weigh_case, gather_case),
}
"""The way back of a kernel that goes both ways, and kernels that another is never launched without."""


def cases(arch: int) -> list[Watched]:
    """Return the cases of the table's entries, those of `benchmarks.gpu.correct`, the largest of attention and of
    experts, and the variants."""
    return [
        *entry_cases(arch), *launched_cases(arch), *largest_cases(arch), *wide_cases(arch), *variant_cases(arch)
    ]  # fmt: skip


def entry_cases(arch: int) -> list[Case]:
    """One case for each entry of the configuration table for this compute capability; two for conversions and for
    the plan of experts, three for a draw's slices."""
    return [
        build(key, config)
        for key, config in configs.TABLE.items()
        if key.arch == arch and (key.kernel not in OF_HOPPER or arch >= 90)
        for build in (BUILDERS[key.kernel], *BESIDE.get(key.kernel, ()))
    ]
