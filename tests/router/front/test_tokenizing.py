"""Long text is tokenized beside everything else, within a budget, and not past the context."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from engine.types import TooLongError
from router.background import LATER
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, GenerateCall
from router.front.intake import Intake
from router.front.tokenizing import PIECE_CHARS, WHOLE_CHARS, Steps, TokenizingPool, at_once, tokenize
from tests.router.fake_cluster import ByteText


class Words:
    """One token per word, and notes how much text it was given."""

    def __init__(self) -> None:
        self.chars = 0

    def __call__(self, text: str) -> list[int]:
        self.chars += len(text)
        return [len(word) for word in text.split()]


def test_a_text_far_beyond_the_context_is_hardly_read() -> None:
    """Guards a megabyte of digits, each a token of half a kilobyte: it was tokenized whole before it was refused."""
    words = Words()
    with pytest.raises(TooLongError) as refused:
        at_once(tokenize(words, "7 " * 2**19, "prompt", 1000))
    assert refused.value.field == "prompt" and "more than 1000" in str(refused.value)
    assert words.chars == PIECE_CHARS


def test_a_long_text_that_fits_is_tokenized_in_one_pass() -> None:
    """Guards the ids: pieces have seams where the tokenizer would have gone on."""
    text = "abcdefghij " * (2 * WHOLE_CHARS // 11)
    ids = at_once(tokenize(Words(), text, "prompt", len(text) // 11 + 1))
    assert ids == Words()(text)


def test_a_text_that_is_known_to_its_end_counts_with_what_was_known() -> None:
    text = "a " * WHOLE_CHARS
    with pytest.raises(TooLongError):
        at_once(tokenize(Words(), text, "messages", WHOLE_CHARS + 1000, known=5000))


@pytest.mark.parametrize("known", [0, 3])
def test_the_exact_length_is_told_where_it_is_cheap(known: int) -> None:
    """Guards callers who cut their prompt by what the refusal says."""
    assert len(at_once(tokenize(Words(), "a " * 2000, "prompt", 1000, known))) == 2000


def work(did: list[str], name: str, gate: threading.Event | None = None, steps: int = 1) -> Steps[str]:
    for step in range(steps):
        if gate is not None:
            assert gate.wait(5)
        did.append(f"{name}{step}")
        yield
    return name


async def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit_s
        await asyncio.sleep(0.002)


def test_the_shortest_text_goes_first_after_every_step() -> None:
    """Guards a short prompt behind forty long ones."""

    async def run() -> list[str]:
        did: list[str] = []
        gate = threading.Event()
        pool = TokenizingPool(1, 10_000)
        first = asyncio.create_task(pool.run(work(did, "long", gate, 3), 900))
        await asyncio.sleep(0)
        others = [
            asyncio.create_task(pool.run(work(did, name), size))
            for name, size in (("middle", 500), ("short", 10), ("too", 500))
        ]
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(first, *others) == ["long", "middle", "short", "too"]
        assert repr(pool) == "TokenizingPool(0 bytes, 0 waiting, 1 idle)"
        pool.close()
        return did

    assert asyncio.run(run()) == ["long0", "short0", "middle0", "too0", "long1", "long2"]


def test_text_beyond_the_budget_is_refused_and_may_come_again() -> None:
    """Guards the router's memory: all that waits to be tokenized is held meanwhile."""

    async def run() -> None:
        gate = threading.Event()
        pool = TokenizingPool(1, 1000)
        held = asyncio.create_task(pool.run(work([], "one", gate), 2000))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await pool.run(work([], "two"), 10)
        assert (refused.value.code, refused.value.retry_after_s) == ("UNAVAILABLE", 1.0)
        gate.set()
        await held
        assert await pool.run(work([], "two"), 10) == "two"
        pool.close()

    asyncio.run(run())


def test_a_longer_text_that_waits_makes_room_for_a_shorter_one() -> None:
    """Guards everybody's prompts from one tenant's long texts, which filled the budget: all others were refused."""

    async def run() -> list[object]:
        gate = threading.Event()
        pool = TokenizingPool(1, 1000)
        sizes = [100, 600, 250, 700, 200]
        texts = [asyncio.create_task(pool.run(work([], str(size), gate), size)) for size in sizes]
        await asyncio.sleep(0)
        assert repr(pool) == "TokenizingPool(550 bytes, 2 waiting, 0 idle)"
        gate.set()
        ends = await asyncio.gather(*texts, return_exceptions=True)
        assert repr(pool) == "TokenizingPool(0 bytes, 0 waiting, 1 idle)"
        pool.close()
        return [end.code if isinstance(end, ApiError) else end for end in ends]

    assert asyncio.run(run()) == ["100", "UNAVAILABLE", "250", "UNAVAILABLE", "200"]


def test_a_caller_that_left_costs_no_more_than_the_step_under_way() -> None:
    """Guards against tokenizing for nobody, and against a thread that is never given back."""

    async def run() -> list[str]:
        did: list[str] = []
        gate = threading.Event()
        pool = TokenizingPool(1, 1000)
        running = asyncio.create_task(pool.run(work(did, "running", gate, 3), 10))
        waiting = asyncio.create_task(pool.run(work(did, "waiting"), 20))
        await asyncio.sleep(0.01)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert repr(pool) == "TokenizingPool(0 bytes, 1 waiting, 0 idle)"
        gate.set()
        await until(lambda: repr(pool) == "TokenizingPool(0 bytes, 0 waiting, 1 idle)")
        assert await pool.run(work(did, "next"), 10) == "next"
        pool.close()
        return did

    assert asyncio.run(run()) == ["running0", "next0"]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread's own priority is Linux's")
def test_tokenizing_stands_back_behind_the_loop() -> None:
    """Guards the streams of a router that has one processor."""

    def niceness() -> Steps[int]:
        yield
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def run() -> int:
        pool = TokenizingPool(1, 1000)
        try:
            return await pool.run(niceness(), 10)
        finally:
            pool.close()

    assert asyncio.run(run()) >= LATER


class Slow(ByteText):
    def __init__(self) -> None:
        self.gate = threading.Event()

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        assert self.gate.wait(5)
        return super().encode(text, add_special=add_special, is_literal=is_literal)


def test_the_deadline_holds_while_a_prompt_waits_to_be_tokenized() -> None:
    async def run() -> str:
        model = Slow()
        intake = Intake(model, RouterConfig(tokenize_inline_bytes=10))
        with pytest.raises(ApiError) as late:
            await intake.take(GenerateCall(prompt=[ChatMessage("user", "x" * 100)], timeout_s=0.05))
        model.gate.set()
        intake.close()
        return late.value.code

    assert asyncio.run(run()) == "DEADLINE_EXCEEDED"
