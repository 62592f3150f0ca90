"""Carries one row out: waits for its moment, strikes, and judges what became of the requests."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

from tests.chaos import faults
from tests.chaos.faults import NoEffectError
from tests.chaos.ground import MODES, Ask, Ground, tokens
from tests.chaos.rows import (
    ANSWER_TOKENS,
    COLLATERAL,
    FROZEN_S,
    PAUSED_S,
    PROMPT_TOKENS,
    Ending,
    Fault,
    Moment,
    Row,
)

PROMPTS = {"victim": tokens(PROMPT_TOKENS, 1), "bystander": tokens(PROMPT_TOKENS, 2)}
END_S = 40.0
TRIES = 5
"""How often a fault is tried that comes too late, as on a machine that is busy with other things."""
SETTLE_S = 3.0
KEEPALIVE_S = 2.0
"""A peer that does not answer is lost by then."""
MARGIN_S = 4.0
"""Time for reports, ticks and polls on two busy cores, beside what the timers say."""
STOPPED_S, RUNNING_S, STOPS = 0.35, 0.05, 8
"""Times of a stutter: a stop stays under the second after which a silent peer is asked whether it lives."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The workers that serve a request, by name."""

    prefill: str
    decode: str

    def targets(self, row: Row) -> list[str]:
        return [self.prefill if role == "prefill" else self.decode for role in row.targets]


