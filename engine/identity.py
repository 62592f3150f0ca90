"""Block identities: who a KV block is, wherever it lies.

An identity names a block's whole past: it chains BLAKE2b-128 over the identity of the block before it and its own
tokens, from a root that is keyed with the cache space (a namespace, with an adapter a part of it) and covers the
model's fingerprint. So equal identities mean equal KV contents, identities form a prefix tree, and whoever does not
know a namespace can neither name nor probe its blocks: every identity below the root depends on it.

Token counts need no field of their own: a token is four bytes and BLAKE2b covers the length of its input, so a partly
filled block never shares an identity with a full one. The block size enters through the cuts alone: a worker names
another's blocks by cutting the tokens at the other's borders, and where the identities of two sizes coincide (a full
block and one partly filled to the same token, both first in their sequence), so do their rows.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

IDENTITY_BYTES = 16
OWNER_BYTES = 16
"""The beginning of a namespace that says whose it is; what follows only parts it further (a request's cache salt)."""
NOBODY = bytes(OWNER_BYTES)
"""The owner of the parts of the namespace that all share."""
SHORT_BYTES = 8
"""Beginning of an identity, where a coincidence would only make a belief wrong."""
TOKEN_BYTES = 4
PIECE_BLOCKS = 32
_KEY_BYTES = 64  # BLAKE2b's longest key
_ROOT = b"headrace root"
_NAMESPACE = b"headrace space"
_ADAPTER = b"headrace adapter"
_GROUP = b"headrace group"
PERSON = b"headrace block"
_BLOCK = blake2b(digest_size=IDENTITY_BYTES, person=PERSON)

Hasher = Callable[[bytes, bytes, int], tuple[bytes, ...]]
"""Names the blocks after a parent: their tokens are packed, and each takes so many bytes of that."""


def owner(namespace: bytes) -> bytes:
    """Return whose namespace it is: all parts of one tenant's cache have one owner."""
    return namespace[:OWNER_BYTES]


def space(namespace: bytes, adapter: str = "") -> bytes:
    """Return the part of the cache that a request's blocks are in: its namespace, and with an adapter (the digest of
    its contents, `engine.model.files.adapter`) a part of its owner's cache which no other adapter shares."""
    if not adapter:
        return namespace
    parted = blake2b(digest_size=IDENTITY_BYTES, person=_ADAPTER)
    _tell(parted, namespace, adapter.encode())
    return (owner(namespace) or NOBODY) + parted.digest()


@lru_cache(maxsize=4096)
def root(space: bytes, fingerprint: str) -> bytes:
    """The parent of every first block: 16 bytes that depend on both arguments. `space` is from the function of that
    name (empty: the namespace that all share, without an adapter), `fingerprint` covers weights and dtype."""
    if len(space) > _KEY_BYTES:
        space = blake2b(space, person=_NAMESPACE).digest()
    keyed = blake2b(key=space, digest_size=IDENTITY_BYTES, person=_ROOT)
    _tell(keyed, fingerprint.encode(), b"")  # the empty end keeps the names of what lies on disks already
    return keyed.digest()


def _tell(digest: blake2b, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The identity of the block that holds `tokens` after `parent`: a full or a partly filled one. Raises OverflowError
    for a token outside 0 .. 2**32 - 1."""
    return extend_packed(parent, _packed(tokens))


def extend_packed(parent: bytes, packed: bytes) -> bytes:
    """Do what `extend` does for tokens that are packed already: four bytes each, little-endian."""
    block = _BLOCK.copy()
    block.update(parent + packed)
    return block.digest()


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Identities of a sequence's full blocks, in order; a partly filled last one is left out. Pieces of `PIECE_BLOCKS`
    that were asked for lately are not hashed again: of a chat's next turn, that is all but the new end."""
    packed = _packed(tokens)
    stride = block_size * TOKEN_BYTES
    end = len(packed) - len(packed) % stride
    identities: list[bytes] = []
    for at in range(0, end, PIECE_BLOCKS * stride):
        parent = identities[-1] if identities else root
        piece = packed[at : min(at + PIECE_BLOCKS * stride, end)]
        hashed = _piece if len(piece) == PIECE_BLOCKS * stride else _hasher
        identities.extend(hashed(parent, piece, stride))
    return identities


def hash_piece(parent: bytes, packed: bytes, stride: int) -> tuple[bytes, ...]:
    """The hasher, unless there is a sooner one."""
    identities = []
    new = _BLOCK.copy
    for start in range(0, len(packed), stride):
        block = new()
        block.update(parent + packed[start : start + stride])
        parent = block.digest()
        identities.append(parent)
    return tuple(identities)


_hasher: Hasher = hash_piece


def hash_with(hasher: Hasher) -> None:
    """Let `hasher` name the blocks of this process: as `hash_piece` does, and sooner (`engine/native_identity.py`)."""
    global _hasher
    _hasher = hasher


@lru_cache(maxsize=2048)
def _piece(parent: bytes, packed: bytes, stride: int) -> tuple[bytes, ...]:
    """At most 9 MB for blocks of 16 tokens."""
    return _hasher(parent, packed, stride)


def blocks(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Identities of all blocks that `tokens` fill, a partly filled last one included."""
    identities = chain(root, tokens, block_size)
    if rest := tokens[len(identities) * block_size :]:
        identities.append(extend(identities[-1] if identities else root, rest))
    return identities


def in_group(ident: bytes, group: int) -> bytes:
    """The identity of what a layer group (`engine.kv.groups`) has of the block `ident`; the first group has its own."""
    if not group:
        return ident
    return blake2b(ident + group.to_bytes(4, "little"), digest_size=IDENTITY_BYTES, person=_GROUP).digest()


def _packed(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":  # peers of either byte order must agree
        words.byteswap()
    return words.tobytes()
