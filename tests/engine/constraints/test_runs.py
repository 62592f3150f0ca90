"""Tokens that must come, over the demo's own tokens: they are those that masks would leave alone, one after the other,
and those in which its tokenizer writes the text."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from llguidance import LLTokenizer
from msgspec.structs import replace

from engine.constraints.matchers import MAX_RUN_TOKENS, Matchers
from engine.constraints.vocabulary import load_vocabulary
from engine.plan import row_of
from engine.step import Row, is_single, run_of
from engine.types import Constraint, ConstraintKind, RequestId, RequestRecord, id_of
from fakes.vocabulary import AtOnce
from tests.engine.constraints.schemas import schemas


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> LLTokenizer:
    return load_vocabulary(demo_model)


def _matchers(vocabulary: LLTokenizer) -> Matchers:
    return Matchers(lambda: vocabulary, vocabulary.vocab_size, AtOnce(), AtOnce())


def _row(constraint: Constraint, output: list[int], name: str = "r") -> Row:
    record = RequestRecord(
        request=RequestId(name), tokens=[1], prompt_tokens=1, max_tokens=400, seed=1, constraint=constraint
    )
    return row_of(record, [1, *output], len(output), len(output) + 1, [], frozenset())


def _next(matchers: Matchers, row: Row, chosen: Random) -> list[int]:
    """Draw a token among those that are allowed; return it with those that can only come behind it."""
    (mask,) = matchers.masks([row])
    assert isinstance(mask, bytes), mask
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    token = int(chosen.choice(np.flatnonzero(bits)))
    (drawn,) = matchers.continued([replace(row, allowed=mask)], [token])
    assert not isinstance(drawn, tuple)
    return [id_of(one) for one in run_of(drawn)]  # type: ignore[arg-type]


def test_each_token_of_a_run_is_the_only_one_allowed_in_its_place(vocabulary: LLTokenizer) -> None:
    """Guards runs that are written in other tokens than a worker would draw that looks at each place anew, which also
    goes for one that finds itself in the middle of a run."""
    ends, runs, longest = set(vocabulary.eos_tokens), 0, 0
    for number, schema in enumerate(schemas()[::4]):
        constraint, chosen = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), Random(number)
        matchers, others, output = _matchers(vocabulary), _matchers(vocabulary), list[int]()
        while len(output) < 60 and not ends.intersection(output):
            first, *run = _next(matchers, _row(constraint, output), chosen)
            output.append(first)
            for token in run:
                (mask,) = others.masks([_row(constraint, output, f"at {len(output)}")])
                assert isinstance(mask, bytes) and is_single(mask), number
                assert int.from_bytes(mask, "little") == 1 << token, number
                output.append(token)
            runs, longest = runs + bool(run), max(longest, len(run))
    assert runs > 100 and longest >= 4


@pytest.mark.parametrize("text", [
    "The quick brown fox jumps over the lazy dog, twice; 1234567 times.",
    '{"firstName": "unbelievable",  "größe": [1, 22, 333]}',
    "    indented\n\n\tand   spaced",
])  # fmt: skip
def test_a_text_that_must_come_is_written_as_its_tokenizer_writes_it(text: str, vocabulary: LLTokenizer) -> None:
    constraint = Constraint(ConstraintKind.LARK, f"start: {json.dumps(text)}")
    matchers, output = _matchers(vocabulary), list[int]()
    while not set(vocabulary.eos_tokens).intersection(output):
        output += _next(matchers, _row(constraint, output), Random(1))
    assert output[:-1] == vocabulary.tokenize_str(text)
    assert len(output) < MAX_RUN_TOKENS
