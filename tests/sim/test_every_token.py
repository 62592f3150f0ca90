"""Whoever dies at whichever token: the client's stream goes on, exact, with the real cores and the fake model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.types import FinishReason, TokenLogprobs
from tests.sim import client as clients
from tests.sim.clock import Process
from tests.sim.plan import Going
from tests.sim.scenarios import _plan, _resumable
from tests.sim.world import World

TOKENS = 11


def holds(world: World, process: Process) -> bool:
    return bool(world.workers[process.pid].scheduler._requests)


@pytest.mark.parametrize("token", range(TOKENS + 1))
@pytest.mark.parametrize("victim", ["decode", "prefill", "router"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_worker_killed_at_every_token(
    drafts: bool, victim: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every position of an answer, the first and the last included: no token lost, doubled or changed. The
    client compares each token as it comes (`client.Client.tokens`) and the end with all of them."""
    ask = _resumable("a", 1, 2, max_tokens=TOKENS)
    world = World(_plan(replace(ask, record=msgspec.structs.replace(ask.record, logprobs=3)), drafts=drafts))
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
    # When the last but one comes to the client, the last is on its way; with drafts more of them may be.
    if victim == "decode" and 0 < token < TOKENS - 1 and not drafts:
        assert world.notes["interrupted, and placed again"] == 1, "another one was killed"
    assert client.outcome == f"complete ({FinishReason.LENGTH.value})"
    assert client.tokens_ == client.want and len(client.want) == TOKENS
    assert client.logprobs == client.want_logprobs and len(client.logprobs) == TOKENS


@pytest.mark.parametrize("drafts", [False, True])
def test_a_request_moved_at_every_token(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards KV and tokens of guesses from going along: it leaves with whatever its latest step has drawn."""
    moved = 0
    take = clients.Client.tokens
    for token in range(1, 24):
        world = World(_plan(_resumable("a", 1, 2, max_tokens=32), drafts=drafts))
        asked: list[str] = []

        def tokens(
            self: clients.Client,
            ids: list[int],
            *rest: Any,
            world: World = world,
            asked: list[str] = asked,
            token: int = token,
            **more: Any,
        ) -> int | None:
            before = len(self.tokens_)
            kept = take(self, ids, *rest, **more)
            if before < token <= len(self.tokens_) and not asked:
                asked.append("the one that is busy")
                world.clock.at(0.0, lambda: world.ask_to_leave(Going("decode", 0.0)))
            return kept

        monkeypatch.setattr(clients.Client, "tokens", tokens)
        world.run()
        (client,) = world.clients
        assert client.outcome == "complete (length)" and client.tokens_ == client.want
        moved += world.notes["request moved"]
    assert moved == 23, "it was not moved each time"
