"""One turn of a worker's engine: plan, launch, complete. The same for both roles, in a thread or in a test.

    one at a time      plan n, launch n, wait for n, complete n
    planned ahead      plan n + 1, launch n + 1, wait for n, complete n: the device has its next step when it ends one

Planned ahead, a row goes on behind a token that its device has not drawn yet, so that a stop is found one step late and
that row is dropped. Which rows wait for their token is the scheduler's to say: it plans nothing then, and the step is
planned when the one under way has ended. Source: asynchronous scheduling, as in NanoFlow (Zhu et al. 2024), SGLang and
vLLM.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.kv.manager import KVCacheManager
from engine.runner import Launched, Runner
from engine.step import Drawn, StepPlan
from engine.storage.tiers.mover import TierMover
from engine.types import TokenLogprobs

log = logging.getLogger(__name__)

C = TypeVar("C")
E = TypeVar("E")
E_in = TypeVar("E_in", contravariant=True)
C_out = TypeVar("C_out", covariant=True)


class Scheduler(Protocol[E_in, C_out]):
    """Fulfilled by `PrefillScheduler` and `DecodeScheduler`. What changes the state returns commands for the shell."""

    kv: KVCacheManager
    leaving: bool

    @property
    def waiting_requests(self) -> int: ...

    @property
    def running_requests(self) -> int: ...

    @property
    def slots(self) -> tuple[int, int]:
        """Token slots that leases hold: those with a token's KV in them, and all."""

    @property
    def is_idle(self) -> bool:
        """True when it holds nothing for anybody."""

    def check(self) -> None:
        """Recompute the invariants."""

    def check_requests(self) -> None:
        """Do so but for the blocks."""

    def handle(self, event: E_in, now: float) -> Sequence[C_out]: ...

    def tick(self, now: float) -> Sequence[C_out]: ...

    def plan(self, now: float) -> tuple[StepPlan | None, Sequence[C_out]]:
        """Return the next step, behind one that was planned and is not complete yet, if there is one; never more."""

    def scored(self, plan: StepPlan, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Take what the scored rows of a step say of their prompts; `complete` of the same step follows."""

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn], now: float) -> Sequence[C_out]: ...


class Ran(NamedTuple):
    """A step that has ended."""

    plan: StepPlan
    seconds: float
    """Since it began to be planned, or since the step before it ended, if that was later."""
    idle_s: float | None
    """The time that the device was idle between the step before and this one; None where nothing was to be computed."""


class BusyTime:
    """How long an engine has been in steps, the one under way included: what only counts a step when it ends shows more
    than a second of them in a second. Written by the engine's thread, read by one other."""

    # Mutable state. Of the engine, replaced as a whole: seconds of what has ended, and since when a step is under way.
    # Of the reader: when it first looked, and what it saw last.

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state: tuple[float, float | None] = (0.0, None)
        self._looked_s: float | None = None
        self._seen = (0.0, 0.0)

    def begin(self, at_s: float) -> None:
        """A step is under way, if none was."""
        ended_s, since_s = self._state
        self._state = (ended_s, at_s if since_s is None else since_s)

    def end(self, at_s: float, follows: bool) -> None:
        """A step has ended; `follows`: the next one is under way."""
        ended_s, since_s = self._state
        self._state = (ended_s + at_s - (at_s if since_s is None else since_s), at_s if follows else None)

    def seconds(self) -> dict[str, float]:
        """Return how long the engine was busy, and how long it was idle since this was first asked. Neither ever falls,
        whatever the engine does meanwhile."""
        now = self._clock()
        ended_s, since_s = self._state
        busy_s = ended_s if since_s is None else ended_s + max(now - since_s, 0.0)
        if self._looked_s is None:
            self._looked_s = now - busy_s
        busy_s = max(busy_s, self._seen[0])
        self._seen = (busy_s, max(now - self._looked_s - busy_s, self._seen[1]))
        return dict(zip(("busy", "idle"), self._seen, strict=True))


class _Step(NamedTuple):
    plan: StepPlan
    launched: Launched
    at_s: float
    before: Launched | None


class Engine(Generic[E, C]):
    """A scheduler with its runner. `publish` carries commands out; it is called before a step runs and after it, so
    that nobody waits for a step to hear what was decided before it. Owner: one thread."""

    # Mutable state: the step under way, the one launched last unless the device had nothing to do since, and when the
    # latest ended.

    def __init__(
        self,
        scheduler: Scheduler[E, C],
        runner: Runner,
        clock: Callable[[], float],
        publish: Callable[[Sequence[C]], None],
        tiers: TierMover | None = None,
        ahead: bool = False,
    ) -> None:
        """`tiers` moves what the manager's tiers ask for, if it has any. `ahead`: plan a step while one runs."""
        self._tiers = tiers
        self._ahead = ahead
        self._under_way: _Step | None = None
        self._latest: Launched | None = None
        self._ended_at = 0.0
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._publish = publish
        self.busy = BusyTime(clock)
        self.steps = 0

    def receive(self, events: Iterable[E]) -> None:
        """Take events in, each acted on before the next."""
        now = self._clock()
        for event in events:
            self._carry_out(self._scheduler.handle(event, now))

    @property
    def is_busy(self) -> bool:
        """True while a step is under way between turns."""
        return self._under_way is not None

    def step(self) -> Ran | None:
        """Launch the next step, if there is anything to compute, and wait for the one that was under way; without
        planning ahead, for the same one. Return the step that has ended, if any has."""
        now = self._clock()
        self._carry_out(self._scheduler.tick(now))
        plan, commands = self._scheduler.plan(now)
        self._carry_out(commands)
        ending, following = self._under_way, None
        if plan is not None:
            before = self._latest
            self.busy.begin(now)
            self._latest = self._runner.launch(plan)
            following = _Step(plan, self._latest, now, before)
        if ending is None and not self._ahead:
            ending, following = following, None
        self._under_way = following
        if ending is None:
            if following is None:
                self._latest = None
            return None
        return self._end(ending)

    def drain(self) -> None:
        """Wait for the step under way, whose result nobody wants any more."""
        if self._under_way is not None:
            self._under_way.launched.wait()
            self._under_way = None

    def _end(self, step: _Step) -> Ran:
        drawn = step.launched.wait()
        ended = self._clock()
        self.busy.end(ended, follows=self._under_way is not None)
        self.steps += 1
        if step.plan.is_scored:
            self._scheduler.scored(step.plan, step.launched.scores())
        self._carry_out(self._scheduler.complete(step.plan, drawn, ended))
        idle_s = None if step.before is None else step.launched.idle_s(step.before)
        began, self._ended_at = max(step.at_s, self._ended_at), ended
        return Ran(step.plan, ended - began, idle_s)

    def _carry_out(self, commands: Sequence[C]) -> None:
        kv = self._scheduler.kv
        moves = () if kv.tiers is None else kv.tiers.take_commands()
        if moves and self._tiers is not None:
            self._tiers.save(moves)
        # Readers in other processes must find the new generation before anybody hears of the block.
        handed_out = kv.take_handed_out()
        if handed_out:
            self._runner.kv.advance(handed_out)
        if moves and self._tiers is not None:
            self._tiers.submit(moves)
        if commands:
            self._publish(commands)


class RequestLedger:
    """What a scheduler keeps of its requests. Fulfils `telemetry.audit.Ledger`; its blocks have ledgers of their own.
    """

    def __init__(self, scheduler: Scheduler[E, C]) -> None:
        self._scheduler = scheduler

    def check(self) -> None:
        """Recompute the invariants."""
        self._scheduler.check_requests()

    def __repr__(self) -> str:
        return repr(self._scheduler)


class Shell(Protocol):
    """The part of a worker that an engine thread drives; all calls come from that thread."""

    def hear(self, items: list[object]) -> None:
        """Take in what has arrived, in order."""

    def is_settling(self) -> bool:
        """True while news is expected within milliseconds that the next step should know of: a copy, a digest."""

    def rest_s(self) -> float:
        """Return how long the engine may sleep at most though nothing arrives: until a step that waits is due."""

    def step(self) -> bool:
        """Run the next step, if there is one. True: there may be more to compute."""


class Inbox:
    """A queue of what the other threads tell an engine, in order."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[object] = queue.SimpleQueue()

    def put(self, item: object) -> None:
        """Add an item, from any thread; never blocks. None only wakes the engine."""
        self._items.put(item)

    def take(self, wait_s: float) -> list[object]:
        """Return all that has arrived; waits up to `wait_s` for the first of it."""
        items: list[object] = []
        try:
            items.append(self._items.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return [item for item in items if item is not None]


class EngineThread:
    """Hears and steps until it is stopped.

    With nothing to compute the thread sleeps until something arrives, a step is due or `idle_s` has passed. While
    transfers settle, a step waits for them, but never longer than `linger_s`: a chunk that lands now joins this step,
    not the next one. If the shell raises, the thread ends and `failure` says why.
    """

    def __init__(self, name: str, inbox: Inbox, shell: Shell, idle_s: float, linger_s: float = 0.005) -> None:
        self._inbox = inbox
        self._shell = shell
        self._idle_s = idle_s
        self._linger_s = linger_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = False
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Make this turn the last one; called from within the shell."""
        self._stopping = True

    def stop(self, timeout_s: float) -> None:
        """Let the step under way finish, then end the thread."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        busy = False
        try:
            while not self._stopping:
                self._shell.hear(self._inbox.take(0.0 if busy else min(self._idle_s, self._shell.rest_s())))
                self._linger()
                busy = self._shell.step()
        except BaseException as error:  # whatever it was: the owner ends the process
            self.failure = error
            log.exception("the engine has failed")
        finally:
            self.ended.set()

    def _linger(self) -> None:
        deadline_s = time.monotonic() + self._linger_s
        while self._shell.is_settling():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not (items := self._inbox.take(left_s)):
                return
            self._shell.hear(items)
