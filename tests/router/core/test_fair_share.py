"""Whose turn it is, of several tenants that wait, and what each has had by then."""

import time
from dataclasses import dataclass, field
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Accepted, Place, Refused, Tokens
from engine.types import RequestId
from router.core import fair_share
from router.core.events import ClientLeft, TellWorker
from router.core.fair_share import (
    LOOKED_AT,
    MAX_TENANTS,
    MOST_PASSED,
    OLDEST_EVERY,
    OUTPUT_WEIGHT,
    QUANTUM,
    FairShare,
)
from tests.router.bench import Bench, ended
from tests.router.core.parts import Parts


def cold(request: RequestId) -> int:
    return 0


def enter(share: FairShare, *names: str, weight: float = 1.0, priority: int = 0, turn: int = 0) -> None:
    """Requests that wait, each of the tenant that its name begins with, in this order."""
    for name in names:
        turn = max([turn, *(entry.key[1] for entry in share._entries.values())]) + 1
        share.enter(RequestId(name), name[0], weight, priority, turn)


def served(share: FairShare, tokens: int = 100, most: int = 1000) -> list[str]:
    """Serve all that wait, each for so many tokens, and return who they were."""
    found = list[str]()
    while len(found) < most and (request := share.next(cold)) is not None:
        share.serve(request, tokens)
        share.began(request, tokens)
        found.append(request)
    return found


def spent(share: FairShare, tenant: str) -> float:
    return share._accounts[tenant].spent


def test_one_tenant_is_served_in_order() -> None:
    share = FairShare()
    enter(share, "a1", "a2", "a3")
    assert served(share) == ["a1", "a2", "a3"] and share.next(cold) is None


def test_a_turn_costs_the_same_however_many_wait() -> None:
    """Guards the router's loop while thousands of a tenant's requests wait: each turn looked at all of them for the
    oldest one."""

    def turns_s(waiting: int) -> float:
        share = FairShare()
        for turn in range(waiting):
            share.enter(RequestId(str(turn)), "a", 1.0, 0, turn + 1)
        began_s = time.thread_time()
        served(share, most=50)
        return time.thread_time() - began_s

    few_s, many_s = (min(turns_s(waiting) for _ in range(3)) for waiting in (60, 12_000))
    assert many_s < 10 * few_s


def test_who_comes_late_does_not_wait_behind_a_flood() -> None:
    """Guards first come, first served across tenants: one of them would own the line."""
    share = FairShare()
    enter(share, *(f"f{number}" for number in range(20)), "late")
    assert served(share, 2000).index("late") == 1


def test_what_goes_on_from_another_router_pays_for_what_it_writes() -> None:
    """Guards the line's shares: a tenant whose streams were taken over wrote for nothing, and one that comes anew may
    not begin below those that wait."""
    share = FairShare()
    enter(share, "w1", "w2", "w3")
    served(share, 5000, 2)
    share.go_on(RequestId("a1"), "a", 2.0)
    assert spent(share, "a") == 5000 == share._level
    share.wrote(RequestId("a1"), 100)
    share.began(RequestId("a1"), 700)
    assert spent(share, "a") == 5000 + OUTPUT_WEIGHT * 100 / 2, "its prompt is paid for"
    enter(share, "a2")
    assert RequestId("a1") not in share and RequestId("a2") in share
    before = spent(share, "a")
    share.left(RequestId("a1"))
    assert spent(share, "a") == before and share._accounts["a"].requests == 1


def test_tokens_are_shared_by_weight() -> None:
    share = FairShare()
    enter(share, *(f"a{number}" for number in range(60)), weight=3.0)
    enter(share, *(f"b{number}" for number in range(60)))
    found = [name[0] for name in served(share, 4000, 40)]
    assert 29 <= found.count("a") <= 31


def test_what_was_cached_costs_nothing_and_answers_cost_twice() -> None:
    """Guards the account: it follows what was really computed, not what was asked for or expected."""
    share = FairShare()
    enter(share, "a1")
    share.serve(RequestId("a1"), 500)
    assert spent(share, "a") == 500.0
    share.began(RequestId("a1"), 40)
    assert spent(share, "a") == 40.0, "the worker had more of it than was believed"
    share.wrote(RequestId("a1"), 30)
    assert spent(share, "a") == 40.0 + 30 * OUTPUT_WEIGHT
    share.began(RequestId("a1"), 700)
    share.left(RequestId("a1"))
    assert spent(share, "a") == 700.0 + 30 * OUTPUT_WEIGHT, "what was evicted meanwhile is paid for"


