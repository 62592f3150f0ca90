"""Constrained answers whose workers are killed, frozen or drained, or whose router is killed: the fault-free answer, to
the token, from real processes."""

import json

import jsonschema
import pytest

from engine.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from router.front.api import Delta, Finished, GenerateCall
from tests.chaos import faults
from tests.chaos.ground import Ask, Ground
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S

pytestmark = pytest.mark.chaos

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


def _call(tenant: str) -> GenerateCall:
    return GenerateCall(
        prompt=PROMPTS["victim"],
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        sampling=SamplingParams(temperature=1.0, repetition_penalty=1.1),
        seed=77,
        max_tokens=80,
        tenant=tenant,
    )


def _run(ground: Ground, call: GenerateCall, role: str = "", at: int = 0, fault: str = "kill") -> list[int]:
    """Read the answer to its end; with `role`, the worker of it that serves the request is hit behind token `at`."""
    tokens, text, reason, victim, pid = list[int](), "", "", "", 0
    for event in ground.client.generate(call):
        if isinstance(event, Finished):
            reason = event.reason
        elif isinstance(event, Delta):
            tokens += event.token_ids
            text += event.text
            if role and not victim and len(tokens) >= at:
                victim = ground.busy(role)
                pid = ground.pid(victim)
                faults.kill(pid) if fault == "kill" else faults.freeze(pid)
    assert reason == FinishReason.STOP
    jsonschema.validate(json.loads(text), SCHEMA)
    if role:
        assert victim, "it was over before the fault"
        if fault == "freeze":
            faults.kill(pid)
        ground.replaced(victim, pid)
    ground.settle(SETTLE_S)
    return tokens


@pytest.mark.parametrize("at", [1, 2, 6, 11, 15])
def test_a_killed_decode_worker_leaves_the_grammar_where_it_was(ground: Ground, at: int) -> None:
    """Guards a grammar that begins anew behind half an answer, on whichever worker."""
    whole = _run(ground, _call("whole"))
    assert _run(ground, _call(f"broken {at}"), "decode", at) == whole


def test_a_frozen_decode_worker_does_too(ground: Ground) -> None:
    whole = _run(ground, _call("whole"))
    assert _run(ground, _call("frozen"), "decode", 5, "freeze") == whole


def _over(ground: Ground, ask: Ask) -> list[int]:
    """Return the tokens of an answer, when it has ended, and nothing of it is left on any worker."""
    ask.join(2 * END_S)
    assert ask.finished is not None, ask.error
    assert ask.finished.reason == FinishReason.STOP
    jsonschema.validate(json.loads(ask.text), SCHEMA)
    ground.settle(SETTLE_S)
    return ask.tokens


@pytest.mark.parametrize("at", [1, 6])
def test_a_drained_decode_worker_hands_it_over(ground: Ground, at: int) -> None:
    """Guards what a worker that leaves names to the one that goes on, which may be a whole run of forced tokens."""
    whole = _run(ground, _call("whole"))
    ask = Ask(ground.client, _call(f"drained {at}"))
    ask.wait_tokens(at)
    name = ground.busy("decode")
    pid = ground.pid(name)
    assert not ask.over, "it was over before the fault"
    ground.cluster.drain(name, timeout_s=END_S, again=True)
    ground.replaced(name, pid)
    assert _over(ground, ask) == whole
    assert ask.finished is not None and ask.finished.stats.decode_worker != name, "it had ended before"


@pytest.mark.parametrize("at", [1, 6])
def test_a_router_that_adopts_it_goes_on_behind_what_its_client_has(ground: Ground, at: int) -> None:
    """Guards half of a run that was told, where the next router hears of the whole."""
    whole = _run(ground, _call("whole"))
    ask = Ask(ground.client, _call(f"orphan {at}"), resume=True)
    ask.wait_tokens(at)
    pid = ground.pid("router")
    faults.kill(pid)
    assert not ask.over, "it was over before the fault"
    ground.replaced("router", pid)
    assert _over(ground, ask) == whole


@pytest.mark.parametrize("at", [0, 2])
def test_a_killed_prefill_worker_changes_nothing(ground: Ground, at: int) -> None:
    """Guards the first tokens, which a prefill worker draws under the same grammar: before and behind them."""
    whole = _run(ground, _call("whole"))
    ask = Ask(ground.client, _call(f"prefill {at}"))
    name = ground.busy("prefill")
    ask.wait_tokens(at)
    pid = ground.pid(name)
    faults.kill(pid)
    assert not ask.over, "it was over before the fault"
    ground.replaced(name, pid)
    assert _over(ground, ask) == whole
