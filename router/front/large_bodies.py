"""Large bodies are parsed one at a time, the smallest first, with a pause after each that is as long as it took: so
whatever they hold, half of the event loop's time is left for everything else."""

import asyncio
import gc
from bisect import insort
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from router.front.api import ApiError

LARGE_BYTES = 64 * 1024
"""A body of this size is parsed in some milliseconds, whatever it holds."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")


class LargeBodies:
    """Belongs to one front and its event loop. At most `budget_bytes` wait; beyond it, the largest are refused."""

    # Mutable state: whether one is parsed or the pause after it lasts, and those that wait, smallest first: (bytes,
    # order, turn).

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._is_busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def __repr__(self) -> str:
        return f"LargeBodies({len(self._waiting)} waiting)"

    async def parse(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Return what `parse` makes of a body, at once of a small one. Raises what it raises, and ApiError(UNAVAILABLE)
        without room."""
        if len(body) <= LARGE_BYTES:
            return parse(body)
        await self._turn(len(body))
        loop, collects = asyncio.get_running_loop(), gc.isenabled()
        began_s = loop.time()
        # No cycles come of a body, and to look for some among a million lists takes longer than to make them.
        gc.disable()
        try:
            return parse(body)
        except ApiError as error:
            error.__traceback__ = None  # its frames hold all that was made
            raise
        finally:
            if collects:
                gc.enable()
            loop.call_later(loop.time() - began_s, self._next)

    async def _turn(self, size_bytes: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = (size_bytes, next(self._order), turn)
        insort(self._waiting, mine)
        while sum([size for size, _, _ in self._waiting]) > self._budget_bytes:
            why = ApiError("UNAVAILABLE", "too many large bodies wait to be read", retry_after_s=RETRY_AFTER_S)
            self._waiting.pop()[2].set_exception(why)
        try:
            await turn
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            elif not turn.cancelled() and turn.exception() is None:
                self._next()
            raise

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._waiting:
            self._waiting.pop(0)[2].set_result(None)
