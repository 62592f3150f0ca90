"""Settles terms from two workers' hellos when they connect: that their KV blocks fit, and in which form they travel.

Protocol, model, weights, dtype, layers and their groups, the model's KV heads, head size and digest algorithm must be
equal: a difference is refused at once, with both values. Blocks of another size, or of a range of the heads, are
converted by the receiver (`transfer.host.repacked`). Of both shares of blocks that shall have a digest, the larger
holds. Blocks travel in 8 bits only where both ask for the same and store more. Both sides come to the same result.
"""

from typing import Final

import msgspec

from engine.kv.layout import DTYPE_BYTES, KVLayout
from engine.messages import Hello
from kernels.block_shape import BlockShape

XXH3, WP64 = "xxh3-64", "wp64"
ALGORITHMS = (XXH3, WP64)
AS_STORED: Final = "as_stored"
WIRES = (AS_STORED, "int8", "fp8")
"""The forms in which blocks may travel: as they are stored, or in 8 bits."""

WIRED = ("nccl", "tcp")
"""The transports on which blocks travel; on the others the receiver reads them where they lie."""


MAX_PEER_RANKS = 256
"""The most ranks with a pool that a peer may have: more than a host has devices. Each costs both sides work."""

TOLD_CHARACTERS = 400
"""The most that a refusal repeats of one value: it is logged, and a peer's may be as long as a whole message."""


class NegotiationError(Exception):
    """The two workers do not fit; the message names what differs, with both values."""


class Agreement(msgspec.Struct, frozen=True):
    """The outcome of two workers' hellos: the peer's layout, the share of blocks with a digest and its algorithm, and
    in which form blocks travel where there is a wire."""

    layout: KVLayout
    digest_share: float = 1.0
    digest: str = XXH3
    wire: str = AS_STORED


def negotiate(mine: Hello, theirs: Hello) -> Agreement:
    """Raises NegotiationError if blocks cannot move between the two."""
    ranks = max((len(endpoint.ranks) for endpoint in theirs.endpoints), default=0)
    if ranks > MAX_PEER_RANKS:
        raise NegotiationError(f"it has {ranks} ranks, and may have {MAX_PEER_RANKS}")
    _same("protocol", mine.protocol, theirs.protocol)
    _same("model", mine.info.model, theirs.info.model)
    _same("model fingerprint", mine.info.fingerprint, theirs.info.fingerprint)
    here, there = _layout(mine), _layout(theirs)
    _same("dtype", here.dtype, there.dtype)
    _same("layer groups", _groups(here), _groups(there))
    _same("number of layers", here.layers, there.layers)
    if here.groups:
        # A window's first block, which others cut elsewhere, would have rows that nobody sent.
        _same("block size (with several layer groups)", here.block_size, there.block_size)
    _same("number of KV heads", here.total_heads, there.total_heads)
    _same("head size", here.head_dim, there.head_dim)
    _same("digest", mine.digest, theirs.digest)
    if mine.digest not in ALGORITHMS:
        raise NegotiationError(f"there is no digest {mine.digest!r}")
    if not common_heads(here, there):
        raise NegotiationError(f"it holds {_heads(there)}, this worker {_heads(here)}")
    for hello in (mine, theirs):
        if hello.wire not in WIRES:
            raise NegotiationError(f"there is no form {_cut(hello.wire)!r} to travel in")
        if not 0.0 <= hello.digest_share <= 1.0:
            raise NegotiationError(f"{hello.digest_share} is no share of blocks to make digests of")
    wire = mine.wire if mine.wire == theirs.wire and here.dtype in DTYPE_BYTES else AS_STORED
    try:
        forms = [unit(*pair, form) for pair in ((here, there), (there, here)) for form in {AS_STORED, wire}]
    except ValueError as error:
        raise NegotiationError(f"these blocks cannot travel as {wire}: {error}") from error
    if mine.digest == WP64:
        try:
            for form in forms:
                digest_shape(form)
        except ValueError as error:
            raise NegotiationError(f"these blocks have no {WP64} digest: {error}") from error
    return Agreement(there, max(mine.digest_share, theirs.digest_share), mine.digest, wire)


def common_heads(one: KVLayout, other: KVLayout) -> range:
    """The model's KV heads that both hold."""
    return range(max(one.heads.start, other.heads.start), min(one.heads.stop, other.heads.stop))


def held_heads(unit: KVLayout, layout: KVLayout) -> slice:
    """Return which of the heads of `layout` those of `unit` are. Raises ValueError if some are not."""
    if unit.heads.start < layout.heads.start or unit.heads.stop > layout.heads.stop:
        raise ValueError(f"{unit} does not fit into {layout}")
    first = unit.first_head - layout.first_head
    return slice(first, first + unit.kv_heads)


def unit(sender: KVLayout, receiver: KVLayout, wire: str = AS_STORED) -> KVLayout:
    """The form in which a block travels, and over which its digest is made: the sender's block, of the heads that both
    hold. Raises ValueError if there are none, or they cannot be in that form."""
    common = sender.restricted(common_heads(sender, receiver))
    return common if wire == AS_STORED else msgspec.structs.replace(common, dtype=wire)


def digest_shape(layout: KVLayout) -> BlockShape:
    """A head's slice as `wp64` sees it. Raises ValueError where it is not whole 64-bit words."""
    return BlockShape(layout.layers, layout.block_size, layout.row_bytes, layout.scale_bytes > 0)


def narrow_bytes(layout: KVLayout, agreement: Agreement, transport: str) -> int:
    """Return the bytes that travel for a block of `layout` in the form that was agreed on; 0 where all of its bytes
    do."""
    if agreement.wire == AS_STORED or transport not in WIRED:
        return 0
    return msgspec.structs.replace(layout, dtype=agreement.wire).block_bytes


def check_whole(sender: KVLayout, receiver: KVLayout) -> None:
    """A handoff has one sender, which must hold every head that the receiver computes with. Raises NegotiationError."""
    if common_heads(sender, receiver) != receiver.heads:
        raise NegotiationError(f"it holds {_heads(sender)}, this worker needs {_heads(receiver)} from one sender")


def _layout(hello: Hello) -> KVLayout:
    try:
        return msgspec.convert(hello.layout, KVLayout)
    except msgspec.ValidationError as error:
        raise NegotiationError(f"{_cut(hello.layout)} is not a KV layout: {_cut(error)}") from error


def _same(what: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise NegotiationError(f"its {what} is {_cut(theirs)}, this worker's is {_cut(mine)}")


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= TOLD_CHARACTERS else f"{text[:TOLD_CHARACTERS]}... ({len(text)} characters)"


def _groups(layout: KVLayout) -> str:
    if not layout.groups:
        return "one (engine.layer_groups off, or layers that are all alike)"
    return ", ".join(f"{group.window or 'all'}: {','.join(map(str, group.layers))}" for group in layout.groups)


def _heads(layout: KVLayout) -> str:
    return f"KV heads {layout.heads.start} to {layout.heads.stop - 1} of {layout.total_heads}"
