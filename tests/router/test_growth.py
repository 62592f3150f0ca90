"""A router that serves thousands of requests, in a process of its own: what it remembers of them has a bound."""

from pathlib import Path

import pytest

from tests.router.growth import ALLOWED_BYTES, grown_bytes, measure


@pytest.mark.slow
@pytest.mark.parametrize(("front", "after"), [("grpc", 2000), ("http", 3000)])
def test_a_router_grows_no_more_once_it_has_served_some_thousand_requests(
    demo_model: Path, front: str, after: int
) -> None:
    """Guards against 3 to 5 MB more with every thousand requests: each finished chat as a list of numbers and its text,
    each ended request with every gap between two of its tokens."""
    found = measure(after + 2000, 1000, demo_model, front=front)
    assert [one.requests for one in found] == list(range(1000, after + 2001, 1000))
    assert grown_bytes(found, after) < ALLOWED_BYTES, found
