"""What a tenant may use: tokens per second with a burst and debts, and samples at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from access.limits import LimitedError, TenantLimits
from access.tenants import Tenant


def limits(**tenants: Tenant) -> TenantLimits:
    return TenantLimits(lambda name: tenants.get(name, Tenant()), 1.5)


def test_concurrency_is_counted_by_sample_and_given_back() -> None:
    found = limits(a=Tenant(concurrency=3))
    first = found.admit("a", 2, 0.0)
    with pytest.raises(LimitedError) as raised:
        found.admit("a", 2, 0.0)
    assert raised.value.retry_after_s == 1.5
    second = found.admit("a", 1, 0.0)
    first.sample_ended()
    third = found.admit("a", 1, 0.0)
    for one in (first, second, third, first):
        one.close()
    found.admit("a", 3, 0.0).close()
    found.tick(0.0)
    assert repr(found) == "TenantLimits(idle)"


def test_more_samples_than_may_ever_run_are_the_callers_fault() -> None:
    with pytest.raises(LimitedError) as raised:
        limits(a=Tenant(concurrency=3)).admit("a", 4, 0.0)
    assert raised.value.retry_after_s is None


def test_a_debt_is_paid_before_the_next_request() -> None:
    found = limits(a=Tenant(tokens_per_s=10, burst_tokens=20))
    admission = found.admit("a", 1, 0.0)
    admission.spend(70)
    with pytest.raises(LimitedError) as raised:
        found.admit("a", 1, 1.0)
    assert raised.value.retry_after_s == pytest.approx(4.1)
    found.admit("a", 1, 1.0 + 4.1)


def test_a_pause_earns_no_more_than_the_burst() -> None:
    found = limits(a=Tenant(tokens_per_s=10, burst_tokens=20))
    found.admit("a", 1, 0.0).spend(1)
    found.admit("a", 1, 1000.0).spend(20)
    with pytest.raises(LimitedError):
        found.admit("a", 1, 1000.0)


def test_tenants_do_not_use_each_others() -> None:
    found = limits(a=Tenant(concurrency=1, tokens_per_s=1), b=Tenant(concurrency=1, tokens_per_s=1))
    found.admit("a", 1, 0.0).spend(1000)
    found.admit("b", 1, 0.0)
    for _ in range(100):
        found.admit("nobody's", 5, 0.0).spend(10**9)


def test_a_changed_limit_counts_at_once() -> None:
    now = {"a": Tenant()}
    found = TenantLimits(lambda name: now[name], 1.0)
    found.admit("a", 9, 0.0).spend(10**9)
    now["a"] = Tenant(concurrency=1, tokens_per_s=5)
    found.admit("a", 1, 0.0).spend(100)
    with pytest.raises(LimitedError):
        found.admit("a", 1, 0.0)
    now["a"] = Tenant(concurrency=2)
    found.admit("a", 1, 0.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50)), max_size=60))
def test_no_tenant_gets_more_than_its_rate_and_one_debt(asks: list[tuple[float, int]]) -> None:
    """Guards the promise in words: rate x time, plus the burst, plus what the last request took beyond."""
    found, now, used = limits(a=Tenant(tokens_per_s=7, burst_tokens=30)), 0.0, 0
    for pause_s, tokens in asks:
        now += pause_s
        try:
            admission = found.admit("a", 1, now)
        except LimitedError as error:
            assert error.retry_after_s is not None and 0 < error.retry_after_s <= 51 / 7 + 1e-6
            continue
        admission.spend(tokens)
        admission.close()
        used += tokens
        assert used <= 30 + 7 * now + 50 + 1e-6
