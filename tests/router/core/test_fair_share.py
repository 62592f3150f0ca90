"""The order of requests of several tenants that wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Place
from router.core import fair_share
from router.core.events import TellWorker
from router.core.fair_share import MAX_TENANTS, FairShare
from tests.router.core.parts import Parts


def order(arrivals: list[tuple[str, int, float]]) -> list[str]:
    """Return the tenants in the order in which their requests, all there at once, are served."""
    share = FairShare()
    tags = [share.tag(name.encode(), tokens, weight) for name, tokens, weight in arrivals]
    return [arrivals[turn][0] for _, turn in sorted(zip(tags, range(len(tags)), strict=True))]


def test_one_tenant_is_served_in_order() -> None:
    share = FairShare()
    tags = [share.tag(b"", tokens, 1.0) for tokens in (500, 1, 20, 1)]
    assert tags == sorted(tags) and len(set(tags)) == 4


def test_who_comes_late_does_not_wait_behind_a_flood() -> None:
    """Guards first come, first served across tenants: one of them would own the line."""
    assert order([("flood", 100, 1.0)] * 20 + [("late", 100, 1.0)]).index("late") == 1


def test_tokens_are_shared_by_weight() -> None:
    served = order([("a", 100, 3.0), ("b", 100, 1.0)] * 40)[:40]
    assert 29 <= served.count("a") <= 31


def test_a_pause_saves_nothing_up() -> None:
    share = FairShare()
    for _ in range(10):
        share.serve(share.tag(b"busy", 100, 1.0))
    late = [share.tag(b"late", 100, 1.0) for _ in range(10)]
    busy = [share.tag(b"busy", 100, 1.0) for _ in range(10)]
    assert sorted(late + busy)[:10] != late, "what it did not ask for before is not its now"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=80))
def test_each_tenants_own_order_is_kept(arrivals: list[tuple[str, int]]) -> None:
    share = FairShare()
    tags: dict[str, list[float]] = {}
    for name, tokens in arrivals:
        tags.setdefault(name, []).append(share.tag(name.encode(), tokens, 2.0))
    assert all(tags[name] == sorted(tags[name]) for name in tags)


def test_names_of_tenants_do_not_pile_up() -> None:
    """Guards memory: where no credentials are asked for, a caller may name as many tenants as it likes."""
    share = FairShare()
    for number in range(3 * MAX_TENANTS):
        share.serve(share.tag(str(number).encode(), 1, 1.0) + 1.0)
    assert len(share._ends) <= MAX_TENANTS + 1
    share.clear()
    assert repr(share) == "FairShare(at 0, 0 tenants)"


def test_the_queue_offers_by_share_and_a_refused_request_keeps_its_place() -> None:
    """Guards the way from a tag to an offer: a flood of one tenant, and one request of another behind it."""
    parts = Parts()
    flood = [parts.wait(f"f{number}", namespace=b"flood") for number in range(3)]
    parts.wait("late", namespace=b"late")
    parts.join("p0")
    parts.join("d0", blocks=1024)
    parts.queue.advance(0.0, parts.out)
    assert offered(parts) == ["f0", "late", "f1", "f2"]
    parts.queue.rejoin(flood[1])
    parts.wait("later", namespace=b"flood")
    parts.queue.rejoin(flood[0])
    parts.queue.advance(0.0, parts.out)
    assert offered(parts) == ["f0", "f1", "later"]
    parts.queue.check()


def offered(parts: Parts) -> list[str]:
    found = [command.record for command in parts.take() if isinstance(command, TellWorker)]
    return [record.record.request for record in found if isinstance(record, Place)]


def test_tenants_that_were_served_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory against tenants that come once."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 2)
    share = FairShare()
    told = []
    for number, served in enumerate((100.0, 200.0, 210.0, 300.0)):
        share.tag(b"%d" % number, 10, 1.0)
        share.serve(served)
        told.append(repr(share))
    assert [text.split(", ")[1] for text in told] == [f"{count} tenants)" for count in (1, 2, 3, 1)]
