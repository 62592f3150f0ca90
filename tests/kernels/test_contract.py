"""The compile-time contract: it is complete, it can fail, and one kernel of it is compiled here. `make contract`
compiles all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from kernels.configs import DEFAULTS, TABLE, ConfigKey, config_for
from kernels.launch import check_interpretable, interpreted
from tests.kernels.contract.cases import BUILDERS, cases
from tests.kernels.contract.check import broken_rules, regressions

FILE = Path(__file__).parent / "contract" / "contract.json"


def test_every_configuration_is_in_the_contract() -> None:
    """Guards against an entry, or a kernel, whose machine code nobody looks at."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    assert triton.__version__ in table
    for version in table.values():
        for arch in (80, 90):
            assert set(version[f"sm_{arch}"]) == {case.name for case in cases(arch)}
    assert set(BUILDERS) == set(DEFAULTS) == {key.kernel for key in TABLE}
    assert len({case.name for case in cases(90)}) == len(cases(90))


def test_the_recorded_contract_breaks_no_house_rule() -> None:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    for version in table.values():
        for arch in (80, 90):
            for case in cases(arch):
                assert broken_rules(case, arch, version[f"sm_{arch}"][case.name]) == [], case.name


def test_worse_machine_code_is_noticed() -> None:
    """Guards the guard, at each count."""
    case = next(case for case in cases(90) if case.name == "decode d128 g4 b64 bfloat16")
    table = json.loads(FILE.read_text(encoding="utf-8"))
    good = table[triton.__version__]["sm_90"][case.name]
    assert regressions(good, good) == []
    for name, change in [
        ("registers", 1),
        ("narrow_loads", 1),
        ("matrix", -1),
        ("tiles_ahead", -1),
    ]:
        assert len(regressions(good, {**good, name: good[name] + change})) == 1
    for name, value in [
        ("spill_instructions", 1),
        ("tiles_ahead", 1),
        ("shared_bytes", 240_000),
        ("matrix", 0),
        ("half_copies", 8),
        ("byte_loads", 64),
    ]:
        assert len(broken_rules(case, 90, {**good, name: value})) == 1


def test_one_kernel_compiles_to_its_contract() -> None:
    """Guards the tool itself, in a process of its own: this one may run Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.kernels.contract",
            "--arch",
            "90",
            "--only",
            "decode d128 g4 b64 bfloat16",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=FILE.parent.parent.parent.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the contract holds" in done.stdout and "matrix=" in done.stdout


def test_shapes_without_an_entry_get_the_default_with_room_for_the_group() -> None:
    known = ConfigKey("decode", 128, 4, 64, "bfloat16", 90)
    assert config_for(known) is TABLE[known]
    assert config_for(ConfigKey("decode", 72, 2, 64, "float16", 90)) == DEFAULTS["decode"]
    assert config_for(ConfigKey("decode", 64, 71, 64, "bfloat16", 90)).rows == 128
    with pytest.raises(KeyError):
        config_for(ConfigKey("sort", 0, 0, 0, "float32", 90))


def test_bfloat16_is_refused_where_it_would_be_garbage() -> None:
    if interpreted():
        with pytest.raises(TypeError, match="interpreter"):
            check_interpretable(torch.zeros(1).to(torch.bfloat16))  # raises
    check_interpretable(torch.zeros(1, dtype=torch.float16))
