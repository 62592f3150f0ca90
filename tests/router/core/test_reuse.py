"""What a second copy costs others, and when it is worth it."""

from collections.abc import Mapping

import pytest

from router.core import reuse
from router.core.policy import PrefillView
from router.core.reuse import (
    ALL_BUSY,
    FEWEST_BEGINNINGS,
    FEWEST_EVICTED,
    MOST_BEGINNINGS,
    MOST_BUSY,
    MOST_EVICTED,
    SHORTEST,
    Arrivals,
    Evictions,
    MissedWaits,
    Reuse,
    half_life,
    spare_tokens,
)

SIZE, LATER_S = 16, 1000.0


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{n}".encode() for n in range(blocks)]


def view(name: str, queue: int = 0, s_per_token: float = 0.01) -> PrefillView:
    return PrefillView(name, 0, queue, s_per_token, 0)


def placed(
    missed: MissedWaits,
    beginning: list[bytes],
    held: Mapping[str, int],
    queues: Mapping[str, int],
    chosen: str,
    now: float = LATER_S,
) -> None:
    views = {name: view(name, queue) for name, queue in queues.items()}
    tokens = (len(beginning) + 1) * SIZE
    missed.placed(beginning, tokens, SIZE, list(views.values()), held, views[chosen], now)


def known(missed: MissedWaits, *beginnings: bytes) -> MissedWaits:
    """Let somebody have waited for these long ago."""
    missed._tokens.update(dict.fromkeys(beginnings, (0.0, 0.0)))
    return missed


def delaying(
    reuse: Reuse, beginning: list[bytes], held: Mapping[str, int], queues: Mapping[str, int]
) -> dict[str, float]:
    return reuse.delaying_tokens(beginning, held, SIZE, queues, 0.01)


def busy_half(reuse: Reuse) -> Reuse:
    """Let a request come to each of four workers in 0.4 s, and keep it busy for half of that."""
    for n in range(500):
        reuse.arrivals.came(n * 0.1, work_s=0.2, workers=4)
    return reuse


@pytest.mark.parametrize(("work_s", "together"), [(0.2, 0.5), (0.28, 0.7), (0.36, 0.9), (0.5, ALL_BUSY)])
def test_while_no_worker_is_idle_nobody_is_sent_elsewhere(work_s: float, together: float) -> None:
    """Guards copies in a surge, which delay all that come until it is over: they were priced as if those went
    elsewhere."""
    prices, held = Reuse(), {"a": 10, "b": 0}
    for n in range(500):
        prices.arrivals.came(n * 0.1, work_s, workers=4)
    apart = min(together, MOST_BUSY)
    idle = 0.8 / 0.4 / (1 - apart) * 160
    for queue in (0, 60, 90):
        found = delaying(prices, chain("7", 10), held, {"a": 60, "b": queue})
        least = min(queue, 60)
        waits = 0.01 * 160 / 0.4 * (least / (1 - together) + (queue - least) / (1 - apart))
        assert found == {"a": 0.0, "b": pytest.approx(idle + waits)}


def test_what_is_held_elsewhere_weighs_by_how_many_lose_by_it() -> None:
    """Guards a conversation that is computed again wherever a queue is a little shorter; and an idle worker, which was
    left idle since others had long queues."""
    prices, held = busy_half(Reuse()), {"a": 10, "b": 0, "c": 4, "d": 0}
    found = delaying(prices, chain("7", 10), held, {"a": 500, "b": 60, "c": 60, "d": 0})
    # λ / (1 - busy) = 5 a second: of the 6 blocks that c lacks, 0.96 s, and the 4 below, 0.64 s, each on its own.
    assert found["a"] == 0.0
    assert found["c"] == pytest.approx((0.6 + 0.48) * 5 * 96)
    assert found["b"] == pytest.approx((0.6 + 0.48) * 5 * 96 + (0.6 + 0.32) * 5 * 64)
    assert found["d"] == pytest.approx(0.48 * 5 * 96 + 0.32 * 5 * 64)
    nothing = delaying(Reuse(), chain("7", 10), held, {"a": 500, "b": 60, "c": 60, "d": 0})
    assert set(nothing.values()) == {0.0}, "nobody comes"
    assert delaying(prices, chain("7", 10), {"a": 3, "b": 3}, {"a": 9, "b": 9}) == {"a": 0.0, "b": 0.0}
    assert delaying(prices, chain("7", 10), {}, {}) == {}


