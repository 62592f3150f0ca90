"""Whose turn it is where several routers have lines of their own before the same workers, and what it is wrong by."""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import ceil
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.siblings import MAX_LIVES, MAX_NAMES, MOST_TOKENS
from access.tenants import MAX_NAME_CHARS
from engine.messages import Accepted, PeerAddress, Place, Refused, TenantLine, TenantsTold
from engine.types import Incarnation, RequestId, RequestRecord
from router.config import RouterConfig
from router.core import fair_share
from router.core.core import Router
from router.core.events import Command, Connected, Event, Fail, Lost, Submit, TellWorker, Tick, WorkerSaid
from router.core.fair_share import OUTPUT_WEIGHT, QUANTUM, TOLD_AGAIN_EVERY, FairShare
from router.core.other_lines import GONE_S, HEARD_S, OtherLines
from router.core.policy import LeastCost
from tests.router.bench import ended
from tests.router.core.test_fair_share import WEIGHTS
from tests.router.fake_cluster import load, worker_info

BLOCKS = 64
S_PER_TOKEN = 1e-3
TICK_S = 0.05
WORD_S = 0.05
"""How long what a router says is under way."""


ERROR_TOKENS = QUANTUM + 408 + 2 * BLOCKS * 16
"""What the shares may be wrong by: the quantum, the largest request, and what is offered while a word is under way: no
more than the pool holds, before the word and after it."""


AT_ONE = {"a": [0], "b": [0]}
APART = {"a": [0], "b": [1, 2, 3]}


@dataclass
class Crowd:
    """What comes: each tenant has `depth` requests that wait at each of its routers, as long as the run lasts."""

    at: Mapping[str, Sequence[int]]
    weights: Mapping[str, float]
    depth: int = 8


