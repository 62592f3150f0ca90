"""Tasks of the GPU benchmark that are refused, fail, die or never end: each costs itself and nothing else."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import correct, isolated
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.isolated import Failure

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its tasks stand in for those of a card")


def behave(card: Card, task: str) -> Line:
    if task == "is refused":
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(262144, 232448, "shared memory")
    if task == "poisons":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    if task == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "hangs":
        signal.pause()
    return {"process": os.getpid(), "device": card.device.type}


@pytest.mark.slow
def test_a_task_that_breaks_its_process_costs_one_task() -> None:
    """Guards all that comes behind an illegal access, and behind a process that is gone or never answers."""
    tasks = ["first", "is refused", "second", "poisons", "third", "dies", "fourth", "hangs", "fifth"]
    began_s = time.monotonic()
    told: dict[str, Any] = dict(isolated.each(tasks, behave, dry_card(), limit_s=2))
    assert list(told) == tasks
    assert "OutOfResources" in told["is refused"] and "262144" in told["is refused"]
    assert told["poisons"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert told["dies"] == "its process died: SIGSEGV"
    assert "not over after" in told["hangs"] and time.monotonic() - began_s < isolated.START_S * 5
    processes = [told[name]["process"] for name in ("first", "second", "third", "fourth", "fifth")]
    assert processes[0] == processes[1], "a refusal is no reason to open the card again"
    assert len(set(processes)) == 4 and os.getpid() not in processes, "a broken process went on"
    assert told["fifth"]["device"] == "cpu"
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_tasks_that_nobody_asks_for_any_more_are_not_begun() -> None:
    """Guards a budget that is over: the process ends with its iterator."""
    some = isolated.each(["first", "hangs"], behave, dry_card(), limit_s=600)
    _, told = next(some)
    assert not isinstance(told, Failure)
    some.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int(told["process"]), 0)


@pytest.mark.slow
def test_a_case_that_fails_loses_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the lines behind the first kernel that the card will not run."""
    fits = correct.CASES[8]
    broken = fits._replace(heads=fits.heads + 1)
    monkeypatch.setattr(correct, "CASES", [broken, fits])
    monkeypatch.setattr(correct, "IN_DRY_RUN", slice(None))
    failed, fine = correct.correct(dry_card())
    assert failed["right"] == 0 and "ValueError" in str(failed["failure"])
    assert str(failed["what"]).startswith("decode 10/3/64")
    assert fine["right"] == 1 and "failure" not in fine


def test_the_whole_card_gets_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards cases that no card would run, because a dry run does not."""
    asked: list[object] = []
    monkeypatch.setattr(correct.isolated, "each", lambda tasks, *rest: asked.extend(tasks) or ())
    card = dry_card()
    assert not list(correct.correct(replace(card, sizes=replace(card.sizes, unit=1))))
    assert asked == correct.CASES and len(set(asked)) == 30
