"""Programs of several generations: a text or a chat that grows by what the program says and what the model writes.

    program = SyncProgram(client, max_tokens=32)
    program.system("You are terse.").user("Name a river.")
    program.gen("river", stop="\\n")
    left, right = program.fork(2)          # what both share is read once
    join([left, right], lambda one: one.user("Where does it end?").gen("end"))

`gen` writes, `select` lets the model choose, `fork` and `join` go on in several ways at once, and the roles say who
speaks. Each generation keeps its name: `program["river"]` is its text, `program.answers["river"]` all that is known of
it. A program without roles is plain text.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from router.client.client import AsyncClient, SyncClient
from router.client.errors import ApiError
from router.client.requests import GeneratedText, Prompt

T = TypeVar("T")
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Selection:
    """What the model chose. `scores` are the choices' log probabilities, per token unless it was told otherwise."""

    choice: str
    scores: dict[str, float]
    cached_tokens: int = field(default=0, repr=False)


Step = tuple[tuple[int, ...], int]
"""Ids so far, and the next one."""
SHARED_OPTIONS = ("model", "tenant", "cache_salt", "priority", "session", "timeout_s")
CHOICE_OPTIONS = ("model", "tenant", "timeout_s")
"""Options that count where the text of a choice becomes tokens."""
PROMPT_OPTIONS = (
    *(*CHOICE_OPTIONS, "parse_control_tokens"),
    *("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)
"""Options that count where a prompt does."""
WRITING_OPTIONS = frozenset(
    {"min_tokens", "n", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs"}
    | {"json_schema", "regex", "lark", "choices"}
)
"""Options that say how much is written and how, and nothing of the prompt."""
SCORERS = 16
"""Steps that are scored at once."""


def scored_steps(prompt: Sequence[int], choices: Mapping[str, Sequence[int]]) -> list[Step]:
    """Return what is to be scored: the next token after each beginning of a choice, each step once. Raises ApiError
    without choices, and for one without tokens."""
    if not choices:
        raise ApiError("INVALID_ARGUMENT", "choices: must not be empty", "choices")
    steps: dict[Step, None] = {}
    for choice, ids in choices.items():
        if not ids:
            raise ApiError("INVALID_ARGUMENT", f"choices: {choice!r} has no tokens", "choices")
        for at, token in enumerate(ids):
            steps[(*prompt, *ids[:at]), token] = None
    return list(steps)


def best_choice(
    prompt: Sequence[int], choices: Mapping[str, Sequence[int]], found: Mapping[Step, GeneratedText], by_token: bool
) -> Selection:
    """Return the likeliest choice; of equals, the first."""
    scores = {}
    for choice, ids in choices.items():
        parts = [found[(*prompt, *ids[:at]), token].logprobs[0] for at, token in enumerate(ids)]
        scores[choice] = sum(parts) / (len(parts) if by_token else 1)
    return Selection(max(scores, key=scores.__getitem__), scores, sum(one.cached_tokens for one in found.values()))


class _Script:
    """A text or a chat so far, and what has been generated in it.

    `options` are those of all its generations (`SyncClient.stream`)."""

    # Mutable state: the text, or the messages, the answers and the choices by name.

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._text = ""
        self._messages: list[dict[str, Any]] = []
        self.answers: dict[str, GeneratedText] = {}
        self.selections: dict[str, Selection] = {}

    def __getitem__(self, name: str) -> str:
        """Return the text that was generated, or chosen, under a name."""
        return self.selections[name].choice if name in self.selections else self.answers[name].text

    def __contains__(self, name: str) -> bool:
        return name in self.answers or name in self.selections

    def __repr__(self) -> str:
        size = f"{len(self._messages)} messages" if self._messages else f"{len(self._text)} characters"
        return f"{type(self).__name__}({size}, {[*self.answers, *self.selections]})"

    def text(self, text: str) -> Self:
        """Add text of a program without roles."""
        if self._messages:
            raise ValueError("a chat grows by its roles: system, user, assistant")
        self._text += text
        return self

    def system(self, text: str) -> Self:
        return self._say("system", text)

    def user(self, text: str) -> Self:
        return self._say("user", text)

    def assistant(self, text: str) -> Self:
        """Add an answer that the model has not written itself."""
        return self._say(ASSISTANT, text)

    @property
    def prompt(self) -> Prompt:
        """What the next generation goes on with."""
        return self._tokenized()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no generation of this program had to compute."""
        answered = sum(one.cached_tokens for one in self.answers.values())
        return answered + sum(one.cached_tokens for one in self.selections.values())

    def _say(self, role: str, text: str) -> Self:
        if self._text:
            raise ValueError("a text has no roles; begin a program with one")
        self._messages.append({"role": role, "content": text})
        return self

    def _asked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a generation. In a text of the program's own, names of control tokens are text."""
        return {**self._literal(), **self._options, **options}

    def _literal(self) -> dict[str, Any]:
        return {} if self._messages else {"parse_control_tokens": False}

    def _tokenized(self) -> str | list[dict[str, Any]]:
        return list(self._messages) if self._messages else self._text

    def _only_read(self) -> dict[str, Any]:
        """Return the options of the request that has the prompt read, and writes as little as there can be."""
        kept = {name: value for name, value in self._options.items() if name not in WRITING_OPTIONS}
        return {**self._literal(), **kept, "max_tokens": 1}

    def _choice_read(self) -> dict[str, Any]:
        """Return the options by which a choice becomes tokens: as plain text that goes on with the prompt."""
        return {**self._kept(CHOICE_OPTIONS), "add_special_tokens": False, "parse_control_tokens": False}

    def _prompt_read(self) -> dict[str, Any]:
        """Return the options by which the prompt becomes the tokens that `gen` goes on with. Raises ApiError for
        `truncate_prompt_tokens`, which only a generation has."""
        if self._options.get("truncate_prompt_tokens") is not None:
            message = "truncate_prompt_tokens: select takes whole prompts only"
            raise ApiError("INVALID_ARGUMENT", message, "truncate_prompt_tokens")
        return {**self._literal(), **self._kept(PROMPT_OPTIONS)}

    def _kept(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._options[name] for name in names if name in self._options}

    def _scoring(self, step: "Step") -> dict[str, Any]:
        """Return the options of the request whose one token is `step`'s, whatever the model would rather write."""
        own = {"max_tokens": 1, "allowed_token_ids": [step[1]], "logprobs": 0, "resumable": False}
        return {**self._kept(SHARED_OPTIONS), **own}

    def _written(self, text: str) -> None:
        if self._messages:
            self._messages.append({"role": ASSISTANT, "content": text})
        else:
            self._text += text

    def _answered(self, name: str, answer: GeneratedText) -> str:
        self._written(answer.text)
        self.answers[name] = answer
        return answer.text

    def _chosen(self, name: str, found: Selection) -> str:
        self._written(found.choice)
        self.selections[name] = found
        return found.choice

    def _copy_of(self, other: "_Script") -> Self:
        self._text, self._messages = other._text, list(other._messages)
        self.answers, self.selections = dict(other.answers), dict(other.selections)
        return self


class SyncProgram(_Script):
    """A program whose generations are waited for."""

    def __init__(self, client: SyncClient, **options: Any) -> None:
        super().__init__(**options)
        self._client = client

    def gen(self, name: str, **options: Any) -> str:
        """Let the model go on, and return what it wrote. Raises ApiError."""
        return self._answered(name, self._client.generate(self.prompt, **self._asked(options)))

    def select(self, name: str, choices: Sequence[str], *, by_token: bool = True) -> str:
        """Let the model choose: each choice's tokens are scored as what comes next, and the likeliest is written.

        `by_token`: the mean of its tokens' log probabilities counts, so that long choices are not at a disadvantage;
        else their sum. Every step is one request of one token, whose prompt the cache holds after the first. Raises
        ApiError."""
        prompt = self._client.tokenize(self._tokenized(), **self._prompt_read())
        ids = {choice: self._client.tokenize(choice, **self._choice_read()) for choice in choices}
        first, *rest = scored_steps(prompt, ids)

        def score(step: Step) -> tuple[Step, GeneratedText]:
            return step, self._client.generate([*step[0]], **self._scoring(step))

        found = dict([score(first)])
        with ThreadPoolExecutor(SCORERS, thread_name_prefix="select") as threads:
            found.update(threads.map(score, rest))
        return self._chosen(name, best_choice(prompt, ids, found, by_token))

    def fork(self, count: int) -> list["SyncProgram"]:
        """Return so many programs that go on from here by themselves. What they share is read now, so that each finds
        it in the cache."""
        if self._messages or self._text:
            self._client.generate(self.prompt, **self._only_read())
        return [type(self)(self._client, **self._options)._copy_of(self) for _ in range(count)]


class AsyncProgram(_Script):
    """The same on an event loop."""

    def __init__(self, client: AsyncClient, **options: Any) -> None:
        super().__init__(**options)
        self._client = client

    async def gen(self, name: str, **options: Any) -> str:
        """Let the model go on, and return what it wrote. Raises ApiError."""
        return self._answered(name, await self._client.generate(self.prompt, **self._asked(options)))

    async def select(self, name: str, choices: Sequence[str], *, by_token: bool = True) -> str:
        """Let the model choose (`SyncProgram.select`)."""
        prompt = await self._client.tokenize(self._tokenized(), **self._prompt_read())
        ids = {choice: await self._client.tokenize(choice, **self._choice_read()) for choice in choices}
        first, *rest = scored_steps(prompt, ids)
        room = asyncio.Semaphore(SCORERS)

        async def score(step: Step) -> tuple[Step, GeneratedText]:
            async with room:
                return step, await self._client.generate([*step[0]], **self._scoring(step))

        found = dict([await score(first)])
        found.update(await asyncio.gather(*map(score, rest)))
        return self._chosen(name, best_choice(prompt, ids, found, by_token))

    async def fork(self, count: int) -> list["AsyncProgram"]:
        """Return so many programs that go on from here by themselves (`SyncProgram.fork`)."""
        if self._messages or self._text:
            await self._client.generate(self.prompt, **self._only_read())
        return [type(self)(self._client, **self._options)._copy_of(self) for _ in range(count)]


def join(branches: Sequence[SyncProgram], work: Callable[[SyncProgram], T]) -> list[T]:
    """Run `work` on all branches at once, and return what each returns, in their order. Raises what the first of them
    raises, when all have ended."""
    if not branches:
        return []
    with ThreadPoolExecutor(len(branches), thread_name_prefix="branch") as threads:
        return list(threads.map(work, branches))


async def ajoin(branches: Sequence[AsyncProgram], work: Callable[[AsyncProgram], Awaitable[T]]) -> list[T]:
    """Run `work` on all branches at once, and return what each returns, in their order."""
    return list(await asyncio.gather(*(work(branch) for branch in branches)))