class Cluster:
    """Routers before one decode worker that computes all that its pool holds at once, in virtual time."""

    def __init__(
        self,
        routers: int,
        crowd: Crowd,
        seed: int,
        *,
        told: bool = True,
        bunch_s: float = 0.0,
        lost: float = 0.0,
        margin: float = 0.0,
    ) -> None:
        """`bunch_s`: how long a step of the worker takes that passes words on; `lost`: the part of words that never
        comes; `margin` that of deadlines."""
        self.bunch_s, self.lost, self.cut = bunch_s, lost, set[int]()
        self.now, self.lots, self.crowd, self.told = 0.0, Random(seed), crowd, told
        config = RouterConfig(max_waiting=10_000, deadline_margin=margin)
        self.each = [Router(config, LeastCost(Random(at))) for at in range(routers)]
        self.running: dict[str, int] = {}
        """The blocks of each request."""
        self.got: dict[str, list[tuple[float, float]]] = {tenant: [] for tenant in crowd.at}
        """When each tenant was given work, and how much, by weight."""
        self.idle_s = 0.0
        self._events: list[tuple[float, int, int, Event]] = []
        self._order, self._numbers = count(), [0] * routers
        self._owner: dict[str, tuple[str, int]] = {}
        info = worker_info("d0", "decode", blocks=BLOCKS)
        for at in range(routers):
            self._do(at, Connected(PeerAddress("d0", "d0:1"), info))
            self._later(self.lots.random() * TICK_S, at, Tick())
        for tenant, homes in crowd.at.items():
            for at in homes:
                for _ in range(crowd.depth):
                    self._come(tenant, at)
        self._report()

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            at_s, _, router, event = heapq.heappop(self._events)
            self.idle_s += (at_s - self.now) * (1 - sum(self.running.values()) / BLOCKS)
            self.now = at_s
            if isinstance(event, WorkerSaid) and not isinstance(event.record, TenantsTold):
                self._end(router, event)
            else:
                self._do(router, event)
                if isinstance(event, Tick):
                    self._tick(router)

    def error(self) -> float:
        """Return the most that one tenant has had more than another since both began, by weight."""
        had, most = dict.fromkeys(self.got, 0.0), 0.0
        for _, tenant, amount in sorted((at_s, name, one) for name, all_ in self.got.items() for at_s, one in all_):
            had[tenant] += amount
            most = max(most, max(had.values()) - min(had.values()))
        return most

    def _later(self, after_s: float, router: int, event: Event) -> None:
        heapq.heappush(self._events, (self.now + after_s, next(self._order), router, event))

    def _come(self, tenant: str, at: int) -> None:
        name = f"{tenant}{next(self._order)}"
        tokens = self.lots.randint(50, 400)
        ids = [next(self._order)] * tokens
        record = RequestRecord(request=RequestId(name), tokens=ids, prompt_tokens=tokens, max_tokens=8, seed=1)
        self._owner[name] = (tenant, tokens)
        self._do(at, Submit(record, tenant=tenant, weight=self.crowd.weights[tenant]))

    def _tick(self, at: int) -> None:
        self._later(TICK_S, at, Tick())
        epoch, lines = self.each[at].lines(self.now) if len(self.each) > 1 and self.told else (0, {})
        if lines:
            self._numbers[at] += 1
            told = TenantsTold(self._numbers[at], {}, f"router-{at}", Incarnation(at + 1), lines, epoch)
            after_s = WORD_S
            if self.bunch_s:
                after_s = ceil((self.now + WORD_S) / self.bunch_s) * self.bunch_s - self.now
            for other in range(len(self.each)):
                if other != at and not (self.lost and self.lots.random() < self.lost):
                    self._later(after_s, other, WorkerSaid("p0", told))

    def _end(self, router: int, event: WorkerSaid) -> None:
        name = event.record.request  # type: ignore[union-attr]
        tenant, _ = self._owner.pop(name)
        del self.running[name]
        self._do(router, event)
        self._come(tenant, router)
        self._report()

    def _report(self) -> None:
        """Tell all routers how it stands, in any order."""
        active = sum(self.running.values())
        for at in self.lots.sample(range(len(self.each)), len(self.each)):
            if at not in self.cut:
                self._do(at, WorkerSaid("d0", load(next(self._order), active, BLOCKS, s_per_token=0.01)))

    def lose(self, at: int) -> None:
        """A router loses its stream to the worker."""
        self.cut.add(at)
        self._do(at, Lost("d0"))

    def _do(self, at: int, event: Event) -> None:
        pending = deque(self.each[at].handle(event, self.now))
        while pending:
            command = pending.popleft()
            if isinstance(command, TellWorker) and isinstance(command.record, Place):
                pending.extend(self._offered(at, command.record))
            elif isinstance(command, Fail):
                self._failed(command)

    def _failed(self, fail: Fail) -> None:
        """A router has ended a request that no worker has."""

    def _offered(self, at: int, place: Place) -> list[Command]:
        name = place.record.request
        blocks = ceil((len(place.record.tokens) + place.record.max_tokens) / 16)
        if sum(self.running.values()) + blocks > BLOCKS:
            return self.each[at].handle(WorkerSaid("d0", Refused(name, place.placement, 1)), self.now)
        tenant, tokens = self._owner[name]
        self.running[name] = blocks
        self.got[tenant].append((self.now, tokens / self.crowd.weights[tenant]))
        out = self.each[at].handle(WorkerSaid("d0", Accepted(name, place.placement, 0)), self.now)
        self._later(tokens * S_PER_TOKEN, at, WorkerSaid("d0", ended(name, place.placement)))
        return out


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("at", [AT_ONE, {"a": [0], "b": [0, 1]}, {"a": [0], "b": [0, 1, 2, 3]}, APART], ids=str)
def test_weights_hold_over_all_routers(at: dict[str, list[int]], weight: float) -> None:
    """Guards the stated error, and a tenant all of whose connections are at one router: beside one that is at four, it
    had an eighth instead of a half. The room that there is goes to whoever waits for it all the same."""
    routers = 1 + max(home for homes in at.values() for home in homes)
    clusters = [Cluster(routers, Crowd(at, {"a": weight, "b": 1.0}), 1, told=told) for told in (True, False)]
    for cluster in clusters:
        cluster.run(12.0)
    assert clusters[0].error() <= ERROR_TOKENS
    if routers > 1:
        assert clusters[1].error() > 2.5 * ERROR_TOKENS, "they would not share by chance"
        assert clusters[0].idle_s <= 1.5 * clusters[1].idle_s, "nobody waits for a tenant that does not come"


LARGEST, TOLD_EVERY, UNDER_WAY = 3000, 5, 5


