"""Random requests against leases of several layer groups, with a memory that knows what every slot must hold.

As in test_machine.py, the shadow keeps for every slot the prefix that it was computed from, and its layer group. A
request reads what its layers see: all of group 0, of the others the window before each token. So a block that was freed
one token early, a tail that a match, a fork or a migration left out, or a block that two sequences have is a wrong read
at once. That the shadow notices is shown by the planted errors at the end.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.kv.groups import GONE, LayerGroup
from engine.kv.ledger import BlockLedger
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.windows import WindowTables
from engine.types import BlockId
from tests.engine.kv.slices import KVSlices

SIZE, CHUNK, BLOCKS = 4, 6, 48
Slot = tuple[int, bytes, tuple[int, ...]]
"""Layer group, namespace and all tokens up to and with this one."""

names = st.sampled_from([b"", b"tenant"])
words = st.lists(st.integers(0, 1), min_size=1, max_size=40)
windows = st.lists(st.integers(1, 14), min_size=1, max_size=2)


@dataclass(eq=False)
class Request:
    name: bytes
    tokens: list[int]
    lease: Lease
    migrating: bool
    computed: int
    grow: int
    found: int = 0
    """Tokens that a match, or the one it was forked from, had for it: no window of what lies before them is kept."""
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)


class WindowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: list[Request] = []

    @initialize(windows=windows, share=st.sampled_from([0.0, 0.1, 0.5]))
    def open(self, windows: list[int], share: float) -> None:
        groups = (LayerGroup((0,)), *(LayerGroup((at,), window) for at, window in enumerate(windows, 1)))
        self.groups = groups
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", groups=groups, ahead_tokens=CHUNK)
        self.slices = KVSlices(self.kv)
        self.kv.entitle(b"tenant", share)
        self.memory: list[list[Slot | None]] = [[None] * SIZE for _ in range(BLOCKS)]

    def _is_idle(self) -> bool:
        return not self.live

    def _advance(self) -> None:
        """Blocks that were handed out anew hold nothing."""
        for block in self.kv.take_handed_out():
            assert not self.kv.cache.holds(block)
            self.memory[block] = [None] * SIZE

    def _reads_its_own(self, request: Request, position: int) -> None:
        """What computing the token at `position` reads is what was computed for it."""
        for number, group in enumerate(self.groups):
            first = max(0, position - group.window + 1) if group.window else 0
            for at in range(first, position):
                block = request.lease.tables[number][at // SIZE]
                assert block != GONE, f"group {number} of {position} lacks {at}"
                held = self.memory[block][at % SIZE]
                assert held == (number, request.name, tuple(request.tokens[: at + 1])), (number, position, at)

    def _write(self, request: Request, start: int, end: int) -> None:
        for number, table in enumerate(request.lease.tables):
            for at in range(start, end):
                block = table[at // SIZE]
                assert self.kv.pool.refs(block) == 1, "a shared block is written"
                assert not self.kv.cache.holds(block), "an indexed block is written"
                self.memory[block][at % SIZE] = (number, request.name, tuple(request.tokens[: at + 1]))

    def _compute(self, request: Request, end: int) -> None:
        """Compute a chunk: each token reads its window, then is written."""
        self.kv.reach(request.lease, request.computed, end)
        self._advance()
        self._copy(request.lease)
        for at in range(request.computed, end):
            self._reads_its_own(request, at)
            self._write(request, at, at + 1)
        request.computed = end

    def _copy(self, lease: Lease) -> None:
        for source, target in lease.copies:
            self.memory[target] = list(self.memory[source])
        self.kv.copied(lease)

    # rules

    @rule(name=names, tokens=words, grow=st.integers(0, 9), migrating=st.booleans())
    def acquire(self, name: bytes, tokens: list[int], grow: int, migrating: bool) -> None:
        before = repr(self.kv), self.kv.available
        lease = self.kv.acquire(
            name,
            tokens,
            match_limit=len(tokens) - 1,
            room_tokens=len(tokens),
            grow_tokens=len(tokens) + grow,
            migrating=migrating,
        )
        if lease is None:
            assert (repr(self.kv), self.kv.available) == before
            assert not self._is_idle(), "an idle worker refuses what fits its pool"
            return
        self._advance()
        request = Request(name, list(tokens), lease, migrating, lease.cached_tokens, grow, lease.cached_tokens)
        if lease.copies:
            whole = lease.cached_tokens - lease.cached_tokens % SIZE
            assert len(lease.copies) == len(self.groups) and whole < lease.cached_tokens
        else:
            self._reads_its_own(request, lease.cached_tokens)
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), grow=st.integers(0, 3), migrating=st.booleans(), more=words)
    def acquire_alike(self, data: st.DataObject, grow: int, migrating: bool, more: list[int]) -> None:
        """A prompt that begins as another, or goes on behind it."""
        other = data.draw(st.sampled_from(self.live))
        at = data.draw(st.integers(1, len(other.tokens)))
        self.acquire(other.name, [*other.tokens[:at], *more][:60], grow, migrating)

    @precondition(lambda self: any(r.computed and not r.migrating for r in self.live))
    @rule(data=st.data(), more=words)
    def fork(self, data: st.DataObject, more: list[int]) -> None:
        ready = [r for r in self.live if r.computed and not r.migrating and not r.lease.copies]
        if not ready:
            return
        parent = data.draw(st.sampled_from(ready))
        at = parent.computed - data.draw(st.integers(0, min(3, parent.computed - 1)))
        if not self.kv.can_fork(parent.lease, at):
            assert at < max(parent.found, parent.computed - 1), "the last token can always be computed again"
            return
        tokens = [*parent.tokens[:at], *more]
        whole = at // SIZE
        lease = self.kv.promise(parent.name, self.kv.blocks_for(len(tokens)) - whole, to_share=whole)
        if lease is None:
            return
        self.kv.check()
        self.kv.commit(parent.lease, parent.tokens[: parent.computed])
        self.kv.fork(parent.lease, lease, at)
        self._advance()
        self._copy(lease)  # before its parent writes on
        self.kv.extend(lease, len(tokens))
        self._advance()
        self.live.append(Request(parent.name, tokens, lease, False, at, 0, found=at))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), commits=st.booleans())
    def step(self, data: st.DataObject, commits: bool) -> None:
        for request in self.live:
            if data.draw(st.booleans()):
                self._step(request, data, commits)

    def _step(self, request: Request, data: st.DataObject, commits: bool) -> None:
        lease = request.lease
        if request.migrating:
            self._land(request, data)
            return
        if request.computed >= len(request.tokens):
            if not request.grow:
                return
            request.grow -= 1
            request.tokens.append(data.draw(st.integers(0, 1)))
            self.kv.extend(lease, len(request.tokens))
        left = len(request.tokens) - request.computed
        self._compute(request, request.computed + data.draw(st.integers(1, min(left, CHUNK))))
        if commits:
            self.kv.commit(lease, request.tokens[: request.computed])
        self.kv.slide(lease, request.computed)

    def _land(self, request: Request, data: st.DataObject) -> None:
        """Everything comes, or the rest is computed here after all."""
        lease, total = request.lease, len(request.tokens)
        if data.draw(st.booleans()):
            self.kv.landed(lease)
            self.kv.restart(lease, request.computed)
        else:
            self._write_group(request, 0, range(len(lease.path), len(lease.blocks)))
            assert self.kv.windows is not None
            for number, wanted in enumerate(self.kv.windows.wanted(len(lease.path), total), 1):
                assert len(wanted) <= -(-(self.groups[number].window - 1) // SIZE) + 1
                self._write_group(request, number, wanted)
            request.computed = total
            self.kv.landed(lease)
        request.migrating = False

    def _write_group(self, request: Request, number: int, blocks: range) -> None:
        for at in range(blocks.start * SIZE, min(blocks.stop * SIZE, len(request.tokens))):
            block = request.lease.tables[number][at // SIZE]
            assert self.kv.pool.refs(block) == 1 and not self.kv.cache.holds(block)
            self.memory[block][at % SIZE] = (number, request.name, tuple(request.tokens[: at + 1]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        """What another has computed meanwhile takes the place of what is still to be computed."""
        request = data.draw(st.sampled_from(self.live))
        lease = request.lease
        if request.migrating or lease.copies or len(lease.path) * SIZE != request.computed:
            return
        if request.computed >= len(request.tokens):
            return
        found = self.kv.adopt(lease, request.tokens[:-1])
        if found > request.computed:
            request.computed = request.found = found
        self._reads_its_own(request, request.computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tail=st.booleans())
    def finish(self, data: st.DataObject, tail: bool) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        if not request.migrating and not request.lease.copies:
            self.kv.commit(request.lease, request.tokens[: request.computed], tail=tail)
        self.kv.release(request.lease)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), grow=st.integers(1, 12))
    def grow(self, data: st.DataObject, grow: int) -> None:
        """More is promised to one that goes on."""
        request = data.draw(st.sampled_from(self.live))
        short = self.kv.shortage(request.lease, len(request.tokens) + request.grow + grow)
        available = self.kv.available
        cost = self.kv.cost(request.lease, short)
        if self.kv.grow(request.lease, short):
            request.grow += grow
            assert self.kv.available == available - cost
        else:
            assert self.kv.available == available < cost

    # what holds at all times

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        BlockLedger(self.kv).check()
        self.slices.go_on()
        for request in self.live:
            if not request.lease.copies:
                self._reads_its_own(request, request.computed)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for request in self.live:
            self.kv.release(request.lease)
        self.kv.check()
        counts = self.kv.pool.counts()
        assert counts["free"] + counts["cached"] == BLOCKS and self.kv.available == BLOCKS


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def _one_block_early(self: WindowTables, lease: Lease, tokens: int) -> None:
    for number, group in enumerate(self.groups):
        first = min(group.first_migrated(tokens, SIZE) + 1, len(lease.blocks))
        if first > lease.starts[number]:
            self._drop(lease, number, range(lease.starts[number], first))
            lease.starts[number] = first


def _shares_too_little(self: WindowTables, parent: Lease, child: Lease, tokens: int) -> list[tuple[BlockId, BlockId]]:
    copies = _fork(self, parent, child, tokens)
    for number in range(len(self.groups)):
        self._drop(child, number, range(child.starts[number], child.starts[number] + 1))
    return copies


_fork = WindowTables.fork


@pytest.mark.parametrize(
    ("method", "planted"), [("slide", _one_block_early), ("fork", _shares_too_little)], ids=["slide", "fork"]
)
def test_the_shadow_notices(method: str, planted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tail that is one block short is found, be it freed early or not shared."""
    monkeypatch.setattr(WindowTables, method, planted)
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            WindowMachine,
            settings=settings(
                max_examples=300,
                stateful_step_count=40,
                deadline=None,
                database=None,
                print_blob=False,
                phases=[Phase.generate],
            ),
        )
