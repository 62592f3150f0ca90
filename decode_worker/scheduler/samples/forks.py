"""Samples of one prompt that share its blocks: who waits for whose prompt, and what becomes of them. Pure.

    FORKING --the parent's prompt is here--> LOCAL, which computes the prompt's last token again
    FORKING --the parent is gone before--> the first of them takes its place, and room; the others wait for it

A fork is taken with the promise of room that it will not share, and holds no blocks while it waits. It goes on beside
its parent out of its promise, or alone in the room of a parent that is gone; where that is too little, it is preempted
(`decode_worker.scheduler.preemption`).

Where many wait for a long prompt, a part of them begins in each turn. Until all have, the parent's blocks stay where
they are: one that has ended keeps them, and one that is to depart does not yet.
"""

from collections.abc import Sequence

from decode_worker.scheduler.pace import Allowance
from decode_worker.scheduler.request import Request, RequestState
from engine.kv.manager import KVCacheManager, Lease
from engine.types import RequestRecord

MAX_FORKED_BLOCKS = 8192
"""Where those that begin in one turn share as many, the rest of them begin in the next ones: it takes about 10 ms."""


class Forks:
    """Mutable state, all of it: `_waiting`, the forks in the order of their arrival by parent; `_sharing`, the parents
    of whose forks a part has begun; what is left of the turn's allowance. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.forked = 0
        """Requests that began with another one's blocks."""
        self.inherited = 0
        """Requests that took the place of one that was gone before it had its prompt."""
        self._kv = kv
        self._waiting: dict[Request, list[Request]] = {}
        self._sharing: dict[Request, None] = {}
        self._allowance = Allowance(MAX_FORKED_BLOCKS)

    def parent(self, record: RequestRecord, other: Request) -> Request | None:
        """Return whom a fork of `other` waits for; None where the two cannot share: `record` is a request like any."""
        other = next((p for p, forks in self._waiting.items() if other in forks), other)
        if other.record.space != record.space:
            return None
        theirs, prompt = other.record, record.prompt_tokens
        same = theirs.prompt_tokens == prompt and theirs.tokens[:prompt] == record.tokens[:prompt]
        # What it shares may have slid out of the windows of one that has gone on, or that comes back with an answer.
        shared = shared_tokens(record)
        can = self._kv.can_fork(other.lease, shared) if other.arrived else self._begins_with(other, shared)
        return other if same and can and record.max_tokens <= theirs.max_tokens else None

    def _begins_with(self, other: Request, tokens: int) -> bool:
        """Return True if the windows of `other` will be those that computing on from `tokens` takes when its blocks
        are here, unless a handoff that is lost names more of its tokens (`stranded`)."""
        return not self._kv.groups or len(other.tokens) <= tokens + 1

    def stranded(self) -> list[Request]:
        """Return those that wait for a prompt that is here, without the windows that they were to share."""
        begun = (RequestState.READY, RequestState.RUNNING)
        over = [parent for parent in self._waiting if parent.state in begun and parent not in self._sharing]
        return [fork for parent in over for fork in self._waiting[parent]]

    def promise(self, record: RequestRecord, room_tokens: int, spare: int = 0) -> Lease | None:
        """Return room for what a fork will not share of `room_tokens` tokens, which leaves `spare` blocks to others, if
        there is any."""
        whole = shared_tokens(record) // self._kv.block_size
        wanted = self._kv.blocks_for(room_tokens) - whole
        return self._kv.promise(record.space, wanted, spare, to_share=whole)

    def waiting(self, parent: Request) -> Sequence[Request]:
        """Return those that wait for the prompt of `parent`."""
        return self._waiting.get(parent, ())

    def wait(self, fork: Request, parent: Request) -> None:
        """`fork` begins as soon as the prompt of `parent` is here."""
        fork.move(RequestState.FORKING)
        self._waiting.setdefault(parent, []).append(fork)

    def leave(self, fork: Request) -> None:
        """Forget a request that ends, or is preempted: if it waits as a fork, nobody gives it blocks any more."""
        for parent, forks in list(self._waiting.items()):
            if fork in forks:
                forks.remove(fork)
                if not forks:
                    del self._waiting[parent]
                    self._sharing.pop(parent, None)

    def begin_turn(self) -> list[Request]:
        """Return the parents whose other forks are to begin now."""
        self._allowance.renew()
        return list(self._sharing)

    @property
    def has_put_off(self) -> bool:
        """True where some are to begin in the next turn."""
        return bool(self._sharing)

    def is_sharing(self, parent: Request) -> bool:
        """Return True while a part of those that wait for `parent` has begun, and the rest begins in the next turns."""
        return parent in self._sharing

    def fork(self, parent: Request) -> list[tuple[Request, int]]:
        """Give those that wait for `parent` the head of its lease, if all of the prompt is in it, or as many of them as
        this turn has time for. Return them, each with the number of tokens that it shares."""
        waiting = self._waiting.get(parent)
        self._sharing.pop(parent, None)
        if not waiting or parent.known < max(shared_tokens(fork.record) for fork in waiting):
            return []
        if not all(self._kv.can_fork(parent.lease, shared_tokens(fork.record)) for fork in waiting):
            return []
        shared: list[tuple[Request, int]] = []
        # A fork holds the nodes of what it shares: they must be there before it takes them over.
        self._kv.commit(parent.lease, parent.tokens[: parent.known])
        for fork in waiting:
            tokens = shared_tokens(fork.record)
            # What they share would slide out of the windows of a parent that goes on.
            if not self._allowance.takes(self._kv.blocks_for(tokens)) and not self._kv.groups:
                self._sharing[parent] = None
                break
            self._kv.fork(parent.lease, fork.lease, tokens)
            fork.have_blocks = tokens // self._kv.block_size
            if fork.output_tokens == 0:
                fork.origin.prefill_cached_tokens = tokens
            shared.append((fork, tokens))
        self.forked += len(shared)
        del waiting[: len(shared)]
        if not waiting:
            del self._waiting[parent]
        return shared

    def heir(self, parent: Request) -> Request | None:
        """Return the first of those that wait for `parent`, which is gone: the others wait for it from now on."""
        waiting = self._waiting.pop(parent, None)
        if not waiting:
            return None
        self.inherited += 1
        heir, *others = waiting
        if others:
            self._waiting[heir] = others
        return heir

    def check(self, forking: set[Request]) -> None:
        """Recompute the invariants: `forking` are all requests in that state."""
        waiting = [fork for forks in self._waiting.values() for fork in forks]
        assert len(waiting) == len(forking) and set(waiting) == forking
        for parent, forks in self._waiting.items():
            assert forks and parent not in forking and not parent.lease.released, parent
            assert all(not fork.lease.blocks for fork in forks)
        assert self._sharing.keys() <= self._waiting.keys()


def shared_tokens(record: RequestRecord) -> int:
    """Return how many tokens a fork shares: its prompt's. The token after the last is computed from the last."""
    return min(record.prompt_tokens, len(record.tokens) - 1)