def test_what_no_worker_began_is_given_back() -> None:
    share = FairShare()
    enter(share, "a1", "a2")
    share.serve(RequestId("a1"), 500)
    share.left(RequestId("a1"))
    assert spent(share, "a") == 0.0
    share.left(RequestId("a2"))
    assert share.next(cold) is None and len(share) == 0


def test_a_charge_from_before_all_began_anew_is_not_put_right() -> None:
    """Guards a tenant's account against credit for what it was never charged."""
    share = FairShare()
    enter(share, "a1")
    share.serve(RequestId("a1"), 500)
    share.begin_anew()
    assert spent(share, "a") == 0.0
    share.began(RequestId("a1"), 1)
    share.wrote(RequestId("a1"), 3)
    assert spent(share, "a") == 3 * OUTPUT_WEIGHT


def test_a_pause_saves_nothing_up() -> None:
    share = FairShare()
    enter(share, *(f"b{number}" for number in range(20)))
    served(share, 2000, 10)
    enter(share, *(f"late{number}" for number in range(10)))
    assert {name[0] for name in served(share, 2000, 4)} == {"b", "l"}, "what it did not ask for before is not its now"


def test_of_equal_tenants_the_hot_prefix_goes_first() -> None:
    """Guards locality: a prefix is used while it is there, as long as nobody falls behind by more than the quantum."""
    share = FairShare()
    enter(share, "a1", "b1", "b2", "b3")
    hot = {"b1": 900, "b2": 900, "b3": 900}
    order = []
    while (request := share.next(lambda name: hot.get(name, 0))) is not None:
        share.serve(request, 600)
        order.append(request)
    assert order == ["b1", "b2", "a1", "b3"], f"after b2 it has had 1,200 more, which is above {QUANTUM:g}"


def test_the_least_tenant_is_passed_by_only_so_often() -> None:
    """Guards against starving beside prefixes that cost nothing: the quantum alone would let a thousand pass."""
    share = FairShare()
    enter(share, "a1", *(f"b{number}" for number in range(50)))
    order = []
    while (request := share.next(lambda name: 900 * (name[0] == "b"))) is not None:
        share.serve(request, 1)
        order.append(request)
    assert order.index(RequestId("a1")) == MOST_PASSED


def test_priority_orders_a_tenants_own_requests() -> None:
    share = FairShare()
    enter(share, "a1", "a2", "b1")
    enter(share, "a3", priority=5)
    enter(share, "a4", priority=-5)
    enter(share, "a5", priority=5)
    found = served(share, 2000)
    assert [name for name in found if name[0] == "a"] == ["a3", "a5", "a1", "a2", "a4"]
    assert found.index("b1") <= 1, "of another tenant's turns it takes none"


def test_a_low_priority_is_served_beside_an_endless_line_of_high_ones() -> None:
    """Guards the stated bound: with k older ones of its tenant, within OLDEST_EVERY * (k + 1) of its turns."""
    share = FairShare()
    for number, name in enumerate(("a0", "a1", "a-low")):
        share.enter(RequestId(name), "a", 1.0, -100, number)
    order = list[str]()
    for number in range(100):
        share.enter(RequestId(f"high{number}"), "a", 1.0, 100, 3 + number)
        request = share.next(cold)
        assert request is not None
        share.serve(request, 10)
        order.append(request)
    assert [order.index(name) + 1 for name in ("a0", "a1", "a-low")] == [OLDEST_EVERY * at for at in (1, 2, 3)]


def test_the_last_of_the_longest_line_makes_room() -> None:
    """Guards a small tenant against a line that another one has filled; and high priorities against low ones."""
    share = FairShare()
    enter(share, "a1", "a2", "a3")
    enter(share, "b1")
    assert share.last_of_the_longest() == "a3"
    enter(share, "a4", priority=1)
    assert share.last_of_the_longest() == "a3"
    enter(share, "c1", "c2", "c3", "c4", weight=0.5)
    assert share.last_of_the_longest() == "c4"


