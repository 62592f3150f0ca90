"""What a pool of processes has compiled is what a later launch finds in Triton's cache."""

import json
import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.slow
@pytest.mark.parametrize("deed", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_of_a_pool_whose_owner_is_killed(deed: signal.Signals) -> None:
    """Guards a machine on which a run was cut short: processes of the pool waited for work for ever."""
    told = f"from tests.benchmarks.test_gpu_compiled_ahead import *; own_a_pool({DECODE!r})"
    with subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.PIPE, text=True, cwd=SOURCE) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert pids and all(map(is_there, pids))
        owner.send_signal(deed)
    deadline_s = time.monotonic() + 20
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline_s, f"{[pid for pid in pids if is_there(pid)]} are left"
        time.sleep(0.05)


def own_a_pool(key: ConfigKey) -> None:
    pool = CompilePool(target_of(dry_card()))
    (answer,) = pool.ask(key, [TABLE[key]]).values()
    answer.result()
    print(*pool._pool._processes, flush=True)
    time.sleep(60)


def is_there(pid: int) -> bool:
    """Whether it runs: one that has ended may wait for whoever is to read how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
