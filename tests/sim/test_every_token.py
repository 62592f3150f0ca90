"""Whoever dies at whichever token: the client's stream goes on, exact, with the real cores and the fake model."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from engine.types import FinishReason, TokenLogprobs
from tests.sim import client as clients
from tests.sim.clock import Process
from tests.sim.scenarios import _plan, _resumable
from tests.sim.world import World

TOKENS = 11


def holds(world: World, process: Process) -> bool:
    return bool(world.workers[process.pid].scheduler._requests)


@pytest.mark.parametrize("token", range(TOKENS + 1))
@pytest.mark.parametrize("victim", ["decode", "prefill", "router"])
def test_a_worker_killed_at_every_token(
    victim: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every position of an answer, the first and the last included: no token lost, doubled or changed. The
    client compares each token as it comes (`client.Client.tokens`) and the end with all of them."""
    ask = _resumable("a", 1, 2, max_tokens=TOKENS)
    world = World(_plan(replace(ask, record=msgspec.structs.replace(ask.record, logprobs=3))))
    killed: list[str] = []

    def strike() -> None:
        process = world.pick(victim, world.rng)
        if victim == "decode":
            holders = [p for p in world.live.values() if p.role == victim and holds(world, p)]
            process = holders[0] if holders else process
        assert process is not None
        killed.append(process.name)
        world.kill(process)
        world.clock.at(0.05, lambda: world.boot(process.name, process.role))

    take = clients.Client.tokens

    def tokens(
        self: clients.Client,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        before = len(self.tokens_)
        kept = take(self, ids, now, logprobs, prompt_logprobs)
        if before < token <= len(self.tokens_) and not killed:
            strike()
        return kept

    monkeypatch.setattr(clients.Client, "tokens", tokens)
    if token == 0:
        world.clock.at(0.0525, strike)
    world.run()
    (client,) = world.clients
    assert len(killed) == 1, "nobody was killed"
    if victim == "decode" and 0 < token < TOKENS:
        assert world.notes["interrupted, and placed again"] == 1, "another one was killed"
    assert client.outcome == f"complete ({FinishReason.LENGTH.value})"
    assert client.tokens_ == client.want and len(client.want) == TOKENS
    assert client.logprobs == client.want_logprobs and len(client.logprobs) == TOKENS
