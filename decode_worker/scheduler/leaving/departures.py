"""Requests that a leaving decode worker has yielded: their KV is kept, and served, until nobody needs it. Pure.

    RUNNING --Yield--> departed --one more step--> complete: all rows are there, and the next token is drawn
    departed --Release, cancel, deadline, router lost, dead end--> released --read by nobody--> gone, its blocks cached
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
from engine.kv.manager import KVCacheManager
from engine.messages import Fault, Handoff, PrefillFailed, StartPrefill
from engine.step import DeadEnd
from engine.types import DrawnToken, Incarnation, RequestId
from transfer.handoff.commands import Command, Emit
from transfer.handoff.source import HandoffSource


@dataclass(slots=True, eq=False)
class Departure:
    """Mutable; owned by `Departures`. `drawn` follow the request's tokens, once they are known."""

    request: Request
    drawn: tuple[DrawnToken, ...] = ()
    asked: bool = False
    """Another worker has asked for it: that one knows of the request, and perhaps of these tokens."""
    released: bool = False
    is_dead_end: bool = False
    """No token can follow: there is no more to compute, and to who still reads it was said."""
    shelved: float | None = None
    """The time since which only lost readers keep it: quarantined, never written again."""
    serving: dict[Handoff, float] = field(default_factory=dict)
    """The time at which each handoff began to be served."""


class Departures:
    """Mutable state, all of it: the departures by request, and what `source` owns. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, fingerprint: str) -> None:
        self.source: HandoffSource[Departure] = HandoffSource(kv, fingerprint, self)
        self.sender = self.source.sender
        self._kv = kv
        self._departures: dict[RequestId, Departure] = {}

    def __len__(self) -> int:
        return len(self._departures)

    def add(self, request: Request) -> None:
        """Take over a request, and its lease, all of whose KV but the newest token's is here."""
        self._departures[request.record.request] = Departure(request)

    @property
    def incomplete(self) -> list[Request]:
        """Requests whose last row is to be computed by the next step, or a part of it."""
        return [
            d.request for d in self._departures.values() if not d.drawn and not d.is_dead_end and d.shelved is None
        ]

    def complete(self, request: Request, drawn: tuple[DrawnToken, ...], now: float) -> list[Command]:
        """Serve the rest of `request`, if anybody still wants it: the step has computed its last row, and `drawn`
        follow."""
        departure = self._departures.get(request.record.request)
        if departure is None or departure.request is not request:
            return []
        departure.drawn = drawn
        return [c for handoff in departure.serving for c in self._serve(departure, handoff, now)]

    def give_up(self, request: Request, why: DeadEnd, now: float) -> list[Command]:
        """Tell those who ask for `request` that no token can follow."""
        departure = self._departures.get(request.record.request)
        if departure is None or departure.request is not request:
            return []
        departure.is_dead_end = True
        commands = []
        for handoff in list(departure.serving):  # one that owes nothing is settled by it
            commands += self.source.fail(handoff, Fault(why.code, why.message, "constraint"))
        if self._departures.get(request.record.request) is departure:
            self._release(departure, now)
        return commands

    def release(self, name: RequestId, placement: int, now: float) -> None:
        """Let a departure go: nobody will ask for it again."""
        departure = self._departures.get(name)
        if departure is not None and departure.request.placement == placement:
            self._release(departure, now)

    def router_lost(self, link: int, now: float) -> list[Departure]:
        """Release what the router was to release. Return those that nobody else has, and whose clients may come back:
        they are the scheduler's again, with their leases."""
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

    # what the source asks for

    def start(self, peer: Incarnation, message: StartPrefill, now: float) -> list[Command]:
        departure = self._departures.get(message.handoff.request)
        why = _problem(departure, message)
        if departure is None or why:
            return [Emit(peer, PrefillFailed(message.handoff, Fault("UNAVAILABLE", why)))]
        self.source.open(peer, message, departure)
        departure.asked = True
        departure.serving[message.handoff] = now
        return self._serve(departure, message.handoff, now)

    def _serve(self, departure: Departure, handoff: Handoff, now: float) -> list[Command]:
        """Offer the blocks that are complete and not offered yet; with the last of them, name the next token."""
        if not self.sender.is_open(handoff):
            return []
        request = departure.request
        commands = self.source.offer(handoff, request.lease, request.known)
        if not departure.drawn:
            return commands
        cached_tokens = request.record.prompt_tokens
        run_s = now - departure.serving[handoff]
        return commands + self.source.finish(
            handoff, departure.drawn, queue_s=0.0, run_s=run_s, cached_tokens=cached_tokens
        )

    def unwanted(self, departure: Departure) -> None:
        """Do nothing: another reader may still ask."""

    def reader_lost(self, departure: Departure, now: float) -> None:
        self._shelve(departure, now)

    def settled(self, departure: Departure, handoff: Handoff) -> None:
        del departure.serving[handoff]
        self._let_go(departure)

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
            self.source.quarantined_since.append(departure.shelved)
        self._kv.commit(request.lease, request.tokens[: request.known], tail=True)
        self._kv.release(request.lease)

    def check(self) -> None:
        self.source.check()
        for departure in self._departures.values():
            request = departure.request
            assert not request.lease.released and departure.serving.keys() <= set(self.sender.unsettled)
            assert request.known <= len(request.tokens)
            assert departure.is_dead_end or (request.known == len(request.tokens)) == bool(departure.drawn)
            assert departure.serving or not departure.released, "kept for nobody"


def _problem(departure: Departure | None, message: StartPrefill) -> str:
    """Return why this worker cannot serve `message`, or nothing."""
    if departure is None or departure.shelved is not None:
        return "the request is not, or no longer, here"
    if departure.is_dead_end:
        return "no token can follow it"
    request, record = departure.request, message.record
    if record.tokens != request.tokens or record.space != request.record.space:
        return "its tokens are not those that were computed here"
    if not 0 <= message.have_tokens < len(request.tokens):
        return f"the decode side cannot have {message.have_tokens} tokens"
    return ""
