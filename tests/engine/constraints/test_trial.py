"""Constraints on trial, in the test's process: what is refused, and that the rest is cheap."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from engine.constraints.trial import try_out
from engine.constraints.trial_messages import CPU_S, MEMORY_BYTES, ConstraintTrial
from engine.constraints.vocabulary import load_vocabulary
from engine.text.files import TextFiles, TextSettings
from engine.types import Constraint, ConstraintKind
from fakes.vocabulary import byte_vocabulary
from router.front.grammars import TrialProcess

VOCABULARY = byte_vocabulary()


def _tried(kind: str, text: object) -> tuple[str, float]:
    written = text if isinstance(text, str) else json.dumps(text)
    began_s = time.process_time()
    verdict = try_out(ConstraintTrial(Constraint(ConstraintKind(kind), written)), VOCABULARY)
    assert (verdict.constraint is None) == bool(verdict.error)
    return verdict.error, time.process_time() - began_s


REFUSED: dict[str, tuple[str, object]] = {
    "no schema": ("json_schema", {"type": "thing"}),
    "refers to itself alone": ("json_schema", {"$ref": "#"}),
    "refer to each other": ("json_schema", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                                            "$ref": "#/$defs/a"}),
    "refers to nothing": ("json_schema", {"$ref": "#/$defs/none"}),
    "alternatives multiply": ("json_schema", {"allOf": [{"oneOf": [
        {"type": "object", "properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(8)]} for i in range(12)]}),
    "expressions multiply": ("json_schema", {"allOf": [{"type": "string", "pattern": f".*{c}.{{30}}x"}
                                                       for c in "abcdefgh"]}),
    "bad expression": ("regex", "a("),
    "repeats itself": ("regex", "((a{1000}){1000}){1000}"),
    "an empty answer alone": ("regex", "(){3}"),
    "a class of no character": ("regex", "[a&&b]"),
    "no rule": ("lark", "nothing: here"),
    "no terminal": ("lark", "start: THING"),
    "neither Lark nor EBNF": ("lark", "hello there"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    error, seconds = _tried(*REFUSED[name])
    assert error and len(error) <= 600
    assert "<state>" not in error, "the parser's inner state is nobody's business"
    assert "NoExtension" not in error, "nor are the library's own names"
    assert seconds < CPU_S


TAKEN: dict[str, tuple[str, object]] = {
    "any JSON": ("json_schema", {}),
    "a tree": ("json_schema", {"$defs": {"t": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/t"}, "value": {"type": "integer"}}, "required": ["value"]}}, "$ref": "#/$defs/t"}),
    "2,000 words": ("json_schema", {"enum": [f"word {number}" for number in range(2000)]}),
    "300 properties": ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"}
                                                                       for i in range(300)}}),
    "nested stars": ("regex", "(a*)*{100}"),
    "a long count": ("regex", "a{5000}b"),
    "a wide window": ("regex", ".*a.{20}"),
    "EBNF": ("lark", 'root ::= "x" [0-9]+ ("," root)?'),
    "Lark": ("lark", 'start: "x" NUM\nNUM: /[0-9]+/'),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    error, seconds = _tried(*TAKEN[name])
    assert not error
    assert seconds < CPU_S


def test_ebnf_becomes_lark() -> None:
    """Guards workers that would each convert it again, by code that is not meant for them."""
    verdict = try_out(ConstraintTrial(Constraint(ConstraintKind.LARK, 'root ::= "x"')), VOCABULARY)
    assert verdict.constraint is not None and 'start: "x"' in verdict.constraint.text


def _prepared(folder: Path, stops: tuple[int, ...]) -> Path:
    """A model like Gemma 3: an added token lies past the embedding."""
    alphabet = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<image>"])
    settings = TextSettings(name="tiny", vocab_size=257, tokens=258, context_tokens=64, stop_ids=stops)
    TextFiles(tokenizer.to_str(), "", settings).save(folder)
    return folder


def test_an_added_token_past_the_embedding_costs_no_constraint(tmp_path: Path) -> None:
    """Guards Gemma 3 270M and 1B, whose token for images has no row: nothing could be constrained with them."""
    vocabulary = load_vocabulary(_prepared(tmp_path, (256,)))
    assert vocabulary.vocab_size == 257
    assert try_out(ConstraintTrial(Constraint(ConstraintKind.REGEX, "a|b")), vocabulary).constraint is not None


def test_a_tokenizer_that_lists_no_added_tokens_costs_no_constraint(tmp_path: Path) -> None:
    """Guards files that leave the list out, as they may."""
    file = next(_prepared(tmp_path, (255,)).rglob("tokenizer.json"))
    whole = json.loads(file.read_text())
    del whole["added_tokens"]
    file.write_text(json.dumps(whole))
    assert load_vocabulary(file.parent).vocab_size == 257


def test_a_model_without_an_end_refuses_constraints_in_words(tmp_path: Path) -> None:
    """Guards the caller from an error of the server's (500) where no request of this kind can be served."""
    process = TrialProcess(_prepared(tmp_path, ()))
    try:
        verdict = process.ask(Constraint(ConstraintKind.REGEX, "a|b"))
    finally:
        process.close()
    assert verdict.error == "this model has no token that ends an answer"


TAKES = """
import sys
from engine.constraints.trial import _limit_memory

_limit_memory()
held = bytearray(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("taken_bytes", "is_refused"), [(240_000_000, False), (260_000_000, True)])
def test_a_trial_has_256_mb(taken_bytes: int, is_refused: bool) -> None:
    """Guards the other half of the promise, which no schema comes near within its second: what is promised is 256 MB
    beyond what the process began with, and neither half nor twice as much."""
    assert MEMORY_BYTES == 256_000_000
    command = [sys.executable, "-c", TAKES, str(taken_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ("MemoryError" in ended.stderr, ended.returncode != 0) == (is_refused, is_refused), ended.stderr
