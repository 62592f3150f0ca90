"""Writes docs/configuration.md, the page of all settings, from the structs that hold them: `python -m
cluster.settings_page`; `--check` compares and changes nothing.

The meaning of a setting is the docstring under its field, the default that of the field, and of a GPU that of
`cluster.defaults`. So the page cannot say what the code does not.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from cluster.config import INTERNAL, MEMORY_KEYS, THREAD_KEYS, ClusterConfig
from cluster.defaults import defaults_on
from cluster.resolve import FLAGS

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """\
# Settings

Every setting of a cluster, by section of the file; made from the code by `python -m cluster.settings_page`, so change
nothing here. The same setting can be said in four ways, of which a later one wins:

| where | how `chunk_tokens` of section `[prefill]` is said |
|---|---|
| default | the column *default*; where a pool computes on a GPU, the column *on a GPU*, if it has an entry |
| file: `headrace up --config FILE` | `chunk_tokens = 256` under `[prefill]` ([an example](../examples/headrace.toml)) |
| variable | `HEADRACE_PREFILL__CHUNK_TOKENS=256` |
| flag | `--set prefill.chunk_tokens=256`; some have flags of their own, named in the tables |

`headrace dump-config` shows what the four come to, and where each value came from; `--running` asks the cluster that
runs. A key that there is not, a value of the wrong type and one out of range are refused before anything starts. Sizes
are in bytes, times in seconds; a list is written as `a,b` in variables and flags, and as `["a", "b"]` in the file.
"""
_COMPUTED = {
    **{key: "by memory" for key in MEMORY_KEYS},
    **{key: "by cores" for key in THREAD_KEYS},
    "decode.itl_target_ms": "`off`, or `auto`",
}


def page() -> str:
    """Return the whole page."""
    on_gpu = defaults_on({"prefill": "cuda", "decode": "cuda"})
    parts = [HEAD, *_sections(ClusterConfig, "", on_gpu)]
    return "\n".join(parts)


def _sections(struct: type[msgspec.Struct], prefix: str, on_gpu: dict[str, Any]) -> Iterator[str]:
    """Yield the section of one struct, then those of the structs in it."""
    told = meanings(struct)
    rows, inner = [], []
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name
        if key in INTERNAL:
            continue
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            inner.append((field.type, key + "."))
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        other = _shown(on_gpu[key]) if key in on_gpu else ""
        rows.append(
            f"| `{field.name}` | {_kind(field.type)} | {_COMPUTED.get(key) or _shown(default)} | {other} "
            f"| {_meaning(key, told.get(field.name, ''))} |"
        )
    if rows:
        title = f"## `[{prefix[:-1]}]`" if prefix else "## At the top of the file"
        head = ["| setting | value | default | on a GPU | meaning |", "|---|---|---|---|---|"]
        yield "\n".join([title, "", _text(struct.__doc__ or ""), "", *head, *rows, ""])
    for part, name in inner:
        yield from _sections(part, name, on_gpu)


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstrings under the fields of a struct, those of the structs that it inherits from included."""
    found: dict[str, str] = {}
    for one in reversed(struct.__mro__):
        if not (issubclass(one, msgspec.Struct) and one is not msgspec.Struct):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = str(below.value.value)
    return found


def _meaning(key: str, told: str) -> str:
    flags = [f"`{flag}`" for flag, of, _, _ in FLAGS if of == key]
    return " ".join([_text(told), *(f"({flag})" for flag in flags)]).strip()


def _text(doc: str) -> str:
    """Return a docstring as one line that a table can hold."""
    return " ".join(doc.split()).replace("|", "\\|")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return "none" if not value else f"`{', '.join(map(str, value))}`"
    return "empty" if value == "" else f"`{value}`"


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_kind(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of names"
    return {int: "a whole number", float: "a number", bool: "`true`, `false`", str: "text"}.get(kind, str(kind))


def main(argv: list[str] | None = None) -> int:
    """Write the page, or with `--check` say whether it is what would be written."""
    parser = argparse.ArgumentParser(prog="python -m cluster.settings_page", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare, and change nothing")
    if not parser.parse_args(argv).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE.name} is out of date: python -m cluster.settings_page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
