"""Small wrong changes of source code, one at a time. Each function body of a file is walked, and every place where an
operator applies gives one mutant or two:

    comparison          `<` becomes `<=`, `==` becomes `!=`, `is` becomes `is not`, `min` becomes `max`
    off by one          a whole number, a length, a difference, a count or a bound is one more or one less
    dropped call        a statement that calls, deletes or adds is left out, or one command of a list, or one wrapper
    dropped condition   a branch is always or never taken, one half of an `and` is left out, a filter lets all pass
    swapped state       a state becomes the next of its kind, True becomes False, an attribute keeps what it had

What never decides anything stays as it is: docstrings, annotations, texts of errors, assertions, `check` and
`__repr__`. Names and defaults at the level of a module or a class stay too, but for tables of states.
"""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Operator(StrEnum):
    COMPARISON = "comparison"
    OFF_BY_ONE = "off by one"
    DROPPED_CALL = "dropped call"
    DROPPED_CONDITION = "dropped condition"
    SWAPPED_STATE = "swapped state"


UNMUTATED = re.compile(r"_?check(_\w+)?|__repr__|__str__|describe")
"""Functions that assert or describe: without them the tests see less, but nothing is done differently."""
COUNTED = re.compile(r"(\w+_tokens|\w*size|\w*count|position|limit|attempt|known|drawn|seq|generation|\w+_blocks)")
"""Names of whole numbers. One that is a list after all gives a mutant that any test finds; there are few."""
WRAPPERS = ("sorted", "reversed", "list", "dict", "set", "tuple", "frozenset")
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class States:
    """The enumerations of a project by class name, and the words that its tables of moves are asked with."""

    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    @classmethod
    def found(cls, sources: Sequence[str]) -> "States":
        members: dict[str, tuple[str, ...]] = {}
        words: dict[str, None] = {}
        for source in sources:
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
                    targets = [at.targets[0] for at in node.body if isinstance(at, ast.Assign)]
                    names = [at.id for at in targets if isinstance(at, ast.Name) and at.id.isupper()]
                    members[node.name] = tuple(names)
                elif (table := _table(node)) is not None:
                    keys = [key.elts[-1] for key in table.keys if isinstance(key, ast.Tuple)]
                    words |= {key.value: None for key in keys if isinstance(key, ast.Constant)}
        return cls(members, tuple(word for word in words if isinstance(word, str)))

    def next(self, kind: str, member: str) -> str | None:
        """Return the member after `member` of enumeration `kind`; None for what is none, or has no other member."""
        names = self.members.get(kind, ())
        if member not in names or len(names) < 2:
            return None
        return names[(names.index(member) + 1) % len(names)]

    def other_word(self, word: Any) -> str | None:
        if word not in self.words:
            return None
        return self.words[(self.words.index(word) + 1) % len(self.words)]


@dataclass(frozen=True, slots=True)
class Edit:
    """Field `name` of `owner`, a node of a parsed file, has `new` in the mutant instead of `old`."""

    operator: Operator
    owner: ast.AST
    name: str
    old: Any
    new: Any
    change: str
    """What is read at that place, and what stands there in the mutant."""
    line: int

    def make(self) -> None:
        setattr(self.owner, self.name, self.new)

    def undo(self) -> None:
        setattr(self.owner, self.name, self.old)


def edits(tree: ast.Module, states: States) -> Iterator[tuple[str, Edit]]:
    """Yield every mutant of a file with the qualified name of the function that it changes ("" for a table), in order
    of the source. An edit must be undone before the next is asked for."""
    yield from _of_bodies(tree.body, "", states)


