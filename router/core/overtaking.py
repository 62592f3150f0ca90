"""Which prompts a new one goes before on a prefill worker, and what it waits for instead of its whole queue. Pure.

A prefill worker does not take prompts in the order in which they came (`prefill_worker/scheduler/line.py`): beside a
long one, those that are much shorter, at most half as long, share half of each step. So who finds nearly all of its
prompt in the cache does not wait for the long one before it, however long, but for

    all that is not twice as long as itself, or of which nothing is known, as it would anyway
    + what the steps in which half is for those and itself compute of the long ones beside them
    + half a step, the one under way on average

and never for more than the queue. While it reads what they compute, who shares a prompt's beginning cannot go before
that one. What it goes before is delayed by what it computes, each by as much.

The router knows these lengths of the prompts that it has sent itself. What a report counts less than them has been
computed, of the oldest first; what it counts more are other routers' prompts, before which nobody is taken to go.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from engine.plan import MUCH_SHORTER
from engine.types import RequestId

NOBODY = 0, 0
"""What a prompt that waits for everybody goes before."""


class ReadingLine:
    """The prompts that the router has sent to one worker and that it has not read yet, the oldest first. The worker
    computes at most `chunk_tokens` in a step; 0: it does not say, and nobody is taken to go before others."""

    # Mutable state: for each of them its uncached tokens, which block of its prompt is the first of those and the
    # name of that block; and all their tokens in order, and the sum of these.

    __slots__ = ("_chunk_tokens", "_lengths", "_prompts", "_tokens")

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._prompts: dict[RequestId, tuple[int, int, bytes]] = {}
        self._lengths: list[int] = []
        self._tokens = 0

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._prompts)

    def enter(self, request: RequestId, tokens: int, first: int, block: bytes) -> None:
        """Note a prompt with so many tokens to compute, from the block `first` on, of that name; b"": it has no whole
        one."""
        self.leave(request)
        self._prompts[request] = tokens, first, block
        self._tokens += tokens
        insort(self._lengths, tokens)

    def leave(self, request: RequestId) -> None:
        """Note that a prompt has been read, or never will be here."""
        known = self._prompts.pop(request, None)
        if known is not None:
            self._tokens -= known[0]
            del self._lengths[bisect_left(self._lengths, known[0])]

    def check(self) -> None:
        """Raise AssertionError if what is kept ready is not what the prompts say."""
        lengths = sorted(tokens for tokens, _, _ in self._prompts.values())
        assert (self._tokens, self._lengths) == (sum(lengths), lengths), "the line is miscounted"

    def overtaken(self, tokens: int, queue_tokens: int, chain: Sequence[bytes], held: int) -> tuple[int, int]:
        """Return of how many queued tokens a prompt with so many uncached `tokens` is not behind, and how many prompts
        those are, which it delays: where the worker has `queue_tokens` to compute, and holds, or is about to, the first
        `held` blocks of its `chain`."""
        # Every decision asks every worker that has much to do: of most, only the oldest prompt is looked at.
        chunk_tokens, lengths, longer = self._chunk_tokens, self._lengths, MUCH_SHORTER * tokens
        if not chunk_tokens or queue_tokens <= chunk_tokens or not lengths or lengths[-1] < longer:
            return NOBODY  # as where there is little to do, and for whoever is no shorter than others
        at = bisect_left(lengths, longer)
        passed, prompts = sum(lengths[at:]), len(lengths) - at
        beside, computed = tokens + self._tokens - passed, self._tokens - queue_tokens
        for length, first, block in self._prompts.values():
            if computed <= 0 and not held:
                break
            # It is taken out as it was sent, and counted as it is by now.
            if length >= longer:
                passed, prompts = passed - length, prompts - 1
            else:
                beside -= length
            left = length if computed <= 0 else max(length - computed, 0)
            computed -= length
            if left >= longer and not (first < held and block == chain[first]):
                passed, prompts = passed + left, prompts + 1
            else:
                beside += left
        steps = -(-2 * beside // chunk_tokens)  # half of each is theirs
        passed -= chunk_tokens // 2 + steps * chunk_tokens - beside
        return (passed, prompts) if passed > 0 else NOBODY