class Lines:
    """The lines of several routers, and the words between them. Each step has room for one request, of any router."""

    def __init__(self, routers: int, weights: dict[str, float], seed: int) -> None:
        self.lots, self.weights, self.step = Random(seed), weights, 0
        self.each = [FairShare() for _ in range(routers)]
        self.at = {name: self.lots.sample(range(routers), self.lots.randint(1, routers)) for name in weights}
        self.got = dict.fromkeys(weights, 0.0)
        self.served: list[tuple[str, float]] = []
        self._words: list[tuple[int, int, int, TenantsTold]] = []
        self._order, self._numbers = count(1), [0] * routers

    def come(self, tenant: str, at: int) -> None:
        turn = next(self._order)
        self.each[at].enter(RequestId(f"{tenant}{turn}"), tenant, self.weights[tenant], 0, turn)

    def lined(self, tenant: str, at: int) -> int:
        account = self.each[at]._waiting.get(tenant)
        return 0 if account is None else len(account.line)

    def serve(self) -> bool:
        """Serve one request, of whichever router is the quickest; False where all that wait are held back."""
        for share in self.lots.sample(self.each, len(self.each)):
            request = share.next(lambda name: self.lots.randrange(10**6))
            if request is not None:
                tokens = self.lots.randint(1, LARGEST)
                share.serve(request, tokens)
                share.began(request, tokens)
                share.left(request)
                amount = tokens / self.weights[request[0]]
                self.got[request[0]] += amount
                self.served.append((request[0], amount))
                return True
        self.served.append(("", 0.0))
        return False

    def tell(self) -> None:
        """Bring words to where they go, and send new ones."""
        self.step += 1
        now = self.step * 0.01
        for word in sorted(self._words, key=lambda word: (word[0], word[2], word[1])):
            if word[0] <= self.step:
                self._words.remove(word)
                self.each[word[2]].heard(word[3], now)
        for at, share in enumerate(self.each):
            share.tick(now)
            if (self.step + at) % TOLD_EVERY == 0 and (news := share.news())[1]:
                self._numbers[at] += 1
                told = TenantsTold(self._numbers[at], {}, f"router-{at}", Incarnation(7), news[1], news[0])
                for other in range(len(self.each)):
                    for _ in range(2 * (other != at)):  # two ways
                        self._words.append((self.step + self.lots.randint(1, UNDER_WAY), told.number, other, told))

    def most(self, tenant: str) -> float:
        """Return the most that a tenant was served, by weight, while a word was under way."""
        span = TOLD_EVERY + UNDER_WAY
        amounts = [amount if name == tenant else 0.0 for name, amount in self.served]
        return max(sum(amounts[at : at + span]) for at in range(len(amounts)))


@given(st.sampled_from([1, 2, 4]), WEIGHTS, st.integers(0, 10**6))
def test_nobody_that_waits_falls_behind_by_more_than_the_delay_of_a_word(
    routers: int, weights: dict[str, float], seed: int
) -> None:
    """Guards the stated bound of several routers, with any weights, at any routers, and whatever is hot: one router's,
    and what another tenant is served elsewhere before the word has come that one waits, and that the other was
    served."""
    lines = Lines(routers, weights, seed)
    for _ in range(300):
        for tenant, homes in lines.at.items():
            for at in homes:
                while lines.lined(tenant, at) < 2:
                    lines.come(tenant, at)
        lines.serve()
        lines.tell()
    for tenant in weights:
        for other in weights:
            unseen = 2 * lines.most(other) if routers > 1 else 0.0
            assert lines.got[other] - lines.got[tenant] <= QUANTUM + LARGEST / weights[other] + unseen


@given(st.sampled_from([2, 4]), WEIGHTS, st.integers(0, 10**6))
def test_no_two_routers_wait_for_each_other(routers: int, weights: dict[str, float], seed: int) -> None:
    """Guards room that nobody takes, where tenants come and go at any time and routers disagree: whoever waits is
    served, and what is held back is not held back for longer than a few words take."""
    lines, held = Lines(routers, weights, seed), 0
    for step in range(400):
        if lines.lots.random() < 0.5 and step < 300:
            tenant = lines.lots.choice(list(weights))
            lines.come(tenant, lines.lots.choice(lines.at[tenant]))
        waits = any(len(share) for share in lines.each)
        if lines.lots.random() < 0.6 or step >= 300:
            held = 0 if lines.serve() or not waits else held + 1
            assert held <= 3 * (TOLD_EVERY + UNDER_WAY)
        lines.tell()
        for share in lines.each:
            share.check(entry.request for account in share._waiting.values() for entry in account.line)
    assert not any(len(share) for share in lines.each)


