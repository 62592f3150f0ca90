"""Faults of every kind, mixed at random under load, for as long as you like: `python -m tests.chaos.soak`.

Clients ask without pause, greedy, seeded and by beam search, short and long, some leave early, half of them come back
after a broken connection; meanwhile a fault strikes every few seconds, workers mostly, and now and then the router is
killed. The report counts requests by their end and faults by their kind, each shown to have taken effect. A router then
serves 10,000 requests of stand-ins for workers. Status 1 if a token was wrong, a request ended in silence, with an
unexpected error or refused as poisonous (none of these kills), blocks did not come back, or the router's memory grew by
more than `tests.router.growth` allows.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.model.prepared.cache import prepare
from tests.chaos.faults import NoEffectError
from tests.chaos.ground import MODES, Ask, Ground, tokens
from tests.chaos.rows import Fault
from tests.chaos.strike import strike
from tests.router.growth import ALLOWED_BYTES, grown_bytes, measure

CLIENTS = 4
PROMPT_LENGTHS = (20, 120, 400)
ANSWER_LENGTHS = (4, 16, 40)
LEAVES = 0.1
"""Share of the requests whose client leaves after the first token."""
ROUTER_DIES = 0.1
"""Share of the faults that are the router's death."""
SEARCH = "search"
"""A mode beside those of `ground.MODES`; it says nothing before its end, and cannot be resumed."""
BEAM_WIDTH = 3
SILENCE_S = 120.0
PAUSE_S = (2.0, 6.0)
ALLOWED_ERRORS = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
NO_ROUTER = "no router"
"""How a request ends that finds none, as while a killed one is started anew."""
UNREACHED = ("nobody answers at", "Stream removed", "Socket closed", "Connection re")
"""What a client is told that reaches no router, or whose router dies as it asks."""
POISONOUS = "refused as poisonous"
"""What a router says of a request that seems to kill its workers. None of these does: each of these is a problem."""