class Reference:
    """Answers of fault-free runs, made once on whatever cluster asks first."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], list[int]] = {}

    def make(self, ground: Ground) -> None:
        for mode in MODES:
            if ("victim", mode) not in self._answers:
                for name, prompt in PROMPTS.items():
                    ask = ground.ask(prompt, mode, ANSWER_TOKENS, f"reference-{mode}")
                    ask.join(END_S)
                    assert ask.finished is not None, ask.error
                    assert len(ask.tokens) == ANSWER_TOKENS
                    self._answers[name, mode] = ask.tokens
        greedy, seeded = (self._answers["victim", mode] for mode in MODES)
        assert greedy != seeded, "the seeded run draws nothing"

    def judge(self, ask: Ask, name: str, mode: str) -> Ending:
        """Judge how a request ended. Fails on a wrong token, and on any error but UNAVAILABLE."""
        whole = self._answers[name, mode]
        if ask.error is not None:
            assert ask.error.code == "UNAVAILABLE", f"{name}: {ask.error.code}: {ask.error}"
            assert ask.tokens == whole[: len(ask.tokens)], f"{name}: wrong tokens before the error"
            return Ending.UNAVAILABLE
        assert ask.finished is not None, f"{name} ended without a word"
        assert ask.tokens == whole, f"{name}: wrong tokens: {ask.tokens}, not {whole}"
        return Ending.EXACT


def run_row(ground: Ground, reference: Reference, row: Row, number: int) -> None:
    """Two requests, one greedy and one seeded; the fault strikes the workers that serve the first. One that comes too
    late proves nothing, and is tried again with new requests."""
    for again in range(TRIES):
        ground.settle(SETTLE_S)
        asks: list[Ask] = []
        try:
            modes = list(MODES) if number % 2 == 0 else list(MODES)[::-1]
            _try_row(ground, reference, row, modes, f"{number}.{again}", asks)
            return
        except NoEffectError:
            if again == TRIES - 1:
                raise
            for ask in asks:
                ask.join(END_S)


def _try_row(
    ground: Ground, reference: Reference, row: Row, modes: list[str], name: str, asks: list[Ask]
) -> None:
    """Carry the row out once. Afterwards every worker is there under its name: in a new life where the fault ended the
    old one, otherwise in the same. `asks` takes the requests that were made. Raises NoEffectError."""
    tenant = f"{row}-{name}"
    with ExitStack() as held:
        if row.moment is Moment.ASKED:
            serving = _asked(ground, modes[0], tenant, held, asks)
        else:
            asks.append(ground.ask(PROMPTS["victim"], modes[0], ANSWER_TOKENS, tenant))
            serving = Serving(ground.busy("prefill"), ground.busy("decode"))
            if row.moment is Moment.SENDING:
                sending(ground, serving.prefill)
        asks.append(ground.ask(PROMPTS["bystander"], modes[1], ANSWER_TOKENS, tenant))
        victim, bystander = asks
        if row.moment is Moment.TOKEN:
            victim.wait_tokens(row.token)
        if victim.over:
            raise NoEffectError("the victim was over before the fault")
        lives = dict(ground.cluster.workers)
        struck = serving.targets(row)
        strike(ground, row.fault, struck, row.rank)
    for ask in asks:
        ask.join(END_S)
    endings = [
        reference.judge(ask, prompt, mode)
        for ask, prompt, mode in zip(asks, PROMPTS, modes, strict=True)
    ]
    assert endings[0] in row.expect, f"the victim's end is {endings[0]}: {victim.error}"
    # Whoever shares both workers with the victim loses both as well.
    collateral = row.expect if len(row.targets) > 1 else COLLATERAL
    assert endings[1] in collateral, f"the bystander failed: {bystander.error}"
    ended = struck if row.fault in (Fault.KILL, Fault.STOP) else []
    for worker in ended:
        ground.replaced(worker, lives[worker].pid)
    ground.settle(SETTLE_S)
    for worker, life in lives.items():
        up = ground.cluster.workers[worker]
        is_same = (up.pid, up.incarnation) == (life.pid, life.incarnation)
        is_new = up.pid != life.pid and up.incarnation != life.incarnation
        assert is_new if worker in ended else is_same, f"{worker} was {life}, and is {up}"


def strike(ground: Ground, fault: Fault, names: list[str], rank: int = 0) -> None:
    """Strike all of them at once, each in this rank's process. Returns when it is done; raises NoEffectError if it did
    not happen."""
    pids = [ground.rank_pid(name, rank) if rank else ground.pid(name) for name in names]
    match fault:
        case Fault.KILL:
            for pid in pids:
                faults.kill(pid)
        case Fault.FREEZE:
            with faults.frozen(*pids):
                time.sleep(FROZEN_S)
        case Fault.PAUSE:
            with faults.frozen(*pids):
                time.sleep(PAUSED_S)
        case Fault.STOP:
            for pid in pids:
                faults.freeze(pid)
            for pid in pids:
                faults.killed_within(pid, ground.hung_s + KEEPALIVE_S + MARGIN_S)
        case Fault.CUT:
            if not all(ground.proxy(name).cut() for name in names):
                raise NoEffectError(f"{names}: no stream was there to be cut")
        case Fault.STUTTER:
            for pid in pids:
                faults.stutter(pid, STOPS, STOPPED_S, RUNNING_S)


def _asked(
    ground: Ground, mode: str, tenant: str, held: ExitStack, asks: list[Ask]
) -> Serving:
    """Place a request that stays reserved while no prefill worker can move. Which one it was given is told by the bytes
    that wait for it. They are held until the fault has struck."""
    prefill = ground.of("prefill")
    held.enter_context(faults.frozen(*(ground.pid(name) for name in prefill)))
    before = {name: ground.proxy(name).bytes_in for name in prefill}
    asks.append(ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, tenant))
    decode = ground.busy("decode")
    deadline_s = time.monotonic() + 1.0
    while True:
        grown = {name: ground.proxy(name).bytes_in - before[name] for name in prefill}
        first, second = sorted(grown, key=grown.__getitem__, reverse=True)[:2]
        if grown[first] > 2 * grown[second] and grown[first] > 50:
            return Serving(first, decode)
        if time.monotonic() > deadline_s:
            raise NoEffectError(f"no prefill worker was asked: bytes by worker {grown}")
        time.sleep(0.002)


def ask_and_catch_sending(ground: Ground, mode: str, tenant: str) -> tuple[Ask, Serving]:
    """Ask the victim's prompt, and return while its blocks are being sent. A prompt that was computed too soon is asked
    again, for another tenant, whose cache is empty. Raises NoEffectError after `TRIES`."""
    for again in range(TRIES):
        ground.settle(SETTLE_S)
        ask = ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, f"{tenant}-{again}")
        try:
            serving = Serving(ground.busy("prefill"), ground.busy("decode"))
            sending(ground, serving.prefill)
            return ask, serving
        except NoEffectError:
            ask.join(END_S)
            if again == TRIES - 1:
                raise
    raise AssertionError("unreachable")


def sending(ground: Ground, prefill: str) -> None:
    """Wait until two more of the request's steps have run, so that their blocks were offered, and it still computes."""
    first = ground.load(prefill)
    assert first is not None
    began_s = time.monotonic()
    deadline_s = began_s + 20.0
    while time.monotonic() < deadline_s:
        load = ground.load(prefill)
        is_idle = load is not None and not (load.running_requests or load.waiting_requests)
        if is_idle and time.monotonic() > began_s + 1.0:
            raise NoEffectError(f"{prefill} had computed everything before it was looked at: {load}")
        if load is not None and load.step >= first.step + 2:
            if not load.running_requests:
                raise NoEffectError(f"{prefill} had computed everything before the fault: {load}")
            return
        time.sleep(0.002)
    raise AssertionError(f"{prefill} makes no steps: {ground.load(prefill)}")
