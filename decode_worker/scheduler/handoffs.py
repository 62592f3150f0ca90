"""The handoffs of one decode worker: which prefill worker fills which request's blocks, and what if it does not. Pure.

    CONNECTING --peer up--> HANDOFF --every block verified--> `KVReceived`
    HANDOFF --a chunk fails, the peer is lost or gives up--> FENCING --no copy of ours is left--> HANDOFF, next attempt
    CONNECTING, HANDOFF, FENCING --no use in trying again--> `Unserved`
    any --abandon--> FENCING --fenced--> `Freed`

What has landed is kept: the next attempt asks only for what is missing. A token that the prefill worker has named is
history by then: the next attempt's prompt includes it, and it is never drawn again. Nothing here frees a block: a lease
may be released only after `KVReceived` or `Freed`. `StartPrefill` leaves over the stream of `decode_worker/peer.py`.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from decode_worker.scheduler.events import (
    Command,
    ConnectPeer,
    Freed,
    FromPeer,
    FromSource,
    PeerDown,
    PeerUp,
    Unservable,
)
from decode_worker.scheduler.pace import Allowance
from decode_worker.scheduler.request import Request, RequestState
from engine import identity
from engine.identity import in_group
from engine.kv.groups import migrated, place
from engine.kv.manager import KVCacheManager
from engine.messages import Fault, FirstToken, Handoff, Offer, PeerAddress, PrefillFailed, StartPrefill
from engine.types import DrawnToken, Incarnation
from transfer.handoff.commands import Arrived, Broken, Emit, ExpectedBlock, Fenced, Received, Rows
from transfer.handoff.commands import Command as TransferCommand
from transfer.handoff.conversion import landed_blocks, landed_tokens, rows_by_block
from transfer.handoff.receiver import KVReceiver

MAX_ATTEMPTS = 4
"""Handoffs tried for one placement, or for what was preempted; then the decode worker prefills by itself."""
CALLERS_FAULT = frozenset({"INVALID_ARGUMENT", "DEADLINE_EXCEEDED"})
"""Error codes that any other prefill worker would give too."""
NO_ROOM = frozenset({"RESOURCE_EXHAUSTED", "OUT_OF_RANGE"})
"""Error codes of a worker whose line is full, or whose pool is too small: another may have room, or this one here."""

MAX_BEGUN_BLOCKS = 2048
"""Where those that a peer has come up for, or several peers, have as many blocks, the rest of them begin in the next
turns: to name so many takes about 10 ms."""


class KVReceived(msgspec.Struct, frozen=True):
    """Outcome: every block of the request's tokens is here and verified."""

    request: Request


class Unserved(msgspec.Struct, frozen=True):
    """Outcome: another prefill worker is needed; nothing of this one is under way any more."""

    request: Request


HandoffResult = Command | KVReceived | Unserved | Unservable | Freed


@dataclass(slots=True)
class Migrated:
    """One migration that ended, for the metrics. `block_bytes`: what travels of one block; 0: all of it."""

    outcome: str
    peer: str
    transport: str
    seconds: float
    blocks: int
    block_bytes: int


