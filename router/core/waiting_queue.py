"""Offers of waiting requests to workers, from the head of the line.

The line is strictly first come, first served: a refused request keeps its turn, and small ones do not overtake it. A
worker that refused is not asked again before its next report, so re-offers come at the rate of reports and never spin.
A sample of a prompt is offered first to a worker that has another one. Pure: time is an argument.
"""

import msgspec

from engine.messages import Place
from engine.types import FinishReason, RequestId
from router.core.adoption import Adoptions
from router.core.call import Call, State
from router.core.call_table import Book
from router.core.cluster_view import Beliefs
from router.core.events import Command, Fail, SendPlace
from router.core.placement import Placer
from router.core.policy import Choice, Demand
from router.core.registry import ModelKey


class Offers:
    """Without state of its own."""

    def __init__(self, book: Book, beliefs: Beliefs, placer: Placer, adoptions: Adoptions) -> None:
        self._book = book
        self._beliefs = beliefs
        self._registry = beliefs.registry
        self._placer = placer
        self._adoptions = adoptions

    def advance(self, now: float, out: list[Command]) -> None:
        """Offer requests from the head of the line while some worker may have room."""
        book = self._book
        if book.has_aside and self._adoptions.is_settled(now):
            book.take_back()
        while (call := book.head()) is not None:
            request = call.record.request
            if self._adoptions.is_unsure(request, now):
                book.put_aside()
                continue
            if not self._offer(call, now, out):
                # It may have come while no worker was known; now that some are, it may be too large for each.
                fault = self._placer.impossible(call.record)
                if fault is None:
                    return
                book.forget(call, out)
                out.append(Fail(request, fault, FinishReason.REJECTED))
            book.next()

    def _offer(self, call: Call, now: float, out: list[Command]) -> bool:
        host, placed = self._beside(call, now)
        if placed is None:
            # Who keeps the KV of a request that was yielded to be placed elsewhere.
            source = None if call.source is None else self._registry.get(call.source[0])
            placed = self._placer.choose(call.record, call.chain, now, source)
        if placed is None:
            return False
        choice, demand, key = placed
        decode = self._registry.get(choice.decode.name)
        assert decode is not None
        call.move(State.OFFERED)
        call.placement = max(call.placement, call.highest) + 1
        call.key = key
        call.decode, call.decode_life = decode.name, decode.life
        call.believed_decode_blocks = choice.decode.cached_blocks
        request = call.record.request
        blocks = demand.blocks - choice.decode.cached_blocks
        self._registry.dispatched(call.decode, request, 0, blocks)
        record = call.record
        if call.deadline_s is not None:
            left_s = max(call.deadline_s - now, 0.0)
            record = msgspec.structs.replace(record, remaining_s=left_s)
        prefill = self._beliefs.use_prefill(call, choice.prefill)
        place = Place(
            record=record,
            placement=call.placement,
            prefill=prefill,
            losses=call.losses,
            fork_of=host,
        )
        out.append(SendPlace(call.decode, place, _reason(call, host, choice)))
        return True

    def _beside(
        self, call: Call, now: float
    ) -> tuple[RequestId | None, tuple[Choice, Demand, ModelKey] | None]:
        """Another sample of its prompt to share blocks with, and the place there."""
        if call.source is None:
            for host in self._book.groups.hosts(call):
                home = self._registry.get(host.decode)
                assert home is not None
                placed = self._placer.beside(call.record, home, host.prefill, now)
                if placed is not None:
                    return host.record.request, placed
        return None, None


def _reason(call: Call, host: RequestId | None, choice: Choice) -> str:
    """Why a placement is what it is: bound to where its KV is, without any prefill worker, or by the policy."""
    if host is not None or call.source is not None:
        return "pinned"
    return choice.reason if choice.prefill.name else "fallback"