@dataclass(slots=True)
class Report:
    """What happened. Clients add under the lock; `problems` is what must stay empty."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    without_effect: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def line(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"

        return (
            f"requests: {line(self.requests)}; {self.tokens} tokens\n"
            f"faults that took effect: {line(self.faults)}\n"
            f"faults without effect, not counted: {line(self.without_effect)}\n"
            f"problems: {len(self.problems)}"
            + "".join(f"\n  {problem}" for problem in self.problems[:20])
        )


@dataclass(frozen=True, slots=True)
class Question:
    prompt: int
    mode: str
    count: int


class Soak:
    """Mutable state: the fault-free answers, the report, and the flag that ends the clients."""

    def __init__(self, ground: Ground, seed: int) -> None:
        self._ground = ground
        self._seed = seed
        self._answers: dict[Question, list[int]] = {}
        self._over = threading.Event()
        self.report = Report()

    def learn(self) -> None:
        """The fault-free answers; a shorter one is the beginning of a longer one, but for a search."""
        for prompt in range(len(PROMPT_LENGTHS)):
            for count in ANSWER_LENGTHS:
                search = Question(prompt, SEARCH, count)
                self._answers[search] = self._learn(search)
            for mode in MODES:
                longest = max(ANSWER_LENGTHS)
                whole = self._learn(Question(prompt, mode, longest))
                for count in ANSWER_LENGTHS:
                    self._answers[Question(prompt, mode, count)] = whole[:count]

    def _learn(self, question: Question) -> list[int]:
        ask = self._ask(question, "reference")
        ask.join(SILENCE_S)
        assert ask.finished is not None, ask.error
        return ask.tokens

    def run(self, seconds: float) -> None:
        clients = [
            threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            self._break_things(time.monotonic() + seconds)
        finally:
            self._over.set()
            for client in clients:
                client.join(2 * SILENCE_S)
        try:
            self._ground.settle(10.0)
        except AssertionError as error:
            self.report.problems.append(f"blocks did not come back: {error}")

    def _ask(self, question: Question, tenant: str, resume: bool = False) -> Ask:
        prompt = tokens(PROMPT_LENGTHS[question.prompt], question.prompt)
        if question.mode == SEARCH:
            return self._ground.ask(prompt, "greedy", question.count, tenant, beam_width=BEAM_WIDTH)
        return self._ground.ask(prompt, question.mode, question.count, tenant, resume=resume)

    def _break_things(self, until_s: float) -> None:
        rng = random.Random(self._seed)
        report = self.report
        while (now := time.monotonic()) < until_s and not self._ground.gave_up:
            time.sleep(min(rng.uniform(*PAUSE_S), max(0.0, until_s - now)))
            fault = rng.choice(list(Fault))
            name = rng.choice(self._ground.names)
            if rng.random() < ROUTER_DIES:
                fault, name = Fault.KILL, "router"
            try:
                strike(self._ground, fault, [name])
                report.faults[f"{fault} {name.partition('-')[0]}"] += 1
            except (NoEffectError, ProcessLookupError):
                # Its process was being replaced.
                report.without_effect[fault] += 1
        if self._ground.gave_up:
            report.problems.append(f"the cluster ended: {self._ground.gave_up}")

    def _client(self, number: int) -> None:
        rng = random.Random(self._seed * 1000 + number)
        asked = 0
        while not self._over.is_set():
            asked += 1
            question = rng.choice(list(self._answers))
            tenant = rng.choice(("shared", f"{number}-{asked}"))
            ask = self._ask(question, tenant, resume=rng.random() < 0.5)
            leaves = rng.random() < LEAVES
            if leaves:
                with suppress(AssertionError):
                    ask.wait_tokens(1, SILENCE_S)
                ask.leave()
            try:
                ask.join(SILENCE_S)
            except AssertionError as error:
                self._note("silence", ask, f"{question}: {error}")
                continue
            self._judge(question, ask, leaves)

    def _judge(self, question: Question, ask: Ask, left: bool) -> None:
        whole = self._answers[question]
        if ask.tokens != whole[: len(ask.tokens)]:
            self._note("wrong", ask, f"{question}: wrong tokens {ask.tokens}, not {whole}")
        elif ask.error is not None:
            is_accused = POISONOUS in ask.error.message
            known = ask.error.code in ALLOWED_ERRORS and not is_accused
            was_reached = not any(sign in ask.error.message for sign in UNREACHED)
            ending = POISONOUS if is_accused else ask.error.code if was_reached else NO_ROUTER
            self._note(ending, ask, "" if known else f"{question}: {ask.error!r}")
        elif ask.finished is not None:
            short = ask.tokens != whole
            self._note(f"exact ({question.mode})", ask, f"{question}: {len(ask.tokens)} tokens" if short else "")
        else:
            self._note("left", ask, "" if left else f"{question}: ended without a word")

    def _note(self, ending: str, ask: Ask, problem: str) -> None:
        report = self.report
        with report.lock:
            report.requests[ending] += 1
            report.tokens += len(ask.tokens)
            if problem:
                report.problems.append(problem)
        if ask.error is not None:
            time.sleep(0.2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mix faults under load and check every token.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--launcher", choices=("process", "ray"), default="process")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        ground = Ground(
            prepare(None, Path(folder)),
            launcher=chosen.launcher,
            transport=chosen.transport,
            restarts=10_000,
        )
        soak = Soak(ground, chosen.seed)
        try:
            soak.learn()
            soak.run(chosen.minutes * 60.0)
        finally:
            ground.close()
        print(f"\nsoak: {chosen.minutes:g} minutes, seed {chosen.seed}, {chosen.launcher}")
        print(soak.report, flush=True)
        grown = grown_bytes(measure(10_000, 1000, prepare(None, Path(folder))), after=2000)
    print(
        f"memory of a router between its requests 2,000 and 10,000: {grown / 2**20:+.1f} MiB, "
        f"{ALLOWED_BYTES / 2**20:.0f} are allowed"
    )
    return 1 if soak.report.problems or grown > ALLOWED_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
