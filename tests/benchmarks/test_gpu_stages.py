"""Parts of the GPU benchmark that fail, die, or never end: each is told, and none costs another anything."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import stages
from benchmarks.gpu.card import Card, Line
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.parts import Part
from benchmarks.gpu.stages import PartOutcome, run

HERE = "tests.benchmarks.test_gpu_stages"


@pytest.fixture(scope="module", autouse=True)
def no_server_left() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def fine(card: Card) -> list[Line]:
    return [{"what": "fine"}]


def fails(card: Card) -> Iterator[Line]:
    yield {"what": "before it failed"}
    print("said on the way")
    raise ValueError("broken on purpose")


def dies(card: Card) -> Iterator[Line]:
    yield {"what": "before it died"}
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(card: Card) -> Iterator[Line]:
    """A part that hangs, and has a process of its own that hangs as well."""
    child = os.fork()
    if not child:
        signal.pause()
    yield {"what": "before it hung", "child": child}
    signal.pause()


def leaves_one(card: Card) -> Iterator[Line]:
    child = os.fork()
    if not child:
        signal.pause()
    yield {"what": "left", "child": child}


def ended(
    *parts: tuple[str, float], heard: Callable[[str, Line], None] = lambda name, line: None
) -> dict[str, PartOutcome]:
    outcomes: dict[str, PartOutcome] = {}
    table = {name: Part(f"{HERE}:{name}", budget_s) for name, budget_s in parts}
    run(table, dry_card, heard, outcomes.__setitem__)
    return outcomes


def test_a_part_that_fails_or_dies_costs_the_others_nothing() -> None:
    """Guards the rest of a run on a machine that is there for minutes, and the lines that a part had by then."""
    outcomes = ended(("fails", 60), ("dies", 60), ("nowhere", 60), ("fine", 60))
    assert list(outcomes) == ["fails", "dies", "nowhere", "fine"]
    failed, died, nowhere, went = outcomes.values()
    assert failed.failure == "ValueError: broken on purpose" and "said on the way" in failed.log
    assert "SIGKILL" in died.failure
    assert [line["what"] for line in failed.lines + died.lines] == [
        "before it failed",
        "before it died",
    ]
    assert "nowhere" in nowhere.failure
    assert went.lines == [{"what": "fine"}] and not went.failure


def test_a_part_that_hangs_is_ended_with_all_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the eight minutes, and the card's memory, which a process that lives on would hold. The clock goes to the
    end of the part's time as soon as the part hangs."""
    over_s = time.monotonic() + 60.0 + 60.0 + 0.5
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(stages, "time", clock)

    def heard(name: str, line: Line) -> None:
        if name == "hangs":
            skipped_s = over_s - time.monotonic()
            clock.monotonic = lambda: time.monotonic() + skipped_s

    outcomes = ended(("fine", 60), ("hangs", 60), ("leaves_one", 60), heard=heard)
    hung = outcomes["hangs"]
    assert "not over after" in hung.failure and hung.took_s < hung.limit_s + 2
    assert hung.lines, "it never began: nothing would be proven"
    assert not outcomes["leaves_one"].failure
    for name in ("hangs", "leaves_one"):
        assert _is_gone(int(outcomes[name].lines[0]["child"])), f"a process of {name} lives on"


def test_a_run_that_is_interrupted_ends_its_part() -> None:
    """Guards the card's memory after Ctrl-C, of which a part in a session of its own does not hear."""
    child = 0

    def interrupt(name: str, line: Line) -> None:
        nonlocal child
        child = int(line["child"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run({"hangs": Part(f"{HERE}:hangs", 60)}, dry_card, interrupt, lambda name, outcome: None)
    assert child and _is_gone(child)


def test_time_that_was_not_used_is_there_for_those_behind() -> None:
    outcomes = ended(("fine", 100), ("leaves_one", 10))
    assert outcomes["leaves_one"].limit_s > 60


def _is_gone(pid: int) -> bool:
    """Say whether the process is gone, or a zombie, which nobody but init can reap."""
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