@pytest.mark.parametrize("step_s", [0.3, 0.6, 1.0])
def test_words_that_come_in_bunches_make_no_error_that_adds_up(step_s: float) -> None:
    """Guards the shares where a worker passes words on only between long steps: names expired, and who had been held
    back for them was served."""
    cluster = Cluster(2, Crowd({"a": [0], "b": [0, 1]}, {"a": 1.0, "b": 1.0}), 1, bunch_s=step_s)
    cluster.run(60.0)
    a, b = (sum(amount for at_s, amount in cluster.got[name] if at_s >= 10.0) for name in "ab")
    assert 0.48 <= a / (a + b) <= 0.52
    moments = [(at_s, amount) for each in cluster.got.values() for at_s, amount in each]
    span_s = step_s + 2 * TICK_S
    most = max(sum(amount for at_s, amount in moments if 0 <= at_s - since_s <= span_s) for since_s, _ in moments)
    assert cluster.error() <= ERROR_TOKENS + 2 * most


def test_words_that_are_lost_lose_no_charge() -> None:
    """Guards the shares where workers die with words that they were to pass on: what such a word had charged was never
    told again."""
    cluster = Cluster(2, Crowd({"a": [0], "b": [0, 1]}, {"a": 1.0, "b": 1.0}), 1, lost=0.3)
    cluster.run(60.0)
    assert cluster.error() <= 2 * ERROR_TOKENS


def test_a_router_without_a_worker_is_waited_for_by_nobody() -> None:
    """Guards all others against a router that has lost its decode workers, and still tells through prefill workers that
    its tenants wait, and that their turn has come: they were held back until it gave up, after 10 s."""
    cluster = Cluster(2, Crowd({"a": [1], "b": [0]}, {"a": 1.0, "b": 1.0}), 1)
    cluster.run(5.0)
    cluster.lose(1)
    assert len(cluster.each[1]._share), "some wait there"
    cluster.run(10.0)
    after = [at_s for at_s, _ in cluster.got["b"] if at_s >= 5.0]
    assert max(later - at_s for at_s, later in pairwise([5.0, *after, 10.0])) < 1.0
    assert len(cluster.each[1]._share) and not cluster.each[0]._share.is_waited_for_elsewhere


def test_a_router_says_that_nobody_waits_while_no_worker_takes_anything() -> None:
    """Guards the three ways in which there is none: it stops, its worker leaves, or is silent. What was charged is told
    all the same."""
    router = Router(RouterConfig(), LeastCost(Random(0)))
    record = RequestRecord(request=RequestId("a1"), tokens=[1] * 40, prompt_tokens=40, max_tokens=8, seed=1)
    router.handle(Submit(record, tenant="a"), 0.0)
    assert router.lines(0.0) == (1, {}), "there is no worker yet"
    router.handle(Connected(PeerAddress("d0", "d0:1"), worker_info("d0", "decode", blocks=BLOCKS)), 0.0)
    router.handle(WorkerSaid("d0", load(1, BLOCKS, BLOCKS)), 0.0)
    router.handle(WorkerSaid("d0", Refused(RequestId("a1"), 1, 1)), 0.0)
    more = msgspec.structs.replace(record, request=RequestId("a2"))
    router.handle(Submit(more, tenant="a"), 0.0)
    waits, waits_not = (1, {"a": (40.0, True, True)}), (1, {"a": (40.0, False, False)})
    assert router.lines(0.0) == waits, "a full worker will take it"
    assert router.lines(0.0, is_stopping=True) == waits_not
    assert router.lines(0.0) == waits
    router.handle(WorkerSaid("d0", load(2, BLOCKS, BLOCKS, leaving=True)), 0.0)
    assert router.lines(0.0) == waits_not
    router.handle(WorkerSaid("d0", load(3, BLOCKS, BLOCKS)), 0.0)
    assert router.lines(0.0) == waits
    assert router.lines(100.0) == waits_not


def told(number: int, lines: dict[str, TenantLine], life: int = 7, epoch: int = 0) -> TenantsTold:
    return TenantsTold(number, {}, "router-1", Incarnation(life), lines, epoch)


