"""A few rows again over Ray: its actors are never restarted by Ray, the supervisor replaces them."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray

from tests.chaos import faults
from tests.chaos.ground import MODES, Ground
from tests.chaos.rows import ANSWER_TOKENS, RAY_ROWS, Ending
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, run_row

pytestmark = [pytest.mark.chaos, pytest.mark.ray]

HUNG_S = 8.0
"""Longer than a zombie is stopped, so that it comes back as it was."""


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference) -> Iterator[Ground]:
    with closing(Ground(model_dir, launcher="ray", hung_s=HUNG_S)) as found:
        reference.make(found)
        yield found


@pytest.mark.parametrize("number", range(len(RAY_ROWS)), ids=[str(row) for row in RAY_ROWS])
def test_row_over_ray(ground: Ground, reference: Reference, number: int) -> None:
    """Guards against an actor that comes back under its name with another's memory or life, and one that never does."""
    run_row(ground, reference, RAY_ROWS[number], number)
    for name, up in ground.cluster.workers.items():
        assert actor_pid(name) == up.pid, f"Ray knows another process as {name}"
        info = ground.probe(name).info
        assert info is not None and (info.name, info.incarnation) == (name, up.incarnation)


def actor_pid(name: str) -> int:
    """Ask whatever actor Ray has under this name for its pid."""
    actor = ray.get_actor(name)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=10.0))


@pytest.mark.parametrize("mode", list(MODES))
def test_a_killed_router_is_back_over_ray(ground: Ground, reference: Reference, mode: str) -> None:
    """Guards against an actor of the router that comes back on another port, or without its requests."""
    ground.settle(SETTLE_S)
    prompt = PROMPTS["victim"]
    ask = ground.ask(prompt, mode, ANSWER_TOKENS, f"router-{mode}", resume=True)
    ask.wait_tokens(3)
    pid = ground.pid("router")
    faults.kill(pid)
    assert not ask.over, "over before the fault"
    ask.join(END_S)
    assert reference.judge(ask, "victim", mode) is Ending.EXACT, ask.error
    ground.replaced("router", pid)
    ground.settle(SETTLE_S)
