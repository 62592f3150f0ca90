"""A beam search whose decode worker dies behind any of its steps: begun again elsewhere, with the same answers."""

from typing import Any

import pytest

from decode_worker.scheduler.request import Request
from decode_worker.scheduler.samples.beams import Beams
from tests.sim.client import Searcher
from tests.sim.scenarios import _plan, _search
from tests.sim.test_every_token import holds
from tests.sim.world import World

STEPS = 9


@pytest.mark.parametrize("victim", ["decode", "prefill"])
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_worker_killed_behind_every_step(
    victim: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the leases of hypotheses, and the restart. The caller compares the answers (`client.Searcher`)."""
    search = _search("a", 1, 2, width=3, max_tokens=STEPS)
    world = World(_plan(search, blocks={"prefill": 14, "decode": 20}))
    killed: list[str] = []
    advance = Beams._follow

    def follow(self: Beams, request: Request, live: Any, steps: Any) -> None:
        advance(self, request, live, steps)
        if len(live.hypotheses[0].tokens) - request.record.prompt_tokens == step and not killed:
            decodes = [p for p in world.live.values() if p.role == "decode" and holds(world, p)]
            process = decodes[0] if victim == "decode" else world.pick(victim, world.rng)
            assert process is not None
            killed.append(process.name)
            world.clock.at(0.0, lambda: world.kill(process))
            world.clock.at(0.05, lambda: world.boot(process.name, process.role))

    monkeypatch.setattr(Beams, "_follow", follow)
    world.run()
    (client,) = world.clients
    assert isinstance(client, Searcher) and client.outcome == "complete (length)"
    assert len(killed) == 1, "nobody was killed"
    assert world.notes["interrupted, and placed again"] == (victim == "decode")
    assert [len(beam.ids) for beam in client.answers] == [STEPS] * 3
