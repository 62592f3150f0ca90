"""The prefix index against a naive model, and what it promises about order and bounds. What it is told of workers, and
asked by the placer, is tried in test_cluster_view.py and test_placement.py."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.identity import chain, root
from router.core.prefix_index import PrefixIndex, PrefixTree

ROOT = root(b"", "f")
PROMPTS = st.lists(st.integers(0, 1), max_size=6)


def blocks(prompt: list[int]) -> list[bytes]:
    return chain(ROOT, prompt, 1)


class Naive:
    """Prompts as tuples, newest last, with every prefix of each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[tuple[int, ...]] = []

    def insert(self, prompt: list[int]) -> None:
        paths = [tuple(prompt[: n + 1]) for n in range(min(len(prompt), self.capacity))]
        self.order = [p for p in self.order if p not in paths] + paths[::-1]
        self.order = self.order[max(len(self.order) - self.capacity, 0) :]

    def cut(self, prompt: list[int], keep: int) -> None:
        if keep < len(prompt):
            gone = tuple(prompt[: keep + 1])
            self.order = [p for p in self.order if p[: len(gone)] != gone]

    def match(self, prompt: list[int]) -> int:
        return sum(tuple(prompt[: n + 1]) in self.order for n in range(len(prompt)))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from(["insert", "cut", "match"]), PROMPTS, st.integers(0, 6))),
)
def test_equals_a_naive_model(capacity: int, steps: list[tuple[str, list[int], int]]) -> None:
    """Guards the binary search, the leaves-first order and the bound: any slip shows as a match."""
    tree, naive = PrefixTree(capacity), Naive(capacity)
    for kind, prompt, keep in steps:
        if kind == "insert":
            tree.insert(blocks(prompt))
            naive.insert(prompt)
        elif kind == "cut":
            tree.truncate(blocks(prompt), keep)
            naive.cut(prompt, keep)
        tree.check()
        assert len(tree) == len(naive.order)
        assert tree.match(blocks(prompt)) == naive.match(prompt)


def test_workers_are_apart_and_can_be_forgotten() -> None:
    """Guards against one worker's cache being credited to another, or to a dead one."""
    index = PrefixIndex()
    index.add("a", 8)
    index.add("b", 8)
    prompt = blocks([1, 1, 0])
    index.insert("a", prompt)
    assert (index.match("a", prompt), index.match("b", prompt)) == (3, 0)
    index.correct("a", prompt, 5)
    assert index.match("a", prompt) == 3, "a correction never raises or lowers without cause"
    index.evict("a", [prompt[1], b"unknown"])
    assert index.match("a", prompt) == 1
    index.forget("a")
    assert index.match("a", prompt) == 0
    index.insert("a", prompt)
    index.check()
