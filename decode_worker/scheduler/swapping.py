"""By which way a preempted request is to have its KV back, and the copies that swapping takes. Pure.

    preempted --computing is the cheaper, or host memory is full--> what is evicted meanwhile is computed again
              --swapping is--> its whole blocks are copied to host memory and kept there (`engine.kv.stashes`)
"""

from collections import Counter

from decode_worker.config import DecodeConfig
from decode_worker.scheduler.costs import Costs
from decode_worker.scheduler.request import Request
from engine.kv.manager import KVCacheManager
from engine.kv.stashes import Stashes
from engine.kv.tier_io import Stored


class Swapping:
    """Mutable state: what is counted, and what `costs` and `stashes` own. Owner: the scheduler."""

    def __init__(self, config: DecodeConfig, kv: KVCacheManager) -> None:
        """Raises ValueError where swapping is asked for and there is no host tier."""
        if config.preemption == "swap" and kv.tiers is None:
            raise ValueError("decode.preemption: to swap takes a host tier (decode.tiers.host_bytes)")
        self.costs = Costs(kv.block_size)
        self.stashes = None if kv.tiers is None else Stashes(kv, kv.tiers)
        self.choices: Counter[str] = Counter()
        """Of requests that had whole blocks to lose: `swap` or `recompute`."""
        self.fallbacks: Counter[str] = Counter()
        """Swaps that came to nothing: host memory was `full`, a copy `failed`, or was not whole when it was `lost`."""
        self.lifted_blocks = 0
        """Of preempted requests, back from a tier."""
        self.lift_s = 0.0
        self._mode = config.preemption
        self._kv = kv

    @property
    def under_way(self) -> int:
        """Requests whose copies have not ended."""
        return 0 if self.stashes is None else self.stashes.under_way

    @property
    def copied(self) -> dict[str, tuple[int, float]]:
        """Blocks to host memory and back, and the seconds that they took."""
        stashes = self.stashes
        out = (0, 0.0) if stashes is None else (stashes.stored_blocks, stashes.store_s)
        return {"out": out, "in": (self.lifted_blocks, self.lift_s)}

    @property
    def freeing(self) -> int:
        """Blocks that can be had when the copies under way have ended."""
        return 0 if self.stashes is None else self.stashes.freeing

    def out(self, request: Request) -> None:
        """It is preempted, and all that it has computed is committed: copy that, if it is to be swapped."""
        tokens = request.known if request.arrived else 0
        if not len(request.lease.path) or tokens < self._kv.block_size:
            return
        choice = self._choose(request, tokens)
        self.choices[choice] += 1
        if choice == "swap" and self.stashes is not None:
            request.stash = self.stashes.put(request.lease, tokens)
            self.fallbacks["full"] += request.stash is None

    def _choose(self, request: Request, tokens: int) -> str:
        stashes, tiers = self.stashes, self._kv.tiers
        if self._mode != "auto" or stashes is None or tiers is None:
            return "swap" if self._mode == "swap" else "recompute"
        copies = stashes.missing(request.lease, tokens)
        here = not request.prefill.name
        is_cheaper = self.costs.is_swap_cheaper(tokens, copies, tiers.cost.host_s, here)
        return "swap" if is_cheaper else "recompute"

    def looks_up(self, request: Request) -> bool:
        """Whether it may have its KV back from a tier."""
        return self._mode == "auto" or request.stash is not None

    def lifted(self, blocks: int, seconds: float, is_whole: bool) -> None:
        """A preempted request has so many blocks back."""
        self.lifted_blocks += blocks
        self.lift_s += seconds
        self.fallbacks["lost"] += not is_whole

    def drop(self, request: Request) -> None:
        """It needs its copies no longer."""
        if request.stash is not None:
            assert self.stashes is not None
            self.stashes.drop(request.stash)
            request.stash = None

    def stored(self, event: Stored, requests: list[Request]) -> None:
        """Copies have ended. `requests`: all that there are."""
        assert self.stashes is not None
        if not event.error:
            self.costs.stored(event.blocks, event.seconds)
        failed = self.stashes.stored(event)
        for request in requests:
            if request.stash in failed:
                request.stash = None
                self.fallbacks["failed"] += 1

    def check(self, requests: list[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        if self.stashes is not None:
            self.stashes.check()
            owned = {r.stash for r in requests if r.stash is not None}
            assert owned == {one for one in self.stashes.kept if not one.dropped}
