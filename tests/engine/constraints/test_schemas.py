"""Two hundred schemas over the demo's own tokens, without its weights: every one of them can be kept, and whatever is
written under it is valid."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer

from engine.constraints.matchers import Matchers
from engine.constraints.vocabulary import load_vocabulary
from engine.plan import row_of
from engine.types import Constraint, ConstraintKind, RequestId, RequestRecord
from fakes.vocabulary import AtOnce
from tests.engine.constraints.schemas import COUNT, schemas

LIMIT = 200
LIKED = 0.7
"""How often the writer takes what brings it nearer to an end, where it may."""


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> LLTokenizer:
    return load_vocabulary(demo_model)


def _written(schema: dict[str, Any], number: int, vocabulary: LLTokenizer, liked: list[int]) -> tuple[str, bool]:
    """Draw tokens at random among what is allowed. Return the text, and whether it came to its end."""
    chosen, output = Random(number), list[int]()
    matchers = Matchers(lambda: vocabulary, vocabulary.vocab_size, AtOnce(), AtOnce())
    record = RequestRecord(
        request=RequestId("r"), tokens=[1], prompt_tokens=1, max_tokens=LIMIT, seed=1,
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)),
    )  # fmt: skip
    ends = frozenset(vocabulary.eos_tokens)
    while len(output) < LIMIT:
        (mask,) = matchers.masks([row_of(record, [1, *output], len(output), len(output) + 1, [], ends)])
        assert isinstance(mask, bytes), mask
        # A mask ends with the last byte that allows something.
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        near = [token for token in liked if token in allowed]
        token = near[0] if near and chosen.random() < LIKED else int(chosen.choice(allowed))
        if token in ends:
            return vocabulary.decode_str(output), True
        output.append(token)
    return vocabulary.decode_str(output), False


def test_every_schema_can_be_kept_and_what_is_finished_is_valid(vocabulary: LLTokenizer) -> None:
    ends = sorted(vocabulary.eos_tokens)
    liked = [*ends, *(vocabulary.tokenize_str(text)[0] for text in ("}", "]", '"', '"}', "1", ",", " "))]
    finished = 0
    for number, schema in enumerate(schemas()):
        text, is_whole = _written(schema, number, vocabulary, liked)
        if is_whole:
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert finished >= 180, f"{finished} of {COUNT} came to their end"


def test_the_schemas_differ() -> None:
    assert len({json.dumps(schema) for schema in schemas()}) == COUNT
