"""The demo model under two hundred schemas: at least 180 answers come to their end, and each of these is valid. Several
are written at once, as a worker would; part of `make parity`.

Each may have as many tokens as a request that does not say how many. With a penalty on repetition, which
docs/structured-output.md advises for models as small as this, almost every answer ends. Drawn as the model's card says,
and no more, the trees go on for ever and some texts without a bound do. The kernels have the same bits on every
processor, so the number is the same each time; without them, which of these end is another rounding's to decide.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.plan import row_of
from engine.step import DeadEnd, StepPlan, run_of
from engine.text.bundle import TextModel
from engine.text.messages import ChatMessage, ChatPrompt
from engine.types import BlockId, Constraint, ConstraintKind, RequestId, RequestRecord, SamplingParams, id_of
from router.config import RouterConfig
from tests.engine.constraints.schemas import COUNT, schemas

ROWS = 16
LIMIT = RouterConfig().default_max_tokens
BLOCKS_EACH = 100
AS_TOLD = SamplingParams(temperature=0.2, top_p=0.9)
PENALIZED = SamplingParams(temperature=0.2, top_p=0.9, frequency_penalty=0.3)


class Answer:
    """One request, and how far it is."""

    def __init__(self, number: int, schema: dict[str, Any], prompt: list[int], sampling: SamplingParams) -> None:
        self.schema = schema
        self.record = RequestRecord(
            request=RequestId(f"r{number}"), tokens=prompt, prompt_tokens=len(prompt), max_tokens=LIMIT, seed=number,
            sampling=sampling, constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
        )  # fmt: skip
        self.tokens = list(prompt)
        self.known = self.steps = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.record.prompt_tokens :]


@pytest.fixture(scope="module")
def device(demo_model: Path) -> Iterator[EngineDevice]:
    opened = open_device(EngineConfig(model_dir=str(demo_model), pool_bytes=BLOCKS_EACH * ROWS * 768 * 1024, threads=1))
    yield opened
    assert opened.matchers is not None
    opened.matchers.close()
    opened.kv.close()


def _run(device: EngineDevice, waiting: list[Answer]) -> Iterator[tuple[Answer, bool]]:
    """Run them, `ROWS` at a time; yield each with whether it came to its end."""
    tables = [[BlockId(row * BLOCKS_EACH + at) for at in range(BLOCKS_EACH)] for row in range(ROWS)]
    running: dict[int, Answer] = {}
    while waiting or running:
        for row in range(ROWS):
            if row not in running and waiting:
                running[row] = waiting.pop(0)
        order = list(running.items())
        plan = StepPlan(tuple(
            row_of(one.record, one.tokens, one.known, len(one.tokens), tables[row], device.stop_ids)
            for row, one in order
        ))  # fmt: skip
        for (row, one), drawn in zip(order, device.runner.launch(plan).wait(), strict=True):
            assert not isinstance(drawn, DeadEnd | tuple), drawn
            one.known = len(one.tokens)
            one.tokens += map(id_of, run_of(drawn))
            one.steps += 1
            is_whole = one.tokens[-1] in device.stop_ids
            if is_whole or len(one.output) >= LIMIT:
                del running[row]
                yield one, is_whole


@pytest.mark.parity
@pytest.mark.parametrize(("sampling", "least"), [(AS_TOLD, 180), (PENALIZED, 190)], ids=["as told", "penalized"])
def test_the_demo_keeps_two_hundred_schemas(
    device: EngineDevice, demo_model: Path, sampling: SamplingParams, least: int
) -> None:
    text = TextModel.load(demo_model)
    asked = []
    for number, schema in enumerate(schemas()):
        says = f"Write a short JSON document that fits this schema: {json.dumps(schema)[:600]}"
        prompt = text.encode_chat_text(text.render_chat(ChatPrompt(messages=(ChatMessage("user", says),))))
        asked.append(Answer(number, schema, prompt, sampling))
    finished, tokens, steps, longest, began_s = 0, 0, 0, list[str](), time.monotonic()
    for one, is_whole in _run(device, asked):
        tokens, steps = tokens + len(one.output), steps + one.steps
        if is_whole:
            finished += 1
            jsonschema.Draft202012Validator(one.schema).validate(json.loads(text.decode(one.output)))
        else:
            longest.append(text.decode(one.output)[:80])
    assert finished >= least, f"{finished} of {COUNT} came to their end; not {longest}"
    assert steps < tokens, "none of their tokens was forced"
    print(f"{finished} of {COUNT} finished: {tokens} tokens by {steps} rows, {time.monotonic() - began_s:.0f} s")