def test_those_that_are_still_to_come_are_delayed_too() -> None:
    """Guards a burst behind one cold prompt, of which nobody waits yet when the second request comes."""
    prices = Reuse()
    assert prices.arrivals.delayed(5.0, 5.0) == 0.0, "nothing is known"
    assert busy_half(prices).arrivals.delayed(0.6, 0.4) == pytest.approx(0.8 / 0.4 / 0.5)


def test_nobody_loses_more_than_it_would_elsewhere() -> None:
    """Guards a prefix that everybody shares against staying with its first holder: those that a copy delays may go to
    any idle worker. A conversation, which has nowhere else to go, still loses all of it."""
    hot, held, queues = chain("hot", 10), {"a": 10, "b": 0}, {"a": 0, "b": 60}
    whole = delaying(busy_half(Reuse()), hot, held, queues)["b"]
    assert whole == pytest.approx((0.6 + 0.8) * 5 * 160)
    for spare, share in ((0.0, 0.0), (160.0, 0.5), (1e9, 1.0)):
        prices = busy_half(Reuse())
        for n in range(20):
            prices.arrivals.came(50.0 + n * 0.1, 0.2, 4, spare)
        assert delaying(prices, hot, held, queues)["b"] == pytest.approx(share * whole, rel=1e-3)


def test_while_all_are_busy_nobody_can_go_elsewhere() -> None:
    """Guards hits where queues are long: what one more copy takes, all that come lose, wherever they go."""
    hot, held = chain("hot", 10), {"a": 10, "b": 0, "c": 0}
    prices = busy_half(Reuse())
    for n in range(20):
        prices.arrivals.came(50.0 + n * 0.1, 0.2, 4, 160.0)
    # Nobody is idle for 40 tokens' time, of which all is lost; of the rest of the queue, and of the copy, one half.
    found = delaying(prices, hot, held, {"a": 500, "b": 60, "c": 40})
    assert found["b"] == pytest.approx((0.4 + (0.2 + 0.8) / 2) * 5 * 160, rel=1e-3)
    assert found["c"] == pytest.approx((0.4 + 0.8 / 2) * 5 * 160, rel=1e-3)


def test_what_is_lost_is_a_mean_of_late() -> None:
    """Guards each of the three: the mean of the first ones, that it fades, and that what another router brings, of
    which nothing is known, changes none of it."""
    arrivals = Arrivals()
    assert arrivals.lost(160) == 160, "nothing is known"
    arrivals.came(0.0, 0.1, 4)
    assert arrivals.lost(160) == 160
    for n, spare in enumerate((100.0, 300.0, 200.0), 1):
        arrivals.came(n * 1.0, 0.1, 4, spare)
    assert arrivals.lost(200) == pytest.approx(100.0)
    arrivals.came(4.0, 0.1, 4)
    assert arrivals.lost(200) == pytest.approx(100.0)
    for n in range(8 * SHORTEST):
        arrivals.came(5.0 + n, 0.1, 4, 600.0)
    before = arrivals.lost(200)
    for n in range(SHORTEST):
        arrivals.came(9000.0 + n, 0.1, 4, 200.0)
    assert before == pytest.approx(150.0, rel=0.01) and arrivals.lost(200) == pytest.approx(200 * 400 / 600, rel=0.01)


