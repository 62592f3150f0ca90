"""The forest's arrays: that there is room for what is reserved, and as many buckets as are needed. What it answers is
compared with a naive model in test_prefix_index.py."""

from random import Random

import numpy as np
import pytest

from router.core.block_table import _FIRST_BUCKETS, BUCKETS_PER_BLOCK, BlockTable


@pytest.mark.parametrize("blocks", [0, 1, 2, 5])
def test_there_is_room_for_as_many_as_are_reserved_and_no_more_is_taken_than_twice(blocks: int) -> None:
    """Guards a node beyond its arrays, and memory that doubles each time that workers join."""
    table = BlockTable()
    table.reserve(blocks)
    arrays = (table.keys, table.parents, table.children, table._next, table._sets, table._free)
    assert {len(array) for array in arrays} == {blocks + 1}, "node 0 stands for none"
    table.reserve(blocks)
    assert len(table.keys) == blocks + 1
    table.reserve(blocks + 1)
    assert len(table.keys) == 2 * (blocks + 1), "one more: twice as many"
    table.reserve(9 * blocks + 9)
    assert {len(array) for array in (table.keys, table._free)} == {9 * blocks + 10}


def test_there_are_so_many_buckets_a_block_once_there_are_many() -> None:
    """Guards lookups whose buckets grow long, and one bucket that is split where there is none."""
    table, random = BlockTable(), Random(5)
    keys = np.array([random.getrandbits(64) for _ in range(5 * _FIRST_BUCKETS)], np.uint64)
    begin, end = 0, _FIRST_BUCKETS // BUCKETS_PER_BLOCK - 3
    for more in (2, 1, 1, 1, 700, 322, 1, 1, 3000):
        table.mark(table.extend(keys[begin:end]), 1)
        assert table._buckets + table._split == max(_FIRST_BUCKETS, BUCKETS_PER_BLOCK * end)
        assert 0 <= table._split < table._buckets and len(table._heads) == 2 * table._buckets
        begin, end = end, end + more
        assert (table.find(keys[:begin]) > 0).all() and not table.find(keys[begin:]).any()
    table.check()


def test_blocks_of_one_bucket_are_told_apart() -> None:
    """Guards a prefix that would be cut where a bucket is shared, or empty, and what hangs below it."""
    table = BlockTable()
    shared = np.array([_FIRST_BUCKETS * (n + 1) for n in range(5)], np.uint64)
    nodes = table.extend(shared)
    table.mark(nodes, 1)
    for unknown in (_FIRST_BUCKETS * 9, 7):
        keys = np.append(shared, np.uint64(unknown))
        assert table.find(keys).tolist() == [*nodes.tolist(), 0]
        keys = np.insert(shared, 3, np.uint64(unknown))
        assert table.find(keys).tolist() == [*nodes[:3].tolist(), 0, *nodes[3:].tolist()]
    table.check()


def test_numbers_of_sets_that_nobody_has_any_more_are_given_again() -> None:
    """Guards memory: workers come and go, and with each the sets that it was in."""
    table = BlockTable()
    nodes = table.extend(np.array([3, 4, 5], np.uint64))
    table.mark(nodes, 1)
    for bit in range(1, 200):
        table.mark(nodes[:2], 1 << bit)
        table.drop(nodes[:2], 1 << bit)
        table.check()
    assert len(table._masks) <= 4


@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_nodes_that_nobody_holds_any_more_are_used_again(at_once: int) -> None:
    """Guards memory: workers evict, and others compute."""
    table = BlockTable()
    for number in range(50):
        nodes = table.extend(np.arange(at_once * number, at_once * (number + 1), dtype=np.uint64))
        table.mark(nodes, 1)
        table.drop(nodes, 1)
        table.check()
    assert table._fresh == at_once + 1 and not len(table)


def test_a_path_below_another_parent_ends_before_the_block_that_it_would_begin_with() -> None:
    """Guards a block of two identities that coincide: it has one parent, and is counted as nobody else's child."""
    table = BlockTable()
    one, two = (table.extend(np.array(keys, np.uint64)) for keys in ([3, 4, 5], [7]))
    table.mark(np.concatenate((one, two)), 1)
    assert not len(table.extend(np.array([4, 5], np.uint64), two.item(0)))
    assert not len(table.extend(np.array([4, 9], np.uint64)))
    table.check()


def test_a_path_of_nothing_changes_nothing() -> None:
    """Guards a block that is never let go: a child that it does not have would be counted below it."""
    table, keys = BlockTable(), np.array([11, 12], np.uint64)
    path = table.extend(keys)
    table.mark(path, 1)
    assert not len(table.extend(keys[:0], parent=path.item(1)))
    table.check()