def test_how_many_are_ahead() -> None:
    share = FairShare()
    assert share.ahead("a", 1.0, 0) == 0
    enter(share, *(f"a{number}" for number in range(4)))
    enter(share, *(f"b{number}" for number in range(10)))
    assert share.ahead("c", 1.0, 0) == 2 and share.ahead("a", 1.0, 0) == 4 + 5
    assert share.ahead("a", 1.0, 1) == 0 + 1, "before its own of a lower priority"
    assert share.ahead("c", 0.25, 0) == 4 + 4


WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2)
LARGEST = 3000


class Crowd:
    """Tenants by name and weight, whose requests come, are served, write and end as lots decide."""

    def __init__(self, weights: dict[str, float], seed: int) -> None:
        self.weights, self.lots = weights, Random(seed)
        self.share, self.minted = FairShare(), 0
        self.running: list[RequestId] = []
        self.got = dict.fromkeys(weights, 0.0)
        """Charged to each tenant, by weight, for the prompts that were served."""

    def come(self, tenant: str) -> None:
        self.minted += 1
        request = RequestId(f"{tenant}{self.minted}")
        self.share.enter(request, tenant, self.weights[tenant], self.lots.choice((-1, 0, 5)), self.minted)

    def serve(self) -> str:
        """Serve the next request; return whose it was. What is hot is anything, and changes."""
        request = self.share.next(lambda name: self.lots.randrange(10**6))
        assert request is not None
        owner, tokens = request[0], self.lots.randint(1, LARGEST)
        behind = [spent(self.share, owner) - account.spent for account in self.share._waiting.values()]
        assert max(behind) <= QUANTUM, "who is served is within the quantum of everybody that waits"
        self.share.serve(request, tokens)
        self.got[owner] += tokens / self.weights[owner]
        self.running.append(request)
        return owner

    def end(self, *, exactly: bool) -> None:
        """A request that was served ends; what it cost is as predicted, or anything."""
        request = self.running.pop(self.lots.randrange(len(self.running)))
        if exactly or self.lots.random() < 0.8:
            self.share.began(request, None if exactly else self.lots.randint(1, LARGEST))
            self.share.wrote(request, self.lots.randint(0, 50))
        self.share.left(request)


@given(WEIGHTS, st.integers(0, 10**6))
def test_nobody_that_waits_falls_behind_by_more_than_the_bound(weights: dict[str, float], seed: int) -> None:
    """Guards the stated bound. While a tenant waits, another one is served at most QUANTUM, one request, and by what it
    had had less, all by weight: whatever comes, whatever is hot, and whoever is new."""
    crowd = Crowd(weights, seed)
    share, marks = crowd.share, dict[str, tuple[dict[str, float], dict[str, float]]]()
    for _ in range(200):
        action = crowd.lots.random()
        if action < 0.5 or not len(share):
            tenant = crowd.lots.choice(list(weights))
            crowd.come(tenant)
            here = {name: account.spent for name, account in share._accounts.items()}
            marks.setdefault(tenant, (dict(crowd.got), here))
        elif action < 0.85 or not crowd.running:
            del marks[crowd.serve()]
            here = {name: account.spent for name, account in share._accounts.items()}
            for tenant in share._waiting:
                marks.setdefault(tenant, (dict(crowd.got), here))
        else:
            crowd.end(exactly=True)
        for tenant, (got, had) in marks.items():
            for other in weights:
                served = crowd.got[other] - got[other]
                less = spent(share, tenant) - had.get(other, 0.0)
                assert not served or served <= QUANTUM + LARGEST / weights[other] + less, (tenant, other)


@given(WEIGHTS, st.integers(0, 10**6))
def test_the_bounds_hold_where_predictions_are_wrong(weights: dict[str, float], seed: int) -> None:
    """Guards `QUANTUM` (in `Crowd.serve`) and MOST_PASSED where charges are put right either way and requests are
    cancelled; and against a request that is served twice, or never."""
    crowd = Crowd(weights, seed)
    share, passed = crowd.share, dict.fromkeys(weights, 0)
    for step in range(300):
        action = crowd.lots.random()
        if step < 200 and (action < 0.5 or not len(share)):
            crowd.come(crowd.lots.choice(list(weights)))
        elif len(share) and (action < 0.85 or not crowd.running):
            least = min(share._waiting, key=lambda name: fair_share._rank(share._waiting[name]))
            owner = crowd.serve()
            passed[least] += owner != least
            passed[owner] = 0
            assert passed[least] <= MOST_PASSED
        elif crowd.running:
            crowd.end(exactly=False)
        share.check(entry.request for account in share._waiting.values() for entry in account.line)
    while len(share):
        crowd.serve()
    assert share.next(cold) is None