def test_how_much_worse_the_next_worker_is() -> None:
    """Guards its four terms: queues, what is cached, what others lose, and speeds; in tokens of the chosen one."""
    home = PrefillView("home", 150, 40, 0.01, 0)
    free = PrefillView("free", 0, 0, 0.01, 0)
    assert spare_tokens(160, [home, free], home) == pytest.approx(160 - (40 + 10))
    dear = PrefillView("dear", 0, 0, 0.01, 0, delaying_tokens=30.0)
    assert spare_tokens(160, [home, dear], home) == pytest.approx(190 - 50)
    assert spare_tokens(160, [home, free, dear], home) == pytest.approx(110), "the best of the others"
    slow = PrefillView("slow", 0, 0, 0.02, 0, delay=1.5)
    assert spare_tokens(160, [home, slow], home) == pytest.approx(3 * 160 - 50)
    assert spare_tokens(160, [home, free], free) == 0.0, "who goes elsewhere than to the soonest has nothing to spare"
    whole = PrefillView("whole", 160, 0, 0.01, 0)
    assert spare_tokens(160, [whole, home], whole) == pytest.approx(50 - 1), "one token is always computed"
    assert spare_tokens(160, [home], home) is None


def test_no_worker_is_taken_to_be_always_busy() -> None:
    """Guards a cold start, where all prompts are computed in full: no copy would be worth anything then."""
    arrivals = Arrivals()
    for n in range(3):
        arrivals.came(n * 0.1, work_s=5.0, workers=1)
    assert arrivals.delayed(0.1, 0.0) == pytest.approx(1.0 / (1.0 - MOST_BUSY))


def test_the_rate_is_of_late() -> None:
    arrivals = Arrivals()
    for n in range(1000):
        arrivals.came(n * 1.0, work_s=0.0, workers=1)
    before = arrivals.delayed(1.0, 0.0)
    for n in range(SHORTEST):
        arrivals.came(1000.0 + n * 0.1, work_s=0.0, workers=1)
    assert before == pytest.approx(1.0) and arrivals.delayed(1.0, 0.0) == pytest.approx(1 / 0.55, rel=0.01)


def test_waits_that_a_copy_would_have_spared_come_to_pay_for_it() -> None:
    """Guards a hot prefix against being served by its first holder alone, and copies that are made at once."""
    prices, hot, held, queues = busy_half(Reuse()), chain("hot", 10), {"a": 10, "b": 0}, {"a": 200, "b": 40}
    known(prices.missed, hot[-1])
    found = []
    for _ in range(9):
        found.append(delaying(prices, hot, held, queues)["b"])
        placed(prices.missed, hot, {"a": 10}, queues, "a")
    # Each waits 160 tokens longer than it had to. Computing the prefix takes as many, of (0.4 + 0.8) · 5 requests.
    assert found[:7] == pytest.approx([960, 800, 640, 480, 320, 160, 0], abs=10)
    # The own time of who computes it is as much as it may spare: it costs nothing then, and nobody is paid for it.
    assert found[8] == -160


def test_a_copy_that_is_made_settles_the_account() -> None:
    """Guards a prefix that goes to every worker in a burst, for waits that the first copy spares."""
    hot = chain("hot", 10)
    missed = known(MissedWaits(), hot[-1])
    for _ in range(3):
        placed(missed, hot, {"a": 10}, {"a": 400, "b": 0}, "a")
    assert missed.of(hot[-1]) == pytest.approx(1200, rel=0.02)
    placed(missed, hot, {"a": 10}, {"a": 400, "b": 0}, "b")
    assert missed.of(hot[-1]) == 0.0
    placed(missed, hot, {"a": 10}, {"a": 400, "b": 0}, "a")
    assert missed.of(hot[-1]) == pytest.approx(400, rel=0.02), "and the next one is counted at once"


def test_who_comes_before_a_copy_could_be_there_has_missed_nothing() -> None:
    """Guards a burst behind a cold prompt against copies for those who had all come before one could be made."""
    missed, cold = MissedWaits(), chain("cold", 10)
    # Its 160 tokens take 1.6 s.
    for now in (7.0, 7.1, 8.5):
        placed(missed, cold, {"a": 10}, {"a": 400, "b": 0}, "a", now)
    assert missed.of(cold[-1]) == 0.0
    placed(missed, cold, {"a": 10}, {"a": 400, "b": 0}, "a", 8.7)
    assert missed.of(cold[-1]) == pytest.approx(400, rel=0.02)


