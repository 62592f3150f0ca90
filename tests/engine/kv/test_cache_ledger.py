"""Pool, cache and tiers, checked in slices: whatever is broken is found in one round, and a slice is never long."""

from collections.abc import Callable

import pytest

from engine.identity import extend
from engine.kv.block_pool import BlockState
from engine.kv.cache_ledger import CacheLedger
from engine.kv.groups import LayerGroup
from engine.kv.ledger import BlockLedger
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tiers.commands import OnDisk, Spill, Spilled
from engine.kv.tiers.tiers import Tiers
from engine.types import BlockId
from telemetry.audit import SlicedLedger

BLOCKS, SIZE, HOST = 24, 4, 12


def run(kv: KVCacheManager, first: int, blocks: int) -> Lease:
    tokens = list(range(first, first + blocks * SIZE))
    lease = kv.acquire(b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens))
    assert lease is not None
    kv.copied(lease)
    kv.reach(lease, 0, len(tokens))
    kv.commit(lease, tokens)
    return lease


def site(groups: tuple[LayerGroup, ...] = ()) -> tuple[KVCacheManager, Lease, Lease]:
    """Blocks that are free, cached, held, in host memory and on disk; who holds some, and others."""
    tiers = Tiers(HOST, 4096, disk_bytes=6 * 4 * 4096)
    kv = KVCacheManager(BLOCKS, SIZE, "m", tiers, groups, ahead_tokens=SIZE if groups else 0)
    for number in range(12):
        kv.release(run(kv, 100 * number, 5))
        while commands := tiers.take_commands():
            for command in commands:
                if isinstance(command, Spill):
                    tiers.handle(Spilled(command.segment, ""))
    held, other = run(kv, 1000, 3), run(kv, 2000, 2)
    for _ in range(3):
        kv._evict(b"")
    kv.check()
    return kv, held, other


def a_round(ledger: SlicedLedger, limit: int = 1) -> int:
    """Check everything once; return how many slices it took."""
    slices = 1
    while not ledger.check_some(limit):
        slices += 1
    return slices


def ledgers(kv: KVCacheManager) -> list[SlicedLedger]:
    return [BlockLedger(kv), CacheLedger(kv)]


Break = Callable[[KVCacheManager, Lease, Lease], object]