def _of_bodies(body: Sequence[ast.stmt], prefix: str, states: States) -> Iterator[tuple[str, Edit]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _of_bodies(node.body, f"{prefix}{node.name}.", states)
        elif isinstance(node, Function):
            if not UNMUTATED.fullmatch(node.name):
                for statement in node.body:
                    for edit in _Walk(states).inside(node, "body", statement):
                        yield prefix + node.name, edit
        elif not prefix and (table := _table(node)) is not None:
            for value in table.values:
                for edit in _Walk(states).inside(table, "values", value):
                    if edit.operator is Operator.SWAPPED_STATE:
                        yield "", edit


def _table(node: ast.stmt) -> ast.Dict | None:
    """Return the dictionary that a name like MOVES_TABLE or _MOVES is given at the level of a module, if it is one."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id.isupper():
            return node.value
    return None


class _Walk:
    """Finds the edits below one node. `counted`: a part of it is one more or less already, and the sum with it."""

    def __init__(self, states: States, counted: bool = False, indexes: bool = False) -> None:
        self.states = states
        self.counted = counted
        self.indexes = indexes
        """The node picks from a tuple or a list, where one before the first is the last."""

    def inside(self, owner: ast.AST, name: str, node: ast.AST) -> Iterator[Edit]:
        """Yield the edits that replace `node`, which stands in field `name` of `owner`, and those below it."""
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _is_text(node):
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        for operator, new in self._instead(node):
            # A method's name may read like a number's.
            if name != "func" or operator is not Operator.OFF_BY_ONE:
                yield self._edit(operator, owner, name, node, new)
        yield from self._within(node)
        for below, value in ast.iter_fields(node):
            if below in ("annotation", "returns", "decorator_list", "ctx", "op", "ops"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._below(node, below).inside(node, below, child)

    def _below(self, node: ast.AST, name: str) -> "_Walk":
        has_constant = isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant)
        is_sum = isinstance(node, ast.BinOp) and (_is_number(node) or has_constant or self.counted)
        return _Walk(self.states, counted=is_sum, indexes=isinstance(node, ast.Subscript) and name == "slice")

    def _edit(self, operator: Operator, owner: ast.AST, name: str, node: ast.AST, new: ast.AST | None) -> Edit:
        old = getattr(owner, name)
        if isinstance(old, list):
            at = next(i for i, child in enumerate(old) if child is node)
            value: Any = old[:at] + ([] if new is None else [new]) + old[at + 1 :]
        else:
            value = new
        if new is not None:
            ast.copy_location(new, node)
            ast.fix_missing_locations(new)
        change = f"{_words(node)} => {_words(new)}"
        line = node.lineno if hasattr(node, "lineno") else owner.lineno  # type: ignore[attr-defined]
        return Edit(operator, owner, name, old, value, change, line)

    def _instead(self, node: ast.AST) -> Iterator[tuple[Operator, ast.AST | None]]:
        """Yield what may stand in the place of `node` as a whole."""
        match node:
            case ast.Expr(value=ast.Call()) | ast.Delete():
                yield Operator.DROPPED_CALL, ast.Pass()
            case ast.AugAssign(value=value) if not isinstance(value, ast.Constant):
                yield Operator.DROPPED_CALL, ast.Pass()
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield Operator.SWAPPED_STATE, ast.Pass()
            case ast.Call(func=ast.Name(id="min" | "max" as name)):
                other = copy.copy(node)
                other.func = ast.copy_location(ast.Name("max" if name == "min" else "min", ast.Load()), node)
                yield Operator.COMPARISON, other
            case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]) if name in WRAPPERS:
                if not isinstance(only, ast.GeneratorExp):
                    yield Operator.DROPPED_CALL, only
            case ast.BoolOp(values=values):
                for at in range(len(values)):
                    rest = values[:at] + values[at + 1 :]
                    yield Operator.DROPPED_CONDITION, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Operator.DROPPED_CONDITION, operand
            case ast.IfExp(body=body, orelse=orelse):
                yield Operator.DROPPED_CONDITION, body
                yield Operator.DROPPED_CONDITION, orelse
            case ast.Constant(value=bool() as value):
                yield Operator.SWAPPED_STATE, ast.Constant(not value)
            case ast.Constant(value=int() as value):
                yield Operator.OFF_BY_ONE, ast.Constant(value + 1)
                if value or not self.indexes:
                    yield Operator.OFF_BY_ONE, ast.Constant(value - 1)
            case ast.Constant(value=str() as value) if (word := self.states.other_word(value)) is not None:
                yield Operator.SWAPPED_STATE, ast.Constant(word)
            case ast.Attribute(value=ast.Name(id=kind), attr=member, ctx=ast.Load()):
                if (following := self.states.next(kind, member)) is not None:
                    yield Operator.SWAPPED_STATE, ast.Attribute(node.value, following, ast.Load())
        if _is_number(node) and not self.counted:
            assert isinstance(node, ast.expr)
            yield Operator.OFF_BY_ONE, ast.BinOp(node, ast.Add(), ast.Constant(1))
            if isinstance(node, ast.Call):
                yield Operator.OFF_BY_ONE, ast.BinOp(node, ast.Sub(), ast.Constant(1))

    def _within(self, node: ast.AST) -> Iterator[Edit]:
        """Yield the edits of a field of `node` that is no node by itself, or may be left out."""
        match node:
            case ast.Compare(ops=ops):
                for at, op in enumerate(ops):
                    swapped = [*ops[:at], COMPARED[type(op)](), *ops[at + 1 :]]
                    yield self._field(Operator.COMPARISON, node, "ops", swapped)
            case ast.If(test=test):
                for constant in (True, False):
                    new = ast.copy_location(ast.Constant(constant), test)
                    change = f"if {_words(test)} => if {constant}"
                    yield Edit(Operator.DROPPED_CONDITION, node, "test", test, new, change, node.lineno)
            case ast.comprehension(ifs=[_, *_] as ifs):
                for condition in ifs:
                    yield self._edit(Operator.DROPPED_CONDITION, node, "ifs", condition, None)
            case ast.match_case(guard=ast.expr() as guard):
                yield self._edit(Operator.DROPPED_CONDITION, node, "guard", guard, None)
            case ast.List(elts=elements, ctx=ast.Load()):
                for element in elements:
                    if isinstance(element, ast.Call | ast.Starred):
                        yield self._edit(Operator.DROPPED_CALL, node, "elts", element, None)

    def _field(self, operator: Operator, node: ast.expr, name: str, new: Any) -> Edit:
        before, old = _words(node), getattr(node, name)
        setattr(node, name, new)
        after = _words(node)
        setattr(node, name, old)
        return Edit(operator, node, name, old, new, f"{before} => {after}", node.lineno)


def _is_text(node: ast.AST) -> bool:
    """Say whether it is a docstring, or an ellipsis in a body's place."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_number(node: ast.AST) -> bool:
    """Say whether `node` is read as a whole number, as far as its shape and its name tell."""
    match node:
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), left=left):
            return not isinstance(left, ast.Constant)
        case ast.BinOp(op=ast.Sub() | ast.Add(), right=ast.Constant()):
            return False  # the constant itself is one more or less
        case ast.BinOp(op=ast.Sub()):
            return True
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _is_number(left) or _is_number(right)
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return COUNTED.fullmatch(name) is not None
    return False


def _words(node: ast.AST | None) -> str:
    """Return the source of a node on one line, cut short where it is long."""
    if node is None:
        return "nothing"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"
