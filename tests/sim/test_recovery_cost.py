"""A lost decode worker costs what its prefill worker had not computed yet, and the tokens already said: counted."""

from collections.abc import Sequence

import pytest

from engine.types import TokenLogprobs
from tests.sim import client as clients
from tests.sim.clock import Process
from tests.sim.scenarios import _plan, _resumable
from tests.sim.supervision import BOOT_S
from tests.sim.world import World
from worker.config import PrefillConfig

PROMPT_TOKENS = 36
ANSWER_TOKENS = 11
BLOCK_TOKENS = 4


def lossy(chunk_tokens: int) -> World:
    """One request to come, in chunks that may end inside of a block."""
    ask = _resumable("a", *range(1, PROMPT_TOKENS - 11), max_tokens=ANSWER_TOKENS)
    assert ask.record.prompt_tokens == PROMPT_TOKENS
    return World(_plan(ask, prefill=PrefillConfig(chunk_tokens=chunk_tokens)))


def computed(world: World, role: str) -> int:
    """Tokens, by all workers of a role, dead ones too."""
    memories = world.memories.values()
    return sum(m.runner.computed_tokens for m in memories if m.process.role == role)


def holder(world: World) -> Process | None:
    """The decode worker that has the request."""
    decodes = (p for p in world.live.values() if p.role == "decode" and p.alive)
    return next((p for p in decodes if world.workers[p.pid].scheduler._requests), None)


def replace(world: World, process: Process) -> None:
    world.kill(process)
    world.clock.at(0.05, lambda: world.boot(process.name, process.role))


@pytest.mark.parametrize("chunk_tokens", [4, 6, 16])
def test_lost_in_the_handoff(chunk_tokens: int) -> None:
    """Guards the chunks that a prefill worker had computed for a reader that died: they are cache, computed once. The
    bound: what it had not computed, and less than a block (a partly filled one, or the token behind a full one)."""
    midway = 0
    for moment in range(28):
        world = lossy(chunk_tokens)
        before: list[int] = []

        def strike(world: World = world, before: list[int] = before) -> None:
            process, client = holder(world), world.clients[0]
            # A loss before the router has heard that the request was taken is none of an accepted placement.
            if process is not None and not client.tokens_ and world.front.runs_on(client):
                before.append(computed(world, "prefill"))
                replace(world, process)

        world.clock.at(BOOT_S + 0.0005 * (moment + 1), strike)
        world.run()
        if not before:
            continue
        assert world.notes["interrupted, and placed again"] == 1
        missing = PROMPT_TOKENS - before[0]
        again = computed(world, "prefill") - before[0]
        assert missing <= again < missing + BLOCK_TOKENS, f"{again} tokens, {missing} were missing"
        midway += 0 < before[0] < PROMPT_TOKENS
    assert midway >= 3, "never was a worker lost while its prompt was being computed"


@pytest.mark.parametrize("token", range(1, ANSWER_TOKENS))
def test_lost_at_a_token(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the prompt's blocks, which the prefill worker still has: after the loss, the prefill worker computes the
    tokens that had been said, the next decode worker those that had not, and nobody anything twice."""
    world = lossy(16)
    before: list[tuple[int, int]] = []
    take = clients.Client.tokens

    def tokens(
        self: clients.Client,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        had = len(self.tokens_)
        kept = take(self, ids, now, logprobs, prompt_logprobs)
        if had < token <= len(self.tokens_) and not before:
            process = holder(world)
            assert process is not None
            before.append((computed(world, "prefill"), computed(world, "decode")))
            replace(world, process)
        return kept

    monkeypatch.setattr(clients.Client, "tokens", tokens)
    world.run()
    assert world.notes["interrupted, and placed again"] == 1, "another one was killed"
    ((prefilled, decoded),) = before
    assert prefilled == PROMPT_TOKENS
    again, on = computed(world, "prefill") - prefilled, computed(world, "decode") - decoded
    assert again >= token
    assert again + on == ANSWER_TOKENS - 1