def spent(share: FairShare, tenant: str) -> float:
    return share._accounts[tenant].spent


def test_what_another_router_charges_counts_here_once() -> None:
    """Guards a tenant against two ways by which one word comes, a late one, one that is lost, and a life that speaks
    after the next one; and a new life's words, and those of a new epoch."""
    share = FairShare()
    share.enter(RequestId("a1"), "a", 1.0, 0, 1)
    for number, charged in ((1, 100.0), (1, 100.0), (4, 150.0), (3, 120.0), (2, 107.0)):
        share.heard(told(number, {"a": (charged, False, False)}), 0.0)
    assert spent(share, "a") == 150.0
    assert share.heard(told(1, {"a": (5.0, False, False)}, life=8), 0.0) and spent(share, "a") == 155.0
    for life, number in ((7, 4), (8, 1), (7, 4), (8, 1)):
        assert not share.heard(told(number, {"a": (999.0, True, True)}, life), 0.0)
    assert spent(share, "a") == 155.0
    share.heard(told(5, {"a": (130.0, False, False)}), 0.0)
    assert spent(share, "a") == 135.0, "less was really computed"
    share.heard(told(6, {"a": (30.0, False, False)}, epoch=1), 0.0)
    assert spent(share, "a") == 165.0
    assert share.news() == (0, {"a": (0.0, True, True)}), "what others charge is not told again"


def test_what_a_router_had_charged_before_it_was_heard_does_not_count() -> None:
    """Guards tenants against a router that begins: the sums of the others are of a long time, and leave out where each
    tenant began."""
    share = FairShare()
    share.enter(RequestId("b1"), "b", 1.0, 0, 1)
    share.heard(told(50, {"a": (9000.0, True, True)}), 0.0)
    assert spent(share, "a") == 0.0
    share.heard(told(51, {"a": (9100.0, True, True)}), 0.0)
    assert spent(share, "a") == 100.0
    share.heard(told(52, {"a": (70.0, True, True), "c": (20.0, True, True)}, epoch=1), 0.0)
    assert spent(share, "a") == 170.0 and spent(share, "c") == 20.0


