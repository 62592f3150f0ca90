"""The grammar of an answer that must call a tool (`tool_choice` required, or a named function), in a model's dialect,
and of one whose reasoning has a budget of tokens.

Each tool has a rule with its own schema, so that references inside of a schema still point where they did. Arguments
are laid out as the model's template lays them out, without free white space. Tokens that were added to the vocabulary,
as most marks are, are no text: a grammar names them by their ids.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from engine.constraints.formats import bound_formats
from engine.text.messages import Tool
from engine.types import Constraint, ConstraintKind, FieldError
from router.front.parsers.choose import Parsing
from router.front.parsers.thinking import CLOSE, OPEN

_LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY = "(?s:.*)"


class ReasoningBudget(NamedTuple):
    """The most tokens of a think block, and the tokens that end an answer: inside of one there are none."""

    tokens: int
    stop_ids: Collection[int]


def budgeted(parsing: Parsing, ids: Mapping[str, int], budget: ReasoningBudget) -> Constraint:
    """Return the constraint to reasoning within its budget: then its block is closed, and anything may follow. Raises
    FieldError for a model whose reasoning has no tokens of its own around it."""
    rules = _bounded(parsing, ids, budget)
    opened = ids[OPEN]
    start = "thought <[*]>*" if parsing.is_open else f"<[^{opened}]>* (<[{opened}]> thought <[*]>*)?"
    return Constraint(ConstraintKind.LARK, "\n".join([f"start: {start}", *rules]))


def forced_calls(
    parsing: Parsing, tools: Sequence[Tool], ids: Mapping[str, int], budget: ReasoningBudget | None = None
) -> Constraint:
    """Return the constraint to calls of `tools`, to one where the parsing is of a single call. `ids` has the tokens
    that were added to the vocabulary, by name; `budget` is that of `budgeted`, and raises as it does."""
    thought, rules = _thinking(parsing, ids)
    if budget is not None:
        rules = _bounded(parsing, ids, budget)
    rules += [f"args_{at}: %json {_schema(tool)}" for at, tool in enumerate(tools)]
    numbered = list(enumerate(tools))
    is_single = parsing.single
    match parsing.tools:
        case "hermes":
            opened, closed = _mark("<tool_call>", ids), _mark("</tool_call>", ids)
            rules.append(f'call: {opened} "\\n" ({_objects(tools, "arguments")}) "\\n" {closed}')
            calls = "call" if is_single else 'call ("\\n" call)*'
        case "llama3":
            rules.append(f"call: {_objects(tools, 'parameters')}")
            calls = "call"
        case "mistral" if "[ARGS]" in ids:
            each = " | ".join(f"{json.dumps(tool.name)} {_mark('[ARGS]', ids)} args_{at}" for at, tool in numbered)
            rules.append(f"call: {_mark('[TOOL_CALLS]', ids)} ({each})")
            calls = "call" if is_single else "call+"
        case "mistral":
            rules.append(f"call: {_objects(tools, 'arguments')}")
            more = "" if is_single else '("," " " call)* '
            calls = f'{_mark("[TOOL_CALLS]", ids)} "[" call {more}"]"'
        case _:
            body = f'{_mark("<|constrain|>", ids)} "json" {_mark("<|message|>", ids)}'
            each = " | ".join(
                f"{json.dumps(f'commentary to=functions.{tool.name} ')} {body} args_{at}" for at, tool in numbered
            )
            rules.append(f"call: {_mark('<|channel|>', ids)} ({each})")
            calls = "call"
    return Constraint(ConstraintKind.LARK, "\n".join([f"start: {thought} {calls}", *rules]))


def _objects(tools: Sequence[Tool], key: str) -> str:
    """Return the calls as JSON objects of two members, in the order that dialects have them in."""
    heads = [json.dumps(f'{{"name": "{tool.name}", "{key}": ') for tool in tools]
    return " | ".join(f'{head} args_{at} "}}"' for at, head in enumerate(heads))


def _thinking(parsing: Parsing, ids: Mapping[str, int]) -> tuple[str, list[str]]:
    """Return what may stand before the calls, and its rules."""
    if parsing.reasoning == "harmony":
        channel, message = _mark("<|channel|>", ids), _mark("<|message|>", ids)
        end, start = _mark("<|end|>", ids), _mark("<|start|>", ids)
        return "thought?", [f'thought: {channel} "analysis" {message} /{_ANY}/ {end} {start} "assistant"']
    if parsing.reasoning != "think":
        return "", []
    if CLOSE in ids:
        rules = [f"thought: /{_ANY}/ {_mark(CLOSE, ids)} /\\n{{0,2}}/"]
    else:
        rules = [f'inside[suffix="{CLOSE}"]: /{_ANY}/', "thought: inside /\\n{0,2}/"]
    return "thought" if parsing.is_open else f"({_mark(OPEN, ids)} thought)?", rules


def _bounded(parsing: Parsing, ids: Mapping[str, int], budget: ReasoningBudget) -> list[str]:
    """Return the rules of a think block that is open, token by token, whatever their text."""
    if parsing.reasoning != "think" or not (OPEN in ids and CLOSE in ids):
        why = "this model does not think" if not parsing.reasoning else "this model's reasoning cannot be bounded"
        raise FieldError("reasoning_budget", why)
    others = ",".join(str(one) for one in sorted({ids[OPEN], ids[CLOSE], *budget.stop_ids}))
    thoughts = f"<[^{others}]>{{0,{budget.tokens}}} " if budget.tokens else ""
    return [f"thought: {thoughts}<[{ids[CLOSE]}]> /\\n{{0,2}}/"]


def _mark(name: str, ids: Mapping[str, int]) -> str:
    return f"<[{ids[name]}]>" if name in ids else json.dumps(name)


def _schema(tool: Tool) -> str:
    schema = json.loads(tool.parameters) if tool.parameters else {}
    if isinstance(schema.get("type"), list):
        schema["type"] = "object"  # arguments are one, and `check_call` has seen that it is allowed
    bound_formats(schema)
    return json.dumps({"type": "object"} | schema | {"x-guidance": _LAYOUT})
