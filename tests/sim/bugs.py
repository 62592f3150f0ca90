"""Historical bugs, planted one at a time. The switch is here and nowhere else: each replaces a method while it is held.

Nothing in the simulator knows of them; `tests/sim/test_planted.py` shows how soon random schedules find each. The names
and the failures behind them are those of the engines' issue trackers: blocks reused on a timer, acknowledgements lost,
blocks freed twice, and so on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from decode_worker.scheduler import handoffs
from decode_worker.scheduler.batch import Batch
from decode_worker.scheduler.endings import Endings
from decode_worker.scheduler.events import Tell
from decode_worker.scheduler.handoffs import Handoffs
from decode_worker.scheduler.leaving.departures import Departures
from decode_worker.scheduler.request import RequestState
from decode_worker.scheduler.samples.beams import Beams
from decode_worker.scheduler.samples.forks import Forks
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.kv.groups import LayerGroup
from engine.kv.manager import KVCacheManager
from engine.kv.tiers import resuming
from engine.kv.tiers.stashes import Stashes
from engine.messages import Landed, Refused
from engine.step import DrawnRun, Row, accepted, run_of
from engine.types import FinishReason
from tests.sim.slips import SLIPS, Patch
from transfer import digest
from transfer.handoff.commands import Arrived, Disconnect, Emit
from transfer.handoff.conversion import rows_by_block
from transfer.handoff.migration import R
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender

Plant = Callable[[], list[Patch]]


def reuse_on_timeout() -> list[Patch]:
    """A silent peer is taken for dead: its blocks are reused while it may still read them."""

    def peer_lost(self: KVSender, peer: Any) -> Any:
        return [Disconnect(peer), *self._all(peer, "dead")]

    return [(KVSender, "peer_lost", peer_lost)]


def acknowledgement_lost() -> list[Patch]:
    """The receiver forgets to acknowledge the chunk that completes a handoff: the sender keeps its blocks for good."""
    received = KVReceiver.received

    def forgetful(self: KVReceiver, *args: Any) -> Any:
        commands = received(self, *args)
        if any(isinstance(c, Arrived) for c in commands):
            return [c for c in commands if not (isinstance(c, Emit) and isinstance(c.record, Landed))]
        return commands

    return [(KVReceiver, "received", forgetful)]


def cancel_between_prefill_and_decode() -> list[Patch]:
    """A cancel between the first token and the last block lets the blocks go while they still land."""
    end = Endings.end

    def hasty(self: Any, request: Any, reason: Any, now: float, *rest: Any, **more: Any) -> Any:
        is_named = request.state is RequestState.HANDOFF and request.prefill.first is not None
        if is_named and not request.arrived and reason is FinishReason.CANCELLED:
            self.prefills.handoffs.done(request)
            request.state = RequestState.READY
        return end(self, request, reason, now, *rest, **more)

    return [(Endings, "end", hasty)]


def double_free_on_retry() -> list[Patch]:
    """What a failed try had reserved is freed before the next try, and with the request once more."""
    fenced = Handoffs._fenced

    def twice(self: Any, request: Any, landed: Any, now: float) -> Any:
        if not request.prefill.abandoned and request.state is not RequestState.ENDING:
            for block in request.lease.blocks[request.have_blocks :]:
                self.kv.pool.release(block, False)
        return fenced(self, request, landed, now)

    return [(Handoffs, "_fenced", twice)]


def stale_name_accepted() -> list[Patch]:
    """The receiver compares request and placement only: what an earlier attempt or another life says is believed."""
    offer = KVReceiver.offer

    def gullible(self: KVReceiver, message: Any) -> Any:
        name = message.handoff
        for known in self._handoffs:
            if (known.request, known.placement) == (name.request, name.placement):
                message = msgspec.structs.replace(message, handoff=known)
        return offer(self, message)

    return [(KVReceiver, "offer", gullible)]


def zombie_writer() -> list[Patch]:
    """The receiver reports its blocks as fenced while its own copies into them still run."""
    fence, received = KVReceiver._fence, KVReceiver.received

    def at_once(self: KVReceiver, handoff: Any, receiving: Any) -> Any:
        if receiving.state is R.STOPPING:
            receiving.outstanding.clear()
        return fence(self, handoff, receiving)

    def shrug(self: KVReceiver, handoff: Any, *rest: Any) -> Any:
        return received(self, handoff, *rest) if handoff in self._handoffs else []

    return [(KVReceiver, "_fence", at_once), (KVReceiver, "received", shrug)]


def digest_not_bound_to_identity() -> list[Patch]:
    """A digest covers the bytes only: intact bytes of the wrong block pass."""
    return [(digest.Binding, "of", lambda self, identity, generation: b"")]


def reservation_deadlock() -> list[Patch]:
    """Instead of saying no, the decode worker holds what there is and waits for the rest; so does the next one."""
    place, tick = DecodeScheduler._place, DecodeScheduler.tick

    def waiters(kv: KVCacheManager) -> list[list[Any]]:
        return vars(kv).setdefault("_waiters", [])

    def hoard(kv: KVCacheManager, waiter: list[Any], wanted: int) -> None:
        held = sum(len(lease.blocks) for lease in waiter[2])
        more = min(kv.available, wanted - held - 1)
        if more > 0:
            lease = kv.acquire(b"", [0], match_limit=0, room_tokens=more * kv.block_size)
            waiter[2].append(lease)

    def greedy(self: Any, link: int, message: Any, now: float) -> Any:
        commands = place(self, link, message, now)
        if not any(isinstance(c, Tell) and isinstance(c.record, Refused) for c in commands):
            return commands
        waiter = [link, message, []]
        waiters(self.kv).append(waiter)
        hoard(self.kv, waiter, self.admission.blocks(message.record))
        return []

    def again(self: Any, now: float) -> Any:
        commands = list(tick(self, now))
        for waiter in list(waiters(self.kv)):
            link, message, leases = waiter
            wanted = self.admission.blocks(message.record)
            if self.kv.available + sum(len(lease.blocks) for lease in leases) >= wanted:
                waiters(self.kv).remove(waiter)
                for lease in leases:
                    self.kv.release(lease)
                commands += greedy(self, link, message, now)
            else:
                hoard(self.kv, waiter, wanted)
        return commands

    return [(DecodeScheduler, "_place", greedy), (DecodeScheduler, "tick", again)]


def duplicate_acknowledgement_counted() -> list[Patch]:
    """Acknowledgements are counted, not matched: one that comes twice stands for a chunk that is still being read."""
    landed = KVSender.landed

    def counted(self: KVSender, message: Landed) -> Any:
        sending = self._handoffs.get(message.handoff)
        if sending is not None and not sending.chunks[message.seq].reading:
            for seq, chunk in enumerate(sending.chunks):
                if chunk.posted and chunk.reading:
                    return landed(self, Landed(message.handoff, seq))
        return landed(self, message)

    return [(KVSender, "landed", counted)]


def indexed_before_landed() -> list[Patch]:
    """A prompt's blocks are found in the decode worker's cache before their bytes are there."""
    place = DecodeScheduler._place

    def early(self: Any, link: int, message: Any, now: float) -> Any:
        commands = place(self, link, message, now)
        request = self._requests.get(message.record.request)
        if request is not None and request.state in (RequestState.CONNECTING, RequestState.HANDOFF):
            self.kv.landed(request.lease)
            self.kv.commit(request.lease, request.tokens)
        return commands

    return [(DecodeScheduler, "_place", early)]


def departure_freed_while_read() -> list[Patch]:
    """A leaving worker frees the blocks of a request as soon as it goes on elsewhere, though they are still read."""
    let_go = Departures._let_go

    def hasty(self: Departures, departure: Any) -> None:
        if departure.request.record.request not in self._departures:
            return
        serving, departure.serving = departure.serving, {}
        let_go(self, departure)
        departure.serving = serving

    return [(Departures, "_let_go", hasty)]


def cached_rows_repacked() -> list[Patch]:
    """A block of another size is repacked whole: its first rows go into a block that was cached, and may be shared."""

    def whole(tokens: int, have: int, sender_size: int, *rest: Any) -> Any:
        return rows_by_block(tokens, have // sender_size * sender_size, sender_size, *rest)

    return [(handoffs, "rows_by_block", whole)]


def boundary_block_shared() -> list[Patch]:
    """A fork shares the prompt's last, partly filled block instead of copying it: samples write into each other."""
    fork = KVCacheManager.fork

    def lazy(self: KVCacheManager, parent: Any, child: Any, tokens: int) -> None:
        fork(self, parent, child, tokens)
        for source, target in child.copies:
            self._let_go(target)
            child.blocks[-1] = source
        child.copies = []

    return [(KVCacheManager, "fork", lazy)]