@given(WEIGHTS, st.integers(0, 10**6))
def test_who_is_new_is_served_soon(weights: dict[str, float], seed: int) -> None:
    """Guards the bound in requests: beside an endless flood of others, hot ones among them, a newcomer is served
    after at most MOST_PASSED, and one of each tenant that has had as little."""
    crowd = Crowd(weights, seed)
    for _ in range(30):
        crowd.come(crowd.lots.choice(list(weights)))
    for _ in range(10):
        crowd.serve()
    crowd.weights["z"], crowd.got["z"] = 1.0, 0.0
    crowd.come("z")
    before = 0
    while crowd.serve() != "z":
        before += 1
        crowd.come(crowd.lots.choice(list(weights)))
    assert before <= MOST_PASSED + len(weights)


def test_names_of_tenants_do_not_pile_up() -> None:
    """Guards memory: where no credentials are asked for, a caller may name as many tenants as it likes."""
    share = FairShare()
    for number in range(3 * MAX_TENANTS):
        name = RequestId(str(number))
        share.enter(name, name, 1.0, 0, number)
        share.serve(name, 5000)
        share.began(name)
        share.left(name)
    assert len(share._accounts) <= MAX_TENANTS + 1 and not share._entries and not share._tenants
    share.begin_anew()
    assert repr(share) == "FairShare(at 0, 0 tenants, 0 waiting)"


def test_who_owes_is_remembered_before_who_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the shares against many names of tenants, by which a debt would be forgotten."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 2)
    share = FairShare()
    enter(share, "w1", "w2", "x1")
    for name, tokens in (("x1", 10), ("w1", 5000), ("w2", 5000)):
        share.serve(RequestId(name), tokens)
        share.began(RequestId(name))
    for name in ("w1", "w2", "x1"):
        share.left(RequestId(name))
    enter(share, "y1", "z1")
    assert sorted(share._accounts) == ["w", "y", "z"] and spent(share, "w") == 10_000.0


def test_the_check_finds_a_line_that_disagrees() -> None:
    share = FairShare()
    enter(share, "a1")
    with pytest.raises(AssertionError, match="others than those"):
        share.check([])


def test_the_queue_offers_by_share_and_a_refused_request_keeps_its_place() -> None:
    """Guards the way from an account to an offer: a flood of one tenant, and one request of another behind it."""
    parts = Parts()
    parts.join("d0", blocks=4096)
    flood = [parts.wait(f"f{n}", tenant="flood", tokens=2000, namespace=b"%d" % n) for n in range(3)]
    parts.wait("late", tenant="late", tokens=2000, namespace=b"late")
    parts.queue.advance(0.0, parts.out)
    assert offered(parts) == ["f0", "late", "f1", "f2"]
    parts.queue.rejoin(flood[1])
    parts.wait("later", tenant="new")
    parts.queue.rejoin(flood[0])
    parts.queue.advance(0.0, parts.out)
    assert offered(parts) == ["f0", "f1", "later"]
    assert spent(parts.table.share, "flood") == 6000.0, "nobody pays twice for one request"
    parts.queue.check()


def test_the_queue_prefers_what_some_worker_holds() -> None:
    """Guards the way from the index to the order: of two tenants that have had as much, the hot prefix goes first."""
    parts = Parts()
    home = parts.join("d0")
    parts.wait("a", tenant="a", namespace=b"a")
    hot = parts.wait("b", tenant="b", namespace=b"b")
    parts.index.insert("d0", hot.chain(home.key))
    parts.queue.advance(0.0, parts.out)
    assert offered(parts) == ["b", "a"]
    assert spent(parts.table.share, "b") == 8.0 and spent(parts.table.share, "a") == 40.0, "two blocks of 40 tokens"


