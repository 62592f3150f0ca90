"""What a kernel's machine code must be, and when it has become worse."""

from kernels.configs import SHARED_BYTES
from tests.kernels.contract.measure import Watched
from tests.kernels.contract.shapes import LARGEST

Counts = dict[str, int]

FEWER_IS_BETTER = ("registers", "shared_bytes", "narrow_loads", "half_copies", "byte_loads")
MORE_IS_BETTER = ("wide_loads", "wide_stores", "async_copies", "matrix", "tiles_ahead")
ATTENTION = ("decode_kernel", "prefill_kernel", "prefill_hopper_kernel")
PRODUCTS = (*ATTENTION, "gate_up_kernel", "down_kernel")


def too_large(arch: int, counts: Counts) -> list[str]:
    if counts["shared_bytes"] <= SHARED_BYTES[arch]:
        return []
    return [f"{counts['shared_bytes']} bytes of shared memory do not exist on sm_{arch}"]


def broken_rules(case: Watched, arch: int, counts: Counts) -> list[str]:
    """House rules that hold for every kernel, whatever was recorded before."""
    found = too_large(arch, counts)
    if case.name.startswith(LARGEST):
        return found
    if counts["stack_bytes"] or counts["spill_instructions"]:
        found.append(f"spills: {counts['stack_bytes']} bytes of stack")
    if case.tile_bytes and counts["tiles_ahead"] < case.stages - 1:
        found.append(f"{counts['tiles_ahead']} tiles ahead with {case.stages} stages")
    if case.kernel.__name__ in PRODUCTS and not counts["matrix"]:
        found.append("no matrix instructions")
    # A warp of a kernel whose parts have their own reads one byte that says which part it is.
    bytewise = counts["byte_loads"] > hasattr(case.kernel, "launch_warps")
    if bytewise or (case.kernel.__name__ in PRODUCTS and counts["half_copies"]):
        found.append("shared memory is read byte by byte, or filled 8 bytes at a time")
    return found


def regressions(before: Counts, now: Counts) -> list[str]:
    """What got worse. The compiler is deterministic, so there is no tolerance."""
    worse = [
        f"{name} {before[name]} -> {now[name]}"
        for name in FEWER_IS_BETTER
        if name in before and now[name] > before[name]
    ]
    worse += [
        f"{name} {before[name]} -> {now[name]}"
        for name in MORE_IS_BETTER
        if name in before and now[name] < before[name]
    ]
    return worse
