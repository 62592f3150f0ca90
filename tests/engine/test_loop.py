"""The order in which a turn's effects leave the engine, and the thread that takes the turns. The same loop is driven by
whole workers in tests/worker/test_worker.py and tests/integration, and by the simulator's clock in tests/sim."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.kv.manager import KVCacheManager
from engine.kv.tiers.tiers import Tiers
from engine.loop import BusyTime, Engine, EngineThread, Inbox, Ran
from engine.step import StepPlan


class Turns:
    """Scheduler, runner and mover of tiers in one, which write down who was called, with what time."""

    leaving = False
    waiting_requests = running_requests = 0
    slots = (0, 0)
    is_idle = True

    def __init__(self, plan: StepPlan | None = None, has_tiers: bool = False, ahead: bool = False) -> None:
        tiers = Tiers(4, 4096) if has_tiers else None
        self.manager = KVCacheManager(2, 4, "m", tiers)
        self.log: list[str] = []
        self.next = plan
        self._now = 0.0
        self.engine: Engine[str, str] = Engine(
            self, Run(self), self._clock, self._publish, self if has_tiers else None, ahead  # type: ignore[arg-type]
        )

    kv = property(lambda self: self.manager)

    def _clock(self) -> float:
        self._now += 1.0
        return self._now

    def _publish(self, commands: Sequence[str]) -> None:
        self.log += [f"publish {command}" for command in commands]

    def _touch(self, commands: list[str]) -> list[str]:
        """Evict whatever is there into the tiers, and hand a block out."""
        lease = self.manager.acquire(b"", [len(self.log)] * 8, match_limit=0, room_tokens=8)
        assert lease is not None
        self.manager.commit(lease, [len(self.log)] * 8)
        self.manager.release(lease)
        return commands

    def check(self) -> None: ...

    def check_requests(self) -> None: ...

    def handle(self, event: str, now: float) -> list[str]:
        self.log.append(f"handle {event} at {now:g}")
        return self._touch([event])

    def tick(self, now: float) -> list[str]:
        self.log.append(f"tick at {now:g}")
        return ["ticked"]

    def plan(self, now: float) -> tuple[StepPlan | None, list[str]]:
        self.log.append("plan")
        return self.next, ["planned"]

    def complete(self, plan: StepPlan, drawn: Sequence[Any], now: float) -> list[str]:
        self.log.append(f"complete {list(drawn)} at {now:g}")
        return ["completed"]

    def save(self, moves: Sequence[object]) -> None:
        self.log += ["save"] * bool(moves)

    def submit(self, moves: Sequence[object]) -> None:
        self.log += ["submit"] * bool(moves)


class Run:
    """The runner's side of `Turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.kv = self

    def advance(self, blocks: Sequence[int]) -> None:
        self._turns.log.append(f"advance {len(blocks)}")

    def launch(self, plan: StepPlan) -> "Step":
        self._turns.log.append("launch")
        return Step(self._turns)


