"""Put a mutant into this process, where its module is imported already: the running functions get other code.

Whoever holds the function sees the change, whatever name it was imported under, so nothing needs to be imported again.
A table of moves gets other entries in place, for the same reason.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tests.mutants.catalogue import Mutant, Source

Place = tuple[str, str, int]
"""File, qualified name and first line of a function."""


class CannotPatch(Exception):
    """The mutant cannot be put into a running process."""


def place_of(code: CodeType) -> Place:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def running(files: set[str]) -> dict[Place, list[FunctionType]]:
    """Return the functions of this process that were defined in `files`."""
    found: dict[Place, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        # Not isinstance: an object may answer for its class itself, and some warn when they are asked.
        if type(thing) is FunctionType and thing.__code__.co_filename in files:
            found[place_of(thing.__code__)].append(thing)
    return dict(found)


def module_of(path: Path) -> ModuleType | None:
    """Return the module that was imported from `path`."""
    modules = list(sys.modules.values())
    return next((module for module in modules if vars(module).get("__file__") == str(path)), None)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of every function and class below `code`."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def plant(source: Source, mutant: Mutant, functions: dict[Place, list[FunctionType]]) -> None:
    """Change this process for good. Raises CannotPatch where the function is not there, or has other closures now."""
    path = source.root / source.path
    tree = source.tree_with(mutant)
    changed = compile(tree, str(path), "exec")
    if not mutant.function:
        _replace_tables(path, changed)
        return
    planted = 0
    for code in codes(changed):
        if code.co_qualname != mutant.function:
            continue
        for function in functions.get(place_of(code), []):
            try:
                function.__code__ = code
            except ValueError as error:
                raise CannotPatch(f"{mutant}: {error}") from error
            planted += 1
    if not planted:
        raise CannotPatch(f"{mutant}: no such function in this process")


def _replace_tables(path: Path, changed: CodeType) -> None:
    module = module_of(path)
    if module is None:
        raise CannotPatch(f"{path} is not imported")
    # Members of an enumeration that is defined anew would not be those that everybody else holds.
    again = ModuleType(module.__name__)
    again.__file__ = module.__file__
    kept, sys.modules[module.__name__] = module, again
    try:
        exec(changed, again.__dict__)
    finally:
        sys.modules[module.__name__] = kept
    for name, table in vars(again).items():
        live = getattr(module, name, None)
        if name.isupper() and isinstance(table, dict) and isinstance(live, dict):
            entries = {_own(module, key): _own(module, value) for key, value in table.items()}
            live.clear()
            live.update(entries)


def _own(module: ModuleType, value: object) -> object:
    """Return `value` with the members of enumerations that `module` itself defines."""
    if isinstance(value, tuple):
        return tuple(_own(module, part) for part in value)
    if isinstance(value, frozenset | set):
        return frozenset(_own(module, part) for part in value)
    kind = getattr(module, type(value).__name__, None)
    if kind is not None and type(value).__module__ == module.__name__:
        return getattr(kind, getattr(value, "name", ""), value)
    return value
