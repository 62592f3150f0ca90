"""Records that nobody has said, or that say something else on their way: what a stale or mistaken peer might say.

Whoever is given one must drop it, or refuse what it offers: the run goes on as if it had never come.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from engine.messages import (
    Cancel,
    DecodeRecord,
    Ended,
    Finish,
    Landed,
    Offer,
    Record,
    Refused,
    Release,
    RequestStats,
    RouterRecord,
    Tokens,
    UsePrefill,
    Yielded,
    decode_worker_frame,
    encode,
)
from engine.types import FinishReason
from tests.sim.clock import Violation
from tests.sim.network import Stream

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.world import World

ROUTER_KINDS = ("early word", "stale word", "stale order")
"""A worker's tokens behind a gap; a worker's record, or a router's, of a placement that is over."""


class Forgeries:
    """Forges on the streams of routers, and knows the offers that nobody may take. Mutable state: these offers."""

    def __init__(self, world: "World", faults: "Faults") -> None:
        self._world = world
        self._faults = faults
        self._untrue: set[tuple[object, int]] = set()

    def meddle(self, stream: Stream, lane: int, data: bytes) -> Sequence[bytes]:
        """Return what travels on a router's stream in place of a frame."""
        frames = [data]
        if lane == 1:
            for record in decode_worker_frame(data):
                if isinstance(record, Tokens):
                    self._faults.saw("Tokens", stream.server, None)
                    frames[:0] = [frame for kind in ROUTER_KINDS for frame in self._forge(kind, stream, record)]
        return frames

    def _forge(self, kind: str, stream: Stream, said: Tokens) -> list[bytes]:
        fault = self._faults.takes(kind)
        if fault is None:
            return []
        self._faults.strikes(fault, self._world.has_handoffs(stream.server))
        rng, promises = self._world.rng, self._world.promises
        if kind == "stale order":
            order = encode([rng.choice(_stale_orders(said))])
            stream.inject(0, order)
            return []
        forged = encode([rng.choice(_early_words(said) if kind == "early word" else _stale_words(said))])
        promises.forged.add(forged)
        return [forged]

    def misstated(self, record: Record) -> Record:
        """Return an offer whose last block has another number of tokens than it was asked for."""
        if not isinstance(record, Offer) or not record.blocks:
            return record
        *rest, last = record.blocks
        tokens = last.tokens - 1 if last.tokens > 1 else last.tokens + 1
        self._untrue.add((record.handoff, record.seq))
        return msgspec.structs.replace(record, blocks=[*rest, msgspec.structs.replace(last, tokens=tokens)])

    def saw(self, record: Record) -> None:
        """Check that nobody acknowledges what was not offered as it was asked for."""
        if self._untrue and isinstance(record, Landed) and (record.handoff, record.seq) in self._untrue:
            raise Violation(f"{record.handoff}: chunk {record.seq} is taken, and was not what was asked for")


def _wrong(said: Tokens) -> list[int]:
    """Return other tokens, none of which ends an answer."""
    return [(token + 1) % 59 for token in said.ids]


def _early_words(said: Tokens) -> list[DecodeRecord]:
    return [Tokens(said.request, said.placement, said.index + 1, _wrong(said))]


def _stale_words(said: Tokens) -> list[DecodeRecord]:
    name, before = said.request, said.placement - 1
    stats = RequestStats(output_tokens=said.index)
    return [
        Tokens(name, before, said.index, _wrong(said)),
        Tokens(name, before, said.index, _wrong(said)),
        Ended(request=name, placement=before, reason=FinishReason.STOP, stats=stats),
        Yielded(request=name, placement=before, stats=stats),
        Refused(name, before, 1),
    ]


def _stale_orders(said: Tokens) -> list[RouterRecord]:
    name, before = said.request, said.placement - 1
    return [
        Cancel(name, before, FinishReason.CANCELLED),
        Finish(name, before, 1),
        Release(name, before),
        UsePrefill(name, before, None),
    ]
