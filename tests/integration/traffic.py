"""A mixed load: shared prefixes, samples, stop strings, clients that leave, deadlines, nonsense."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from engine.constraints.text import schema_constraint
from engine.types import SamplingParams
from router.front.api import ApiError, ChatMessage, Delta, GenerateCall
from router.grpc.client import Client

KINDS = ("answered", "left", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT")
"""How requests of the mix end."""
GREEDY = SamplingParams(temperature=0.0)
_CITY = {"type": "object", "properties": {"capital_of_the_country": {"enum": ["Paris", "Rome"]}}}
_CITY |= {"required": ["capital_of_the_country"], "additionalProperties": False}
FORCED = schema_constraint(_CITY, "constraint")


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def prompt(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    return _prompt(random.Random(seed), count)


class Clients:
    """Clients that ask one request after the other, each in a thread of its own, until they are told to end."""

    def __init__(self, address: str, clients: int, seed: int) -> None:
        self._client = Client(address)
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + n), n), daemon=True)
            for n in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, limit_s: float) -> None:
        """Send no more requests. Fails if those under way have not ended within `limit_s`."""
        self._over.set()
        for thread in self._threads:
            thread.join(limit_s)
            assert not thread.is_alive(), "a client was left without an answer"
        self._client.close()

    def _run(self, rng: random.Random, client: int) -> None:
        raise NotImplementedError


class Traffic(Clients):
    """A mix, whose requests are all answered. `ended` counts how requests ended."""

    def __init__(self, address: str, clients: int, seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self._shared = _prompt(random.Random(seed), 96)
        super().__init__(address, clients, seed)

    def until_mixed(self, limit_s: float) -> None:
        """Wait until requests have ended in every way, from now on. Fails past `limit_s`."""
        before, deadline_s = self.ended.copy(), time.monotonic() + limit_s
        while missing := [kind for kind in KINDS if self.ended[kind] == before[kind]]:
            assert time.monotonic() < deadline_s, f"no request was {missing}: {self.ended}"
            time.sleep(0.1)

    def _run(self, rng: random.Random, client: int) -> None:
        # Each client begins somewhere else, so that all kinds are under way at any time.
        for call, leave_after in islice(self._calls(rng), client, None):
            if self._over.wait(rng.uniform(0.05, 0.2)):
                return
            try:
                self._ask(call, leave_after)
                self.ended["left" if leave_after else "answered"] += 1
            except ApiError as error:
                self.ended[error.code] += 1

    def _calls(self, rng: random.Random) -> Iterator[tuple[GenerateCall, int]]:
        """Calls, each with the number of tokens after which its client leaves (0: it stays)."""
        while True:
            unique = _prompt(rng, rng.randrange(20, 200))
            yield _call([*self._shared, *unique[:30]], rng.randrange(16, 40)), 0
            yield _call(unique, rng.randrange(16, 40)), 0
            chat = [ChatMessage("user", "Count from one to twenty, in words, with commas.")]
            yield GenerateCall(prompt=chat, sampling=GREEDY, max_tokens=40, stop=(", t", "s")), 0
            yield _call(_prompt(rng, 60), 16, n=2), 0
            # Its keys are forced: tokens without a step.
            yield GenerateCall(prompt=chat, sampling=GREEDY, max_tokens=60, constraint=FORCED), 0
            yield _call(_prompt(rng, 40), 60), 3
            # What cannot be in time is refused when it comes, if that can be foreseen: of an answer it cannot.
            yield _call(_prompt(rng, 700), 16, timeout_s=0.2), 0
            # The longer time is for machines on which the shorter one is too short for a first token.
            late_s = rng.choice((0.6, 2.4))
            yield GenerateCall(prompt=_prompt(rng, 60), sampling=GREEDY, max_tokens=600, timeout_s=late_s), 0
            yield _call([1, 2], -1), 0

    def _ask(self, call: GenerateCall, leave_after: int) -> None:
        events, seen = self._client.generate(call), 0
        try:
            for event in events:
                seen += len(event.token_ids) if isinstance(event, Delta) else 0
                if leave_after and seen >= leave_after:
                    return
        finally:
            events.close()  # type: ignore[attr-defined]


def _call(prompt: list[int], max_tokens: int, **more: object) -> GenerateCall:
    return GenerateCall(
        prompt=prompt,
        sampling=GREEDY,
        max_tokens=max_tokens,
        ignore_eos=True,
        **more,  # type: ignore[arg-type]
    )


class Crowd(Clients):
    """Short prompts and long answers: what they hold grows behind what was promised to them when they were taken. When
    it ends, all leave at their next token."""

    def _run(self, rng: random.Random, client: int) -> None:
        while not self._over.is_set():
            events = self._client.generate(_call(_prompt(rng, 46), 96))
            for _ in events:
                if self._over.is_set():
                    break
            events.close()  # type: ignore[attr-defined]


class Calls(Clients):
    """Calls that are all alike; a context manager, at whose end those under way are left. `answered` and `errors` count
    how calls ended. `shared`: with one prompt for all, but for its last tokens."""

    def __init__(
        self,
        address: str,
        clients: int,
        prompt_tokens: int,
        max_tokens: int,
        shared: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.answered = 0
        self.errors: Counter[str] = Counter()
        self._prompt_tokens, self._max_tokens = prompt_tokens, max_tokens
        self._timeout_s = timeout_s
        self._head = prompt(prompt_tokens - 4, 0) if shared else []
        super().__init__(address, clients, seed=1000)

    def __enter__(self) -> "Calls":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(60.0)

    def _run(self, rng: random.Random, client: int) -> None:
        while not self._over.wait(0.05):
            tokens = [*self._head, *_prompt(rng, self._prompt_tokens - len(self._head))]
            call = _call(tokens, self._max_tokens)
            if self._timeout_s is not None:
                # An answer that may end at any token is not refused early, but begins and comes too late.
                call = msgspec.structs.replace(call, timeout_s=self._timeout_s, ignore_eos=False)
            events = self._client.generate(call)
            try:
                for _ in events:
                    if self._over.is_set():
                        break
                else:
                    self.answered += 1
            except ApiError as error:
                self.errors[error.code] += 1
            finally:
                events.close()  # type: ignore[attr-defined]