def test_each_part_of_a_prompt_has_its_own_account() -> None:
    """Guards a system prompt that everybody shares against paying for one conversation's copy, and the reverse."""
    talk = chain("talk", 10)
    missed, held = known(MissedWaits(), talk[9], talk[3]), {"a": 10, "b": 4, "c": 4}
    placed(missed, talk, held, {"a": 100, "b": 90, "c": 95, "d": 20}, "a")
    assert missed.of(talk[9]) == pytest.approx(80.0, rel=0.01), "by all that hold less: who holds none is the soonest"
    assert missed.of(talk[3]) == pytest.approx(70.0, rel=0.01)
    placed(missed, talk, held, {"a": 100, "b": 0, "c": 0, "d": 20}, "b")
    assert missed.of(talk[9]) == 0.0 and missed.of(talk[3]) == pytest.approx(70.0, rel=0.01)


def test_who_holds_more_holds_the_beginning_too() -> None:
    """Guards a long queue at one holder of a beginning, while another one, which holds more, could have taken it."""
    talk = chain("talk", 10)
    missed = known(MissedWaits(), talk[3])
    placed(missed, talk, {"a": 10, "b": 4}, {"a": 10, "b": 100, "c": 0}, "a")
    assert missed.of(talk[3]) == pytest.approx(10.0, rel=0.01)


def test_nobody_waits_where_a_holder_is_idle_or_the_others_are_slow() -> None:
    missed, hot = MissedWaits(), chain("hot", 10)
    placed(missed, hot, {"a": 10, "b": 10}, {"a": 0, "b": 500, "c": 0}, "a")
    assert len(missed) == 0
    slow, home = view("slow", 0, s_per_token=1.0), view("home", 20)
    missed.placed(hot, 11 * SIZE, SIZE, [slow, home], {"home": 10}, home, LATER_S)
    assert len(missed) == 0, "it would have computed the rest for longer than the queue of the other one takes"
    # What others hold than those that were compared does not matter: decode workers hold the longest beginnings.
    little_slower = view("slow", 0, s_per_token=0.012)
    missed.placed(hot, 11 * SIZE, SIZE, [little_slower, home], {"home": 4, "decode": 10}, home, LATER_S)
    assert len(missed) == 0


def test_the_past_fades() -> None:
    """Guards copies that are made of what was popular an hour ago."""
    hot = chain("hot", 10)
    missed = known(MissedWaits(), hot[-1])
    placed(missed, hot, {"a": 10}, {"a": 100, "b": 0}, "a")
    for _ in range(SHORTEST):
        placed(missed, chain("cold", 2), {}, {"a": 0, "b": 0}, "a")
    assert missed.of(hot[-1]) == pytest.approx(50.0, rel=0.01)


def test_memory_is_bounded_and_what_matters_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a memory that grows with every prompt."""
    monkeypatch.setattr(reuse, "MOST_BEGINNINGS", 100)
    monkeypatch.setattr(reuse, "FEWEST_BEGINNINGS", 40)
    assert MOST_BEGINNINGS > 100 and FEWEST_BEGINNINGS > 40
    hot = chain("hot", 10)
    missed = known(MissedWaits(), hot[-1])
    for n in range(500):
        placed(missed, hot, {"a": 10}, {"a": 100, "b": 0}, "a")
        placed(known(missed, f"{n}3".encode()), chain(f"{n}", 4), {"a": 4}, {"a": 2, "b": 0}, "a")
        assert len(missed) <= 102
    assert missed.of(hot[-1]) > 1000


def test_what_changes_no_price_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "FEWEST_BEGINNINGS", 40)
    missed = MissedWaits()
    for n in range(3000):
        placed(known(missed, f"{n}3".encode()), chain(f"{n}", 4), {"a": 4}, {"a": 2, "b": 0}, "a")
        assert len(missed) <= 800, "two tokens are half of one after as many requests as halve them"


def test_weights_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a router of many days: the weight of the newest request grows for ever otherwise."""
    monkeypatch.setattr(reuse, "_LARGEST", 4.0)
    every = [chain(f"{n}", 4)[-1] for n in range(3)]
    missed, other = known(MissedWaits(), *every), known(MissedWaits(), *every)
    for n in range(3000):
        placed(missed, chain(f"{n % 3}", 4), {"a": 4}, {"a": 30, "b": 0}, "a")
    monkeypatch.undo()
    for n in range(3000):
        placed(other, chain(f"{n % 3}", 4), {"a": 4}, {"a": 30, "b": 0}, "a")
    for n in range(3):
        assert missed.of(chain(f"{n}", 4)[-1]) == pytest.approx(other.of(chain(f"{n}", 4)[-1])) != 0.0