def test_sums_begin_anew_where_accounts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a tenant that was forgotten here, and comes back: its sum was less than what others had heard, and was
    taken for tokens given back. What was not told yet is told after that."""
    share, other = FairShare(), FairShare()
    other.enter(RequestId("z1"), "z", 1.0, 0, 1)
    numbers = count(1)

    def say() -> None:
        epoch, lines = share.news()
        other.heard(told(next(numbers), lines, epoch=epoch), 0.0)

    def charge(tenant: str, tokens: int) -> None:
        turn = next(numbers)
        name = RequestId(f"{tenant}{turn}")
        with monkeypatch.context() as few:
            few.setattr(fair_share, "MAX_TENANTS", 2)
            share.enter(name, tenant, 1.0, 0, turn)
        share.serve(name, tokens)
        share.began(name)
        share.left(name)

    share.enter(RequestId("w"), "w", 1.0, -9, 0)
    say()
    charge("a", 500)
    say()
    charge("w", 300)
    charge("c", 1)
    charge("a", 200)
    assert share._sums_epoch > 0
    say()
    assert spent(other, "a") == 700.0 and spent(other, "w") == 300.0


def test_a_word_that_is_lost_is_made_up_for() -> None:
    """Guards the last charge of a tenant, after which it has nothing to tell: each second all are named."""
    share = FairShare()
    for number in (1, 2):
        share.enter(RequestId(f"a{number}"), f"t{number}", 1.0, 0, number)
    share.serve(RequestId("a1"), 300)
    words = [share.news()[1] for _ in range(TOLD_AGAIN_EVERY + 1)]
    assert ["t1" in word for word in words] == [True, *[False] * (TOLD_AGAIN_EVERY - 1), True]
    assert words[-1]["t1"] == (300.0, False, False)


@pytest.mark.parametrize("charged", [float("nan"), float("inf"), -float("inf"), -1.0, 2 * MOST_TOKENS])
def test_what_is_no_sum_is_not_taken_in(charged: float) -> None:
    """Guards every account against a peer that has the secret: one NaN, and no comparison was ever true again."""
    share = FairShare()
    share.enter(RequestId("a1"), "a", 1.0, 0, 1)
    assert not share.heard(told(1, {"a": (charged, True, True)}), 0.0) and not share.is_waited_for_elsewhere
    assert spent(share, "a") == 0.0


def test_names_of_others_do_not_pile_up() -> None:
    """Guards memory against a peer that has the secret: lives of routers, names of any length, and any number of them;
    and those that wait, which are known still."""
    others = OtherLines()
    for life in range(2 * MAX_LIVES):
        others.heard(told(1, {f"t{life}": (1.0, False, False)}, life), 0.0)
    assert len(others._lives) == MAX_LIVES
    assert others.knows(told(1, {}, 2 * MAX_LIVES - 1)) and not others.knows(told(1, {}, 0))
    others = OtherLines()
    lines = {"a" * (MAX_NAME_CHARS + 1): (1.0, True, True), "a": (7.0, True, True)}
    assert others.heard(told(1, lines), 0.0) == {"a": 7.0}
    for number in range(2, 12):
        others.heard(told(number, {f"{number} {at}": (1.0, False, False) for at in range(1000)}), 0.0)
    (life,) = others._lives.values()
    assert len(life.sums) <= MAX_NAMES and others.waiting == {"a"}
    assert others.heard(told(12, {"a": (9.0, True, True), "2 1": (5.0, False, False)}), 0.0) == {"a": 2.0, "2 1": 0.0}
    flood = {f"w{at}": (1.0, True, True) for at in range(2 * MAX_NAMES)}
    others.heard(told(13, flood), 0.0)
    assert len(life.sums) == MAX_NAMES and len(others.waiting) <= MAX_NAMES


def test_a_new_life_waits_for_what_it_says_alone() -> None:
    """Guards all others against what the life before had waiting, for as long as its words count."""
    others = OtherLines()
    others.heard(told(9, {"a": (0.0, True, True)}), 0.0)
    others.heard(told(1, {"b": (0.0, True, False)}, life=8), 0.0)
    assert others.waiting == {"b"} and not others.due


def test_who_waits_elsewhere_is_waited_for_only_while_it_is_said() -> None:
    """Guards all others against a router that dies, or hangs, while requests wait there."""
    share = FairShare()
    for number in (1, 2):
        share.enter(RequestId(f"b{number}"), "b", 1.0, 0, number)
    assert share.heard(told(1, {"a": (0.0, True, True)}), 10.0) and share.is_waited_for_elsewhere
    share.serve(RequestId("b1"), 2000)
    assert share.next(lambda name: 0) is None, "b has had more than the quantum"
    assert share.news() == (0, {"b": (2000.0, True, False)}), "and its turn has not come"
    share.tick(10.0 + HEARD_S - 0.01)
    assert share.next(lambda name: 0) is None
    share.tick(10.0 + HEARD_S)
    assert share.next(lambda name: 0) == "b2"
    share.heard(told(2, {"a": (0.0, True, True)}), 12.0)
    assert spent(share, "a") == 0.0 and share.next(lambda name: 0) is None, "it has waited all along"
    share.heard(told(3, {"a": (0.0, False, False)}), 12.0)
    assert share.next(lambda name: 0) == "b2", "or until its requests wait no more"
    share.heard(told(4, {"a": (0.0, True, True)}), 12.0)
    assert spent(share, "a") == 2000.0, "it has come anew"
    share.tick(12.0 + GONE_S - 0.01)
    assert share.is_waited_for_elsewhere
    share.tick(12.0 + GONE_S)
    assert not share.is_waited_for_elsewhere


def test_who_waits_elsewhere_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards all others where there are many tenants: one that waits elsewhere, and has had no more than the last one
    served, was forgotten, came here, and began with nothing: nobody else was served for ages."""
    monkeypatch.setattr(fair_share, "MAX_TENANTS", 2)
    share = FairShare()
    for number in range(1, 4):
        share.enter(RequestId(f"b{number}"), "b", 1.0, 0, number)
    share.heard(told(1, {"a": (5000.0, True, True)}), 0.0)
    for number in (1, 2):
        share.serve(RequestId(f"b{number}"), 6000)
    for number, tenant in enumerate("cd", 4):
        share.enter(RequestId(f"{tenant}1"), tenant, 1.0, 0, number)
    assert "a" in share._accounts
    share.enter(RequestId("a1"), "a", 1.0, 0, 6)
    assert spent(share, "a") == 5000.0
    # Nor does one begin with nothing whose account is not there for any other reason.
    share._others.waiting |= {"e"}
    share.enter(RequestId("e1"), "e", 1.0, 0, 9)
    assert spent(share, "e") == 5000.0