def promise_counts_shared_blocks() -> list[Patch]:
    """A fork is promised as if it shared what is left over of its prompt too: there is no room for its own copy."""

    def greedy(self: Forks, record: Any, room_tokens: int, spare: int = 0) -> Any:
        prompt = self._kv.blocks_for(record.prompt_tokens)
        return self._kv.promise(record.namespace, self._kv.blocks_for(room_tokens) - prompt, spare)

    return [(Forks, "promise", greedy)]


def hypotheses_outlive_their_search() -> list[Patch]:
    """A search that ends or gives way lets its own lease go, and those of its other hypotheses are nobody's."""

    def drop(self: Beams, request: Any) -> None:
        self._live.pop(request, None)

    return [(Beams, "drop", drop)]


def swapped_blocks_freed_at_once() -> list[Patch]:
    """A victim's blocks are had at once, while the copies to host memory still read them."""
    put = Stashes.put

    def hasty(self: Stashes, lease: Any, tokens: int) -> Any:
        stash = put(self, lease, tokens)
        if stash is not None and stash.stores:
            self._kv.release(stash.lease)
            stash.lease = self._kv.promise(lease.namespace, 0)
        return stash

    return [(Stashes, "put", hasty), (Stashes, "check", lambda self: None)]


def rejected_draft_cached() -> list[Patch]:
    """The KV of the first draft that was not drawn is taken for that of the token that was."""
    accepted = Batch._accepted

    def one_more(self: Batch, request: Any, row: Row, drawn: Any) -> int:
        return min(row.drafts, accepted(self, request, row, drawn) + 1)

    return [(Batch, "_accepted", one_more)]


