"""What flags say an answer must be like, as fields of a call."""

from pathlib import Path
from typing import Any

import pytest

from cluster.cli.answer_flags import form_of
from cluster.cli.ask import drawn_by
from cluster.cli.command import _parsers
from cluster.config import ConfigError
from engine.types import Constraint, ConstraintKind
from router.front.api import GenerateCall
from router.grpc.convert import call_from_proto, call_to_proto


def fields(*flags: str) -> dict[str, Any]:
    _, verbs = _parsers()
    return form_of(verbs["generate"].parse_args(["hi", *flags]))


@pytest.mark.parametrize(
    ("flags", "kind", "text"),
    [
        (["--json-schema", '{"type":"object"}'], ConstraintKind.JSON_SCHEMA, '{"type":"object"}'),
        (["--regex", "[0-9]{2}"], ConstraintKind.REGEX, "[0-9]{2}"),
        (["--grammar", 'start: "a"'], ConstraintKind.LARK, 'start: "a"'),
        (["--grammar", 'root ::= "a"'], ConstraintKind.LARK, 'root ::= "a"'),
        (["--choice", "red", "--choice", "dark green"], ConstraintKind.LARK, 'start: "red" | "dark green"'),
    ],
)
def test_a_form_travels(flags: list[str], kind: ConstraintKind, text: str) -> None:
    """Guards a flag that is read and then forgotten: what it says must be in the call that the server reads."""
    found = fields(*flags)
    assert found["constraint"] == Constraint(kind, text) and found["constraint_field"] == flags[0]
    sent = call_to_proto(GenerateCall(prompt="hi", **found))
    assert call_from_proto(sent).constraint == Constraint(kind, text)


def test_a_form_may_lie_in_a_file(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text('{"type": "array"}')
    grammar.write_text('start: "a" | "b"')
    assert fields("--json-schema", str(schema))["constraint"].text == '{"type": "array"}'
    assert fields("--grammar", str(grammar))["constraint"].text == 'start: "a" | "b"'


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--json-schema", "/nowhere/x.json"], "--json-schema: /nowhere/x.json: No such file or directory"),
        (["--json-schema", "{not json}"], "--json-schema: is not JSON"),
        (["--grammar", "/nowhere/g.lark"], "--grammar: /nowhere/g.lark: No such file"),
        (["--regex", " "], "--regex: must not be empty"),
        (["--choice", ""], "--choice: must not hold an empty choice"),
        (["--logit-bias", "7=1", "--logit-bias", "7=2"], "--logit-bias: names a token twice"),
    ],
)
def test_a_slip_names_its_flag(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fields(*flags)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize("flags", [["--regex", "a", "--choice", "b"], ["--logit-bias", "7:1"], ["--n", "0"]])
def test_what_cannot_be_meant_is_refused_while_it_is_read(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fields(*flags)
    assert flags[0] in capsys.readouterr().err


def test_biases_are_of_tokens() -> None:
    found = fields("--logit-bias", "42=-5.5", "--logit-bias", "7=100")
    assert found["logit_bias"] == ((7, 100.0), (42, -5.5))


def test_chat_has_a_form_too() -> None:
    _, verbs = _parsers()
    drawn = drawn_by(verbs["chat"].parse_args(["--choice", "yes", "--choice", "no"]))
    assert drawn["constraint"].text == 'start: "yes" | "no"'