def test_who_comes_elsewhere_begins_where_those_are_that_wait() -> None:
    """Guards those that wait against one that saves up by asking elsewhere; and it against what it had before all
    began anew."""
    share = FairShare()
    for number in (1, 2):
        share.enter(RequestId(f"b{number}"), "b", 1.0, 0, number)
    share.serve(RequestId("b1"), 900)
    share.heard(told(1, {"a": (30.0, True, True)}), 0.0)
    assert share._accounts["a"].spent == 930.0
    share.enter(RequestId("c1"), "c", 1.0, 0, 3)
    assert share._accounts["c"].spent == 900.0
    idle = FairShare()
    idle.enter(RequestId("b1"), "b", 1.0, 0, 1)
    idle.serve(RequestId("b1"), 5000)
    assert idle.news() == (0, {}), "nobody waits, so that it does not count"
    idle.heard(told(1, {"a": (30.0, True, True)}), 0.0)
    assert idle._accounts["b"].spent == 0.0 and idle._accounts["a"].spent == 30.0
    idle.wrote(RequestId("b1"), 10)
    assert idle.news() == (1, {"b": (10 * OUTPUT_WEIGHT, False, False)})


def test_who_is_held_back_elsewhere_has_waited_all_along() -> None:
    """Guards a tenant whose turn comes and goes while it waits: each time it was taken to have come anew, and to begin
    where the others are by then. So what routers thought of it went apart, further and further."""
    share = FairShare()
    for number in (1, 2, 3):
        share.enter(RequestId(f"b{number}"), "b", 1.0, 0, number)
    share.heard(told(1, {"a": (100.0, True, False)}), 0.0)
    share.serve(RequestId("b1"), 5000)
    assert share.next(lambda name: 0) == "b2", "nobody waits for it meanwhile"
    share.heard(told(2, {"a": (100.0, True, True)}), 0.0)
    assert share._accounts["a"].spent == 100.0 and share.next(lambda name: 0) is None
    share.enter(RequestId("a1"), "a", 1.0, 0, 4)
    assert share._accounts["a"].spent == 100.0 and share.next(lambda name: 0) == "a1"
    alone = FairShare()
    alone.heard(told(1, {"a": (100.0, True, False)}), 0.0)
    assert alone.is_waited_for_elsewhere, "not all begin anew"


def test_that_nobody_waits_any_more_is_said_once() -> None:
    share = FairShare()
    share.enter(RequestId("a1"), "a", 1.0, 0, 1)
    assert share.news() == (0, {"a": (0.0, True, True)}) == share.news()
    share.serve(RequestId("a1"), 700)
    assert share.news() == (0, {"a": (700.0, False, False)}) and share.news() == (0, {})


def test_of_many_tenants_a_word_names_some_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the loop of every router where thousands of tenants are served: all were named to all others with each
    word. Whose turn has come or gone is told first, and of the rest everything in turn."""
    monkeypatch.setattr(fair_share, "MOST_NAMED", 4)
    share, other = FairShare(), FairShare()
    other.enter(RequestId("z1"), "z", 1.0, 0, 1)
    for at in range(14):
        share.go_on(RequestId(f"r{at}"), f"t{at}", 1.0)
    share.enter(RequestId("w"), "w", 1.0, 0, 1)
    for number in range(1, 30):
        for at in range(14):
            share.wrote(RequestId(f"r{at}"), 3)
        if number == 20:
            share.enter(RequestId("new"), "new", 1.0, 0, 2)
        elif number == 21:
            share.serve(RequestId("new"), 10)
        epoch, lines = share.news()
        assert len(lines) <= 4
        assert number not in (1, 20, 21) or ("w" if number == 1 else "new") in lines
        other.heard(told(number, lines, epoch=epoch), number * 0.05)
        assert "w" in other._others.waiting and "w" in other._others.due
    for number in range(30, 34):
        epoch, lines = share.news()
        other.heard(told(number, lines, epoch=epoch), number * 0.05)
    assert [spent(other, f"t{at}") for at in range(14)] == [29 * 3 * OUTPUT_WEIGHT] * 14
    assert spent(other, "new") - spent(share, "new") == 0.0


def test_those_put_aside_wait_where_another_routers_line_begins() -> None:
    """Guards what was charged until then: all began anew, as if nobody had waited here."""
    share = FairShare()
    share.enter(RequestId("a1"), "a", 1.0, 0, 1)
    share.put_aside(RequestId("a1"))
    share.go_on(RequestId("b1"), "b", 1.0)
    share.wrote(RequestId("b1"), 50)
    assert share.heard(told(1, {"c": (1.0, True, True)}), 0.0)
    assert spent(share, "b") == 50 * OUTPUT_WEIGHT


def test_of_lines_that_come_and_go_each_is_named_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tenants from being named by nobody: the same few were the first to have changed at every word."""
    monkeypatch.setattr(fair_share, "MOST_NAMED", 4)
    share, named, turn = FairShare(), set[str](), 0
    share.enter(RequestId("always"), "always", 1.0, 0, 0)
    for _ in range(12):
        for at in range(6):
            turn += 1
            share.enter(RequestId(f"r{turn}"), f"t{at}", 1.0, 0, turn)
        named |= share.news()[1].keys()
        for at in range(turn - 5, turn + 1):
            share.left(RequestId(f"r{at}"))
        named |= share.news()[1].keys()
    assert named == {"always", *(f"t{at}" for at in range(6))}