class Step:
    """A step that draws a 9 and begins 0.5 s after the one before it has ended."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def wait(self) -> list[int]:
        self._turns.log.append("wait")
        return [9]

    def idle_s(self, before: "Step") -> float:
        assert before is not self
        return 0.5


PLANNED = ["plan", "publish planned", "launch"]


def test_what_was_decided_before_a_step_is_heard_before_it_runs() -> None:
    turns = Turns(StepPlan(()))
    assert turns.engine.step() == Ran(StepPlan(()), 1.0, None) and turns.engine.steps == 1
    assert turns.log == [
        "tick at 1", "publish ticked", *PLANNED, "wait", "complete [9] at 2", "publish completed",
    ]  # fmt: skip
    assert not turns.engine.is_busy


def test_planned_ahead_a_step_is_launched_before_the_one_before_it_is_waited_for() -> None:
    """Guards the order that keeps a device busy, and the last step, behind which nothing comes."""
    turns = Turns(StepPlan((), number=1), ahead=True)
    assert turns.engine.step() is None and turns.engine.is_busy
    assert turns.log == ["tick at 1", "publish ticked", *PLANNED], "nobody has waited"
    turns.log.clear()
    turns.next = StepPlan((), number=2)
    assert turns.engine.step() == Ran(StepPlan((), number=1), 2.0, None)
    ended = ["wait", "complete [9] at 3", "publish completed"]
    assert turns.log == ["tick at 2", "publish ticked", *PLANNED, *ended]
    turns.log.clear()
    turns.next = None
    assert turns.engine.step() == Ran(StepPlan((), number=2), 2.0, 0.5), "since the step before it ended, at 3"
    assert "launch" not in turns.log and turns.log[-3:] == ["wait", "complete [9] at 5", "publish completed"]
    assert not turns.engine.is_busy and turns.engine.steps == 2


def test_a_step_under_way_counts_as_far_as_it_is() -> None:
    """Guards a page that shows more than a second of steps in a second: a step of 40 s that is told of when it ends.
    Looked at every second, an engine is busy, or idle, for just that second."""
    now = 0.0
    busy = BusyTime(lambda: now)
    seen = [busy.seconds()]
    for second in range(1, 100):
        now = float(second)
        if second in (10, 70):
            busy.begin(now - 0.5)
        if second == 50:
            busy.begin(now)
            busy.end(now - 0.25, follows=True)
        if second in (60, 80):
            busy.end(now, follows=False)
        seen.append(busy.seconds())
        gone = {state: seconds - seen[-2][state] for state, seconds in seen[-1].items()}
        assert sum(gone.values()) == pytest.approx(1.0) and min(gone.values()) >= 0, second
    assert seen[40]["busy"] == 30.5 and seen[-1] == pytest.approx({"busy": 61.0, "idle": 38.0})


def test_what_is_read_of_an_engine_never_falls() -> None:
    """Guards a counter that Prometheus would take for a worker that was started again: a step that began before the
    clock was read, as its thread sees it, and ended after."""
    now = 5.0
    busy = BusyTime(lambda: now)
    busy.begin(1.0)
    first = busy.seconds()
    busy.end(4.0, follows=False)
    assert first == {"busy": 4.0, "idle": 0.0} and busy.seconds() == first
    now = 7.0
    assert busy.seconds() == {"busy": 4.0, "idle": 2.0}


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_tells_its_time(ahead: bool) -> None:
    turns = Turns(StepPlan(()), ahead=ahead)
    turns.engine.busy.seconds()
    for _ in range(3):
        turns.engine.step()
    told = turns.engine.busy.seconds()
    # The clock ticks whenever somebody asks: at the plan of each step and at its end, and here.
    assert told == ({"busy": 5.0, "idle": 1.0} if ahead else {"busy": 3.0, "idle": 4.0})


@pytest.mark.parametrize("ahead", [False, True])
def test_a_time_without_work_is_not_counted_as_idle(ahead: bool) -> None:
    turns = Turns(StepPlan(()), ahead=ahead)
    turns.engine.step()
    assert (ran := turns.engine.step()) is not None and ran.idle_s == (None if ahead else 0.5)
    turns.next = None
    while turns.engine.step() is not None:
        pass
    turns.next = StepPlan(())
    idle = [ran.idle_s for ran in (turns.engine.step(), turns.engine.step(), turns.engine.step()) if ran is not None]
    assert idle == [None, 0.5, 0.5][: 2 if ahead else 3]


def test_a_step_that_nobody_wants_any_more_is_waited_for_and_not_completed() -> None:
    """Guards the memory of an engine that ends: a device would go on writing to it."""
    turns = Turns(StepPlan(()), ahead=True)
    turns.engine.step()
    turns.engine.drain()
    turns.engine.drain()
    assert turns.log[-1] == "wait" and turns.log.count("wait") == 1 and not turns.engine.is_busy


def test_without_a_plan_nothing_runs() -> None:
    turns = Turns()
    assert turns.engine.step() is None and turns.engine.steps == 0
    assert "launch" not in turns.log and turns.log[-1] == "publish planned"


def test_a_block_is_saved_then_advanced_and_only_then_heard_of() -> None:
    """Guards a peer that hears of a block while its memory shows the old generation, and a tier that saves a block
    after it was handed out anew."""
    turns = Turns(has_tiers=True)
    turns.engine.receive(["a", "b"])
    assert turns.log == [
        "handle a at 1", "advance 2", "publish a", "handle b at 1", "save", "advance 2", "submit", "publish b",
    ]  # fmt: skip


def test_an_inbox_gives_what_came_in_order() -> None:
    inbox = Inbox()
    assert inbox.take(0.0) == []
    for item in ("a", None, "b"):
        inbox.put(item)
    assert inbox.take(10.0) == ["a", "b"]
    inbox.put(None)
    assert inbox.take(10.0) == [], "it only wakes"


class Listener:
    """A shell that ends its thread when it has heard `last`, and settles while `settling` says so."""

    def __init__(self, last: object, settling: Callable[[list[object]], bool] = lambda heard: False) -> None:
        self.inbox = Inbox()
        self.thread = EngineThread("engine", self.inbox, self, idle_s=10.0, linger_s=10.0)
        self.heard: list[object] = []
        self.steps: list[int] = []
        self.due_s: list[float] = []
        self._last = last
        self._settling = settling

    def hear(self, items: list[object]) -> None:
        self.heard += items

    def is_settling(self) -> bool:
        return self._settling(self.heard)

    def rest_s(self) -> float:
        return self.due_s.pop(0) if self.due_s else float("inf")

    def step(self) -> bool:
        self.steps.append(len(self.heard))
        if "fail" in self.heard:
            raise RuntimeError("no more")
        if self._last in self.heard:
            self.thread.end()
        return False

    def run(self) -> None:
        self.thread.start()
        assert self.thread.ended.wait(10.0)
        self.thread.stop(10.0)


def test_a_step_waits_for_news_that_is_due() -> None:
    """Guards a chunk that lands now from joining only the step after the next one."""
    shell = Listener("landed", settling=lambda heard: "landed" not in heard)
    shell.inbox.put("begun")
    late = threading.Timer(0.05, shell.inbox.put, ["landed"])
    late.start()
    shell.run()
    late.join()
    assert shell.heard == ["begun", "landed"] and shell.steps == [2]


def test_news_that_do_not_end_hold_up_no_step_for_long() -> None:
    """Guards the tokens of all others from one transfer that always has something to tell."""
    shell = Listener("begun", settling=lambda heard: not shell.inbox.put("more"))
    shell.thread = EngineThread("engine", shell.inbox, shell, idle_s=10.0, linger_s=0.01)
    shell.inbox.put("begun")
    shell.run()
    assert len(shell.steps) == 1 and set(shell.heard) == {"begun", "more"}


def test_a_thread_wakes_for_a_step_that_is_due() -> None:
    """Guards streams from a step that waits for rows that never land: nothing else would wake the thread in time."""
    shell = Listener("begun")
    shell.due_s = [0.0, 0.01, 0.0]
    late = threading.Timer(0.5, shell.inbox.put, ["begun"])
    late.start()
    shell.run()
    late.join()
    assert len(shell.steps) == 4 and shell.steps[-1] == 1, "three times for what was due, once for what arrived"


def test_a_failure_ends_the_thread_and_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    shell = Listener("never")
    shell.inbox.put("fail")
    shell.run()
    assert isinstance(shell.thread.failure, RuntimeError) and "the engine has failed" in caplog.text


def test_a_thread_that_sleeps_is_stopped_at_once() -> None:
    shell = Listener("never")
    shell.thread.start()
    shell.thread.stop(5.0)
    assert shell.thread.ended.is_set() and shell.thread.failure is None