@pytest.mark.parametrize("prefills", [0, 1])
def test_the_core_charges_what_workers_report(prefills: int) -> None:
    """Guards the way from a worker's word to the account: who reads a prompt itself says at once what it had, a prefill
    worker's part is known at the end; tokens count as they come, by either way; and a cancelled offer costs nothing."""
    bench = Bench(prefills=prefills, max_waiting=9)
    name, share = RequestId("a"), bench.router._table.share
    bench.submit(name, tokens=40, tenant="t")
    assert spent(share, "t") == 40.0, "nothing was believed to be cached"
    bench.hear(Accepted(name, 1, 32))
    told = 40.0 if prefills else 8.0
    assert spent(share, "t") == told
    bench.hear(Tokens(name, 1, 0, [5, 6]))
    assert bench.router.next_tokens("d0", Tokens(name, 1, 2, [7])) == [7]
    assert spent(share, "t") == told + 3 * OUTPUT_WEIGHT
    bench.hear(ended(name, 1, output_tokens=3, prefill_cached_tokens=16))
    assert spent(share, "t") == 24.0 + 3 * OUTPUT_WEIGHT, "by its last word, 16 of 40 were cached"
    bench.submit(RequestId("b"), tokens=300, tenant="t")
    before = spent(share, "t")
    bench.do(ClientLeft(RequestId("b")))
    bench.hear(Refused(RequestId("b"), 1, 1))
    assert before > spent(share, "t") and not share._entries


def offered(parts: Parts) -> list[str]:
    found = [command.record for command in parts.take() if isinstance(command, TellWorker)]
    return [record.record.request for record in found if isinstance(record, Place)]


def test_who_was_served_may_be_passed_by_as_often_again() -> None:
    """Guards locality: what it was passed by before it was served counts no more."""
    share = FairShare()
    enter(share, "a1", "a2", "a3", *(f"b{number}" for number in range(5 * MOST_PASSED)))
    order = []
    while len(share) and len(order) < 3 * MOST_PASSED + 3:
        request = share.next(lambda name: 900 * (name[0] == "b"))
        assert request is not None
        share.serve(request, 1)
        order.append(request)
    assert [at for at, name in enumerate(order) if name[0] == "a"] == [
        MOST_PASSED, 2 * MOST_PASSED + 1, 3 * MOST_PASSED + 2
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [None, 50])
def test_what_was_not_offered_has_not_begun(tokens: int | None) -> None:
    """Guards a late word of a worker that has lost the request: it waits again, and pays when it is offered."""
    share = FairShare()
    enter(share, "a1")
    share.began(RequestId("a1"), tokens)
    share.began(RequestId("unknown"), tokens)
    assert spent(share, "a") == 0.0
    share.serve(RequestId("a1"), 500)
    share.left(RequestId("a1"))
    assert spent(share, "a") == 0.0, "no worker has begun it"


def test_as_many_tenants_as_there_may_be_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the border: a tenant is forgotten for another only when there are more."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 3)
    share = FairShare()
    for name in ("a1", "b1", "c1"):
        enter(share, name)
        served(share, 10)
        share.left(RequestId(name))
    share._level = 100.0  # nobody owes anything
    enter(share, "d1")
    assert sorted(share._accounts) == ["a", "b", "c", "d"]
    served(share, 10)
    share.left(RequestId("d1"))
    enter(share, "e1")
    assert "a" not in share._accounts and "e" in share._accounts


def test_as_many_wait_as_stand_in_the_lines() -> None:
    share = FairShare()
    for expected, name in enumerate(("a1", "a2", "b1")):
        assert len(share) == expected
        enter(share, name)
    share.serve(RequestId("a1"), 10)
    assert len(share) == 2


def test_tenants_whose_requests_came_from_another_router_are_forgotten_too() -> None:
    """Guards the memory of a router that only takes over, from many tenants."""
    share = FairShare()
    for number in range(3 * MAX_TENANTS):
        name = RequestId(str(number))
        share.go_on(name, name, 1.0)
        share.left(name)
    assert len(share._accounts) <= MAX_TENANTS + 1 and not share._entries and not share._tenants


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_that_was_cached_to_its_end_still_costs_one_token(tokens: int) -> None:
    """Guards the order of tenants: whoever is served for nothing would be the next for ever."""
    share = FairShare()
    enter(share, "a1")
    share.serve(RequestId("a1"), 500)
    share.began(RequestId("a1"), tokens)
    assert spent(share, "a") == 1.0


def test_where_too_many_owe_their_debts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bound of what is remembered, to the tenant: so many may owe, and not one more."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 3)
    for owing, remembered in ((3, ["a", "b", "c"]), (4, ["y"])):
        share = FairShare()
        names = ["a1", "b1", "c1", "d1"][:owing]
        enter(share, *names)
        served(share, 5000)
        for name in names:
            share.left(RequestId(name))
        share._level = 100.0  # all of them owe
        enter(share, "y1")
        served(share, 1)
        share.left(RequestId("y1"))
        share._accounts["y"].spent = 0.0  # one that does not
        enter(share, "z1")
        assert sorted(share._accounts) == [*remembered, "z"]


