"""Block identities: equal only for equal pasts, in one namespace, of one model."""

import pytest

from engine.identity import PIECE_BLOCKS, chain, extend, owner, root, space


def test_chain_is_repeated_extension() -> None:
    """Guards against a router and a worker that name the same block differently."""
    start, tokens = root(b"n", "f"), list(range(50))
    names = chain(start, tokens, 16)
    parent = start
    for index, name in enumerate(names):
        parent = extend(parent, tokens[16 * index : 16 * index + 16])
        assert name == parent and len(name) == 16
    assert len(names) == 3
    assert chain(names[0], tokens[16:], 16) == names[1:]


@pytest.mark.parametrize("size", [1, 16])
def test_pieces_that_were_hashed_before_change_nothing(size: int) -> None:
    """Guards the names of a long prompt, of its next turn, and of others that share some pieces with it: a piece is the
    same only after the same blocks, in the same namespace, and with blocks of the same size."""
    tokens = list(range((3 * PIECE_BLOCKS + 5) * 16))
    other = [*tokens[: len(tokens) // 2], 7, *tokens[len(tokens) // 2 + 1 :]]
    moved = [*tokens[PIECE_BLOCKS * size :], *tokens[: PIECE_BLOCKS * size]]
    for start in (root(b"", "f"), root(b"n", "f")):
        for prompt in (tokens[:-40], tokens, other, moved, tokens, tokens[: size - 1]):
            names, parent = [], start
            for at in range(0, len(prompt) - size + 1, size):
                parent = extend(parent, prompt[at : at + size])
                names.append(parent)
            assert chain(start, prompt, size) == names


def test_anything_that_differs_changes_every_name() -> None:
    """Guards against prefixes shared between tenants, models, adapters or different pasts."""
    starts = [
        root(b"", "f"),
        root(b"n", "f"),
        root(b"n\0", "f"),
        root(b"n" * 65, "f"),
        root(b"n", "g"),
        root(space(b"n", "lora"), "f"),
        root(space(b"n", "lorb"), "f"),
        root(space(b"", "lora"), "f"),
        root(space(b"n\0", "lora"), "f"),
        root(b"n", ""),
    ]
    tokens = [1, 2, 3, 4]
    names = {name for start in starts for name in chain(start, tokens, 2)}
    names |= {extend(starts[0], part) for part in ([1], [1, 2, 3], [2, 1], [0, 1], [1, 0])}
    assert len(names) == 2 * len(starts) + 5


def test_an_adapter_parts_its_owners_cache() -> None:
    """Guards against an adapter's blocks that count for another tenant, and against identities of requests without an
    adapter that change because there are adapters."""
    tenant, salted = b"t" * 16, b"t" * 16 + b"s" * 16
    assert space(tenant) == tenant and space(b"") == b""
    spaces = [space(part, name) for part in (b"", tenant, salted) for name in ("", "a", "b")]
    assert len(set(spaces)) == 9
    assert {owner(space(part, "a")) for part in (tenant, salted)} == {tenant}


def test_known_value() -> None:
    """Guards against a silent change of the scheme: caches of two versions must not disagree."""
    assert (
        chain(root(b"tenant", "model"), range(4), 4)[0].hex() == "eb3fac6bb1accd44dbbd7c045307899c"
    )


@pytest.mark.parametrize("token", [-1, 2**32])
def test_no_token_wraps_around(token: int) -> None:
    """Guards against two tokens with one name."""
    with pytest.raises(OverflowError):
        extend(b"", [token])