def _drop_owner(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    del kv._owners[held.blocks[0]]


def _swap_owner(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    kv._owners[held.blocks[0]] = b"another"


def _lose_node(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    del kv.cache._by_block[held.blocks[-1]]


def _cut_node(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    held.path[0].children.clear()


def _double(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    held.blocks[-1] = other.blocks[-1]


def _turn_line(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    line = kv.cache.shares._lines[b""]
    for block in list(line)[::-1]:
        line.move_to_end(block)


def _leave_line(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    line = kv.cache.shares._lines[b""]
    block = list(line)[-1]
    del line[block]
    kv.cache.shares.idle -= 1


def _shift_slot(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    host = kv.tiers.host  # type: ignore[union-attr]
    one, two = list(host._slots)[:2]
    host._slots[one] = host._slots[two]


def _lose_slot(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    host = kv.tiers.host  # type: ignore[union-attr]
    del host._slots[next(iter(host._slots))]


def _pin_idle(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    host = kv.tiers.host  # type: ignore[union-attr]
    host._pins[next(iter(host._idle))] = 1


def _misplace(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    disk = kv.tiers.disk  # type: ignore[union-attr]
    ident, place = next(iter(disk.places.items()))
    disk.places[ident] = OnDisk(place.segment, place.at + 1)


def _stale_place(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    disk = kv.tiers.disk  # type: ignore[union-attr]
    disk.places[bytes(32)] = OnDisk(999, 0)


def _count_bytes(kv: KVCacheManager, held: Lease, other: Lease) -> None:
    kv.tiers.disk.used_bytes -= 1  # type: ignore[union-attr]


BROKEN: dict[str, Break] = {
    "a block of two owners": _double,
    "a block that nobody holds": lambda kv, held, other: kv.pool.allocate(1),
    "a block that is free and held": lambda kv, held, other: kv.pool._free.insert(0, held.blocks[0]),
    "a block that is free twice": lambda kv, held, other: kv.pool._free.append(kv.pool._free[0]),
    "a block that is not free and not held": lambda kv, held, other: kv.pool._free.pop(),
    "a cached block that is not indexed": _lose_node,
    "a free block that is indexed": lambda kv, held, other: kv.pool.recycle(BlockId(kv.cache.shares.first(b"", 1)[0])),
    "a count that is wrong": lambda kv, held, other: kv.pool._counts.update({BlockState.ACTIVE.value: 1}),
    "a held count that is wrong": lambda kv, held, other: kv.pool._held.__setitem__(0, 1),
    "a promise that is not there": lambda kv, held, other: setattr(kv, "_promised", -1),
    "a block without a namespace": _drop_owner,
    "a block of another namespace": _swap_owner,
    "a share that is wrong": lambda kv, held, other: kv.cache.shares.took(b"", 1),
    "a node without its children": _cut_node,
    "a line that begins with a parent": _turn_line,
    "a block that is in no line": _leave_line,
    "a name too few": lambda kv, held, other: kv._identities.pop(),
    "a name too many": lambda kv, held, other: kv._identities.add(extend(bytes(32), [1])),
    "a slot of two blocks": _shift_slot,
    "a slot of none": _lose_slot,
    "a block that is pinned and idle": _pin_idle,
    "a share of host memory that is wrong": lambda kv, held, other: kv.tiers.host.shares.took(b"", 1),  # type: ignore[union-attr]
    "a place beside the segment's": _misplace,
    "a place in no segment": _stale_place,
    "bytes of the disk that are wrong": _count_bytes,
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_found_in_one_round(what: str) -> None:
    """Guards what a check of everything at once finds: in slices, nothing of it is lost."""
    kv, held, other = site()
    for ledger in ledgers(kv):
        a_round(ledger)
    BROKEN[what](kv, held, other)
    found = []
    for ledger in ledgers(kv):
        try:
            a_round(ledger)
        except Exception as error:
            found.append(error)
    assert found


@pytest.mark.parametrize(
    "breaks",
    [
        lambda kv: setattr(kv.windows, "promised", kv.windows.promised + 1),
        lambda kv: setattr(kv.windows, "doubled", kv.windows.doubled + 1),
        lambda kv: kv.windows._holders.popitem(),
        lambda kv: kv.windows._worth.add(kv.pool.free_list[0]),
        lambda kv: next(iter(kv.leases())).held.__setitem__(0, 1),
    ],
)
def test_what_is_broken_of_window_groups_is_found(breaks: Callable[[KVCacheManager], object]) -> None:
    kv, *_leases = site((LayerGroup((0,)), LayerGroup((1,), 22)))
    assert a_round(CacheLedger(kv)) > 10
    breaks(kv)
    with pytest.raises(AssertionError):
        a_round(CacheLedger(kv))


@pytest.mark.parametrize("number", [0, 1])
def test_a_slice_looks_at_so_many_blocks_and_no_more(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every stream of a worker: a check went through all blocks, slots and segments while they waited."""
    kv = KVCacheManager(4000, SIZE, "m")
    leases = [run(kv, 1000 * at, 100) for at in range(30)]
    for lease in leases[::2]:
        kv.release(lease)
    ledger, looked, slices = ledgers(kv)[number], 0, list[int]()
    of_pool = kv.pool.state

    def state(block: BlockId) -> BlockState:
        nonlocal looked
        looked += 1
        return of_pool(block)

    monkeypatch.setattr(kv.pool, "state", state)
    is_over = False
    while not is_over:
        before, is_over = looked, ledger.check_some(300)
        slices.append(looked - before)
    assert looked >= 4000 and len(slices) > 4000 / 300 and max(slices) <= 3 * 300


def test_blocks_that_come_and_go_meanwhile_break_nothing() -> None:
    """Guards a sound worker: a slice must not compare what is now with what was in the slice before."""
    kv, *_ = site()
    both, rounds = ledgers(kv), [0, 0]
    for number in range(400):
        lease = run(kv, 100 * (number % 7), 1 + number % 5)
        for at, ledger in enumerate(both):
            rounds[at] += ledger.check_some(20)
        kv.release(lease)
        for at, ledger in enumerate(both):
            rounds[at] += ledger.check_some(20)
        for command in kv.tiers.take_commands():  # type: ignore[union-attr]
            if isinstance(command, Spill):
                kv.tiers.handle(Spilled(command.segment, ""))  # type: ignore[union-attr]
    assert min(rounds) > 3
    kv.check()


def test_a_lease_that_ends_while_its_tables_are_checked_breaks_nothing() -> None:
    """Guards a sound worker: its blocks are another group's by then, and its table is read no more."""
    kv, *leases = site((LayerGroup((0,)), LayerGroup((1,), 22)))
    tables = CacheLedger(kv)._tables()
    next(tables)
    for lease in leases:
        kv.release(lease)
    kv.pool._groups = [1 - group for group in kv.pool._groups]
    assert not list(tables)
