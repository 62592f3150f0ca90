"""Words of other routers that nobody sane would say: they raise nothing, what is kept of them is bounded, and what a
tenant may use stays a number.

Tried elsewhere too: what is used in test_elsewhere.py, and who waits in tests/router/core/test_shared_line.py.
"""

from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from access import siblings
from access.elsewhere import GONE_S, UsageElsewhere
from access.limits import LimitedError, TenantLimits
from access.siblings import MAX_LIVES, MAX_NAMES, MOST_TOKENS, SiblingLife
from access.tenants import MAX_NAME_CHARS, Tenant
from engine.messages import TenantsTold
from engine.types import Incarnation
from router.core.other_lines import OtherLines

RATE, BURST = 10.0, 100


def limited() -> TenantLimits:
    return TenantLimits(lambda name: Tenant(tokens_per_s=RATE, burst_tokens=BURST, concurrency=2), 1.0)


@pytest.mark.parametrize(
    "use",
    [
        *((tokens, 0, 50.0) for tokens in (nan, inf, -inf, -1, 10**300, 2 * MOST_TOKENS)),
        *((10, running, 50.0) for running in (-1, -(10**9), 10**300)),
        *((10, 0, left) for left in (nan, -inf, -1e300)),
    ],
    ids=str,
)
def test_a_use_that_is_none_is_not_taken_in(use: tuple[int, int, float]) -> None:
    """Guards a tenant against one word after which it may never ask again, or as often as it likes; and other tenants
    of the same word."""
    limits = limited()
    for number in (1, 2):
        limits.elsewhere.heard("router-1", 7, number, {"a": use, "b": (60, 1, 40.0)}, 0.0)
    assert limits.elsewhere.running("a") == 0 and "a" not in limits._usage
    assert limits.elsewhere.running("b") == 1 and limits._usage["b"].bucket.level == 40.0
    limits.admit("a", 2, 0.0)
    limits.elsewhere.heard("router-1", 7, 3, {"a": (30, 0, 70.0)}, 0.0)
    assert limits._usage["a"].bucket.level == 70.0


@pytest.mark.parametrize("running", [0, 1])
def test_what_is_used_elsewhere_does_not_pile_up(running: int) -> None:
    """Guards memory against lives of routers, names of any length, and any number of them; and a tenant that runs
    something, of which it is known still how much it had used."""
    charged: list[tuple[str, float, float]] = []
    usage = UsageElsewhere(lambda name, tokens, most, now: charged.append((name, tokens, most)))
    for life in range(2 * MAX_LIVES):
        usage.heard(f"router-{life % 3}", life, 1, {f"t{life}": (1, 1, 0.0)}, 0.0)
    assert len(usage._lives) == MAX_LIVES
    usage.tick(GONE_S)
    usage.heard("router-1", 7, 1, {"a" * (MAX_NAME_CHARS + 1): (1, 1, 0.0), "a": (7, 1, 0.0)}, GONE_S)
    for number in range(2, 12):
        usage.heard("router-1", 7, number, {f"{number} {at}": (1, running, 0.0) for at in range(1000)}, GONE_S)
    (life_of_it,) = usage._lives.values()
    assert len(life_of_it.sums) <= MAX_NAMES and len(life_of_it.going_on) <= MAX_NAMES
    del charged[:]
    usage.heard("router-1", 7, 12, {"a": (9, 1, 5.0)}, GONE_S)
    assert charged == [("a", 2, inf)] and usage.running("a") == 1
    usage.heard("router-1", 7, 13, {"other": (9, 0, 5.0)}, GONE_S)
    assert charged[1:] == ([] if running else [("other", 0.0, 5.0)]), "what it had used may have been forgotten"


