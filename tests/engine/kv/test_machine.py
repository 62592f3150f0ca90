"""Random requests against pool, tree and leases, with a memory that knows what every slot must hold.

The KV of a token depends on all tokens before it, so the shadow keeps for every slot the whole prefix that it was
computed from. Whoever reads a slot (a hit, a later step, a neighbour's match) must find exactly his own prefix there.
The rules one by one are in test_manager.py, the same machine over tiers in tiers/test_machine.py.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.block_pool import BlockState
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.radix_cache import Node
from tests.engine.kv.slices import KVSlices

BLOCKS, SIZE = 16, 4
Slot = tuple[bytes, tuple[int, ...]]
"""Namespace and all tokens up to and with this one."""

names = st.sampled_from([b"", b"tenant"])
words = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Request:
    name: bytes
    tokens: list[int]
    lease: Lease
    migrating: bool
    computed: int
    grow: int
    generations: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(BLOCKS, SIZE, "m")
        self.slices = KVSlices(self.kv)
        self.memory: list[list[Slot | None]] = [[None] * SIZE for _ in range(BLOCKS)]
        self.live: list[Request] = []
        self.parked: list[Lease] = []
        self.handed_out = [0] * BLOCKS

    # what a worker does around the manager

    def _advance(self) -> None:
        """Blocks that were handed out anew hold nothing."""
        for block in self.kv.take_handed_out():
            assert not self.kv.cache.holds(block)
            self.memory[block] = [None] * SIZE
            self.handed_out[block] += 1
            assert self.handed_out[block] == self.kv.pool.generation(block)

    def _write(self, request: Request, end: int) -> None:
        for at in range(request.computed, end):
            block = request.lease.blocks[at // SIZE]
            assert self.kv.pool.refs(block) == 1, "a shared block is written"
            assert not self.kv.cache.holds(block), "an indexed block is written"
            self.memory[block][at % SIZE] = (request.name, tuple(request.tokens[: at + 1]))
        request.computed = end

    def _reads_its_own(self, request: Request) -> None:
        for at in range(request.computed):
            held = self.memory[request.lease.blocks[at // SIZE]][at % SIZE]
            assert held == (request.name, tuple(request.tokens[: at + 1])), at

    def _paths(self) -> list[tuple[bytes, tuple[int, ...], Node]]:
        """All that is cached: namespace, tokens from the root on, node."""
        found = []
        for name, root in self.kv.cache._roots.items():
            stack: list[tuple[tuple[int, ...], Node]] = [((), root)]
            while stack:
                before, node = stack.pop()
                for key, child in node.children.items():
                    tokens = (*before, *memoryview(key).cast("I"))
                    found.append((name, tokens, child))
                    stack.append((tokens, child))
        return found

    # rules

    @rule(name=names, tokens=words, grow=st.integers(0, 9), migrating=st.booleans())
    def acquire(self, name: bytes, tokens: list[int], grow: int, migrating: bool) -> None:
        limit, before = len(tokens) - 1, repr(self.kv)
        best = 0
        for held_by, cached, _ in self._paths():
            common = 0
            while common < min(len(cached), limit) and cached[common] == tokens[common]:
                common += 1
            best = max(best, common if held_by == name else 0)
        assert self.kv.matched_tokens(name, tokens, limit) == best, "to the token"
        lease = self.kv.acquire(
            name,
            tokens,
            match_limit=limit,
            room_tokens=len(tokens),
            grow_tokens=len(tokens) + grow,
            migrating=migrating,
        )
        if lease is None:
            assert repr(self.kv) == before
            assert self.live or self.parked, "an idle worker refuses what fits its pool"
            return
        if migrating:
            best -= best % SIZE
        assert lease.cached_tokens in (best, best - best % SIZE)  # the copy's source may be needed
        self._advance()
        for source, target in lease.copies:
            assert self.kv.pool.refs(source) >= 1 and self.kv.pool.refs(target) == 1
            self.memory[target] = list(self.memory[source])
        request = Request(name, list(tokens), lease, migrating, lease.cached_tokens, grow)
        self._reads_its_own(request)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def acquire_the_same(self, data: st.DataObject) -> None:
        """Two that compute the same at once: the second one's blocks are duplicates."""
        request = data.draw(st.sampled_from(self.live))
        self.acquire(request.name, request.tokens, 0, False)

    @precondition(lambda self: any(r.computed and not r.migrating for r in self.live))
    @rule(data=st.data(), more=words, is_dropped=st.booleans())
    def fork(self, data: st.DataObject, more: list[int], is_dropped: bool) -> None:
        """A sample of the same prompt: it promises what it will not share, and writes only what is its own."""
        ready = [r for r in self.live if r.computed and not r.migrating and not r.lease.copies]
        if not ready:
            return
        parent = data.draw(st.sampled_from(ready))
        at = data.draw(st.integers(1, parent.computed))
        tokens = [*parent.tokens[:at], *more]
        before = repr(self.kv)
        lease = self.kv.promise(parent.name, self.kv.blocks_for(len(tokens)) - at // SIZE)
        if lease is None:
            assert repr(self.kv) == before
            return
        shared = self.kv.pool.counts()
        self.kv.fork(parent.lease, lease, at)
        taken = shared["free"] + shared["cached"] - sum(
            self.kv.pool.counts()[state] for state in ("free", "cached")
        )
        assert taken == (at % SIZE > 0), "a fork takes one block at most"
        self._advance()
        if is_dropped:
            self.kv.release(lease)  # before its copy was made
            return
        for source, target in lease.copies:
            self.memory[target] = list(self.memory[source])
        self.kv.copied(lease)
        fork = Request(parent.name, tokens, lease, False, at, 0)
        self._reads_its_own(fork)
        self.kv.extend(lease, len(tokens))
        self._advance()
        self.live.append(fork)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some of the batch: for each a chunk of the prompt, or what a migration brings, or a new token."""
        for request in self.live:
            if data.draw(st.booleans()):
                self._step(request, data)

    def _step(self, request: Request, data: st.DataObject) -> None:
        lease = request.lease
        self._reads_its_own(request)
        if request.migrating:
            self._write(request, len(request.tokens))
            if data.draw(st.booleans()):
                return  # the bytes are there, not yet verified
            self.kv.landed(lease)
            request.migrating = False
        elif request.computed < len(request.tokens):
            self.kv.copied(lease)
            self._write(request, data.draw(st.integers(request.computed, len(request.tokens))))
        elif request.grow:
            request.grow -= 1
            request.tokens.append(data.draw(st.integers(0, 1)))
            self.kv.extend(lease, len(request.tokens))
            self._advance()
            self._write(request, len(request.tokens))
        self.kv.commit(lease, request.tokens[: request.computed])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tail=st.booleans())
    def finish(self, data: st.DataObject, tail: bool) -> None:
        """The end, wherever the request stands; a peer may be reading its blocks for a while yet."""
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        if not request.migrating:
            self.kv.copied(request.lease)
            if data.draw(st.booleans()):
                self._write(request, len(request.tokens))
            self.kv.commit(request.lease, request.tokens[: request.computed], tail=tail)
        if data.draw(st.booleans()):
            self.kv.quarantine(request.lease)
            self.parked.append(request.lease)
        else:
            self.kv.release(request.lease)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.parked))
        self.parked.remove(lease)
        self.kv.release(lease)

    @rule()
    def pressure(self) -> None:
        """Somebody takes all there is: everything that nobody holds is evicted, and nothing else."""
        room, cached = self.kv.available, self.kv.pool.counts()["cached"]
        assert self.kv.acquire(b"x", [0], match_limit=0, room_tokens=(room + 1) * SIZE) is None
        lease = self.kv.acquire(b"x", [0], match_limit=0, room_tokens=room * SIZE)
        assert lease is not None and self.kv.available == 0
        self._advance()
        assert len(self.kv.take_evicted()) >= room - (BLOCKS - cached)
        self.kv.release(lease)

    # what holds at all times

    @invariant()
    def sound(self) -> None:
        self.kv.check()
        self.slices.go_on()
        for request in self.live:
            self._reads_its_own(request)
        for name, tokens, node in self._paths():
            held = self.memory[node.block]
            first = len(tokens) - len(node.key) // 4
            for at in range(first, len(tokens)):
                assert held[at % SIZE] == (name, tokens[: at + 1]), "the tree promises what is not there"

    def teardown(self) -> None:
        for lease in [*self.parked, *(request.lease for request in self.live)]:
            self.kv.release(lease)
        self.kv.check()
        counts = self.kv.pool.counts()
        assert counts["free"] + counts["cached"] == BLOCKS
        assert all(self.kv.pool.state(b) is not BlockState.QUARANTINED for b in range(BLOCKS))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
