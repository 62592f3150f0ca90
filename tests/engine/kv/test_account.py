"""The manager beside an account in plain lists: who holds each block, what is cached of which tokens, what goes next.

The account has no numbers of blocks, no tree, no queue of losers and no counts: it looks everything up in lists of all
there is. After every step of a random run both must say the same, to the block and in the same order: what is free,
promised and cached, what was evicted, who holds how much. So a border that is off by one is seen where it is crossed,
and not only where it does harm (test_machine.py knows what a slot must hold). Layer groups are in
test_window_machine.py, loads and disks in tiers/test_machine.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from engine.identity import blocks as names_of
from engine.kv.ledger import BlockLedger
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.tiers import Tiers

SIZE, BLOCKS = 3, 14
SPACES = (b"", b"one", b"two")
Tokens = tuple[int, ...]
Name = tuple[bytes, Tokens]
"""Namespace, and all tokens up to a block's end."""


@dataclass(eq=False)
class Block:
    space: bytes
    state: str
    holders: int = 1
    name: Tokens | None = None


@dataclass(eq=False)
class Held:
    space: bytes
    blocks: list[Block]
    promised: int
    committed: int
    cached_tokens: int
    copies: list[tuple[Block, Block]] = field(default_factory=list)
    steps: int = 0
    displaced: list[Block] = field(default_factory=list)
    tail: Tokens = ()
    released: bool = False


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _needed(tokens: int) -> int:
    return len(range(0, tokens, SIZE))


def _beyond(space: bytes, asking: bytes, count: int, those: Iterable[bytes], own: dict[bytes, int]) -> int:
    return sum(one == space for one in those) + count * (space == asking) - own.get(space, 0)


def _loser(asking: bytes, count: int, those: list[bytes], idle: list[bytes], own: dict[bytes, int]) -> bytes:
    """Return who gives way: whoever has the most beyond its own; of equals whoever asks."""
    excess = {space: _beyond(space, asking, count, those, own) for space in idle}
    losers = [space for space in excess if excess[space] == max(excess.values())]
    return asking if asking in losers else min(losers)


class Host:
    """The tier below: whole blocks by name. Those that are to be copied down are in no line until they are."""

    def __init__(self, size: int, own: dict[bytes, int]) -> None:
        self.size, self.own = size, own
        self.stored: list[Name] = []
        self.line: list[Name] = []
        self.saving: list[Name] = []
        self.forgotten: list[Name] = []

    def demote(self, name: Name) -> bool:
        space, _ = name
        if name in self.line:
            self.line.remove(name)
            self.line.append(name)
        if name in self.stored:
            return True
        if len(self.stored) == self.size and not self.line:
            return False
        those, idle = [of for of, _ in self.stored], [of for of, _ in self.line]
        is_beyond = space in self.own and space in idle and _beyond(space, space, 1, those, self.own) > 0
        if is_beyond or len(self.stored) == self.size:
            loser = space if is_beyond else _loser(space, 1, those, idle, self.own)
            first = next(one for one in self.line if one[0] == loser)
            self.line.remove(first)
            self.stored.remove(first)
            self.forgotten.append(first)
        self.stored.append(name)
        self.saving.append(name)
        return True

    def saved(self) -> None:
        self.line += self.saving
        self.saving = []