def test_what_is_just_enough_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards both borders of what is forgotten: the least that changes a price stays, and so do as many as may."""
    missed = MissedWaits()
    missed._tokens = {b"a": (5.0, 1.0), b"b": (4.0, 2.0), b"c": (6.0, 0.0)}
    missed._forget(5.0)
    assert missed._tokens == {b"a": (5.0, 1.0), b"c": (6.0, 0.0)}
    monkeypatch.setattr(reuse, "MOST_BEGINNINGS", 4)
    missed._tokens = {b"b": (1.0, 0.0), b"a": (2.0, 0.0)}
    missed._forget(0.0)
    assert list(missed._tokens) == [b"b", b"a"], "as they came"
    missed._tokens = {b"b": (1.0, 9.0), b"a": (2.0, 0.0), b"c": (3.0, 0.0)}
    missed._forget(0.0)
    assert missed._tokens == {b"c": (3.0, 0.0), b"a": (2.0, 0.0)}


def test_one_prompt_alone_says_nothing_of_how_often_they_come() -> None:
    """Guards the first price of a router that has run for long: its clock does not begin at nought."""
    arrivals = Arrivals()
    arrivals.came(1000.0, 1.0, 1)
    assert arrivals.delayed(1.0, 1.0) == 0.0
    arrivals.came(1002.0, 1.0, 1)
    assert arrivals.delayed(1.0, 1.0) == pytest.approx((1.0 + 0.5) / 2.0 / (1.0 - 0.5))


@pytest.mark.parametrize("workers", [2, 16])
def test_half_of_what_was_missed_is_of_so_many_requests(workers: int) -> None:
    missed, views = MissedWaits(), {f"w{n}": 0 for n in range(workers)}
    for _ in range(int(half_life(workers))):
        placed(missed, chain("a", 2), {}, views, "w0")
    assert missed._weight == pytest.approx(2.0)


def test_what_was_missed_is_counted_to_the_token() -> None:
    """Guards the account where workers are not of one speed: 416 tokens of the holder's, against 16 of a slower one."""
    hot = chain("hot", 10)
    missed = known(MissedWaits(), hot[-1])
    views = [view("a", 400, 0.01), view("b", 0, 0.02)]
    missed.placed(hot, 11 * SIZE, SIZE, views, {"a": 10}, views[0], LATER_S)
    assert missed.of(hot[-1]) == pytest.approx(416 - 2 * 16)


def test_a_prompt_that_is_held_to_its_end_still_has_one_token_to_read() -> None:
    """Guards the account of the very last block: without it, whoever reads in no time has nothing to be compared by."""
    hot = chain("hot", 10)
    missed = known(MissedWaits(), hot[-1])
    views = [view("a", 400, 0.01), view("b", 0, 0.02)]
    missed.placed(hot, 10 * SIZE, SIZE, views, {"a": 10}, views[0], LATER_S)
    assert missed.of(hot[-1]) == pytest.approx(401 - 2 * 1)


def test_who_comes_when_a_copy_could_just_be_there_has_missed_it() -> None:
    """Guards the border: 160 tokens at 10 ms are there after 1.6 s, and not a moment before."""
    hot = chain("hot", 10)
    for now, has_missed in ((1.599, False), (1.6, True)):
        missed = known(MissedWaits(), hot[-1])
        placed(missed, hot, {"a": 10}, {"a": 100, "b": 0}, "a", now)
        assert (missed.of(hot[-1]) > 0.0) == has_missed


