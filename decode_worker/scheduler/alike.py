"""Prompts computed here that begin alike: the later ones wait until the first has computed what they share. Pure.

    a prompt joins the line --one before it has, or computes, more of the same beginning--> waits
    that one has come to where they part, or is gone --> takes over what is cached by now, looks again, or is computed

Whole blocks are shared, of prompts of one namespace. Who waits keeps its own blocks, which nobody has written, until it
has others in their place. Nobody waits for one that waits, so that all wait for somebody who is computed.
"""

from collections.abc import Iterable, Iterator, Sequence

from decode_worker.scheduler.request import Request, RequestState
from engine.kv.manager import KVCacheManager


class Alike:
    """Mutable state: `_waits`, whom each waits for, and until how many tokens of it are known. Owner: the batch."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._waits: dict[Request, tuple[Request, int]] = {}
        self.saved_tokens = 0
        """Prompt tokens that were taken over instead of being computed again, until the shell has taken the number."""

    def joined(self, request: Request, line: Iterable[Request]) -> None:
        """Let `request` wait if one of those in line before it computes more of what it begins with."""
        first = self._first(request, line)
        if first is not None:
            self._waits[request] = first

    def left(self, request: Request) -> None:
        """Forget a request that is in line no more: those that wait for it wait no longer."""
        self._waits.pop(request, None)
        for other, (first, _) in self._waits.items():
            if first is request:
                self._waits[other] = request, 0

    def computable(self, line: Sequence[Request]) -> Iterator[Request]:
        """Go over those of the line that need not wait now; who has waited goes on behind what it shares."""
        for at, request in enumerate(line):
            waited = self._waits.get(request)
            if waited is not None:
                first, shared_tokens = waited
                if first.known < shared_tokens:
                    continue
                has_gained = self._take_over(request, first)
                del self._waits[request]
                if has_gained or not self._kv.groups:  # else what they share has slid out of a window
                    self.joined(request, line[:at])
            if request not in self._waits:
                yield request

    def missing_tokens(self, request: Request) -> int:
        """Return how many tokens of a request in line are its own to compute."""
        _, shared_tokens = self._waits.get(request, (None, 0))
        return len(request.tokens) - max(request.known, shared_tokens)

    def _first(self, request: Request, line: Iterable[Request]) -> tuple[Request, int] | None:
        """Return who computes most of what `request` begins with, and lacks, and how many tokens of it."""
        size, known = self._kv.block_size, request.known
        if request.record.prompt_logprobs is not None:
            return None  # it computes all of its prompt
        if len(request.lease.path) * size != known:
            return None  # it has begun in the middle of a block, into which a copy may have to go first
        best: tuple[Request, int] | None = None
        for other in line:
            if other in self._waits or other.lease.namespace != request.lease.namespace:
                continue
            shared_tokens = _shared_blocks(request.tokens, other.tokens, known // size, size) * size
            if shared_tokens > max(known, best[1] if best else 0):
                best = other, shared_tokens
        return best

    def _take_over(self, request: Request, first: Request) -> bool:
        """Give `request` what is cached by now of its tokens. Return True if that is any."""
        if first.state is RequestState.LOCAL:
            self._kv.commit(first.lease, first.tokens[: first.known])
        gained = self._kv.adopt(request.lease, request.tokens[:-1]) - request.known
        if gained <= 0:
            return False
        request.known += gained
        self.saved_tokens += gained
        if request.output_tokens == 0:
            request.origin.prefill_cached_tokens = request.known
        request.prefill.local_from = request.known
        return True

    def check(self, line: Sequence[Request]) -> None:
        """Recompute the invariants: `line` is all that is computed here."""
        for request, (first, shared_tokens) in self._waits.items():
            assert request in line and (not shared_tokens or (first in line and first not in self._waits))
            assert len(request.lease.path) * self._kv.block_size == request.known


def _shared_blocks(ours: Sequence[int], theirs: Sequence[int], known: int, size: int) -> int:
    """Return how many whole blocks two prompts begin with alike, of which `known` are not looked at unless the next one
    is the same; our last token is never shared."""
    least, most = known, min(len(ours) - 1, len(theirs)) // size
    head, next_one = slice(least * size), slice(least * size, (least + 1) * size)
    if least >= most or ours[next_one] != theirs[next_one] or ours[head] != theirs[head]:
        return 0
    least += 1
    while least < most:
        middle = (least + most + 1) // 2
        if ours[least * size : middle * size] == theirs[least * size : middle * size]:
            least = middle
        else:
            most = middle - 1
    return least