@dataclass(eq=False, repr=False)
class Handoffs:
    """Mutable state, all of it: `_open`, `_connecting`, `_peers`, what is counted, what is left of the turn's
    allowance, and what `receiver` owns. Owner: the scheduler."""

    kv: KVCacheManager
    receiver: KVReceiver
    incarnation: Incarnation
    """This worker's incarnation."""
    fingerprint: str
    vocab: int
    migrated: list[Migrated] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    _open: dict[Handoff, Request] = field(default_factory=dict)
    _connecting: list[Request] = field(default_factory=list)
    """Those whose peer is up by now begin in this turn, or the next ones."""
    _peers: dict[PeerAddress, PeerUp] = field(default_factory=dict)
    """By every address that one was named by: of one life there may be several."""
    _allowance: Allowance = field(default_factory=lambda: Allowance(MAX_BEGUN_BLOCKS))

    def __len__(self) -> int:
        return len(self._open) + len(self._connecting)

    @property
    def has_put_off(self) -> bool:
        """True where some are to begin in the next turn."""
        return any(request.prefill.worker in self._peers for request in self._connecting)

    def tick(self, now: float) -> list[HandoffResult]:
        """Begin what was put off."""
        self._allowance.renew()
        return self._begin_connected(now)

    def _begin_connected(self, now: float) -> list[HandoffResult]:
        """Begin those whose peer is up, in their order, as many as this turn has time for."""
        results: list[HandoffResult] = []
        for request in [r for r in self._connecting if r.prefill.worker in self._peers]:
            if not self._allowance.takes(self.kv.blocks_for(len(request.tokens))):
                break
            self._connecting.remove(request)
            results += self.begin(request, now)
        return results

    def begin(self, request: Request, now: float) -> list[HandoffResult]:
        """Ask the request's prefill worker for what its lease does not have yet."""
        prefill = request.prefill
        prefill.was_full = False
        peer = self._peers.get(prefill.worker)
        if peer is None:
            request.move(RequestState.CONNECTING)
            self._connecting.append(request)
            return [ConnectPeer(prefill.worker)]
        record = request.record
        handoff = Handoff(record.request, request.placement, prefill.attempt, self.incarnation, peer.peer)
        request.move(RequestState.HANDOFF)
        prefill.handoff, prefill.first, prefill.handoff_tokens = handoff, None, len(request.tokens)
        prefill.sender_block_size = peer.block_size
        request.origin.transport, request.origin.block_bytes = peer.transport, peer.block_bytes
        self._open[handoff] = request
        self.kv.extend(request.lease, len(request.tokens), migrating=True)
        self.receiver.expect(handoff, self._targets(request))
        left_s = None if record.remaining_s is None else max(0.0, request.deadline - now)
        ours: dict[str, object] = {"context": b"", "emitted_logprobs": ()}
        record = msgspec.structs.replace(record, tokens=list(request.tokens), remaining_s=left_s, **ours)
        have = request.have_blocks * self.kv.block_size
        return [Emit(peer.peer, StartPrefill(handoff=handoff, record=record, have_tokens=have))]

    def _targets(self, request: Request) -> dict[int, ExpectedBlock]:
        """Return the sender's blocks still to land by index, each with the identity its bytes must have."""
        size, tokens, own = request.prefill.sender_block_size, request.tokens, self.kv.block_size
        root = identity.root(request.record.space, self.fingerprint)
        identities = identity.blocks(root, tokens, size)
        have = request.have_blocks * own
        if self.kv.groups:
            return self._grouped_targets(request, identities)
        rows = rows_by_block(len(tokens), have, size, own, request.lease.blocks)
        return {at: ExpectedBlock(rows[at], identities[at], min(size, len(tokens) - at * size)) for at in rows}

    def _grouped_targets(self, request: Request, identities: list[bytes]) -> dict[int, ExpectedBlock]:
        """The same where layers are kept in groups: by place, and both sides cut blocks alike."""
        size, total, tables = self.kv.block_size, len(request.tokens), request.lease.tables
        targets = {}
        for at, group in self._migrating(request, total):
            count = min(size, total - at * size)
            rows = (Rows(0, tables[group][at], 0, count),)
            targets[place(at, group, len(tables))] = ExpectedBlock(rows, in_group(identities[at], group), count)
        return targets

    def _migrating(self, request: Request, tokens: int) -> list[tuple[int, int]]:
        """Return index and group of each block that a handoff of so many tokens brings."""
        indices = range(request.have_blocks, self.kv.blocks_for(tokens))
        return migrated(self.kv.groups, indices, tokens, self.kv.block_size)

    def done(self, request: Request) -> None:
        """Forget its handoff: blocks and first token are both here, or nobody wants them."""
        if request.prefill.handoff is not None:
            self._open.pop(request.prefill.handoff, None)

    def filling(self) -> list[Request]:
        """Return requests whose blocks are being filled, and that go on when they are."""
        return [request for request in self._open.values() if request.state is RequestState.HANDOFF]

    def overdue(self, now: float) -> list[Request]:
        """Return requests that have ended, whose last blocks have not landed in their time."""
        late = [r for r in self._open.values() if now >= r.deadline and not r.prefill.abandoned]
        return [request for request in late if request.state is RequestState.ENDING]

    def abandon(self, request: Request, now: float) -> list[HandoffResult]:
        """Give its handoff up; `Freed` follows, at once or when the last copy of ours has ended."""
        handoff = request.prefill.handoff
        if request.state is RequestState.CONNECTING:
            self._connecting.remove(request)
            return [Freed(request)]
        assert handoff is not None
        request.prefill.abandoned = True
        return self._heed(self.receiver.stop(handoff), now)

    # events

    def handle(self, event: FromSource, now: float) -> list[HandoffResult]:
        """Handle offers, failures, lost and new peers, and receives that ended; first tokens come by `first_token`."""
        match event:
            case FromPeer(_, Offer() as message):
                return self._heed(self.receiver.offer(message), now)
            case FromPeer(_, PrefillFailed() as message):
                return self._failed(message, now)
            case Received(handoff, seq, error, seconds):
                if not error:
                    self._open[handoff].origin.migration_s += seconds
                return self._heed(self.receiver.received(handoff, seq, error), now)
            case PeerUp():
                self._peers[event.address] = event
                return self._begin_connected(now)
            case PeerDown():
                return self._peer_down(event, now)
        raise TypeError(f"not an event: {event!r}")

    def _peer_down(self, event: PeerDown, now: float) -> list[HandoffResult]:
        lost = {event.address, *(address for address, up in self._peers.items() if up.peer == event.peer)}
        self._peers = {address: up for address, up in self._peers.items() if up.peer != event.peer}
        results: list[HandoffResult] = []
        if event.peer is not None:
            results += self._heed(self.receiver.peer_lost(event.peer), now)
        for request in [r for r in self._connecting if r.prefill.worker in lost - self._peers.keys()]:
            self._connecting.remove(request)
            results.append(Unserved(request))
        for handoff, request in list(self._open.items()):
            if handoff.prefill == event.peer and request.state is RequestState.HANDOFF:
                # All landed, but the first token will never be named.
                del self._open[handoff]
                results.append(Unserved(request))
        return results

    def fault(self, message: FirstToken) -> Fault | None:
        """Return how its worker has failed where it names what no step could take in, or an account that cannot be."""
        request = self._open.get(message.handoff)
        if request is None:
            return None
        named = [one for token in message.drawn for one in _named(token)]
        told = [one for scored in message.prompt_logprobs for one in _named(scored)]
        are_ids = all(0 <= token < self.vocab for token in [*named, *told])
        are_spans = all(0.0 <= span_s < math.inf for span_s in (message.queue_s, message.run_s))
        if are_ids and are_spans and 0 <= message.cached_tokens <= request.prefill.handoff_tokens:
            return None
        self.dropped["first token: impossible"] += 1
        return Fault("INTERNAL", "the prefill worker names a first token, or an account of it, that cannot be")

    def first_token(self, message: FirstToken) -> Request | None:
        """Return the request whose first token this is; None if it comes late or twice."""
        request = self._open.get(message.handoff)
        if request is None:
            self.dropped["first token: unknown handoff"] += 1
            return None
        if request.state is not RequestState.HANDOFF or request.prefill.first is not None:
            why = "stopped" if request.prefill.first is None else "duplicate"
            self.dropped[f"first token: {why}"] += 1
            return None
        request.prefill.first = message
        if request.output_tokens == 0:
            request.origin.prefill_cached_tokens = message.cached_tokens
        return request

    def _failed(self, message: PrefillFailed, now: float) -> list[HandoffResult]:
        request = self._open.get(message.handoff)
        if request is None:
            self.dropped["prefill failed: unknown handoff"] += 1
            return []
        if request.state is RequestState.ENDING:
            return self.abandon(request, now)
        if request.state is not RequestState.HANDOFF:
            self.dropped["prefill failed: stopped"] += 1
            return []
        if message.fault.code in CALLERS_FAULT:
            return [Unservable(request, message.fault)]
        request.prefill.was_full = message.fault.code in NO_ROOM
        return self._retreat(request, now, elsewhere=True)

    def _heed(self, commands: Iterable[TransferCommand], now: float) -> list[HandoffResult]:
        """Act on what the receiver says of a handoff; everything else goes to the shell."""
        results: list[HandoffResult] = []
        for command in commands:
            match command:
                case Arrived(handoff):
                    results += self._arrived(self._open[handoff])
                case Broken(handoff, _):
                    request = self._open[handoff]
                    if request.state is RequestState.ENDING:
                        results += self.abandon(request, now)
                    else:
                        results += self._retreat(request, now, elsewhere=False)
                case Fenced(handoff, landed):
                    results += self._fenced(self._open.pop(handoff), landed, now)
                case _:
                    results.append(command)
        return results

    def _arrived(self, request: Request) -> list[HandoffResult]:
        blocks = len(self._migrating(request, request.prefill.handoff_tokens))
        request.origin.migrated_blocks += blocks
        self.note("ok", request, request.origin.migration_s, blocks)
        request.arrived = True
        request.known = request.prefill.handoff_tokens
        self.kv.landed(request.lease)
        return [Freed(request) if request.state is RequestState.ENDING else KVReceived(request)]

    def _retreat(self, request: Request, now: float, elsewhere: bool) -> list[HandoffResult]:
        """Fence this attempt. What follows is decided when that is done."""
        prefill = request.prefill
        assert prefill.handoff is not None
        prefill.elsewhere |= elsewhere
        request.move(RequestState.FENCING)
        if not self.receiver.is_expected(prefill.handoff):
            del self._open[prefill.handoff]
            return [Unserved(request)]
        return self._heed(self.receiver.stop(prefill.handoff), now)

    def _fenced(self, request: Request, landed: tuple[int, ...], now: float) -> list[HandoffResult]:
        prefill = request.prefill
        if prefill.abandoned:
            self.note("expired", request)
            return [Freed(request)]
        size, before, sender_size = self.kv.block_size, request.have_blocks, prefill.sender_block_size
        # The token after the last has to be computed from the last: its row is never taken as known.
        limit = min(len(request.tokens) - 1, prefill.handoff_tokens)
        if self.kv.groups:
            blocks = landed_blocks(frozenset(landed), before, self.kv.groups, prefill.handoff_tokens, size)
            request.have_blocks = min(blocks, limit // size)
            came = len(landed)
        else:
            request.have_blocks = landed_tokens(frozenset(landed), before * size, sender_size, limit) // size
            came = request.have_blocks - before
        request.origin.migrated_blocks += came
        prefill.attempt += 1
        elsewhere, prefill.elsewhere = prefill.elsewhere, False
        if elsewhere or prefill.tries >= MAX_ATTEMPTS or prefill.worker not in self._peers:
            self.note("failed", request, 0.0, came)
            return [Unserved(request)]
        self.note("retry", request, 0.0, came)
        return self.begin(request, now)

    def note(self, outcome: str, request: Request, seconds: float = 0.0, blocks: int = 0) -> None:
        """Count an attempt to fetch `request` from its prefill worker that has ended, after `blocks` blocks landed."""
        name, origin = request.prefill.worker.name, request.origin
        one = Migrated(outcome, name, origin.transport, seconds, blocks, origin.block_bytes)
        self.migrated.append(one)

    def take_migrated(self) -> list[Migrated]:
        """Return the attempts that have ended since the last call."""
        taken, self.migrated = self.migrated, []
        return taken

    def check(self) -> None:
        self.receiver.check()
        for handoff, request in self._open.items():
            assert request.prefill.handoff == handoff and not request.lease.released, request
        for request in self._connecting:
            assert request.state is RequestState.CONNECTING and not request.lease.released
        for handoff in self.receiver.unfinished:
            assert handoff in self._open, f"{handoff} is received for nobody"


def _named(token: DrawnToken) -> list[int]:
    """Return the ids that are said with a token, its own first."""
    return [token] if isinstance(token, int) else [token.token, *(other for other, _ in token.top)]
