"""What the compiler makes of a sum over ranks. What it computes: `tests/engine/ranks/test_one_shot.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from tests.kernels.contract.cases import entry_cases
(case,) = (case for case in entry_cases({arch}) if case.name == "rank_sum bfloat16")
print(case.compile({arch}).asm["ptx"])
"""
# In this order, and each as often as it says.
ORDER = [
    ("st.global.v4", "the part is written to the slot"),
    ("bar.sync", "by all threads"),
    ("atom.global.sys.release.exch", "before the others are told"),
    ("atom.global.sys.acquire.add", "whose flags are looked at"),
    ("atom.global.sys.acquire.add", "again and again"),
    ("bar.sync", "and then, by all threads"),
    ("ld.global.v4", "their slots are read"),
    ("st.global.v4", "and x is written"),
]


@pytest.mark.parametrize("arch", [80, 90])
def test_parts_are_told_after_they_are_written_and_read_after_they_are_told(arch: int) -> None:
    """Guards fences that an interpreter does not need: a scope of one device, a load that is moved before the wait, a
    cache that is not coherent. In a process of its own: this one may run Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arch=arch)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    ptx, at = re.sub(r"//.*", "", done.stdout), 0
    for instruction, why in ORDER:
        at = ptx.find(instruction, at) + 1
        assert at, f"{instruction}: {why}"
    waited = ptx.index("atom.global.sys.acquire")
    assert len(re.findall(r"atom\.global\.sys\.release\.exch", ptx)) == 1 and ".nc." not in ptx
    assert not re.search(r"ld\.global\.v4", ptx[ptx.index("atom.global.sys.release") : waited])
    last = ptx.rindex("atom.global.sys.acquire")
    assert len(re.findall(r"ld\.global\.v4", ptx[last:])) == 4 * 2, "a slot is read before the wait has ended"