def test_nothing_is_forgotten_while_there_is_room() -> None:
    missed = MissedWaits()
    missed._tokens = {f"{n}".encode(): (0.0, 0.0) for n in range(missed._room)}
    missed._fade(1)
    assert len(missed) == missed._room, "as many as there may be"
    missed._tokens[b"more"] = (0.0, 0.0)
    missed._fade(1)
    assert not len(missed), "of none of them anything was missed"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_what_a_copy_displaces_delays_others_when_it_comes_back(share: float) -> None:
    """Guards small caches, where the blocks that make room for a copy are computed again, on workers that others wait
    for."""
    reuse, talk = Reuse(), chain("talk", 10)
    held, queues = {"a": 10, "b": 4, "c": 0, "d": 0}, {"a": 100, "b": 50, "c": 30, "d": 20}
    for n in range(100):
        reuse.arrivals.came(n * 1.0, 0.5, 4, 40.0)
    before = delaying(reuse, talk, held, queues)
    reuse.evictions.evicted(chain("gone", FEWEST_EVICTED), 0)
    reuse.evictions.asked(chain("gone", int(FEWEST_EVICTED * share)))
    after = reuse.delaying_tokens(talk, held, SIZE, queues, 0.01, full={"a", "b", "c"})
    assert after["a"] == before["a"] == 0.0 and after["d"] == before["d"], "one is no copy, one has room"
    for name, tokens in (("b", 6 * SIZE), ("c", 10 * SIZE)):
        lost = tokens * 40.0 / (tokens + 40.0)
        delayed = (50 * 0.01 + tokens * 0.01 / 2) / 4.0 / (1 - 0.5 / 4.0)
        assert after[name] - before[name] == pytest.approx(share * (tokens + delayed * lost))


def test_evictions_cost_what_is_asked_for_again() -> None:
    """Guards copies where caches are small: of what makes room for one, so much has to be computed anew."""
    evictions = Evictions()
    assert evictions.share == 0.0
    for n in range(400):
        evictions.evicted(chain(f"{n}-", 8), 10_000)
        evictions.asked(chain(f"{n}-", 8)[2:4])
        evictions.asked([*chain(f"{n}-", 8)[:2], b"never held", *chain(f"{n}-", 8)[4:]])
    assert evictions.share == pytest.approx(0.5, abs=0.01), "what follows a block that nobody had is not looked at"
    for n in range(10_000):
        evictions.evicted(chain(f"other{n}-", 8), 10_000)
    assert evictions.share == pytest.approx(0.0, abs=0.001)


def test_a_block_that_is_asked_for_again_counts_once() -> None:
    evictions = Evictions()
    evictions.evicted(chain("a", FEWEST_EVICTED), 0)
    for _ in range(3):
        evictions.asked(chain("a", FEWEST_EVICTED // 4))
    assert evictions.share == pytest.approx(0.25)


@pytest.mark.parametrize(("between", "is_late"), [(0, False), (400, False), (1_000, True)])
def test_who_asks_after_a_turnover_would_not_have_found_it_anyway(between: int, is_late: bool) -> None:
    evictions = Evictions()
    evictions.evicted(chain("a", 100), 1_000)
    for n in range(between // 100):
        evictions.evicted(chain(f"other{n}-", 100), 1_000)
    evictions.asked(chain("a", 100))
    assert (evictions.share == 0.0) is is_late


def test_evictions_are_all_seen_and_of_the_requests_of_several_routers_a_part() -> None:
    evictions = Evictions()
    for n in range(400):
        evictions.evicted(chain(f"{n}-", 8), 10_000)
        evictions.asked(chain(f"{n}-", 1))
        for _ in range(3):
            evictions.came()
    assert evictions.share == pytest.approx(0.5, abs=0.01)


def test_what_was_evicted_is_remembered_within_bounds() -> None:
    evictions = Evictions()
    for n in range(100):
        evictions.evicted(chain(f"{n}-", 2_000), 10**9)
        assert len(evictions) <= 2 * (MOST_EVICTED + 2_000)
    assert len(evictions) >= MOST_EVICTED
