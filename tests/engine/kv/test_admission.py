"""Admission cannot deadlock: whatever arrives in whatever order, a worker that keeps the manager's rules goes on.

A request is admitted with blocks for its prompt and the promise of room to grow; a promise counts running, reserved and
in-flight growth. So every admitted request can finish, and an empty worker admits whatever fits its pool. The
schedulers that admit are in tests/prefill_worker/scheduler and tests/decode_worker/scheduler/test_admission.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.manager import KVCacheManager, Lease

BLOCKS, SIZE = 10, 4


@dataclass
class Asked:
    """A prompt of `shared` common and `own` tokens, then up to `answer` more; `migrating` blocks land after a while,
    and a peer reads them for `read_for` turns after the end."""

    shared: int
    own: int
    answer: int
    migrating: bool
    read_for: int

    @property
    def wanted(self) -> int:
        return self.shared + self.own + self.answer


@dataclass
class Running:
    asked: Asked
    lease: Lease
    tokens: list[int] = field(default_factory=list)
    landed: bool = False


def _requests() -> st.SearchStrategy[Asked]:
    fits = lambda asked: -(-asked.wanted // SIZE) <= BLOCKS  # noqa: E731
    return st.builds(
        Asked,
        shared=st.integers(0, 16),
        own=st.integers(1, 24),
        answer=st.integers(0, 24),
        migrating=st.booleans(),
        read_for=st.integers(0, 3),
    ).filter(fits)


def serve(asked: list[Asked], pick: Callable[[int], int]) -> int:
    """Serve all of them; `pick(n)` chooses among n. Returns the turns taken; raises AssertionError if nothing moves,
    ValueError or KeyError if somebody admitted cannot grow."""
    kv = KVCacheManager(BLOCKS, SIZE, "m")
    waiting, running = list(asked), list[Running]()
    leaving: list[tuple[int, Lease]] = []
    turn = 0
    while waiting or running or leaving:
        turn += 1
        moved = False
        for _, lease in [item for item in leaving if item[0] <= turn]:
            kv.release(lease)
            moved = True
        leaving = [item for item in leaving if item[0] > turn]
        for _ in range(len(waiting)):  # any order, and one that does not fit holds up nobody
            at = pick(len(waiting))
            request = waiting[at]
            tokens = [*range(request.shared), *(1000 + id(request) % 997 + n for n in range(request.own))]
            lease = kv.acquire(
                b"",
                tokens,
                match_limit=len(tokens) - 1,
                room_tokens=len(tokens),
                grow_tokens=request.wanted,
                migrating=request.migrating,
            )
            if lease is not None:
                del waiting[at]
                running.append(Running(request, lease, tokens))
                moved = True
                break
        if running:
            one = running[pick(len(running))]
            moved = True
            if one.asked.migrating and not one.landed:
                kv.landed(one.lease)
                one.landed = True
            elif len(one.tokens) < one.asked.wanted:
                kv.copied(one.lease)
                one.tokens.append(5000 + turn)
                kv.extend(one.lease, len(one.tokens))
            else:
                running.remove(one)
                kv.copied(one.lease)
                kv.commit(one.lease, one.tokens, tail=True)
                kv.quarantine(one.lease)
                leaving.append((turn + one.asked.read_for, one.lease))
        assert moved or leaving, f"frozen: {kv!r}, {len(waiting)} wait"
        kv.check()
    return turn


@settings(max_examples=100, deadline=None)
@given(st.lists(_requests(), min_size=1, max_size=12), st.data())
def test_no_arrival_order_freezes_a_worker(asked: list[Asked], data: st.DataObject) -> None:
    serve(asked, lambda n: data.draw(st.integers(0, n - 1)))


def test_without_promises_the_same_worker_gets_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail: three requests that are admitted without counting each other's growth."""
    three = [Asked(0, 8, 12, False, 0) for _ in range(3)]
    assert serve(three, lambda n: 0) > 0
    free = property(lambda kv: kv.pool.free + kv.cache.idle)
    monkeypatch.setattr(KVCacheManager, "available", free)
    monkeypatch.setattr(KVCacheManager, "check", lambda kv: None)
    with pytest.raises((KeyError, ValueError)):
        serve(three, Random(1).randrange)
