"""Beam searches on one decode worker: every live hypothesis has a lease, forked where two go on from one. Pure.

    the prompt is here --> one hypothesis, which computes the prompt's last token again
    a step has run --> the search picks the next hypotheses: of those from one parent, the first goes on in its blocks,
                       the others fork it before the next step; whoever has no child lets its blocks go at once
    over, cancelled, preempted --> all leases but the request's own are let go

What hypotheses have in common is one set of blocks; only a boundary block is copied. Nothing is said before the search
is over, so one that lost its blocks, or its worker, begins again from its prompt: the same search finds the same
answers. The request's own lease is always that of the first hypothesis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from decode_worker.scheduler.request import Request, RequestState
from engine.beam import BeamSearch, BeamStep
from engine.kv.manager import KVCacheManager, Lease
from engine.plan import end_tokens, row_of
from engine.step import Candidates, Row
from engine.types import Beam, BlockId


@dataclass(slots=True, eq=False)
class _Hypothesis:
    """`tokens` is the prompt with its output; all rows but the last one's are in the blocks, of `parent` or its own."""

    tokens: list[int]
    lease: Lease
    parent: "_Hypothesis | None" = None

    @property
    def known(self) -> int:
        return len(self.tokens) - 1


@dataclass(slots=True)
class _Live:
    search: BeamSearch
    hypotheses: list[_Hypothesis]
    drawn: list[Candidates] = field(default_factory=list)


class Beams:
    """Mutable state, all of it: the searches by request, and `forked`. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager, stop_ids: frozenset[int]) -> None:
        self.forked = 0
        """Hypotheses that began with another one's blocks."""
        self._kv = kv
        self._stop_ids = stop_ids
        self._live: dict[Request, _Live] = {}

    def begin(self, request: Request) -> None:
        """Begin its search: its prompt is here."""
        params, record = request.record.beams, request.record
        assert params is not None
        search = BeamSearch(params, record.max_tokens, end_tokens(record, self._stop_ids))
        first = _Hypothesis(list(request.tokens), request.lease)
        self._live[request] = _Live(search, [first])

    def wants(self, request: Request) -> list[tuple[Lease, int]]:
        """Return the blocks that the next step of its search needs beyond what is promised, by lease."""
        wants = []
        for one in self._live[request].hypotheses:
            short = self._kv.shortage(one.lease, len(one.tokens))
            if one.parent is not None and one.lease.to_share is None:
                short -= one.known // self._kv.block_size
            wants.append((one.lease, short))
        return wants

    def prepare(self, request: Request) -> None:
        """Make the forks: there is room."""
        for one in self._live[request].hypotheses:
            if one.parent is not None:
                self._kv.fork(one.parent.lease, one.lease, one.known)
                one.parent = None
                self.forked += 1

    def rows(self, request: Request) -> list[Row]:
        """Return a row for each hypothesis; to be called after `prepare`."""
        live, record, rows = self._live[request], request.record, list[Row]()
        live.drawn.clear()
        for one in live.hypotheses:
            self._kv.extend(one.lease, len(one.tokens))
            wanted = live.search.candidates
            self._kv.reach(one.lease, one.known, len(one.tokens))
            own = one.known, len(one.tokens), one.lease.blocks, self._stop_ids
            rows.append(row_of(record, one.tokens, *own, wanted, windows=one.lease.windows))
        return rows

    def leases(self, request: Request) -> list[Lease]:
        return [one.lease for one in self._live[request].hypotheses]

    def copies(self, request: Request) -> list[tuple[BlockId, BlockId]]:
        return [pair for one in self._live[request].hypotheses for pair in one.lease.copies]

    def complete(self, request: Request, candidates: Candidates) -> list[Beam] | None:
        """Take what came of one row, in order; the last one moves the search on. Return its answers at the end."""
        live = self._live[request]
        live.drawn.append(candidates)
        if len(live.drawn) < len(live.hypotheses):
            return None
        for one in live.hypotheses:
            self._kv.copied(one.lease)
            self._kv.commit(one.lease, one.tokens)
            self._kv.slide(one.lease, len(one.tokens))
        steps = live.search.advance(live.drawn)
        if live.search.is_over:
            assert request.record.beams is not None
            return live.search.answers[: request.record.beams.answers]
        self._follow(request, live, steps)
        return None

    def _follow(self, request: Request, live: _Live, steps: Sequence[BeamStep]) -> None:
        before, heirs = live.hypotheses, dict[int, _Hypothesis]()
        live.hypotheses = []
        for step in steps:
            heir = heirs.get(step.parent)
            if heir is None:
                parent = before[step.parent]
                parent.tokens.append(step.token)
                one = heirs[step.parent] = _Hypothesis(parent.tokens, parent.lease)
            else:
                tokens = heir.tokens.copy()
                tokens[-1] = step.token
                whole = (len(tokens) - 1) // self._kv.block_size
                lease = self._kv.promise(request.record.space, 0, to_share=whole)
                assert lease is not None
                one = _Hypothesis(tokens, lease, parent=heir)
            live.hypotheses.append(one)
        for at, childless in enumerate(before):
            if at not in heirs:
                self._kv.release(childless.lease)
        request.lease = live.hypotheses[0].lease

    def drop(self, request: Request) -> None:
        """End the search; what remains is the request's own lease."""
        live = self._live.pop(request, None)
        if live is not None:
            for one in live.hypotheses[1:]:
                self._kv.release(one.lease)

    def check(self, requests: Sequence[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        decoding = {r for r in requests if r.record.beams and r.state in (RequestState.READY, RequestState.RUNNING)}
        assert decoding == self._live.keys()
        for request, live in self._live.items():
            assert live.hypotheses[0].lease is request.lease
            assert all(not one.lease.released for one in live.hypotheses)
            outputs = [one.tokens[request.record.prompt_tokens :] for one in live.hypotheses]
            assert outputs == [one.ids for one in live.search.live]
