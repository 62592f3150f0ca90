"""What the one command consists of, in order, and how much of its eight minutes each part may take."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import NamedTuple

from benchmarks.gpu.card import Card, Line


class Part(NamedTuple):
    """`target` (`module:function`) takes the card and gives lines. It is imported when it runs, so that a package which
    only one part needs is missed by that one alone."""

    target: str
    budget_s: float

    def lines(self, card: Card) -> Iterable[Line]:
        module, _, name = self.target.partition(":")
        measure: Callable[[Card], Iterable[Line]] = getattr(import_module(module), name)
        return measure(card)


PARTS = {
    "copy_rate": Part("benchmarks.gpu.card:copy_rate", 10),
    "correct": Part("benchmarks.gpu.correct:correct", 100),
    "orders": Part("benchmarks.gpu.decode:orders", 30),
    "decode": Part("benchmarks.gpu.decode:shapes", 30),
    "eight_bits": Part("benchmarks.gpu.decode:eight_bits", 20),
    "shared": Part("benchmarks.gpu.decode:shared", 20),
    "blocks": Part("benchmarks.gpu.decode:blocks", 20),
    "peers": Part("benchmarks.gpu.peers:peers", 25),
    "prefill": Part("benchmarks.gpu.others:prefill", 20),
    "copies": Part("benchmarks.gpu.others:copies", 15),
    "transport": Part("benchmarks.gpu.transport:transport", 30),
    "engine": Part("benchmarks.gpu.engine:on_card", 45),
    "cluster": Part("benchmarks.gpu.cluster:cluster", 80),
    "demo": Part("benchmarks.gpu.cluster:demo", 20),
}
LIMIT_S = 465.0
"""The sum of all budgets is at most this; what is left of eight minutes is for starting and ending processes."""
