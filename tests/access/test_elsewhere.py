"""What several routers together let a tenant use: as much as one would, but for what is still to be told."""

import random

import pytest

from access.elsewhere import GONE_S
from access.limits import TELL_AFTER_S, TELL_ALL_S, LimitedError, TenantAdmission, TenantLimits
from access.tenants import Tenant

RATE, BURST, LAG_S = 1000.0, 2000, 0.1


class Routers:
    """Routers that tell each other every 50 ms; what they tell takes as long again. `now` is the clock of all."""

    def __init__(self, count: int, **tenants: Tenant) -> None:
        self.now = 0.0
        self.each = [TenantLimits(lambda name: tenants.get(name, Tenant()), 1.0) for _ in range(count)]
        self._numbers = [0] * count
        self._lives = list(range(count))
        self._on_its_way: list[tuple[float, int, int, int, dict[str, tuple[int, int, float]]]] = []
        self.tenants = tenants

    def tick(self) -> None:
        self.now += 0.05
        for arrives_s, router, life, number, uses in list(self._on_its_way):
            if arrives_s > self.now:
                continue
            self._on_its_way.remove((arrives_s, router, life, number, uses))
            for at, other in enumerate(self.each):
                if at != router:
                    for _ in range(2):  # two ways
                        other.elsewhere.heard(f"router-{router}", life, number, uses, self.now)
        for router, limits in enumerate(self.each):
            limits.tick(self.now)
            uses = limits.news(self.now)
            if uses is not None:
                self._numbers[router] += 1
                number = self._numbers[router]
                self._on_its_way.append((self.now + 0.05, router, self._lives[router], number, uses))

    def begin_again(self, router: int) -> None:
        """A router is killed, with all that ran there, and another one comes in its place."""
        self.each[router] = TenantLimits(lambda name: self.tenants.get(name, Tenant()), 1.0)
        self._numbers[router] = 0
        self._lives[router] += 100

    def takes(self, router: int, samples: int = 1) -> TenantAdmission | None:
        try:
            return self.each[router].admit("a", samples, self.now)
        except LimitedError:
            return None


def used(routers: Routers, seconds: float, tokens: int, ask: list[int]) -> int:
    """Tokens of a tenant that asks those routers for as much as it may."""
    total = 0
    while routers.now < seconds:
        for router in ask:
            admission = routers.takes(router)
            if admission is not None:
                admission.spend(tokens)
                admission.close()
                total += tokens
        routers.tick()
    return total


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_rate_holds_over_all_routers(count: int) -> None:
    """Guards against a tenant that gets its rate once from each router, and against one that gets less than its rate.
    The error is what the others let in within a report's time: here a request each at two ticks."""
    tokens, seconds = 100, 30.0
    routers = Routers(count, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST))
    total = used(routers, seconds, tokens, list(range(count)))
    fair = RATE * seconds + BURST
    assert fair - RATE * LAG_S - tokens <= total <= fair + tokens + (count - 1) * 3 * tokens


def test_a_tenant_at_one_of_several_routers_gets_all_of_its_rate() -> None:
    """Guards against a rate that is divided by the number of routers: a client has one connection."""
    routers = Routers(3, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST))
    total = used(routers, 30.0, 100, [1])
    assert total == pytest.approx(RATE * 30.0 + BURST, abs=200)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_samples_at_once_are_counted_over_all_routers(count: int) -> None:
    """Guards the limit of running samples: at once it may be passed by what the others let in meanwhile, and then no
    more until it is kept again."""
    routers = Routers(count, a=Tenant(concurrency=4))
    rng, held = random.Random(1), list[tuple[int, TenantAdmission]]()
    burst = [routers.takes(router) for router in range(count) for _ in range(6)]
    assert sum(one is not None for one in burst) == 4 * count, "the limit once at each, while none has told"
    held = [(0, one) for one in burst if one is not None]
    most = 0
    for turn in range(400):
        routers.tick()
        if held and (turn < 20 or rng.random() < 0.5):
            held.pop(rng.randrange(len(held)))[1].sample_ended()
        elif (admission := routers.takes(turn % count)) is not None:
            held.append((turn % count, admission))
        if turn >= 20:
            most = max(most, len(held))
    assert 4 <= most <= 4 + min(count - 1, 2), "one is asked at each tick, and a word takes two"
    for router in range(count):
        if len(held) >= 4:
            assert routers.takes(router) is None


def test_what_ran_at_a_killed_router_is_free_again() -> None:
    """Guards the share of a router that is gone: its samples would count for ever."""
    routers = Routers(2, a=Tenant(concurrency=2))
    assert routers.takes(0, 2) is not None
    routers.tick()
    routers.tick()
    assert routers.takes(1) is None
    routers.begin_again(0)
    # It tells of its new life, which runs nothing.
    for _ in range(4):
        routers.tick()
    assert routers.takes(1) is not None


