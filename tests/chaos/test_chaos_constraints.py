"""Constrained answers whose workers are killed or frozen: the fault-free answer, to the token, from real processes."""

import json

import jsonschema
import pytest

from engine.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from router.front.api import Delta, Finished, GenerateCall
from tests.chaos import faults
from tests.chaos.ground import Ground
from tests.chaos.strike import PROMPTS, SETTLE_S

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
