"""Compiles constraints, within limits that bound memory and the time of every mask.

The limits are counts, not seconds: what they refuse, they refuse on every machine. Source: llguidance (Moskal et al.,
2024): an Earley parser over a lexer of derivatives, both built as far as they are needed.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

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


def compile_constraint(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher that stands at the beginning. Whoever uses it makes a copy. Raises FieldError with the
    compiler's words. Lets other Python threads run."""
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                grammar = LLMatcher.grammar_from_json_schema(constraint.text, defaults={"whitespace_pattern": BLANKS})
            case ConstraintKind.REGEX:
                grammar = LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.LARK:
                grammar = LLMatcher.grammar_from_lark(constraint.text)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)
    except ValueError as error:
        raise FieldError(FIELD, shown(str(error))) from error
    if matcher.is_error():
        raise FieldError(FIELD, shown(matcher.get_error()))
    return matcher


def shown(message: str) -> str:
    """Return what the library says, without the state that it may add, and of bounded length."""
    message = message.split("<non-verbose/>")[0].split("<state>")[0].strip()
    return message[:MESSAGE_CHARS] or "cannot be kept"