def test_a_router_that_says_nothing_more_is_forgotten() -> None:
    limits = TenantLimits(lambda name: Tenant(concurrency=2), 1.0)
    limits.elsewhere.heard("router-0", 7, 3, {"a": (10, 2, 0.0)}, 0.0)
    with pytest.raises(LimitedError):
        limits.admit("a", 1, GONE_S - 0.1)
    limits.tick(GONE_S)
    assert repr(limits.elsewhere) == "UsageElsewhere(nobody)"
    limits.admit("a", 1, GONE_S)


def test_a_router_that_begins_believes_the_others_about_the_burst() -> None:
    """Guards against a tenant that has its burst once more with every router that is started again."""
    routers = Routers(2, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST))
    used(routers, 10.0, 100, [0, 1])
    routers.begin_again(0)
    for _ in range(25):
        routers.tick()
        # The other goes on: the tenant takes what comes in.
        if (admission := routers.takes(1)) is not None:
            admission.spend(100)
            admission.close()
    assert routers.each[0]._usage["a"].bucket.level < 300


@pytest.mark.parametrize("how", ["begins", "has heard nothing for a while"])
def test_who_first_hears_a_part_of_what_is_used_charges_nobody_for_the_past(how: str) -> None:
    """Guards against a router that charges a tenant for all that it ever used elsewhere: most reports name other
    tenants only, and the first one that names this one told of its whole life."""
    routers = Routers(2, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST), b=Tenant(tokens_per_s=RATE))
    assert used(routers, 10.0, 100, [0]) > 2 * BURST
    while routers.now < 14.5:  # its bucket is full again, and no report of all is due
        routers.tick()
    if how == "begins":
        routers.begin_again(1)
    else:
        routers.each[1].elsewhere.tick(routers.now + GONE_S)
    assert repr(routers.each[1].elsewhere) == "UsageElsewhere(nobody)"
    routers.each[0].admit("b", 1, routers.now).spend(1)
    routers._on_its_way.clear()
    routers.tick()
    assert routers._on_its_way[0][-1].keys() == {"b"}, "the first report that it hears is a part"
    for _ in range(40):
        routers.tick()
    assert routers.takes(1) is not None
    assert routers.each[1]._usage["a"].bucket.level == BURST
    # What is used from now on counts as ever.
    routers.each[0].admit("a", 1, routers.now).spend(1500)
    for _ in range(4):
        routers.tick()
    assert routers.each[1]._usage["a"].bucket.level == pytest.approx(BURST - 1500, abs=300)


def test_that_nothing_runs_any_more_is_told_of_one_that_used_nothing() -> None:
    """Guards a tenant whose first request was told of and then failed before it used a token: it was forgotten at once,
    and the other router refused the tenant for ever."""
    routers = Routers(2, a=Tenant(concurrency=1))
    admission = routers.takes(0)
    assert admission is not None
    for _ in range(2):
        routers.tick()
    assert routers.takes(1) is None, "it was told of"
    admission.close()
    for _ in range(3):
        routers.tick()
    assert routers.takes(1) is not None


def test_who_uses_nothing_any_more_is_told_of_for_a_while_only() -> None:
    """Guards reports that hold every tenant that there ever was; and the count of what it used, which goes on."""
    routers = Routers(2, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST))
    used(routers, 1.0, 100, [0])
    assert "a" in routers.each[0]._told
    quiet_s = routers.now + BURST / RATE + TELL_AFTER_S + TELL_ALL_S
    while routers.now < quiet_s:
        routers.tick()
    assert routers.each[0].news(routers.now + TELL_ALL_S) == {}
    (admission,) = [routers.takes(0)]
    assert admission is not None
    admission.spend(500)
    for _ in range(3):
        routers.tick()
    assert routers.each[1]._usage["a"].bucket.level == pytest.approx(BURST - 500, abs=150)


def test_a_report_that_comes_twice_or_late_counts_once() -> None:
    limits = TenantLimits(lambda name: Tenant(tokens_per_s=1.0, burst_tokens=100), 1.0)
    for number, tokens in ((1, 10), (1, 10), (3, 40), (2, 20), (3, 40)):
        limits.elsewhere.heard("router-0", 7, number, {"a": (tokens, 0, 100.0 - tokens)}, 0.0)
    assert limits._usage["a"].bucket.level == 60.0
    limits.elsewhere.heard("router-0", 8, 1, {"a": (5, 0, 55.0)}, 0.0)
    assert limits._usage["a"].bucket.level == 55.0, "another life counts anew"


