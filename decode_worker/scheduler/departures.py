"""Requests that a leaving decode worker has yielded: their KV is kept, and served, until nobody needs it. Pure.

    RUNNING, READY --Yield--> departed --one more step--> complete: all rows are there, and the next token is drawn
    departed --Release, cancel, deadline, router lost--> released --read by nobody--> gone, its blocks cached
    departed --router lost, and nobody has asked for it--> it runs here again, if its client may come back

To whoever goes on with the request this worker is a prefill worker that has the whole prompt in its cache: it is asked
by `StartPrefill`, offers whole blocks at once and the rest after the step, and names the next token. It does not tell
that token to the router: the request's tokens are those of its new decode worker from then on. Should that one fail,
another may ask, until the router says `Release`. The source blocks obey the fence of every sender
(`transfer.handoff.sender`).

No cycle of waits can arise among workers that leave at the same time: a departure has all the blocks that it will ever
want (without them it does not depart), and a leaving worker takes no request: only readers wait for it, for bytes.
"""

from dataclasses import dataclass, field

from decode_worker.scheduler.request import Request
from engine import identity
from engine.kv.manager import KVCacheManager
from engine.messages import Fault, FirstToken, Handoff, Landed, PrefillFailed, StartPrefill, Stop
from engine.types import Incarnation, RequestId
from transfer.handoff.commands import (
    Broken,
    Command,
    Emit,
    FromReader,
    Posted,
    ReaderDead,
    ReaderEvent,
    ReaderLost,
    ReaderUp,
    Sent,
    Settled,
)
from transfer.handoff.sender import KVSender, outgoing


@dataclass(slots=True)
class _Serving:
    """One handoff of a departure."""

    since: float
    offered_blocks: int
    chunks: int = 0


@dataclass(slots=True, eq=False)
class Departure:
    """Mutable; owned by `Departures`. `token` follows the request's tokens, once it is drawn."""

    request: Request
    identities: list[bytes]
    token: int | None = None
    asked: bool = False
    """Whoever goes on has been here: it knows of the request, and perhaps the token."""
    released: bool = False
    shelved: float | None = None
    """Since when it is kept only because readers that are lost may still read: quarantined, never written again."""
    serving: dict[Handoff, _Serving] = field(default_factory=dict)


