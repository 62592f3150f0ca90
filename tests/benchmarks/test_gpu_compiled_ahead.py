"""What a pool of processes has compiled is what a later launch finds in Triton's cache."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.card import Card
from benchmarks.gpu.compiled_ahead import CompilePool, Target, target_of
from benchmarks.gpu.dry import dry_card
from kernels.configs import SHARED_BYTES, TABLE, ConfigKey, KernelConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a card that is not there")
SOURCE = Path(__file__).parents[2]
DECODE = ConfigKey("decode", 64, 3, 16, "bfloat16", 90)
PREFILL = ConfigKey("prefill", 64, 3, 16, "bfloat16", 90)


def launch_again(*keys: ConfigKey) -> list[bool]:
    """Make the same launches, in another process, with tensors that have memory, as on a card. Returns whether each
    kernel was found in the cache."""
    from triton import knobs

    from benchmarks.gpu.tuned_steps import step_of
    from kernels.compile_only import compile_only

    found: list[bool] = []
    knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    with compile_only(90, SHARED_BYTES[90]) as compiled:
        for key in keys:
            step_of(dry_card_without_interpreter(), key)(TABLE[key])()
    # Each is looked up by the launch and once more by `compile_only`.
    return found[: 2 * len(compiled) : 2]


def dry_card_without_interpreter() -> Card:
    card = dry_card()
    del os.environ["TRITON_INTERPRET"]
    return card


def in_another_process(cache: Path, *keys: ConfigKey) -> subprocess.Popen[str]:
    told = "import json; from tests.benchmarks.test_gpu_compiled_ahead import *; "
    told += f"print(json.dumps(launch_again(*{keys!r})))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", told], stdout=pipe, stderr=pipe, text=True, env=environment, cwd=SOURCE
    )


def found_by(process: subprocess.Popen[str]) -> list[bool]:
    with process:
        told, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    return list(json.loads(told))


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found_by_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards compiling ahead for nothing: another constant, type or alignment than that of the launch, or another
    folder, and each candidate is compiled a second time while the card waits."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "ahead"))
    elsewhere = in_another_process(tmp_path / "elsewhere", DECODE)
    pool = CompilePool(target_of(dry_card()))
    try:
        answers = [pool.ask(key, [TABLE[key]])[TABLE[key]] for key in (DECODE, PREFILL)]
        assert [answer.result(240) for answer in answers] == ["", ""]
    finally:
        pool.close()
    again = in_another_process(tmp_path / "ahead", DECODE, PREFILL)
    assert found_by(elsewhere) == [False, False]
    assert found_by(again) == [True, True, True]


def test_what_the_card_has_no_room_for_is_refused_before_it_is_timed() -> None:
    """Guards the minutes of a card against candidates that cannot run, and a pool that is lost with one of them."""
    card = dry_card()
    whole = replace(card, dtype=torch.bfloat16, sizes=replace(card.sizes, unit=1, heads=8, kv_heads=1, batch=1))
    pool = CompilePool(Target(replace(whole, device=torch.device("meta")), 90))
    key = ConfigKey("prefill", 256, 8, 64, "bfloat16", 90)
    too_large, fits = KernelConfig(64, 8, 3, 128), TABLE[key]
    try:
        answers = pool.ask(key, [too_large, fits])
        refused, taken = (answers[config].result(240) for config in (too_large, fits))
    finally:
        pool.close()
    assert refused.startswith("OutOfResources") and "262144" in refused and "232448" in refused
    assert taken == ""
