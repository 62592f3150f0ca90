"""The auditor finds what does not add up, says so with all books, and costs next to nothing."""

import logging

import pytest

from engine.kv.block_pool import BlockPool, BlockState
from telemetry.audit import AuditError, Auditor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A ledger whose check takes its time."""

    def __init__(self, clock: Clock, cost_s: float) -> None:
        self.checks = 0
        self._clock = clock
        self._cost_s = cost_s

    def check(self) -> None:
        self.checks += 1
        self._clock.now += self._cost_s


def test_a_block_counted_twice_is_found_and_all_ledgers_are_dumped(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a leak, or a double free, that only shows as a wrong answer weeks later."""
    ours, theirs = BlockPool(8), BlockPool(4)
    auditor = Auditor({"kv": ours, "transfer": theirs}, Clock(), lambda seconds: None)
    block = ours.allocate(2, BlockState.RESERVED)[0]
    auditor.audit()
    ours._free.append(block)
    with caplog.at_level(logging.CRITICAL), pytest.raises(AuditError, match=r"^the kv ledger"):
        auditor.audit()
    assert "6 free" in caplog.text and "4 free" in caplog.text


def test_the_plainest_broken_ledger_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Guards the cause that the supervisor counts: whose turn it happens to be says nothing."""
    clock, pool = Clock(), BlockPool(4)
    auditor = Auditor({"kv": pool, "scheduler": pool}, clock, lambda seconds: None)
    assert auditor.look()
    pool._free.pop()
    clock.now += 1.0
    with caplog.at_level(logging.CRITICAL), pytest.raises(AuditError, match=r"^the kv ledger"):
        auditor.look()


def test_audits_are_rare_and_rarer_where_they_are_dear() -> None:
    """Guards against a check that keeps a large pool's engine from its next step."""
    clock = Clock()
    cheap, dear = Slow(clock, 0.001), Slow(clock, 0.5)
    for ledger, every_s in ((cheap, 1.0), (dear, 50.0)):
        spent: list[float] = []
        auditor = Auditor({"it": ledger}, clock, spent.append, every_s=1.0)
        began_s = clock.now
        while clock.now < began_s + 500.0:
            auditor.look()
            clock.now += 0.25
        assert ledger.checks == len(spent) == pytest.approx(500.0 / every_s, rel=0.3)
        assert sum(spent) <= 0.011 * 500.0


def test_every_ledger_has_its_turn() -> None:
    """Guards against one that is never recomputed because another is always due before it."""
    clock = Clock()
    ledgers = {str(n): Slow(clock, 0.0) for n in range(3)}
    auditor = Auditor(ledgers, clock, lambda seconds: None, every_s=1.0)
    for _ in range(30):
        auditor.look()
        clock.now += 0.5
    assert [ledger.checks for ledger in ledgers.values()] == [5, 5, 5]


class Long:
    """A ledger of many blocks, one of which may be broken."""

    def __init__(self, clock: Clock, blocks: int, broken: int = -1) -> None:
        self.rounds = self.looked = 0
        self.is_broken_whole = False
        self._clock, self._blocks, self._broken = clock, blocks, broken

    def check(self) -> None:
        self._clock.now += self._blocks * 1e-6
        if self.is_broken_whole:
            raise ValueError("it is broken")

    def check_some(self, limit: int) -> bool:
        first, self.looked = self.looked, min(self._blocks, self.looked + limit)
        self._clock.now += (self.looked - first) * 1e-6
        if first <= self._broken < self.looked:
            self.looked = 0
            raise ValueError("it is broken")
        if self.looked < self._blocks:
            return False
        self.rounds, self.looked = self.rounds + 1, 0
        return True


def test_a_long_ledger_is_checked_in_slices() -> None:
    """Guards every stream of a worker against the number of its blocks: none waits for more than a slice, which takes
    no more than its share of the time, and every ledger still has its turn."""
    clock, spent = Clock(), list[float]()
    long, short = Long(clock, 1_000_000), Slow(clock, 0.0)
    auditor = Auditor({"long": long, "short": short}, clock, spent.append, every_s=0.4, slice_items=2000)
    began_s = clock.now
    while clock.now < began_s + 250.0:
        auditor.look()
        clock.now += 0.01
    assert max(spent) <= 0.0021 and sum(spent) <= 0.011 * 250.0
    assert (long.rounds, short.checks) == (2, 2), "a second of checks takes a hundred"


def test_what_a_slice_finds_ends_the_worker_where_everything_bears_it_out(caplog: pytest.LogCaptureFixture) -> None:
    """Guards a healthy worker's requests against a slice that compares two moments; and that what is broken ends it."""
    clock = Clock()
    long = Long(clock, 10_000, broken=5_000)
    auditor = Auditor({"long": long}, clock, lambda seconds: None, slice_items=2000)

    def look() -> None:
        for _ in range(6):
            auditor.look()
            clock.now += 1.0

    with caplog.at_level(logging.ERROR):
        look()
    assert "a part of the long ledger did not add up, and all of it does now: it is broken" in caplog.text
    long.is_broken_whole = True
    with pytest.raises(AuditError, match=r"^the long ledger .* it is broken"):
        look()
