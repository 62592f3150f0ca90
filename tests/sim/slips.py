"""Small slips of the cores, planted one at a time as `tests.sim.bugs` does: a comparison off by one, a check left out.

Each is what a line that was changed by mistake would do, and hurts only where a rare fault meets it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from decode_worker.scheduler import batch
from decode_worker.scheduler.admission import Admission
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine import plan
from engine.beam import BeamSearch
from engine.kv.tiers.disk_index import DiskIndex
from engine.kv.tiers.host_index import HostIndex
from engine.messages import Tokens
from engine.step import Row
from engine.types import EarlyStopping, FinishReason
from prefill_worker.scheduler.scheduler import PrefillScheduler
from router.core import losses
from router.core.call import Call
from router.core.core import Router
from router.core.events import WorkerSaid
from router.core.recovery import RetryBudget
from transfer import digest
from transfer.handoff.receiver import KVReceiver
from transfer.host import pull
from transfer.host.pull import HostPullTransport

Patch = tuple[Any, str, Any]


def draw_off_by_one_after_recovery() -> list[Patch]:
    """A request that goes on elsewhere draws each position with the number of the one before it."""

    def draw_key(self: Row) -> tuple[int, int, int]:
        record = self.record
        return record.seed, record.sample_index, len(self.tokens) - (len(record.tokens) > record.prompt_tokens)

    return [(Row, "draw_key", property(draw_key))]


def draw_of_another_sample() -> list[Patch]:
    """Samples of one prompt draw with each other's numbers where they share its blocks."""
    return [(Row, "draw_key", property(lambda self: (self.record.seed, 0, len(self.tokens))))]


def gap_of_one_token() -> list[Patch]:
    """The router takes tokens behind a gap of one as the next ones."""
    tokens = Router._tokens

    def gullible(self: Any, call: Call, record: Tokens, *rest: Any) -> None:
        if record.index == len(call.emitted) + 1:
            record = msgspec.structs.replace(record, index=record.index - 1)
        tokens(self, call, record, *rest)

    return [(Router, "_tokens", gullible)]


def stale_placement_believed() -> list[Patch]:
    """The router takes what a worker says of an earlier placement for what it says of this one."""
    heard = Router._heard

    def gullible(self: Any, event: WorkerSaid, *rest: Any) -> None:
        record: Any = event.record
        call = self._calls.get(getattr(record, "request", None))
        if call is not None and record.placement < call.placement:
            event = WorkerSaid(event.worker, msgspec.structs.replace(record, placement=call.placement))
        heard(self, event, *rest)

    return [(Router, "_heard", gullible)]


def stale_order_believed() -> list[Patch]:
    """A decode worker does what a router says of an earlier placement to the request that it has."""
    return [(Admission, "current", lambda self, name, placement: self.requests.get(name))]


def retry_budget_ignored() -> list[Patch]:
    """Requests are placed again after losses, as often as there are any."""
    return [(RetryBudget, "take", lambda self, now: True)]


def max_placements_ignored() -> list[Patch]:
    """A request goes on after each loss, whatever the limit."""
    judge = losses.judge

    def patient(call: Call, config: Any, *rest: Any) -> Any:
        return judge(call, msgspec.structs.replace(config, max_placements=1_000), *rest)

    return [(losses, "judge", patient)]


def losses_forgotten() -> list[Patch]:
    """A request that is placed again has lost nothing yet."""
    rewrite = Call.rewrite

    def forgetful(self: Call) -> None:
        rewrite(self)
        self.losses = 0

    return [(Call, "rewrite", forgetful)]


def offer_of_other_tokens_taken() -> list[Patch]:
    """A block with another number of tokens than was asked for is received."""
    offer = KVReceiver.offer

    def easy(self: Any, message: Any) -> Any:
        receiving = self._handoffs.get(message.handoff)
        if receiving is not None:
            wanted = {at: block.tokens for at, block in receiving.expected.items()}
            blocks = [msgspec.structs.replace(b, tokens=wanted.get(b.index, b.tokens)) for b in message.blocks]
            message = msgspec.structs.replace(message, blocks=blocks)
        return offer(self, message)

    return [(KVReceiver, "offer", easy)]


def digest_of_the_first_head() -> list[Patch]:
    """A block's digest covers its first head only."""
    combine = digest.combine
    return [(digest, "combine", lambda heads, tokens, binding: combine(heads[:1], tokens, binding))]


def second_generation_check_left_out() -> list[Patch]:
    """A block that is written anew while it is read counts as read."""

    def copy(reading: Any, blocks: Iterable[Any]) -> None:
        for block in blocks:
            pull.expect(reading.source, [block])
            place = np.frombuffer(reading.landing.place(reading.ended), dtype=np.uint8)
            np.copyto(place, reading.source.read(block[0]))
            reading.landing.landed(reading.ended)
            reading.ended += 1

    return [(HostPullTransport, "_copy", staticmethod(copy))]


