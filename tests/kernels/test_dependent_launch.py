"""The merge of split rows as a dependent launch: what the machine code of both kernels says of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, re, sys
import torch
from benchmarks.gpu import correct
from kernels.compile_only import compile_only
from tests.kernels.contract.launched import without_memory

case = next(case for case in correct.CASES if case.kind == "decode" and case.head_dim == 128)
told = {}
for arch in (80, 90):
    card = without_memory(arch)
    with compile_only(arch, 1 << 30) as compiled:
        correct.launched(card, case, correct.random_rows(card, case))
    for kernel in compiled:
        lines = [line.strip() for line in kernel.asm["ptx"].splitlines()]
        order = [word for line in lines for word in re.findall(r"griddepcontrol.\\w+|ld.global|st.global", line)]
        told[f"{kernel.metadata.name} {arch}"] = order, kernel.metadata.launch_pdl
print(json.dumps(told))
"""


def test_the_merge_looks_at_nothing_that_is_computed_before_it_has_waited(tmp_path: Path) -> None:
    """Guards a merge that reads, or ends, before the launch that it depends on has ended: the next one would not wait
    for that either. It knows how many parts there are by then. Older devices have plain launches."""
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    merging, is_dependent = told["merge_kernel 90"]
    assert is_dependent and merging[:3] == ["ld.global", "ld.global", "griddepcontrol.wait"]
    assert merging.count("griddepcontrol.wait") == 1 and "ld.global" in merging[3:]
    first, is_dependent = told["decode_kernel 90"]
    assert not is_dependent and first[0] == "griddepcontrol.launch_dependents"
    for kernel in ("merge_kernel 80", "decode_kernel 80"):
        order, is_dependent = told[kernel]
        assert not is_dependent and not any("griddepcontrol" in word for word in order)
