"""The parts of the one command, in order, and how much of its eight minutes each may take."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import NamedTuple

from benchmarks.gpu.card import Card, Line


class Part(NamedTuple):
    """One part. `target` (`module:function`) takes the card and gives lines. It is imported when it runs, so that a
    package which only one part needs is missed by that one alone."""

    target: str
    budget_s: float

    def lines(self, card: Card) -> Iterable[Line]:
        module, _, name = self.target.partition(":")
        measure: Callable[[Card], Iterable[Line]] = getattr(import_module(module), name)
        return measure(card)


PARTS = {
    "copy_rate": Part("benchmarks.gpu.card:copy_rate", 10),
    "correct": Part("benchmarks.gpu.correct:correct", 90),
    "orders": Part("benchmarks.gpu.decode:orders", 20),
    "decode": Part("benchmarks.gpu.decode:shapes", 20),
    "eight_bits": Part("benchmarks.gpu.decode:eight_bits", 10),
    "shared": Part("benchmarks.gpu.decode:shared", 10),
    "blocks": Part("benchmarks.gpu.decode:blocks", 20),
    "peers": Part("benchmarks.gpu.peers:peers", 20),
    "prefill": Part("benchmarks.gpu.others:prefill", 20),
    "copies": Part("benchmarks.gpu.others:copies", 15),
    "beside": Part("benchmarks.gpu.overlap:beside", 20),
    "sampling": Part("benchmarks.gpu.sampling:sampling", 10),
    "products": Part("benchmarks.gpu.weights:products", 15),
    "experts": Part("benchmarks.gpu.weights:experts", 15),
    "transport": Part("benchmarks.gpu.transport:transport", 50),
    "engine": Part("benchmarks.gpu.engine:on_card", 45),
    "cluster": Part("benchmarks.gpu.cluster:cluster", 65),
    "demo": Part("benchmarks.gpu.cluster:demo", 10),
}
LIMIT_S = 465.0
"""The sum of all budgets is at most this; what is left of eight minutes is for starting and ending processes."""


def within(names: Sequence[str], limit_s: float) -> dict[str, Part]:
    """Return these parts, in the order of the table; together they have all of `limit_s`, each in proportion to its
    budget."""
    asked_s = sum(PARTS[name].budget_s for name in names)
    return {
        name: part._replace(budget_s=part.budget_s * limit_s / asked_s)
        for name, part in PARTS.items()
        if name in names
    }