@dataclass
class Books:
    """What one tenant has had, and its requests that wait: name, priority, turn and weight of each."""

    weight: float
    spent: float = 0.0
    turns: int = 0
    passed: int = 0
    open: int = 0
    line: list[tuple[str, int, int, float]] = field(default_factory=list)
    aside: list[tuple[str, int, int, float]] = field(default_factory=list)

    def next(self) -> tuple[str, int, int, float]:
        oldest = min(self.line, key=lambda entry: entry[2])
        return oldest if self.turns >= OLDEST_EVERY - 1 else min(self.line, key=lambda entry: (-entry[1], entry[2]))


class Plain:
    """The same rules, with nothing kept in order: all is looked up when it is asked for."""

    def __init__(self) -> None:
        self.books: dict[str, Books] = {}
        self.level, self.epoch = 0.0, 0
        self.charged: dict[str, tuple[float, float, int]] = {}
        """By request that was served: tokens of its prompt, its weight, and when it was charged."""
        self.begun: set[str] = set()

    def waiting(self) -> list[tuple[str, Books]]:
        """Those that wait, who has had the least first."""
        having = [(name, books) for name, books in self.books.items() if books.line]
        return sorted(having, key=lambda one: (one[1].spent, one[1].next()[2]))

    def enter(self, request: str, tenant: str, weight: float, priority: int, turn: int) -> None:
        books = self.books.setdefault(tenant, Books(weight))
        books.weight = weight
        self.line_up(books, (request, priority, turn, weight))
        books.open += 1

    def line_up(self, books: Books, entry: tuple[str, int, int, float]) -> None:
        if not books.line:
            others = self.waiting()
            books.spent = max(books.spent, others[0][1].spent if others else self.level)
        books.line.append(entry)

    def put_aside(self, request: str, tenant: str) -> None:
        books = self.books[tenant]
        entry = next(entry for entry in books.line if entry[0] == request)
        books.line.remove(entry)
        books.aside.append(entry)

    def bring_back(self, request: str, tenant: str) -> None:
        books = self.books[tenant]
        entry = next(entry for entry in books.aside if entry[0] == request)
        books.aside.remove(entry)
        self.line_up(books, entry)

    def last(self) -> set[str]:
        """The last of each tenant that has the most waiting for its weight."""
        waiting = {name: b.line + b.aside for name, b in self.books.items() if b.line or b.aside}
        most = max(len(entries) / self.books[name].weight for name, entries in waiting.items())
        longest = [entries for name, entries in waiting.items() if len(entries) / self.books[name].weight == most]
        return {max(entries, key=lambda entry: (-entry[1], entry[2]))[0] for entries in longest}

    def go_on(self, request: str, tenant: str, weight: float) -> None:
        books = self.books.setdefault(tenant, Books(weight, self.level))
        books.open += 1
        self.charged[request] = (0.0, weight, -1)
        self.begun.add(request)

    def next(self, cached: dict[str, int]) -> str | None:
        waiting = self.waiting()
        if not waiting:
            return None
        least = waiting[0][1]
        if least.passed >= MOST_PASSED:
            return least.next()[0]
        equal = [books.next()[0] for _, books in waiting if books.spent - least.spent <= QUANTUM][:LOOKED_AT]
        return max(equal, key=lambda request: cached.get(request, 0))

    def serve(self, request: str, tenant: str, tokens: int) -> None:
        books, first = self.books[tenant], self.waiting()[0][1]
        first.passed += first is not books
        entry = next(entry for entry in books.line if entry[0] == request)
        books.turns = 0 if entry[2] == min(turn for _, _, turn, _ in books.line) else books.turns + 1
        books.passed = 0
        self.level = books.spent
        books.line.remove(entry)
        self.charged[request] = (max(tokens, 1), entry[3], self.epoch)
        books.spent += max(tokens, 1) / entry[3]

    def charge(self, request: str, tenant: str, tokens: float) -> None:
        before, weight, epoch = self.charged[request]
        if epoch == self.epoch:
            self.books[tenant].spent += (tokens - before) / weight
        self.charged[request] = (tokens, weight, epoch)

    def left(self, request: str, tenant: str) -> None:
        books = self.books[tenant]
        books.open -= 1
        books.line = [entry for entry in books.line if entry[0] != request]
        books.aside = [entry for entry in books.aside if entry[0] != request]
        if request in self.charged and request not in self.begun:
            self.charge(request, tenant, 0.0)
        self.charged.pop(request, None)

    def begin_anew(self) -> None:
        self.level, self.epoch = 0.0, self.epoch + 1
        self.books = {name: books for name, books in self.books.items() if books.open}
        for books in self.books.values():
            books.spent = 0.0

    def ahead(self, tenant: str, weight: float, priority: int) -> int:
        line = self.books[tenant].line if tenant in self.books else []
        before = sum(of >= priority for _, of, _, _ in line)
        others = [books for name, books in self.waiting() if name != tenant]
        return before + sum(min(len(b.line), ceil((before + 1) * b.weight / weight)) for b in others)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_events_is_accounted_for_as_the_rules_say(seed: int) -> None:
    """Guards every figure of the accounts, and so whose turn it is: a token, a turn or a request too many."""
    random, share, plain = Random(seed), FairShare(), Plain()
    tenants: dict[str, str] = {}
    waiting, aside, served = list[str](), list[str](), list[str]()
    for turn in range(1, 260):
        what = random.randrange(14)
        if what < 4:
            name, tenant = f"r{turn}", random.choice("abcdefghijk"[: 3 + seed])
            tenants[name], weight, priority = tenant, random.choice((1.0, 1.0, 2.0, 0.5)), random.choice((0, 0, 1))
            assert share.ahead(tenant, weight, priority) == plain.ahead(tenant, weight, priority)
            for one in (share, plain):
                one.enter(RequestId(name), tenant, weight, priority, turn)
            waiting.append(name)
        elif what < 7 and waiting:
            cached = {name: random.choice((0, 0, 500)) for name in waiting}
            chosen = share.next(lambda request, cached=cached: cached.get(request, 0))  # type: ignore[misc]
            assert chosen is not None and chosen == plain.next(cached)
            tokens = random.choice((0, 1, 100, 1024, 1025, 3000))
            share.serve(chosen, tokens)
            plain.serve(chosen, tenants[chosen], tokens)
            waiting.remove(chosen)
            served.append(chosen)
        elif what == 7 and served:
            name, known = random.choice(served), random.choice((None, 0, 1, 700))
            share.began(RequestId(name), known)
            plain.begun.add(name)
            if known is not None:
                plain.charge(name, tenants[name], max(known, 1))
        elif what == 8 and served:
            name, tokens = random.choice(served), random.randrange(40)
            share.wrote(RequestId(name), tokens)
            plain.books[tenants[name]].spent += OUTPUT_WEIGHT * tokens / plain.charged[name][1]
        elif what in (9, 10) and (waiting or aside or served):
            name = random.choice([*waiting, *aside, *served])
            next(names for names in (waiting, aside, served) if name in names).remove(name)
            share.left(RequestId(name))
            plain.left(name, tenants[name])
        elif what == 11 and random.random() < 0.3:
            name, tenant = f"g{turn}", random.choice("ax")
            tenants[name] = tenant
            for one in (share, plain):
                one.go_on(RequestId(name), tenant, 2.0)
            served.append(name)
        elif what == 12 and waiting:
            name = random.choice(waiting)
            share.put_aside(RequestId(name))
            plain.put_aside(name, tenants[name])
            waiting.remove(name)
            aside.append(name)
        elif what == 13:
            for name in random.sample(aside, min(len(aside), 3)):
                assert share.bring_back(RequestId(name)) and not share.bring_back(RequestId(name))
                plain.bring_back(name, tenants[name])
                aside.remove(name)
                waiting.append(name)
        if not (waiting or aside) and random.random() < 0.5:
            share.begin_anew()
            plain.begin_anew()
        share.check([RequestId(name) for name in waiting + aside])
        assert len(share) == len(waiting) and all(RequestId(name) in share for name in waiting)
        assert share._level == pytest.approx(plain.level)
        told = {name: (a.spent, a.turns, a.passed, a.requests) for name, a in share._accounts.items()}
        assert told == {name: pytest.approx((b.spent, b.turns, b.passed, b.open)) for name, b in plain.books.items()}
        assert {name for name in (*waiting, *aside, *served) if share.is_aside(RequestId(name))} == set(aside)
        if waiting or aside:
            assert share.last_of_the_longest() in plain.last()