def test_the_shares_hold_where_tenants_are_named_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the stated error: what is said so much later, and it does not add up."""
    monkeypatch.setattr(fair_share, "MOST_NAMED", 1)
    cluster = Cluster(2, Crowd({"a": [0], "b": [0, 1]}, {"a": 1.0, "b": 1.0}), 1)
    cluster.run(60.0)
    assert cluster.error() <= ERROR_TOKENS + 2 * BLOCKS * 16


def test_a_word_of_a_few_tenants_is_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the loop of a router that has several siblings: at each of their words both sets were made again of all
    that any had said. Only a new life, and what is too old, make one look at all."""
    looks: list[float] = []
    look = OtherLines._look

    def counted(self: OtherLines, now: float) -> None:
        looks.append(now)
        look(self, now)

    monkeypatch.setattr(OtherLines, "_look", counted)
    others = OtherLines()
    others.heard(told(1, {f"t{at}": (1.0, True, at % 2 == 0) for at in range(8)}), 0.0)
    others.heard(TenantsTold(1, {}, "router-2", Incarnation(1), {"t0": (1.0, True, True)}, 0), 0.0)
    assert looks == [0.0, 0.0]
    for number in range(2, 22):
        now = number * 0.05
        others.tick(now)
        others.heard(told(number, {f"t{number % 8}": (float(number), number % 3 > 0, number % 5 > 0)}), now)
        said = [(name, *one) for life in others._lives.values() for name, one in life.going_on.items()]
        assert others.waiting == {name for name, _, _ in said}
        assert others.due == {name for name, at_s, is_due in said if is_due and now - at_s < HEARD_S}
    assert looks == [0.0, 0.0]
    others.tick(HEARD_S)
    assert looks == [0.0, 0.0, HEARD_S] and "t0" in others.due
    others.tick(0.81 + HEARD_S)
    assert "t0" not in others.due, "it was named last at 0.8 s"


def main() -> None:
    """Print what a tenant at router 0 gets beside one at others: its share of the tokens from second 10 to 130, and
    the error since the beginning, in tokens / weight; and how much of the pool is not in use."""
    for routers, at in ((1, AT_ONE), (2, {"a": [0], "b": [0, 1]}), (4, {"a": [0], "b": [0, 1, 2, 3]}), (4, APART)):
        for weight in (1.0, 3.0):
            for is_told in (False, True)[routers == 1 :]:
                cluster = Cluster(routers, Crowd(at, {"a": weight, "b": 1.0}), 1, told=is_told)
                cluster.run(130.0)
                a, b = (sum(amount for at_s, amount in cluster.got[name] if at_s >= 10.0) for name in "ab")
                share, idle = a * weight / (a * weight + b), cluster.idle_s / 130.0
                fair, error = weight / (weight + 1.0), cluster.error()
                print(f"{routers} {at} told {is_told}: {share:.3f} of {fair:.3f}, off by {error:.0f}, idle {idle:.3f}")


if __name__ == "__main__":
    main()
