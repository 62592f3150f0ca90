"""A router that serves thousands of requests, in a process of its own: what it remembers of them has a bound."""

from pathlib import Path

import pytest

from tests.router.growth import ALLOWED_BYTES, grown_bytes, measure


@pytest.mark.slow
def test_a_router_grows_no_more_once_it_has_served_two_thousand_requests(demo_model: Path) -> None:
    """Guards against 3 to 5 MB more with every thousand requests: each finished chat as a list of numbers and its text,
    each ended request with every gap between two of its tokens."""
    found = measure(4000, 1000, demo_model)
    assert [one.requests for one in found] == [1000, 2000, 3000, 4000]
    assert grown_bytes(found, 2000) < ALLOWED_BYTES, found