class Account:
    def __init__(self, own: dict[bytes, int], host: Host) -> None:
        self.own = own
        self.host = host
        self.lower: list[Name] = []
        self.living: list[Block] = []
        self.line: list[Block] = []
        self.index: dict[Name, Block] = {}
        self.held: list[Held] = []
        self.evicted: list[Name] = []
        self.told: list[tuple[Name, list[Name]]] = []

    @property
    def free(self) -> int:
        return BLOCKS - len(self.living)

    @property
    def promised(self) -> int:
        return sum(held.promised for held in self.held)

    @property
    def available(self) -> int:
        return self.free + len(self.line) - self.promised

    # who has what

    def _hold(self, block: Block) -> None:
        if not block.holders:
            self.line.remove(block)
            block.state = "active"
        block.holders += 1

    def _let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        if block.name is None:
            self.living.remove(block)
        else:
            block.state = "cached"
            self.line.append(block)

    def _drop(self, block: Block) -> None:
        self.line.remove(block)
        self.living.remove(block)
        assert block.name is not None
        del self.index[block.space, block.name]

    def _evict(self, space: bytes) -> None:
        block = next(one for one in self.line if one.space == space)
        assert block.name is not None
        self._drop(block)
        name = space, block.name
        if len(block.name) % SIZE or not self.host.demote(name):
            self.evicted.append(name)
        else:
            self.lower = [*(one for one in self.lower if one != name), name]

    def take_evicted(self) -> list[Name]:
        """Return what is nowhere any more."""
        gone = [name for name in (*self.evicted, *self.host.forgotten) if name not in self.host.stored]
        self.evicted, self.host.forgotten = [], []
        self.lower = [name for name in self.lower if name not in gone]
        return [name for name in gone if name not in self.index]

    def _allocate(self, space: bytes, count: int, state: str) -> list[Block]:
        if space in self.own:
            idle = sum(block.space == space for block in self.line)
            excess = _beyond(space, space, count, [block.space for block in self.living], self.own)
            for _ in range(min(max(excess, 0), idle)):
                self._evict(space)
        while self.free < count:
            those, having = [block.space for block in self.living], [block.space for block in self.line]
            self._evict(_loser(space, count, those, having, self.own))
        made = [Block(space, state) for _ in range(count)]
        self.living += made
        return made

    # what is cached

    def _below(self, space: bytes, path: Tokens) -> list[Tokens]:
        """What the blocks hold that are cached right behind a path, in order."""
        size = len(path)
        return sorted(
            name[size:]
            for of, name in self.index
            if of == space and size < len(name) <= size + SIZE and name[:size] == path
        )

    def match(self, space: bytes, tokens: Tokens, limit: int) -> tuple[list[Block], Block | None, int]:
        at, found = 0, list[Block]()
        while at + SIZE <= limit and (space, tokens[: at + SIZE]) in self.index:
            at += SIZE
            found.append(self.index[space, tokens[:at]])
        rest = tokens[at : min(at + SIZE, limit)]
        below = self._below(space, tokens[:at])
        near = [*[key for key in below if key < rest][-1:], *[key for key in below if key >= rest][:1]]
        best = max(near, key=lambda key: _common(key, rest), default=())
        if not _common(best, rest):
            return found, None, 0
        return found, self.index[space, tokens[:at] + best], _common(best, rest)

    # leases

    def acquire(
        self, space: bytes, tokens: Tokens, limit: int, grow: int, migrating: bool, spare: int
    ) -> Held | None:
        found, partial, more = self.match(space, tokens, limit)
        if migrating:
            partial = None
        promised = max(0, _needed(grow) - _needed(len(tokens)))
        new = _needed(len(tokens)) - len(found)
        left = self.available - sum(not block.holders for block in found) - new - promised - spare
        if partial is not None and left - (not partial.holders) < 0:
            partial = None
        if left < 0:
            return None
        for block in [*found, *([] if partial is None else [partial])]:
            self._hold(block)
        own = self._allocate(space, new, "reserved" if migrating else "active")
        held = Held(space, found + own, promised, len(found), len(found) * SIZE)
        if partial is not None:
            held.copies.append((partial, own[0]))
            held.cached_tokens += more
        self.held.append(held)
        return held

    def promise(self, space: bytes, blocks: int) -> Held | None:
        return self.acquire(space, (), 0, blocks * SIZE, migrating=False, spare=0)

    def fork(self, parent: Held, child: Held, tokens: int) -> None:
        whole = tokens // SIZE
        child.blocks, child.committed, child.cached_tokens = parent.blocks[:whole], whole, tokens
        for block in child.blocks:
            self._hold(block)
        if tokens % SIZE:
            boundary = parent.blocks[whole]
            source = next((source for source, target in parent.copies if target is boundary), boundary)
            self._hold(source)
            self.extend(child, tokens, migrating=False)
            child.copies = [(source, child.blocks[whole])]

    def extend(self, held: Held, tokens: int, *, migrating: bool) -> None:
        missing = max(0, _needed(tokens) - len(held.blocks))
        held.promised -= missing
        held.blocks += self._allocate(held.space, missing, "reserved" if migrating else "active") if missing else []

    def grow(self, held: Held, blocks: int) -> bool:
        if blocks > self.available:
            return False
        held.promised += blocks
        return True

    def copied(self, held: Held) -> None:
        for source, _ in held.copies:
            self._let_go(source)
        held.copies = []

    def landed(self, held: Held) -> None:
        for block in held.blocks:
            if block.state == "reserved":
                block.state = "active"

    def commit(self, held: Held, tokens: Tokens, *, tail: bool) -> None:
        if tail and held.steps:
            held.tail, tail = tokens, False
        last = len(tokens) if tail else len(tokens) // SIZE * SIZE
        fresh: list[Tokens] = []
        for start in range(held.committed * SIZE, last, SIZE):
            block, path, name = held.blocks[start // SIZE], tokens[:start], tokens[: min(start + SIZE, last)]
            if block in [target for _, target in held.copies]:
                break
            known, key = self.index.get((held.space, name)), name[start:]
            if known is None:
                below = self._below(held.space, path)
                if any(longer[: len(key)] == key for longer in below):
                    break
                before = [shorter for shorter in below if shorter < key][-1:]
                for shorter in before:
                    other = self.index[held.space, path + shorter]
                    if key[: len(shorter)] == shorter and not other.holders:
                        self.line.remove(other)
                        self.line.insert(0, other)
                fresh += [name] if len(key) == SIZE else []
            elif not known.holders:
                self._drop(known)
                known = None
            if known is None:
                self.index[held.space, name], block.name = block, name
            elif known is not block:
                self._hold(known)
                held.blocks[start // SIZE] = known
                if held.steps:
                    held.displaced.append(block)
                else:
                    self._let_go(block)
            held.committed += 1
        if fresh:
            self.told.append(((held.space, fresh[0][:-SIZE]), [(held.space, name) for name in fresh]))

    def adopt(self, held: Held, tokens: Tokens) -> int:
        found, _, _ = self.match(held.space, tokens, len(tokens))
        for at in range(held.committed, len(found)):
            self._hold(found[at])
            own, held.blocks[at] = held.blocks[at], found[at]
            held.committed += 1
            self._let_go(own)
        return held.committed * SIZE

    def quarantine(self, held: Held) -> None:
        for block in held.blocks:
            if block.holders == 1:
                block.state = "quarantined"

    def release(self, held: Held) -> None:
        held.released, held.promised = True, 0
        if not held.steps:
            self._give_back(held)

    def ended(self, held: Held) -> None:
        held.steps -= 1
        if held.steps:
            return
        for block in held.displaced:
            self._let_go(block)
        held.displaced = []
        if held.tail:
            tokens, held.tail = held.tail, ()
            self.commit(held, tokens, tail=True)
        if held.released:
            self._give_back(held)

    def _give_back(self, held: Held) -> None:
        self.held.remove(held)
        self.copied(held)
        for block in reversed(held.blocks):
            self._let_go(block)


@dataclass(eq=False)
class Request:
    tokens: list[int]
    lease: Lease
    held: Held
    migrating: bool
    computed: int


class Run:
    """A random run of requests through both."""

    def __init__(self, seed: int, host_blocks: int) -> None:
        self.random = Random(seed)
        share = 0.3 * (seed % 2)
        host = Host(host_blocks, {b"one": int(share * host_blocks)} if share else {})
        self.account = Account({b"one": int(share * BLOCKS)} if share else {}, host)
        self.tiers = Tiers(host_blocks, 4096) if host_blocks else None
        self.kv = KVCacheManager(BLOCKS, SIZE, "m", self.tiers)
        self.kv.entitle(b"one", share)
        self.kv.tells_cached = True
        self.live: list[Request] = []
        self.under_way: list[list[Request]] = []
        self.numbers: dict[Block, int] = {}

    # what requests do

    def acquire(self) -> None:
        pick = self.random
        space, tokens = pick.choice(SPACES), [pick.choice((0, 0, 0, 1)) for _ in range(pick.randint(1, 11))]
        if self.live and pick.random() < 0.5:
            other = pick.choice(self.live)
            space, tokens = other.held.space, [*other.tokens[: pick.randint(1, 9)], *tokens][:12]
        limit, grow = len(tokens) - 1, len(tokens) + pick.randint(0, 5)
        migrating, spare = pick.random() < 0.3, pick.choice((0, 0, 0, 1, 2))
        lease = self.kv.acquire(
            space,
            tokens,
            match_limit=limit,
            room_tokens=len(tokens),
            grow_tokens=grow,
            migrating=migrating,
            spare=spare,
        )
        held = self.account.acquire(space, tuple(tokens), limit, grow, migrating, spare)
        assert (lease is None) == (held is None)
        if lease is not None and held is not None:
            self.live.append(Request(tokens, lease, held, migrating, lease.cached_tokens))

    def look(self) -> None:
        tokens = [self.random.choice((0, 0, 1)) for _ in range(9)]
        space, limit = self.random.choice(SPACES), self.random.randint(0, 9)
        found, _, more = self.account.match(space, tuple(tokens), limit)
        assert self.kv.matched_tokens(space, tokens, limit) == len(found) * SIZE + more

    def fork(self, parent: Request) -> None:
        at = self.random.randint(1, max(parent.computed, 1))
        if parent.migrating or not parent.computed or at // SIZE > parent.held.committed:
            return
        tokens = [*parent.tokens[:at], *([1] * self.random.randint(0, 4))]
        blocks = self.kv.blocks_for(max(len(tokens), at)) - at // SIZE
        lease, held = (one.promise(parent.held.space, blocks) for one in (self.kv, self.account))
        assert (lease is None) == (held is None)
        if isinstance(lease, Lease) and isinstance(held, Held):
            self.kv.fork(parent.lease, lease, at)
            self.account.fork(parent.held, held, at)
            self.live.append(Request(tokens, lease, held, False, at))

    def compute(self, request: Request) -> None:
        if request.migrating:
            self.kv.landed(request.lease)
            self.account.landed(request.held)
            request.migrating, end = False, len(request.tokens)
        else:
            self.kv.copied(request.lease)
            self.account.copied(request.held)
            end = self.random.randint(request.computed, len(request.tokens))
        self.kv.extend(request.lease, end)
        self.account.extend(request.held, end, migrating=False)
        request.computed = end
        self.commit(request, tail=False)

    def commit(self, request: Request, *, tail: bool) -> None:
        tokens = request.tokens[: request.computed]
        self.kv.commit(request.lease, tokens, tail=tail)
        self.account.commit(request.held, tuple(tokens), tail=tail)

    def write(self, request: Request) -> None:
        """One more token, for which more may be promised first."""
        if request.migrating or request.computed < len(request.tokens) or len(request.tokens) > 14:
            return
        short = self.kv.shortage(request.lease, len(request.tokens) + 1)
        assert short == max(0, _needed(len(request.tokens) + 1) - len(request.held.blocks) - request.held.promised)
        has_grown = self.kv.grow(request.lease, short)
        assert has_grown == self.account.grow(request.held, short)
        if has_grown:
            request.tokens.append(self.random.choice((0, 1)))
            self.compute(request)

    def adopt(self, request: Request) -> None:
        if request.migrating or request.held.copies or request.computed != request.held.committed * SIZE:
            return
        tokens = request.tokens[: min(len(request.tokens) - 1, len(request.held.blocks) * SIZE)]
        found = self.kv.adopt(request.lease, tokens)
        assert found == self.account.adopt(request.held, tuple(tokens))
        request.computed = max(request.computed, found)

    def launch(self) -> None:
        step = [request for request in self.live if not request.migrating and self.random.random() < 0.5]
        self.kv.launched([request.lease for request in step])
        for request in step:
            request.held.steps += 1
        self.under_way.append(step)

    def end(self) -> None:
        if self.under_way:
            step = self.under_way.pop(0)
            self.kv.ended([request.lease for request in step])
            for request in step:
                self.account.ended(request.held)

    def finish(self, request: Request) -> None:
        self.live.remove(request)
        if not request.migrating and self.random.random() < 0.8:
            self.commit(request, tail=self.random.random() < 0.6)
        if self.random.random() < 0.2:
            self.kv.quarantine(request.lease)
            self.account.quarantine(request.held)
            self.same()
        self.kv.release(request.lease)
        self.account.release(request.held)

    def step(self) -> None:
        alone = [*4 * [self.acquire], self.look, self.launch, self.launch, *3 * [self.end]]
        others = [self.fork, *3 * [self.compute], self.write, self.adopt, self.adopt, *2 * [self.finish]]
        at = self.random.randrange(len(alone) + len(others))
        if at < len(alone):
            alone[at]()
        elif self.live:
            others[at - len(alone)](self.random.choice(self.live))

    # both say the same

    def same(self) -> None:
        kv, account = self.kv, self.account
        self._know_numbers()
        assert kv.available == account.available and kv.pool.free == account.free
        assert kv.promised == account.promised
        states = Counter(block.state for block in account.living)
        assert kv.pool.counts() == {"free": account.free, **{s: states[s] for s in kv.pool.counts() if s != "free"}}
        numbers = [self.numbers[block] for block in account.living]
        assert len(set(numbers)) == len(numbers)
        assert [kv.pool.refs(at) for at in numbers] == [block.holders for block in account.living]  # type: ignore[arg-type]
        indexed = {self._name(name): self.numbers[block] for name, block in account.index.items()}
        assert {node.identity: node.block for node in kv.cache.nodes()} == indexed
        lines = {space: [self.numbers[b] for b in account.line if b.space == space] for space in SPACES}
        assert dict(kv.cache.shares.lines()) == {space: line for space, line in lines.items() if line}
        assert kv.take_evicted() == list(map(self._name, account.take_evicted()))
        self._same_below()
        told = [(self._name(above) if above[1] else b"", list(map(self._name, run))) for above, run in account.told]
        assert kv.take_cached() == told
        account.told.clear()
        BlockLedger(kv).check()
        kv.check()

    def _same_below(self) -> None:
        if self.tiers is None:
            return
        if self.random.random() < 0.7:
            self.tiers.take_commands()
            self.account.host.saved()
        host, line = self.tiers.host, self.account.host.line
        assert len(host) == len(self.account.host.stored)
        assert all(self._name(name) in host for name in self.account.host.stored)
        lines = {space: [self._name(name) for name in line if name[0] == space] for space in SPACES}
        assert dict(host.shares.lines()) == {space: names for space, names in lines.items() if names}
        assert self.kv.lower() == list(map(self._name, self.account.lower))
        for space, tokens in self.account.lower:
            above = self._name((space, tokens[:-SIZE])) if tokens[SIZE:] else b""
            assert self.kv.above(self._name((space, tokens))) == above

    def _know_numbers(self) -> None:
        assert len(list(self.kv.leases())) == len(self.account.held)
        for lease, held in zip(self.kv.leases(), self.account.held, strict=True):
            assert len(lease.blocks) == len(held.blocks)
            for number, block in zip(lease.blocks, held.blocks, strict=True):
                assert self.numbers.setdefault(block, number) == number
            assert lease.copies == [(self.numbers[source], self.numbers[target]) for source, target in held.copies]
            assert lease.displaced == [self.numbers[block] for block in held.displaced]
            told = (lease.promised, len(lease.path), lease.cached_tokens, lease.steps, lease.released)
            assert told == (held.promised, held.committed, held.cached_tokens, held.steps, held.released)

    def _name(self, name: Name) -> bytes:
        space, tokens = name
        return names_of(self.kv.cache.root_identity(space), list(tokens), SIZE)[-1]


@pytest.mark.parametrize("host_blocks", [0, 7])
@pytest.mark.parametrize("seed", range(12))
def test_the_manager_does_what_the_account_says(seed: int, host_blocks: int) -> None:
    """Guards every figure of the pool, and the order in which blocks go: one token, block, holder or turn too many."""
    run = Run(seed, host_blocks)
    for _ in range(300):
        run.step()
        run.same()
    for request in run.live:
        run.kv.release(request.lease)
        run.account.release(request.held)
    while run.under_way:
        run.end()
    run.same()
    assert run.kv.available == BLOCKS and not run.account.held
