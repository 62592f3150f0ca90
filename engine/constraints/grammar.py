"""Compiles constraints, within limits that bound memory and the time of every mask.

The limits are counts, not seconds: what they refuse, they refuse on every machine. Source: llguidance (Moskal et al.,
2024): an Earley parser over a lexer of derivatives, both built as far as they are needed.
"""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraints.formats import with_bounds
from engine.constraints.text import FIELD
from engine.types import Constraint, ConstraintKind, FieldError

LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000,  # about 10 ms of a core
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,  # up to 2 KB each
    max_grammar_size=100_000,
    verbose_errors=False,
)
BLANKS = r" |\n {0,32}"
"""What may stand between the tokens of JSON. Without a bound, a small model goes on with blanks for ever."""
MESSAGE_CHARS = 500
NOTHING = "allows nothing"
_EXCERPT = re.compile(r"\n *\d+ \| .*(?:\n *\^)?", re.DOTALL)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_POINTER = re.compile(r"Pointer '([^']*)' does not exist")


def compile_constraint(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher that stands at the beginning. Whoever uses it makes a copy. Raises FieldError that says what is
    wrong. Lets other Python threads run."""
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                # The compiler knows only objects; an empty one allows as much.
                schema = "{}" if constraint.text.strip() == "true" else with_bounds(constraint.text)
                grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": BLANKS})
            case ConstraintKind.REGEX:
                grammar = LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.LARK:
                grammar = LLMatcher.grammar_from_lark(constraint.text)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    except ValueError as error:
        raise FieldError(FIELD, explained(constraint.kind, str(error))) from error
    if matcher.is_error():
        raise FieldError(FIELD, explained(constraint.kind, matcher.get_error()))
    return matcher


def explained(kind: ConstraintKind, message: str) -> str:
    """Return what is wrong with a constraint, for its writer: without the compiler's view of what it was made into."""
    text = _EXCERPT.sub("", shown(message))
    if "regex parse error" in text:
        # The parser shows the expression and marks the place; its finding stands last.
        text = f"in an expression: {text.rpartition('error: ')[2]}"
    match kind:
        case ConstraintKind.REGEX:
            found = _PLACE.sub("", text).removeprefix("in an expression: ")
            return f"is not an expression that can be kept to: {found}"
        case ConstraintKind.JSON_SCHEMA:
            pointer = _POINTER.search(text)
            found = text if pointer is None else f"a $ref points to {pointer[1]}, which is not there"
            return f"is not a schema that can be kept to: {found}"
        case ConstraintKind.LARK:
            return f"is not a grammar that can be kept to: {_PLACE.sub(_placed, text)}"


def _placed(found: re.Match[str]) -> str:
    return f"line {found[1]}, column {found[2]}: "


def shown(message: str) -> str:
    """Return what the library says, without the state that it may add, and of bounded length."""
    message = message.split("<non-verbose/>")[0].split("<state>")[0].strip()
    if message.startswith("NoExtension"):  # the library's name for it, and all that it says
        return NOTHING
    return message[:MESSAGE_CHARS] or "cannot be kept"