def test_what_is_given_back_is_given_back_at_all_routers() -> None:
    """Guards a tenant whose requests are refused before any worker saw them: the other routers kept what they cost."""
    routers = Routers(2, a=Tenant(tokens_per_s=1.0, burst_tokens=100))
    admission = routers.takes(0)
    assert admission is not None
    admission.spend(80)
    for _ in range(3):
        routers.tick()
    assert routers.each[1]._usage["a"].bucket.level == pytest.approx(20, abs=1)
    admission.sample_refused(80)
    for _ in range(3):
        routers.tick()
    assert routers.each[1]._left("a", routers.now) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("tenants", [3, 4, 17])
def test_of_many_tenants_a_report_names_some_in_turn(tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the loop of every router: thousands of tenants that use something were all named to all others twenty
    times a second. What comes later is of no less: sums are told as they stand."""
    monkeypatch.setattr("access.limits.MOST_NAMED", 4)
    names = [f"t{at}" for at in range(tenants)]
    routers = Routers(2, **dict.fromkeys(names, Tenant(tokens_per_s=1e-3, burst_tokens=10**6)))
    admissions = [routers.each[0].admit(name, 1, 0.0) for name in names]
    for _ in range(40):
        for admission in admissions:
            admission.spend(7)
        routers.tick()
        named = [len(word[-1]) for word in routers._on_its_way]
        assert max(named, default=0) <= 4
    turns = -(-tenants // 4)
    heard = [routers.each[1]._usage[name].bucket.level for name in names]
    assert all(level <= 10**6 - 7 * (40 - turns - 2) + 1 for level in heard), "each has its turn"
    for admission in admissions:
        admission.close()
    for _ in range(turns + 2):
        routers.tick()
    for name in names:
        assert routers.each[1]._usage[name].bucket.level == pytest.approx(10**6 - 7 * 40, abs=1)
        assert routers.each[1].elsewhere.running(name) == 0


def test_what_runs_is_told_before_what_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `concurrency` where there are more tenants than one report names: their samples at once were told last."""
    monkeypatch.setattr("access.limits.MOST_NAMED", 2)
    names = [f"t{at}" for at in range(20)]
    limits = TenantLimits(lambda name: Tenant(tokens_per_s=RATE, concurrency=4), 1.0)
    admissions = [limits.admit(name, 1, 0.0) for name in names]
    for at in range(1, 11):
        limits.news(at * 0.05)
    for admission in admissions:
        admission.spend(5)
    limits.admit("t13", 1, 0.6)
    news = limits.news(0.6)
    assert news is not None and len(news) == 2 and news["t13"][:2] == (5, 2)


def test_of_requests_that_come_and_go_each_tenant_is_named_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the limits of some against the others: the same few were the first of whom more or less ran."""
    monkeypatch.setattr("access.limits.MOST_NAMED", 4)
    names = [f"t{at}" for at in range(6)]
    limits = Routers(1, **dict.fromkeys(names, Tenant(tokens_per_s=1e-3, burst_tokens=10**6))).each[0]
    named, now = set[str](), 0.0
    for _ in range(12):
        admissions = [limits.admit(name, 1, now) for name in names]
        named |= (limits.news(now) or {}).keys()
        for admission in admissions:
            admission.close()
        now += 0.05
        named |= (limits.news(now) or {}).keys()
    assert named == set(names)


def test_a_rate_holds_over_all_routers_where_tenants_are_named_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the stated error: as many times 0.05 s more as it takes to name all, and over time none."""
    monkeypatch.setattr("access.limits.MOST_NAMED", 1)
    others = {f"t{at}": Tenant(tokens_per_s=1.0) for at in range(3)}
    routers = Routers(2, a=Tenant(tokens_per_s=RATE, burst_tokens=BURST), **others)
    running = [limits.admit(name, 1, 0.0) for limits in routers.each for name in others]
    tokens, total = 100, 0
    while routers.now < 30.0:
        for router in range(2):
            if (admission := routers.takes(router)) is not None:
                admission.spend(tokens)
                admission.close()
                total += tokens
        for one in running:
            one.spend(1)
        routers.tick()
    fair = RATE * 30.0 + BURST
    assert fair - RATE * (LAG_S + 0.15) - tokens <= total <= fair + (1 + 3 + 3) * tokens


def test_who_uses_nothing_is_looked_for_among_some_tenants_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("access.limits.LOOKED_AT", 2)
    asked: list[str] = []

    def tenant(name: str) -> Tenant:
        asked.append(name)
        return Tenant(concurrency=1)

    limits = TenantLimits(tenant, 1.0)
    admissions = [limits.admit(name, 1, 0.0) for name in "abcde"]
    admissions[4].close()
    del asked[:]
    for _ in range(3):
        limits.tick(0.05)
    assert asked == ["a", "b", "c", "d", "e", "a"] and limits._usage.keys() == set("abcd")