class Departures:
    """Mutable state, all of it: the departures by request and by open handoff, the readers, and what `sender` owns.
    Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, fingerprint: str) -> None:
        self.sender = KVSender()
        self._kv = kv
        self._fingerprint = fingerprint
        self._departures: dict[RequestId, Departure] = {}
        self._served: dict[Handoff, Departure] = {}
        self._readers: dict[Incarnation, bool] = {}
        self._let_go_since: list[float] = []

    def __len__(self) -> int:
        return len(self._departures)

    def add(self, request: Request) -> None:
        """Take over a request, and its lease, all of whose KV but the newest token's is here."""
        root = identity.root(request.record.namespace, self._fingerprint)
        identities = identity.blocks(root, request.tokens, self._kv.block_size)
        self._departures[request.record.request] = Departure(request, identities)

    @property
    def incomplete(self) -> list[Request]:
        """Those whose last row is to be computed by the next step."""
        return [d.request for d in self._departures.values() if d.token is None and d.shelved is None]

    def take_quarantined(self) -> list[float]:
        """Since when blocks were quarantined that were let go since the last call: one time per departure."""
        taken, self._let_go_since = self._let_go_since, []
        return taken

    def complete(self, request: Request, token: int, now: float) -> list[Command]:
        """The step has run: `request` has all its rows, and `token` follows."""
        departure = self._departures[request.record.request]
        departure.token = token
        return [c for handoff in list(departure.serving) for c in self._serve(handoff, now)]

    def release(self, name: RequestId, placement: int, now: float) -> None:
        """Nobody will ask for it again."""
        departure = self._departures.get(name)
        if departure is not None and departure.request.placement == placement:
            self._release(departure, now)

    def router_lost(self, link: int, now: float) -> list[Departure]:
        """Who was to say `Release` will not. Returns those that nobody else has, and whose clients may come back: they
        are the scheduler's again, with their leases."""
        back = []
        for departure in [d for d in self._departures.values() if d.request.link == link]:
            if departure.asked or not departure.request.record.context:
                self._release(departure, now)
            else:
                del self._departures[departure.request.record.request]
                back.append(departure)
        return back

    def tick(self, now: float) -> None:
        for departure in [d for d in self._departures.values() if now >= d.request.deadline]:
            self._release(departure, now)

    # what readers and the transfer thread say

    def handle(self, event: ReaderEvent | Posted | Sent, now: float) -> list[Command]:
        match event:
            case FromReader(peer, StartPrefill() as message):
                return self._start(peer, message, now)
            case FromReader(_, Landed() as message):
                return self._settle(self.sender.landed(message))
            case FromReader(_, Stop() as message):
                return self._settle(self.sender.stop(message))
            case Posted(handoff, seq, digests):
                return self._settle(self.sender.posted(handoff, seq, digests))
            case Sent(handoff, seq, error):
                return self._settle(self.sender.sent(handoff, seq, error))
            case ReaderUp(peer, reads_remotely, unfinished):
                self._readers[peer] = reads_remotely
                stops = [Stop(handoff) for handoff in self.sender.unclaimed(peer, unfinished)]
                return [c for stop in stops for c in self._settle(self.sender.stop(stop))]
            case ReaderLost(peer):
                self._readers.pop(peer, None)
                commands = self._settle(self.sender.peer_lost(peer))
                for departure in {self._served[h] for h in self.sender.quarantined}:
                    self._shelve(departure, now)
                return commands
            case ReaderDead(peer):
                return self._settle(self.sender.peer_dead(peer))
        raise TypeError(f"not an event: {event!r}")

    def _start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        handoff = message.handoff
        if handoff in self._served:
            return []  # every verb is idempotent on its handoff's name
        departure = self._departures.get(handoff.request)
        why = _problem(departure, message)
        if departure is None or why:
            return [Emit(peer, PrefillFailed(handoff, Fault("UNAVAILABLE", why)))]
        self.sender.open(handoff, self._readers[peer])
        self._served[handoff] = departure
        departure.asked = True
        departure.serving[handoff] = _Serving(now, message.have_tokens // self._kv.block_size)
        return self._serve(handoff, now)

    def _serve(self, handoff: Handoff, now: float) -> list[Command]:
        """Offer what is there and not offered yet; with the last of it, name the next token."""
        if not self.sender.is_open(handoff):
            return []
        departure = self._served[handoff]
        request, serving = departure.request, departure.serving[handoff]
        total, size = len(request.tokens), self._kv.block_size
        whole = departure.token is not None
        ready = self._kv.blocks_for(total) if whole else request.known // size
        commands: list[Command] = []
        if ready > serving.offered_blocks:
            first, serving.offered_blocks = serving.offered_blocks, ready
            serving.chunks += 1
            blocks = outgoing(self._kv, request.lease, departure.identities, total, first, ready)
            commands += self._settle(self.sender.offer(handoff, blocks))
        if departure.token is None:
            return commands
        said = FirstToken(
            handoff=handoff,
            token=departure.token,
            chunks=serving.chunks,
            queue_s=0.0,
            run_s=now - serving.since,
            cached_tokens=min(total - 1, request.record.prompt_tokens),
        )
        commands.append(Emit(handoff.decode, said))
        return commands + self._settle(self.sender.close(handoff))

    def _settle(self, commands: list[Command]) -> list[Command]:
        """What the sender says of a handoff is acted on here, where the leases are; the rest goes to the shell."""
        rest: list[Command] = []
        for command in commands:
            match command:
                case Settled(handoff):
                    departure = self._served.pop(handoff)
                    del departure.serving[handoff]
                    self._let_go(departure)
                case Broken(handoff, why):
                    fault = Fault("UNAVAILABLE", f"KV blocks could not be sent: {why}")
                    rest.append(Emit(handoff.decode, PrefillFailed(handoff, fault)))
                    if self.sender.is_open(handoff):
                        rest += self._settle(self.sender.close(handoff))
                case _:
                    rest.append(command)
        return rest

    def _release(self, departure: Departure, now: float) -> None:
        departure.released = True
        self._shelve(departure, now)
        self._let_go(departure)

    def _shelve(self, departure: Departure, now: float) -> None:
        lost = set(self.sender.quarantined)
        if departure.released and departure.serving and departure.serving.keys() <= lost:
            departure.shelved = now if departure.shelved is None else departure.shelved
            self._kv.quarantine(departure.request.lease)

    def _let_go(self, departure: Departure) -> None:
        if not departure.released or departure.serving:
            return
        request = departure.request
        del self._departures[request.record.request]
        if departure.shelved is not None:
            self._let_go_since.append(departure.shelved)
        self._kv.commit(request.lease, request.tokens[: request.known], tail=True)
        self._kv.release(request.lease)

    def check(self) -> None:
        """Recompute the invariants."""
        self.sender.check()
        assert self._served.keys() == set(self.sender.unsettled)
        for handoff, departure in self._served.items():
            assert handoff in departure.serving
        for departure in self._departures.values():
            request = departure.request
            assert not request.lease.released and departure.serving.keys() <= self._served.keys()
            assert request.known == len(request.tokens) - (departure.token is None)
            assert departure.serving or not departure.released, "kept for nobody"


def _problem(departure: Departure | None, message: StartPrefill) -> str:
    """Why this worker cannot serve `message`, or nothing."""
    if departure is None or departure.shelved is not None:
        return "the request is not, or no longer, here"
    request, record = departure.request, message.record
    if record.tokens != request.tokens or record.namespace != request.record.namespace:
        return "its tokens are not those that were computed here"
    if not 0 <= message.have_tokens < len(request.tokens):
        return f"the decode side cannot have {message.have_tokens} tokens"
    return ""