def leaves_with_departures_unread() -> list[Patch]:
    """A decode worker leaves while others still have to read the requests that it has yielded."""

    def is_idle(self: Any) -> bool:
        held = self._requests or len(self.prefills)
        return not (held or self.swapping.under_way or self.endings.orphans.is_untold)

    return [(DecodeScheduler, "is_idle", property(is_idle))]


def prefill_leaves_with_blocks_unread() -> list[Patch]:
    """A prefill worker leaves when all is computed, though readers still want it."""

    def is_idle(self: Any) -> bool:
        return not self.waiting_requests and not self.running_requests

    return [(PrefillScheduler, "is_idle", property(is_idle))]


def pinned_segment_evicted() -> list[Patch]:
    """Room on disk is made by removing a segment that is being read, before any other."""
    reserve = DiskIndex.reserve

    def ruthless(self: DiskIndex, *args: Any, **more: Any) -> Any:
        pins = {number: one.pins for number, one in self._segments.items()}
        for number in [number for number, count in pins.items() if count]:
            self._segments[number].pins = 0
            self._segments.move_to_end(number, last=False)
        try:
            return reserve(self, *args, **more)
        finally:
            for number, one in self._segments.items():
                one.pins = pins.get(number, 0)

    return [(DiskIndex, "reserve", ruthless)]


def pinned_slot_reused() -> list[Patch]:
    """A slot of host memory stays in line while it is read: the next block that is evicted is written over it."""

    pin, unpin = HostIndex.pin, HostIndex.unpin

    def lax(self: HostIndex, identity: bytes) -> Any:
        slot = pin(self, identity)
        self._join(identity)
        return slot

    def late(self: HostIndex, identity: bytes, **more: Any) -> bool:
        if identity not in self._slots or identity not in self._pins:
            self._pins.pop(identity, None)
            return False
        if identity in self._idle:
            del self._idle[identity]
            self.shares.occupy(self._owners[identity], identity)
        return unpin(self, identity, **more)

    return [(HostIndex, "pin", lax), (HostIndex, "unpin", late), (HostIndex, "check", lambda self: None)]


def end_before_it_may_come() -> list[Patch]:
    """A token that ends an answer may come one token too soon."""
    banned = plan.banned_tokens
    return [(plan, "banned_tokens", lambda record, output, ends: banned(record, output + 1, ends))]


def tokens_that_end_ignored() -> list[Patch]:
    """An answer goes on behind the tokens that its client has named."""
    reason = batch.finish_reason

    def deaf(record: Any, *rest: Any) -> Any:
        return reason(msgspec.structs.replace(record, stop_token_ids=()), *rest)

    return [(batch, "finish_reason", deaf)]


def end_called_the_limit() -> list[Patch]:
    """An answer whose last possible token ends it is said to have been cut off."""
    reason = batch.finish_reason

    def short(record: Any, tokens: int, *rest: Any) -> Any:
        return FinishReason.LENGTH if tokens >= record.max_tokens else reason(record, tokens, *rest)

    return [(batch, "finish_reason", short)]


def search_ends_with_an_answer_missing() -> list[Patch]:
    """A search is over with one answer less than it is wide."""
    is_worth = BeamSearch._is_worth_going_on

    def hasty(self: BeamSearch, log_prob: float, length: int) -> bool:
        return len(self.answers) + 1 != self._params.width and is_worth(self, log_prob, length)

    return [(BeamSearch, "_is_worth_going_on", hasty)]


def search_ends_although_better_may_come() -> list[Patch]:
    """A patient search reckons with answers of the length of now, and not of any."""
    is_worth = BeamSearch._is_worth_going_on

    def impatient(self: BeamSearch, *rest: Any) -> bool:
        kept, self._params = self._params, msgspec.structs.replace(self._params, early_stopping=EarlyStopping.HEURISTIC)
        try:
            return is_worth(self, *rest)
        finally:
            self._params = kept

    return [(BeamSearch, "_is_worth_going_on", impatient)]


SLIPS: tuple[Callable[[], list[Patch]], ...] = (
    draw_off_by_one_after_recovery,
    draw_of_another_sample,
    gap_of_one_token,
    stale_placement_believed,
    stale_order_believed,
    retry_budget_ignored,
    max_placements_ignored,
    losses_forgotten,
    offer_of_other_tokens_taken,
    digest_of_the_first_head,
    second_generation_check_left_out,
    leaves_with_departures_unread,
    prefill_leaves_with_blocks_unread,
    pinned_segment_evicted,
    pinned_slot_reused,
    end_before_it_may_come,
    tokens_that_end_ignored,
    end_called_the_limit,
    search_ends_with_an_answer_missing,
    search_ends_although_better_may_come,
)
