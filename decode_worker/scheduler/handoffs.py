"""The handoffs of one decode worker: which prefill worker fills which request's blocks, and what if it does not. Pure.

    CONNECTING --peer up--> HANDOFF --every block verified--> `Landed`
    HANDOFF --a chunk fails, the peer is lost or gives up--> FENCING --no copy of ours is left--> HANDOFF, next attempt
    CONNECTING, HANDOFF, FENCING --no use in trying again--> `Unserved`
    any --abandon--> FENCING --fenced--> `Freed`

What has landed is kept: the next attempt asks only for what is missing. A token that the prefill worker has named is
history by then: the next attempt's prompt includes it, and it is never drawn again. Nothing here frees a block: leases
belong to the scheduler, which may release one only after `Landed` or `Freed`.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from decode_worker.scheduler.events import ConnectPeer, PeerDown, PeerUp
from decode_worker.scheduler.outcomes import Freed, Hopeless, Landed, Result, Unserved
from decode_worker.scheduler.request import Migrated, Request, RequestState
from engine import identity
from engine.kv.manager import KVCacheManager
from engine.messages import FirstToken, Handoff, Offer, PrefillFailed, StartPrefill
from engine.types import Incarnation
from transfer.handoff.commands import (
    Arrived,
    Broken,
    Command,
    Emit,
    ExpectedBlock,
    Fenced,
    Received,
)
from transfer.handoff.conversion import landed_tokens, rows_by_block
from transfer.handoff.receiver import KVReceiver

MAX_ATTEMPTS = 4
"""Handoffs tried for one placement, or for what was preempted; then the decode worker prefills by itself."""
CALLERS_FAULT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "DEADLINE_EXCEEDED"})
"""What another prefill worker would answer as well."""


class Handoffs:
    """Mutable state, all of it: `_open`, `_connecting`, `_peers`, what is counted, and what `receiver` owns. Owner: the
    scheduler."""

    def __init__(
        self, kv: KVCacheManager, receiver: KVReceiver, incarnation: Incarnation, fingerprint: str
    ) -> None:
        self.receiver = receiver
        self.migrated: list[Migrated] = []
        self.dropped: Counter[str] = Counter()
        self._kv = kv
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._open: dict[Handoff, Request] = {}
        self._connecting: list[Request] = []
        self._peers: dict[str, PeerUp] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._connecting)

    def find(self, handoff: Handoff) -> Request | None:
        return self._open.get(handoff)

    def begin(self, request: Request, now: float) -> list[Result]:
        """Ask the request's prefill worker for what its lease does not have yet."""
        peer = self._peers.get(request.prefill.name)
        if peer is None or peer.address != request.prefill:
            request.move(RequestState.CONNECTING)
            self._connecting.append(request)
            return [ConnectPeer(request.prefill)]
        record = request.record
        handoff = Handoff(
            record.request, request.placement, request.attempt, self._incarnation, peer.peer
        )
        request.move(RequestState.HANDOFF)
        request.handoff = handoff
        request.first, request.transport = None, peer.transport
        request.sender_block_size, request.block_bytes = peer.block_size, peer.block_bytes
        self._open[handoff] = request
        self._kv.extend(request.lease, len(request.tokens), migrating=True)
        self.receiver.expect(handoff, self._targets(request))
        if len(request.tokens) > len(record.tokens):
            record = msgspec.structs.replace(record, tokens=list(request.tokens))
        left_s = None if record.remaining_s is None else max(0.0, request.deadline - now)
        record = msgspec.structs.replace(record, remaining_s=left_s, context=b"")
        have = request.have_blocks * self._kv.block_size
        return [Emit(peer.peer, StartPrefill(handoff=handoff, record=record, have_tokens=have))]

    def _targets(self, request: Request) -> dict[int, ExpectedBlock]:
        """The sender's blocks still to land by index, each with the identity its bytes must have."""
        size, tokens, own = request.sender_block_size, request.tokens, self._kv.block_size
        root = identity.root(request.record.namespace, self._fingerprint)
        identities = identity.blocks(root, tokens, size)
        have = request.have_blocks * own
        rows = rows_by_block(len(tokens), have, size, own, request.lease.blocks)
        return {
            at: ExpectedBlock(rows[at], identities[at], min(size, len(tokens) - at * size))
            for at in rows
        }

    def done(self, request: Request) -> None:
        """Blocks and first token are both here."""
        if request.handoff is not None:
            self._open.pop(request.handoff, None)

    def overdue(self, now: float) -> list[Request]:
        """Requests that have ended, whose last blocks have not landed in their time."""
        return [
            request
            for request in self._open.values()
            if request.state is RequestState.ENDING and not request.abandoned and now >= request.deadline
        ]

    def abandon(self, request: Request, now: float) -> list[Result]:
        """Want no more of it; `Freed` follows, at once or when the last copy of ours has ended."""
        if request.state is RequestState.CONNECTING:
            self._connecting.remove(request)
            return [Freed(request)]
        handoff = request.handoff
        if handoff is None or handoff not in self._open:
            return [Freed(request)]
        if not self.receiver.is_expected(handoff):
            del self._open[handoff]
            return [Freed(request)]
        request.abandoned = True
        return self._heed(self.receiver.stop(handoff), now)

    # events

    def peer_up(self, event: PeerUp, now: float) -> list[Result]:
        self._peers[event.address.name] = event
        ready = [r for r in self._connecting if r.prefill == event.address]
        self._connecting = [r for r in self._connecting if r.prefill != event.address]
        return [result for request in ready for result in self.begin(request, now)]

    def peer_down(self, event: PeerDown, now: float) -> list[Result]:
        known = self._peers.get(event.address.name)
        if known is not None and known.peer == event.peer:
            del self._peers[event.address.name]
        results: list[Result] = []
        if event.peer is not None:
            results += self._heed(self.receiver.peer_lost(event.peer), now)
        for request in [r for r in self._connecting if r.prefill == event.address]:
            self._connecting.remove(request)
            results.append(Unserved(request))
        for handoff, request in list(self._open.items()):
            if handoff.prefill == event.peer and request.state is RequestState.HANDOFF:
                # All landed, but the first token will never be named.
                del self._open[handoff]
                results.append(Unserved(request))
        return results

    def offer(self, message: Offer, now: float) -> list[Result]:
        return self._heed(self.receiver.offer(message), now)

    def received(self, event: Received, now: float) -> list[Result]:
        request = self._open.get(event.handoff)
        if request is not None and not event.error:
            request.migration_s += event.seconds
        return self._heed(self.receiver.received(event.handoff, event.seq, event.error), now)

    def first_token(self, message: FirstToken) -> Request | None:
        """The request whose first token this is, or None if it comes late or twice."""
        request = self._open.get(message.handoff)
        if request is None:
            self.dropped["first token: unknown handoff"] += 1
            return None
        if request.state is not RequestState.HANDOFF or request.first is not None:
            why = "stopped" if request.first is None else "duplicate"
            self.dropped[f"first token: {why}"] += 1
            return None
        request.first = message
        return request

    def failed(self, message: PrefillFailed, now: float) -> list[Result]:
        """The prefill worker gave up."""
        request = self._open.get(message.handoff)
        if request is None:
            self.dropped["prefill failed: unknown handoff"] += 1
            return []
        if request.state is RequestState.ENDING:
            return self.abandon(request, now)
        if request.state is not RequestState.HANDOFF:
            self.dropped["prefill failed: stopped"] += 1
            return []
        # What was preempted may have outgrown the prefill worker's pool: that is not the caller's fault.
        is_late = message.fault.code == "DEADLINE_EXCEEDED"
        if is_late or (message.fault.code in CALLERS_FAULT and request.preempted_at is None):
            return [Hopeless(request, message.fault)]
        return self._retreat(request, now, elsewhere=True)

    def _heed(self, commands: Iterable[Command], now: float) -> list[Result]:
        """What the receiver says of a handoff is acted on here; everything else goes to the shell."""
        results: list[Result] = []
        for command in commands:
            match command:
                case Arrived(handoff):
                    results += self._arrived(self._open[handoff])
                case Broken(handoff, _):
                    results += self._broken(self._open[handoff], now)
                case Fenced(handoff, landed):
                    results += self._fenced(self._open.pop(handoff), landed, now)
                case _:
                    results.append(command)
        return results

    def _arrived(self, request: Request) -> list[Result]:
        blocks = len(request.lease.blocks) - request.have_blocks
        request.arrived = True
        request.migrated_blocks += blocks
        self.note("ok", request, request.migration_s, blocks)
        return [Landed(request)]

    def _broken(self, request: Request, now: float) -> list[Result]:
        if request.state is RequestState.ENDING:
            return self.abandon(request, now)
        return self._retreat(request, now, elsewhere=False)

    def _retreat(self, request: Request, now: float, elsewhere: bool) -> list[Result]:
        """Fence this attempt. What follows is decided when that is done."""
        assert request.handoff is not None
        request.elsewhere |= elsewhere
        request.move(RequestState.FENCING)
        if not self.receiver.is_expected(request.handoff):
            del self._open[request.handoff]
            return [Unserved(request)]
        return self._heed(self.receiver.stop(request.handoff), now)

    def _fenced(self, request: Request, landed: tuple[int, ...], now: float) -> list[Result]:
        if request.abandoned or request.state is RequestState.ENDING:
            self.note("expired", request)
            return [Freed(request)]
        size, before = self._kv.block_size, request.have_blocks
        # The token after the last has to be computed from the last: its row is never taken as known.
        there = landed_tokens(
            frozenset(landed), before * size, request.sender_block_size, len(request.tokens) - 1
        )
        request.have_blocks = there // size
        landed_blocks = request.have_blocks - before
        request.migrated_blocks += landed_blocks
        request.attempt += 1
        elsewhere, request.elsewhere = request.elsewhere, False
        if elsewhere or request.tries >= MAX_ATTEMPTS or request.prefill.name not in self._peers:
            self.note("failed", request, 0.0, landed_blocks)
            return [Unserved(request)]
        self.note("retry", request, 0.0, landed_blocks)
        return self.begin(request, now)

    def note(
        self, outcome: str, request: Request, seconds: float = 0.0, blocks: int = 0
    ) -> None:
        """An attempt to fetch `request` from its prefill worker has ended, after `blocks` blocks had landed."""
        name = request.prefill.name
        self.migrated.append(
            Migrated(outcome, name, request.transport, seconds, blocks, request.block_bytes)
        )

    def check(self) -> None:
        self.receiver.check()
        for handoff, request in self._open.items():
            assert request.handoff == handoff and not request.lease.released, request
        for request in self._connecting:
            assert request.state is RequestState.CONNECTING and not request.lease.released
        for handoff in self.receiver.unfinished:
            assert handoff in self._open, f"{handoff} is received for nobody"
