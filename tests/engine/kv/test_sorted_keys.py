"""Keys in order, against a plain sorted list."""

from bisect import insort
from random import Random

from engine.kv.sorted_keys import PIECE_KEYS, SortedKeys


def test_neighbours_are_those_of_a_sorted_list() -> None:
    """Guards the borders of pieces: keys come and go until pieces have been split and emptied."""
    random = Random(5)
    keys, model = SortedKeys(()), []
    for step in range(12 * PIECE_KEYS):
        if model and (step > 8 * PIECE_KEYS or random.random() < 0.2):
            key = model.pop(random.randrange(len(model)))
            keys.remove(key)
        else:
            key = random.randbytes(2)
            if key not in model:
                keys.add(key)
                insort(model, key)
        if step % 16:
            continue
        wanted = random.choice([key, random.randbytes(2)])
        near = [k for k in model if k < wanted][-1:] + [k for k in model if k >= wanted][:1]
        assert keys.around(wanted) == near
    assert list(keys) == model and len(model) < 8 * PIECE_KEYS


def test_neighbours_are_found_across_pieces() -> None:
    """Guards the longest common beginning: it may be that of the last key of the piece before."""
    keys = SortedKeys(b"%04d" % number for number in range(0, 4 * PIECE_KEYS, 2))
    assert len(keys._pieces) > 1
    for low in range(0, 4 * PIECE_KEYS - 2, 2):
        assert keys.around(b"%04d" % (low + 1)) == [b"%04d" % low, b"%04d" % (low + 2)]


def test_the_last_key_of_a_piece_that_was_split_is_found_in_it() -> None:
    """Guards the border of two pieces: the key below it would be taken for the last one of the first."""
    keys = SortedKeys(b"%04d" % number for number in range(2 * PIECE_KEYS))
    last = b"%04d" % (PIECE_KEYS - 1)
    assert [piece[-1] for piece in keys._pieces] == keys._lasts and keys._lasts[0] == last
    keys.remove(last)
    assert list(keys) == [b"%04d" % number for number in range(2 * PIECE_KEYS) if number != PIECE_KEYS - 1]
    assert keys.around(last) == [b"%04d" % (PIECE_KEYS - 2), b"%04d" % PIECE_KEYS]