def test_as_many_tenants_as_are_remembered_are_counted() -> None:
    """Guards the rates of many tenants, told in words of 1,024: from 3,073 on what was known of them was forgotten with
    each word, so that much of what they had used was never counted."""
    charged: list[float] = []
    usage = UsageElsewhere(lambda name, tokens, most, now: charged.append(tokens))
    others = OtherLines()
    for number in range(1, 13):
        tokens, at = 5 * ((number - 1) // 4 + 1), (number - 1) % 4 * 1024
        uses = {f"{tenant}": (tokens, 0, 50.0) for tenant in range(at, at + 1024)}
        usage.heard("router-1", 7, number, uses, 0.0)
        lines = {name: (float(tokens), False, False) for name in uses}
        told = others.heard(TenantsTold(number, {}, "router-1", Incarnation(7), lines, 0), 0.0)
        assert told == dict.fromkeys(uses, 5.0)
    assert charged == [5] * 3 * MAX_NAMES


def test_a_new_life_runs_what_it_says_alone() -> None:
    usage = UsageElsewhere(lambda name, tokens, most, now: None)
    usage.heard("router-1", 7, 4, {"a": (1, 2, 0.0)}, 0.0)
    usage.heard("router-2", 7, 4, {"a": (1, 4, 0.0)}, 0.0)
    usage.heard("router-1", 8, 1, {"b": (1, 1, 0.0)}, 0.0)
    usage.heard("router-1", 7, 4, {"a": (1, 2, 0.0)}, 0.0)
    assert (usage.running("a"), usage.running("b")) == (4, 1)


def test_the_last_word_of_a_life_that_is_over_counts_and_runs_nothing() -> None:
    """Guards a tenant's `concurrency` and its turn against a word that another worker passes on late: what ran at a
    router's earlier life counted beside its new one's for three seconds more."""
    charged: list[float] = []
    usage = UsageElsewhere(lambda name, tokens, most, now: charged.append(tokens))
    others = OtherLines()
    for life, number, tokens in ((7, 1, 5), (8, 1, 1), (7, 2, 8)):
        usage.heard("router-1", life, number, {"a": (tokens, 2, 0.0)}, 0.0)
        name = "b" if life == 8 else "a"
        lines = {name: (float(tokens), True, True)}
        assert others.heard(TenantsTold(number, {}, "router-1", Incarnation(life), lines, 0), 0.0)
    assert usage.running("a") == 2 and others.waiting == others.due == {"b"}
    assert charged == [5, 1, 3]


def test_who_waits_over_an_epoch_is_no_stumbling_block() -> None:
    """Guards against a KeyError amid the router's core: of one that waited, no sum of the new epoch was known."""
    others = OtherLines()
    others.heard(TenantsTold(1, {}, "r", Incarnation(1), {"a": (5.0, True, True)}, 0), 0.0)
    flood = {f"{at}": (1.0, False, False) for at in range(MAX_NAMES + 1)}
    charges = others.heard(TenantsTold(2, {}, "r", Incarnation(1), flood, 1), 0.0)
    assert charges is not None and 0 < len(charges) <= MAX_NAMES and others.waiting == {"a"}


NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f", "x" * (MAX_NAME_CHARS + 1)])
SUMS = st.floats() | st.floats(0, MOST_TOKENS) | st.integers(-(2**63), 2**64)
INTS = st.integers(-(2**63), 2**64) | st.integers(0, 4)
WORDS = st.lists(
    st.tuples(
        *(st.sampled_from(["router-1", "router-2"]), st.integers(0, 4), INTS, st.integers(0, 2)),
        st.dictionaries(NAMES, st.tuples(SUMS, INTS, st.floats(), st.booleans())),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(WORDS)
def test_no_word_raises_or_grows_what_is_kept(
    words: list[tuple[str, int, int, int, dict[str, tuple[float, int, float, bool]]]],
) -> None:
    with pytest.MonkeyPatch.context() as few:
        few.setattr(siblings, "MAX_LIVES", 3)
        few.setattr(siblings, "MAX_NAMES", 3)
        limits, others = limited(), OtherLines()
        for at, (router, life, number, epoch, said) in enumerate(words):
            now = at * 0.2
            uses = {name: (tokens, running, left) for name, (tokens, running, left, _) in said.items()}
            limits.elsewhere.heard(router, life, number, uses, now)  # type: ignore[arg-type]
            lines = {name: (charged, bool(running), due) for name, (charged, running, _, due) in said.items()}
            charges = others.heard(TenantsTold(number, {}, router, Incarnation(life), lines, epoch), now)
            assert all(map(isfinite, (charges or {}).values()))
            for lives in (limits.elsewhere._lives, others._lives):
                assert len(lives) <= 3
                kept: list[SiblingLife[Any]] = list(lives.values())
                assert all(len(life.sums) <= 6 and len(life.going_on) <= 3 for life in kept)
            assert all(isfinite(usage.bucket.level) for usage in limits._usage.values())
            try:
                limits.admit("a", 1, now).close()
            except LimitedError as error:
                assert error.retry_after_s is not None and isfinite(error.retry_after_s)
            limits.tick(now)
            others.tick(now)
