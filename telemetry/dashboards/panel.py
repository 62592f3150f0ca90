"""A dashboard as plain data. `grafana` makes Grafana's JSON of it, a test asks every query of a live cluster."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

INFINITY = float("inf")
Kind = Literal["timeseries", "stat", "heatmap", "table"]


class Proof(StrEnum):
    """What a live cluster must show in a panel, beside data in its range."""

    SHOWN = "shown"
    """Nothing more: zero is the good case."""
    LOAD = "load"
    """Something else than zero under a mixed load."""
    FAULT = "fault"
    """Something else than zero once a worker was killed and requests went wrong."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` is Grafana's name of it. `low` and `high` bound every value that a sound cluster can show.
    `names` are words for values, shown in their place."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    low: float = 0.0
    high: float = INFINITY
    proof: Proof = Proof.LOAD
    kind: Kind = "timeseries"
    width: int = 8
    stacked: bool = False
    names: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard. `name` is its file and the end of its uid, by which links find it: never changed."""

    name: str
    title: str
    text: str
    rows: tuple[PanelRow, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def one(
    title: str,
    text: str,
    unit: str,
    expr: str,
    legend: str = "",
    *,
    low: float = 0.0,
    high: float = INFINITY,
    proof: Proof = Proof.LOAD,
    kind: Kind = "timeseries",
    width: int = 8,
    stacked: bool = False,
    names: tuple[tuple[float, str], ...] = (),
) -> Panel:
    """Make a panel of a single query."""
    query = (Query(expr, legend),)
    return Panel(title, text, unit, query, low, high, proof, kind, width, stacked, names)
