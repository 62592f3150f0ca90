"""The prefix tree: what matches, what is indexed twice or not at all, and who is evicted next. Its order of neighbours
is in test_sorted_keys.py, random requests in test_machine.py, the published examples in test_examples.py and
test_figure.py."""

import random
from typing import Any

import pytest

from engine.kv.groups import GONE, LayerGroup
from engine.kv.radix_cache import Match, Node, RadixCache
from engine.types import BlockId

NAME = b"tenant"


def _insert(cache: RadixCache, tokens: list[int], first: int) -> list[Node]:
    """Index a sequence in blocks `first ..`, which nobody holds afterwards."""
    nodes: list[Node] = []
    for at in range(0, len(tokens), cache.block_size):
        parent = nodes[-1] if nodes else cache.root(NAME)
        node = cache.insert(parent, tokens[at : at + cache.block_size], BlockId(first + len(nodes)))
        assert node is not None
        nodes.append(node)
    for node in reversed(nodes):
        cache.let_go(node.block)
    cache.check()
    return nodes


def test_a_match_is_exact_to_the_token_and_ends_at_the_limit() -> None:
    """Guards the last token of a prompt, which must always be computed, and a match in another's namespace."""
    cache = RadixCache(4, "m")
    nodes = _insert(cache, [1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert cache.match(NAME, [1, 2, 3, 4, 5, 6, 7, 8], 8) == Match(nodes)
    assert cache.match(NAME, [1, 2, 3, 4, 5, 6, 7, 8], 7) == Match(nodes[:1], nodes[1], 3)
    assert cache.match(NAME, [1, 2, 3, 4, 5, 9, 7, 8], 8) == Match(nodes[:1], nodes[1], 1)
    assert cache.match(b"other", [1, 2, 3, 4], 4) == Match([])


@pytest.mark.parametrize(
    ("tokens", "block", "shared"), [([1, 2, 3, 9], 0, 3), ([1, 9, 9, 8], 1, 3), ([2, 1, 1, 1], 2, 1)]
)
def test_of_several_children_the_one_that_shares_most_is_copied(tokens: list[int], block: int, shared: int) -> None:
    cache = RadixCache(4, "m")
    for at, sequence in enumerate(([1, 2, 3, 4], [1, 9, 9, 9], [2, 2, 2, 2])):
        _insert(cache, sequence, at)
    match = cache.match(NAME, tokens, 4)
    assert match.partial is not None and (match.partial.block, match.partial_tokens) == (block, shared)


def test_the_same_tokens_are_indexed_once() -> None:
    cache = RadixCache(4, "m")
    (node,) = _insert(cache, [1, 2, 3, 4], 0)
    assert cache.insert(cache.root(NAME), [1, 2, 3, 4], BlockId(1)) is node
    assert cache.insert(cache.root(NAME), [1, 2, 3], BlockId(2)) is None, "it only begins a longer one"
    assert len(cache) == 1 and not cache.holds(BlockId(1)) and not cache.holds(BlockId(2))


def test_a_longer_tail_pushes_the_shorter_one_out_first() -> None:
    """Guards a conversation's old tails: each turn would leave one behind, at the end of the line."""
    cache = RadixCache(4, "m")
    _insert(cache, [7, 7, 7, 7], 0)
    _insert(cache, [1, 2], 1)
    _insert(cache, [1, 2, 3], 2)
    assert [cache.evict(NAME).block for _ in range(3)] == [1, 0, 2]


def test_the_least_recently_used_leaf_goes_first_and_a_held_one_never() -> None:
    cache = RadixCache(4, "m")
    _insert(cache, [1, 1, 1, 1, 2, 2, 2, 2], 0)
    _insert(cache, [3, 3, 3, 3], 2)
    cache.occupy(BlockId(2))
    assert cache.idle == 2
    assert [cache.evict(NAME).block for _ in range(2)] == [1, 0]
    with pytest.raises(KeyError):
        cache.evict(NAME)
    cache.let_go(BlockId(2))
    cache.evict(NAME)
    cache.check()
    assert cache.match(NAME, [3, 3, 3, 3], 4).nodes == [] and len(cache) == 0


def test_another_block_of_the_same_content_takes_its_place() -> None:
    cache = RadixCache(4, "m")
    (node,) = _insert(cache, [1, 2, 3, 4], 0)
    assert cache.rebind(node, BlockId(5)) == 0
    assert cache.holds(BlockId(5)) and not cache.holds(BlockId(0)) and cache.idle == 0
    cache.check()


def test_an_identity_names_tokens_namespace_and_model() -> None:
    """Guards tenants from each other in the tiers and in the router's index, where blocks go by identity alone."""
    chains = []
    for name, model in ((b"a", "m"), (b"b", "m"), (b"a", "n")):
        cache = RadixCache(2, model)
        first = cache.insert(cache.root(name), [1, 2], BlockId(0))
        assert first is not None
        second = cache.insert(first, [1, 2], BlockId(1))
        assert second is not None
        chains += [first.identity, second.identity]
    assert len(set(chains)) == 6


def test_a_shorter_tail_that_somebody_holds_does_not_give_way() -> None:
    """Guards a block that is read: it stood in the line of those that may be evicted, since a longer one came."""
    cache = RadixCache(4, "m")
    _insert(cache, [1, 2], 1)
    cache.occupy(BlockId(1))
    assert cache.insert(cache.root(NAME), [1, 2, 3], BlockId(2)) is not None
    assert cache.idle == 0
    with pytest.raises(KeyError):
        cache.evict(NAME)


@pytest.mark.parametrize("seed", range(20))
def test_a_match_that_goes_on_is_the_one_that_begins_anew(seed: int) -> None:
    """Guards the waiting prompts of a line, looked up in every step: also where blocks go, and others come."""
    dice, cache = random.Random(seed), RadixCache(2, "m")
    prompts = [[dice.randrange(2) for _ in range(dice.randrange(1, 14))] for _ in range(8)]
    latest: list[Match | None] = [None] * len(prompts)
    free, went_on = [BlockId(at) for at in range(40)], 0
    for _ in range(300):
        tokens = dice.choice(prompts)[: dice.randrange(1, 14)]
        if dice.random() < 0.5 and len(free) > 7:
            path = [cache.root(NAME)]
            for at in range(0, len(tokens) - 1, 2):
                node = cache.insert(path[-1], tokens[at : at + 2], free[-1])
                assert node is not None
                if node.block == free[-1]:
                    free.pop()
                else:
                    cache.occupy(node.block)
                path.append(node)
            for node in reversed(path[1:]):
                cache.let_go(node.block)
        elif len(cache):
            free.append(cache.evict(NAME).block)
        for number, prompt in enumerate(prompts):
            if dice.random() < 0.5:
                before = latest[number]
                went_on += before is not None and bool(before.nodes)
                latest[number] = cache.match(NAME, prompt, len(prompt), before=before)
                assert latest[number] == cache.match(NAME, prompt, len(prompt))
    assert went_on > 100


def test_a_match_that_goes_on_looks_at_no_token_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long prompts that wait: each step looked up all that they have in common, for each of them."""
    cache, tokens = RadixCache(4, "m"), list(range(4000))
    nodes = _insert(cache, tokens[:3996], 0)
    match, packed = cache.match(NAME, tokens, 4000), list[int]()
    monkeypatch.setattr(cache, "_pack", lambda *them: packed.extend(them) or b"")
    again = cache.match(NAME, tokens, 4000, before=match)
    assert again.nodes == nodes and len(packed) <= 4


def _cut(found: Match, groups: list[LayerGroup], size: int) -> tuple[int, Node | None]:
    """The plain definition: as far as every window group has all that the next token sees."""

    def suffices(nodes: list[Node], tokens: int) -> bool:
        return all(
            node.windows is not None and node.windows[number] != GONE
            for number, group in enumerate(groups)
            for node in nodes[group.first_needed(tokens, size) :]
        )

    nodes, partial = found.nodes, found.partial
    best = max(end for end in range(len(nodes) + 1) if suffices(nodes[:end], end * size))
    if partial is None or best < len(nodes) or not suffices([*nodes, partial], best * size + found.partial_tokens):
        return best, None
    return best, partial


@pytest.mark.parametrize("seed", range(20))
def test_a_match_ends_where_the_windows_have_all_that_the_next_token_sees(seed: int) -> None:
    """Guards a prompt that goes on behind a block that a window group has let go, one that begins anew though it need
    not, and one that is looked up again from what was found before."""
    dice, size = random.Random(seed), 3
    groups = [LayerGroup((1,), dice.choice((2, 4, 7, 20))), LayerGroup((2,), dice.choice((1, 3, 5)))][: 1 + seed % 2]
    cache, prompts = RadixCache(size, "m", windows=groups), [[dice.randrange(2) for _ in range(40)] for _ in range(4)]
    latest: list[Match | None] = [None] * len(prompts)
    free, cuts, partials = [BlockId(at) for at in range(200)], set[int](), 0
    for _ in range(300):
        tokens = dice.choice(prompts)[: dice.randrange(1, 40)]
        node, has_tail = cache.root(NAME), dice.random() < 0.6
        for at in range(0, len(tokens), size):
            child = cache.insert(node, tokens[at : at + size], free[-1]) if len(free) > 40 else None
            if child is None:
                break
            if child.block == free[-1]:
                cache.let_go(free.pop())
            for number in range(len(groups)):
                assert child.windows is not None
                if child.windows[number] == GONE and (has_tail or dice.random() < 0.3):
                    cache.bind(child, number, free[-1])
                    cache.let_go(free.pop())
            node = child
        for _ in range(dice.randrange(12)):
            block = dice.choice(list(cache._by_block)) if len(cache) else None
            indexed = None if block is None else cache.node(block)
            if indexed is not None and block is not None and (block != indexed.block or _is_bare(indexed)):
                cache.shares.occupy(NAME, block)
                cache.forget(block)
                free.append(block)
        for number, prompt in enumerate(prompts):
            limit = len(prompt) - number
            found = cache.match(NAME, prompt, limit, before=latest[number])
            first = cache.longest(NAME, prompt, limit)
            best, partial = _cut(first, groups, size)
            assert found.nodes == first.nodes[:best] and found.path == first.nodes and found.partial is partial
            assert found.partial_tokens == (0 if partial is None else first.partial_tokens)
            assert cache.match(NAME, prompt, limit, whole=True) == Match(found.nodes, uncut=first.nodes)
            latest[number] = found
            cuts.add(len(first.nodes) - best)
            partials += partial is not None
    assert len(cuts) > 3 and partials > 10


def _is_bare(node: Node) -> bool:
    return not node.children and all(block == GONE for block in node.windows or ())


@pytest.mark.parametrize("windows", [0, 20, 999])
def test_few_nodes_are_looked_at_for_windows(windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long prompts that wait where layers are kept in groups: each step looked at every block that they have in
    common, for each of them."""
    group, tokens, seen = LayerGroup((1,), 33), list(range(4000)), list[int]()
    cache = RadixCache(4, "m", windows=[group])
    nodes = _insert(cache, tokens[:3996], 0)
    for at in range(windows):  # only the head has windows, or everything
        cache.bind(nodes[at], 0, BlockId(2000 + at))
    match = cache.match(NAME, tokens, 4000)
    assert len(match.nodes) == windows and match.path == nodes
    packed = list[int]()

    class Counted(list[BlockId]):
        def __getitem__(self, at: Any) -> Any:
            seen.append(at)
            return super().__getitem__(at)

    for node in nodes:
        node.windows = Counted(node.windows or ())
    monkeypatch.setattr(cache, "_pack", lambda *them: packed.extend(them) or b"")
    again = cache.match(NAME, tokens, 4000, before=match)
    assert len(again.nodes) == windows and again.path == nodes
    assert len(packed) <= 4 and 0 < len(seen) < 999 // 8 + 20
