"""Where long text is tokenized: a few threads of the router's own, a budget of text, and no work past the context.

Tokenizing costs memory and time by the token, several hundred bytes and some microseconds each, and a caller chooses
how many tokens its text has. So a text that could be much longer than the context is counted first, piece by piece, and
refused as soon as it cannot fit; only what fits, nearly, is tokenized in one pass, which alone gives the ids that the
model was trained on. After every piece the shortest text that waits has its turn, and a caller that has left costs no
more than the piece under way. Where the budget is full, the longest text that waits is refused in place of a
shorter one: so long texts keep out no short one.
"""

import asyncio
import heapq
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TypeVar

from engine.types import TooLongError
from router.background import stand_back
from router.front.api import ApiError

PIECE_CHARS = 16 * 1024
WHOLE_CHARS = 64 * 1024
"""Text of this length is tokenized in one pass whatever the context: at worst it makes so many tokens."""
SEAM_TOKENS = 128
"""The most that a cut adds to the count: it parts one word, or the mark of a control token, whose halves are tokenized
apart."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in steps: each `next` is one, and the last returns what was made."""


def tokenize(
    encode: Callable[[str], list[int]], text: str, field: str, context_tokens: int, known: int = 0
) -> Steps[list[int]]:
    """Tokenize what follows `known` ids of a prompt. Raises TooLongError as soon as the context cannot hold it; what
    exceeds it by little is returned, for its exact length to be told."""
    if len(text) > max(context_tokens, WHOLE_CHARS):
        tokens = known
        for at in range(0, len(text), PIECE_CHARS):
            tokens += len(encode(text[at : at + PIECE_CHARS])) - (SEAM_TOKENS if at else 0)
            if tokens > context_tokens:
                raise TooLongError(field, f"has more than {context_tokens} tokens, which is what the context holds")
            yield
    return encode(text)


def tokenize_end(encode: Callable[[str], list[int]], text: str, kept: int) -> Steps[list[int]]:
    """Tokenize the end of a text of which the last `kept` tokens are wanted: all of a short one, and of a longer one as
    much as surely has more than so many, with room for a word that the cut parts. It is the caller's to cut: so it
    knows that these are not the tokens of the whole text."""
    chars = max(4 * (kept + SEAM_TOKENS), WHOLE_CHARS)
    while chars < len(text):
        ids = encode(text[-chars:])
        if len(ids) >= kept + SEAM_TOKENS:
            return ids
        chars *= 2
        yield
    return encode(text)


def at_once(steps: Steps[T]) -> T:
    """Run all steps here and now."""
    while (made := advance(steps)) is None:
        pass
    return made


async def in_turns(steps: Steps[T]) -> T:
    """Return what `steps` return; after each, the event loop does what else there is to do."""
    while (made := advance(steps)) is None:
        await asyncio.sleep(0)
    return made


class TokenizingPool:
    """Belongs to the router's event loop, and works in `threads` threads.

    At most `budget_bytes` of text, what waits included, is held at a time; a single text is taken whatever its size."""

    # Mutable state: bytes of each text that is held, by its order, and their sum; idle threads, and a heap of those
    # that wait: (bytes, order, turn).

    def __init__(self, threads: int, budget_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "tokenizer", stand_back)
        self._budget_bytes = budget_bytes
        self._held: dict[int, int] = {}
        self._held_bytes = 0
        self._idle = threads
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def __repr__(self) -> str:
        return f"TokenizingPool({self._held_bytes} bytes, {len(self._waiting)} waiting, {self._idle} idle)"

    async def run(self, steps: Steps[T], size_bytes: int) -> T:
        """Return what `steps` return; raises what they raise, and ApiError(UNAVAILABLE) without room in the budget."""
        if not self.has_room(size_bytes):
            self._make_room(size_bytes)
        order = next(self._order)
        self._held[order] = size_bytes
        self._held_bytes += size_bytes
        try:
            while True:
                await self._turn(size_bytes, order)
                made = await self._step(steps)
                if made is not None:
                    return made
        finally:
            self._let_go(order)

    def has_room(self, size_bytes: int) -> bool:
        """Return whether text of this size is taken without refusing another."""
        return not self._held_bytes or self._held_bytes + size_bytes <= self._budget_bytes

    def close(self) -> None:
        """Let go of the threads, each after its step."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, size_bytes: int) -> None:
        """Refuse the longest text that waits for the sake of a new one, if it is longer: without it there is room.
        Raises ApiError otherwise."""
        longest = max([one for one in self._waiting if not one[2].done()], default=None)
        if longest is None or longest[0] <= size_bytes:
            raise _no_room()
        self._waiting.remove(longest)
        heapq.heapify(self._waiting)
        _, order, turn = longest
        self._let_go(order)
        turn.set_exception(_no_room())

    def _let_go(self, order: int) -> None:
        self._held_bytes -= self._held.pop(order, 0)

    async def _turn(self, size_bytes: int, order: int) -> None:
        """Wait for a thread. A text of fewer bytes comes first, of equals the older one."""
        if self._idle and not self._waiting:
            self._idle -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size_bytes, order, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            raise

    async def _step(self, steps: Steps[T]) -> T | None:
        """Run one step in a thread, which stays taken until the step has ended, whether or not anybody waits."""
        loop = asyncio.get_running_loop()
        work = self._threads.submit(advance, steps)

        def ended(_: Future[T | None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        work.add_done_callback(ended)
        return await asyncio.wrap_future(work)

    def _leave(self) -> None:
        self._idle += 1
        while self._waiting and self._idle:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._idle -= 1
                turn.set_result(None)


def _no_room() -> ApiError:
    return ApiError("UNAVAILABLE", "too much text waits to be tokenized", retry_after_s=RETRY_AFTER_S)


def advance(steps: Steps[T]) -> T | None:
    """Run one step; return what was made after the last, else None."""
    try:
        next(steps)
    except StopIteration as end:
        made: T = end.value
        return made
    return None
