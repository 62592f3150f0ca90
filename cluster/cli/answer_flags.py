"""Flags that say what an answer must be like: of `generate`, which may also ask for several, and of `chat`."""

import argparse
import math
from pathlib import Path
from typing import Any

from cluster.cli.numbers import whole
from engine.constraints.text import check_constraint, choices_constraint
from engine.types import Constraint, ConstraintKind, FieldError

MOST_FILE_BYTES = 1 << 20


def add_answer_flags(parser: argparse.ArgumentParser, has_samples: bool) -> None:
    form = parser.add_argument_group("form", "what the answer must be like, to the letter; one of these")
    one = form.add_mutually_exclusive_group()
    text = "a JSON schema, or a file that holds one: the answer is JSON that it allows"
    one.add_argument("--json-schema", default=None, metavar="JSON|FILE", help=text)
    one.add_argument("--regex", default=None, metavar="PATTERN", help="the whole answer matches it")
    text = "the answer is one of these; repeated for each"
    one.add_argument("--choice", action="append", default=[], metavar="TEXT", help=text)
    one.add_argument("--grammar", default=None, metavar="LARK|FILE", help="a grammar of Lark or EBNF, or a file")
    parser.add_argument(
        "--logit-bias",
        action="append",
        type=token_bias,
        default=[],
        metavar="TOKEN=X",
        help="add this to the logit of a token, by its id; may be repeated",
    )
    if has_samples:
        text = "so many answers, drawn side by side; of several, each is printed when all are there"
        parser.add_argument("--n", type=whole(1, 2**31 - 1), default=1, metavar="N", help=text)


def token_bias(text: str) -> tuple[int, float]:
    """Parse `TOKEN=X`. Raises what argparse shows the user."""
    token, sign, amount = text.partition("=")
    try:
        found = int(token), float(amount)
    except ValueError:
        found = -1, math.nan
    if not sign or found[0] < 0 or not math.isfinite(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN=X, such as 42=-5.5")
    return found


def form_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a call that these flags fill in. Raises ConfigError."""
    from cluster.config import ConfigError

    try:
        return _fields(arguments)
    except FieldError as error:
        raise ConfigError(str(error)) from error


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    bias = dict(arguments.logit_bias)
    if len(bias) < len(arguments.logit_bias):
        raise FieldError("--logit-bias", "names a token twice")
    fields: dict[str, Any] = {"logit_bias": tuple(sorted(bias.items()))}
    given = [
        ("--json-schema", ConstraintKind.JSON_SCHEMA, _read("--json-schema", arguments.json_schema, ("{",))),
        ("--regex", ConstraintKind.REGEX, arguments.regex),
        ("--grammar", ConstraintKind.LARK, _read("--grammar", arguments.grammar, ("start:", "::="))),
    ]
    for flag, kind, text in given:
        if text is not None:
            fields |= {"constraint": Constraint(kind, text), "constraint_field": flag}
    if arguments.choice:
        fields |= {"constraint": choices_constraint(arguments.choice, "--choice"), "constraint_field": "--choice"}
    if "constraint" in fields:
        check_constraint(fields["constraint"], fields["constraint_field"])
    return fields


def _read(flag: str, said: str | None, signs: tuple[str, ...]) -> str | None:
    """Return the text itself where it has a sign of one, else what the file of that name holds."""
    if said is None or any(sign in said for sign in signs):
        return said
    try:
        with Path(said).open(encoding="utf-8") as file:
            return file.read(MOST_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        shown = " or ".join(repr(sign) for sign in signs)
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise FieldError(flag, f"{said}: {why}; give the text itself, with {shown} in it, or a file") from error
