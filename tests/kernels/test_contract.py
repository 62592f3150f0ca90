"""The compile-time contract: it is complete, it can fail, and one kernel of it is compiled here. `make contract`
compiles all."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from benchmarks.gpu import correct
from kernels.configs import (
    DEFAULTS,
    SHARED_BYTES,
    TABLE,
    ConfigKey,
    KernelConfig,
    config_for,
    default_config,
    table_arch,
)
from kernels.launch import check_interpretable, interpreted
from tests.kernels.contract.cases import BUILDERS, cases
from tests.kernels.contract.check import broken_rules, regressions
from tests.kernels.contract.expert_cases import wide_cases
from tests.kernels.contract.largest_cases import largest, largest_cases, program_size
from tests.kernels.contract.launched import without_memory

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
        ("tiles_ahead", case.stages - 2),
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


def test_every_launch_of_the_first_check_is_in_the_contract() -> None:
    """Guards the first minutes on a card: a shape that `correct` runs there and nobody has compiled for it."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    card = without_memory(90)
    for version in table.values():
        for arch in (80, 90):
            recorded = version[f"sm_{arch}"]
            for case in correct.CASES:
                assert recorded[f"correct: {case.name(card)}"]["shared_bytes"] <= SHARED_BYTES[arch]
                assert case.kind == "prefill" or f"correct: merge {case.heads}/{case.head_dim}" in recorded


def test_no_shape_needs_more_shared_memory_than_there_is() -> None:
    """Guards a worker that starts and fails at its first request. Of every size of program that any head size, group
    and type comes to, the one with the most rows is in the contract."""
    table = json.loads(FILE.read_text(encoding="utf-8"))
    shapes = product(
        ("decode", "decode_shared", "prefill"),
        [*range(16, 130, 2), 160, 192, 256, 320, 512],
        [*range(1, 34), 48, 64, 71, 96, 128, 256],
        ("float16", "bfloat16", "int8", "float8_e4m3fn", "float32"),
    )
    most = {arch: largest(arch) for arch in SHARED_BYTES}
    refused = 0
    for (kernel, head_dim, group, dtype), arch in product(shapes, SHARED_BYTES):
        key = ConfigKey(kernel, head_dim, group, 64, dtype, arch)
        try:
            size, rows = program_size(key, default_config(key))
        except ValueError:
            refused += 1
            padded, wide = 1 << (max(64, head_dim) - 1).bit_length(), 2 if dtype == "float32" else 1
            assert (1 << (group - 1).bit_length()) * padded * wide > 32768, key
            continue
        assert rows <= most[arch][size][0], key
        assert rows >= group, key
    assert refused
    for version in table.values():
        for arch in SHARED_BYTES:
            for case in (*largest_cases(arch), *wide_cases(arch)):
                assert version[f"sm_{arch}"][case.name]["shared_bytes"] <= SHARED_BYTES[arch], case.name


def test_shapes_without_an_entry_get_the_default_of_their_size() -> None:
    known = ConfigKey("decode", 64, 8, 64, "bfloat16", 90)
    assert config_for(known) is TABLE[known] != default_config(known)
    assert config_for(ConfigKey("decode", 72, 2, 64, "float16", 90)) == DEFAULTS["decode"]
    assert config_for(ConfigKey("decode", 64, 71, 64, "bfloat16", 90)).rows == 128
    assert config_for(ConfigKey("prefill", 256, 8, 128, "bfloat16", 90)) == KernelConfig(32, 8, 2, 64)
    with pytest.raises(KeyError):
        config_for(ConfigKey("sort", 0, 0, 0, "float32", 90))
    with pytest.raises(ValueError, match="group of 128 heads of 512"):
        config_for(ConfigKey("decode", 512, 128, 64, "bfloat16", 90))


@pytest.mark.parametrize(("major", "arch"), [(8, 80), (9, 90), (10, 90), (12, 80)])
def test_a_gpu_gets_entries_that_fit_it(major: int, arch: int) -> None:
    """Guards a workstation's GPU of sm_120, with 99 KiB of shared memory, against what fits an H100."""
    assert table_arch(major) == arch


def test_bfloat16_is_refused_where_it_would_be_garbage() -> None:
    if interpreted():
        with pytest.raises(TypeError, match="interpreter"):
            check_interpretable(torch.zeros(1).to(torch.bfloat16))  # raises
    check_interpretable(torch.zeros(1, dtype=torch.float16))
