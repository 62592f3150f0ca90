"""Grafana's own types, generated from its schema (`grafana-foundation-sdk`), asked what they make of a dashboard.

Reading a dashboard into them and writing it again drops every field that Grafana does not know; what was read is then
held against the types it was declared with, enumerations included.
"""

import json
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

# Of the Prometheus data source, not of every annotation: these types end where a data source begins.
OF_PROMETHEUS = {
    "annotations.list.step",
    "annotations.list.titleFormat",
    "annotations.list.textFormat",
}


def faults(dashboard: dict[str, Any]) -> list[str]:
    """What Grafana would not understand of it, each thing once."""
    plugins.register_default_plugins()
    known = Dashboard.from_json(dashboard)
    written = json.loads(json.dumps(known, cls=JSONEncoder))
    lost = [f"{path} is unknown" for path in _lost(dashboard, written) if path not in OF_PROMETHEUS]
    return sorted({*lost, *_misfits(known)})


def _lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths of what is there before and not, or not the same, after."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            inner = f"{path}.{key}" if path else key
            if key in after:
                yield from _lost(value, after[key], inner)
            else:
                yield inner
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from _lost(one, other, path)
    elif before != after:
        yield path


def _misfits(found: object) -> Iterator[str]:
    """Attributes of an object, and of all below it, whose values are not of their declared type."""
    hints = typing.get_type_hints(type(found))
    for name, value in vars(found).items():
        if name in hints and not _fits(value, hints[name]):
            yield f"{type(found).__name__}.{name} cannot be {value!r}"
        values = value if isinstance(value, list) else [value]
        for inner in values:
            if type(inner).__module__.startswith("grafana_foundation_sdk") and hasattr(
                inner, "__dict__"
            ):
                yield from _misfits(inner)


def _fits(value: Any, hint: Any) -> bool:
    kind, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if kind is list:
        return isinstance(value, list) and all(_fits(one, inside[0]) for one in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(one, inside[1]) for one in value.values())
    if kind is typing.Literal:
        return value in inside
    if inside:
        return any(_fits(value, one) for one in inside)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, dict) and hasattr(hint, "from_json"):
        # Links of panels are left as they came.
        known = hint.from_json(value)
        return set(value) <= set(known.to_json()) and not list(_misfits(known))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in {one.value for one in hint}
    return isinstance(value, hint)
