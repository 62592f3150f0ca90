"""Requests whose next blocks come out of a lower tier, into their own leases. Pure.

    taken, or room after preemption --a tier has the next blocks, and is the sooner--> LOADING --> handoff or LOCAL

Until the load has ended its blocks are written by the tier thread: they are RESERVED, and a request that is over keeps
them until then. What could not be loaded is had as if there were no tier.
"""

from dataclasses import dataclass

from decode_worker.scheduler.outcomes import Freed, Lifted, Result
from decode_worker.scheduler.request import Request, RequestState
from engine.kv.manager import KVCacheManager, Lease
from engine.kv.tier_io import Loaded, Place


@dataclass(frozen=True, slots=True)
class Found:
    """The blocks of a sequence from number `first` on that a tier has; pinned."""

    first: int
    identities: tuple[bytes, ...]
    places: tuple[Place, ...]


class Loading:
    """Mutable state: `_under_way`, by the number of its load. Owner: the scheduler."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._under_way: dict[int, tuple[Request, Found]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def find(
        self, lease: Lease, tokens: list[int], tokens_per_s: float | None
    ) -> Found | None:
        """The whole blocks of `tokens` that come next after those cached in a new lease and are loaded sooner than had
        at `tokens_per_s`; None: all that a tier has. To be followed by `begin`."""
        kv, tiers = self._kv, self._kv.tiers
        if tiers is None:
            return None
        limit, nodes = len(tokens) - 1, lease.path
        parent = nodes[-1].identity if nodes else kv.cache.root_identity(lease.namespace)
        found = tiers.find(parent, tokens, len(nodes) * kv.block_size, limit, kv.block_size)
        if found and tokens_per_s is not None:
            count = tiers.worthwhile(found, kv.block_size, tokens_per_s)
            tiers.counts.refused += count < len(found)
            found = found[:count]
        if not found:
            return None
        return Found(len(nodes), tuple(found), tiers.pin(found))

    def begin(self, request: Request, found: Found) -> None:
        """Load it into the request's lease, which has RESERVED blocks for it."""
        assert request.have_blocks == found.first
        assert self._kv.tiers is not None
        targets = request.lease.blocks[found.first : found.first + len(found.identities)]
        number = self._kv.tiers.load(found.places, found.identities, targets)
        self._under_way[number] = request, found
        request.move(RequestState.LOADING)

    def loaded(self, event: Loaded) -> list[Result]:
        """A load has ended. To be called after `Tiers.handle`."""
        request, found = self._under_way.pop(event.number)
        if request.state is RequestState.ENDING:
            return [Freed(request)]
        request.have_blocks += event.blocks
        is_whole = event.blocks == len(found.identities)
        return [Lifted(request, event.blocks, event.host_s + event.disk_s, is_whole)]

    def check(self, loading: set[Request]) -> None:
        """Recompute the invariants: `loading` are all requests in that state."""
        requests = [request for request, _ in self._under_way.values()]
        assert len(requests) == len(set(requests))
        assert loading == {r for r in requests if r.state is not RequestState.ENDING}
        for request, found in self._under_way.values():
            assert not request.lease.released
            assert len(request.lease.blocks) >= found.first + len(found.identities)