def rejected_draft_told() -> list[Patch]:
    """The first draft that was not drawn is told in the place of the token that was."""
    complete = Batch.complete

    def credulous(self: Batch, plan: Any, drawn: Any) -> Any:
        told, results = list[Any](), iter(drawn)
        for row in plan.rows:
            if row.draw:
                told.append(next(results))
                if row.drafts and (count := accepted(row, run := run_of(told[-1]))) < row.drafts:
                    told[-1] = DrawnRun((*run[:count], row.tokens[count - row.drafts]))
        return complete(self, plan, told)

    return [(Batch, "complete", credulous)]


def planned_behind_drafts() -> list[Patch]:
    """The next step is planned as if all drafts of the one under way were drawn."""
    goes_on = Batch.goes_on

    def hasty(self: Batch) -> bool:
        counts = [step.drafts for step in self._under_way]
        for step in self._under_way:
            step.drafts = 0
        try:
            return goes_on(self)
        finally:
            for step, drafts in zip(self._under_way, counts, strict=True):
                step.drafts = drafts

    return [(Batch, "goes_on", hasty)]


def window_slides_too_far() -> list[Patch]:
    """A layer group's window lets a block go that the next token still sees, as chunks of prompts did elsewhere."""
    first_kept = LayerGroup.first_kept

    def later(self: LayerGroup, tokens: int, block_size: int) -> int:
        return min(first_kept(self, tokens, block_size) + 1, tokens // block_size)

    return [(LayerGroup, "first_kept", later)]


def tail_not_loaded() -> list[Patch]:
    """A prefix comes back from a lower tier without the windows' tails: what the first group has counts alone."""

    def nothing(*_: Any) -> list[tuple[int, int]]:
        return []

    return [(resuming, "_lacking", nothing)]



BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        reuse_on_timeout,
        acknowledgement_lost,
        cancel_between_prefill_and_decode,
        double_free_on_retry,
        stale_name_accepted,
        zombie_writer,
        digest_not_bound_to_identity,
        reservation_deadlock,
        duplicate_acknowledgement_counted,
        indexed_before_landed,
        departure_freed_while_read,
        cached_rows_repacked,
        boundary_block_shared,
        promise_counts_shared_blocks,
        hypotheses_outlive_their_search,
        swapped_blocks_freed_at_once,
        rejected_draft_cached,
        rejected_draft_told,
        planned_behind_drafts,
        window_slides_too_far,
        tail_not_loaded,
        *SLIPS,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Keep the bug `name` in the code inside this block."""
    patches = BUGS[name]()
    kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    for owner, attribute, changed in patches:
        setattr(owner, attribute, changed)
    try:
        yield
    finally:
        for owner, attribute, original in kept:
            setattr(owner, attribute, original)
