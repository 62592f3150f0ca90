"""Gives a preempted request its KV back: what each way costs, and the copies that swapping takes. Pure.

    preempted --computing is the cheaper, or host memory is full--> what is evicted meanwhile is computed again
              --swapping is--> its whole blocks are copied to host memory and kept there (`engine.kv.tiers.stashes`)

Ways: `pool`, computed on the prefill pool; `here`, computed here; `shared`, from a sample of its prompt that is fetched
at the same time; `swap`, from a lower tier.

Costs are seconds, all of them as measured here. Computing: from asking for KV to having it, per token, on the prefill
pool with its line and the transfer, or here. Swapping: per block, the copy to host memory, which is paid at once, and
the copy back, which is paid for what is gone from the device when the request comes back. What was never measured
counts as free, so that it is tried; each time that swapping is refused its price fades a little, so that it is tried
again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.scheduler.request import Preempted, Request
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import Stored
from engine.kv.tiers.cost import FADING
from engine.kv.tiers.stashes import Stashes
from engine.plan import mean
from worker.config import DecodeConfig


@dataclass(slots=True)
class Resumed:
    """A preempted request decodes again, `seconds` after it was preempted; the KV of `lost_tokens` was gone."""

    way: str
    lost_tokens: int
    seconds: float


class Swapping:
    """Mutable state: what is counted, and what `costs` and `stashes` own. Owner: the scheduler."""

    def __init__(self, config: DecodeConfig, kv: KVCacheManager) -> None:
        """Raises ValueError where swapping is asked for and there is no host tier."""
        if config.preemption == "swap" and kv.tiers is None:
            raise ValueError("decode.preemption: to swap takes a host tier (decode.tiers.host_bytes)")
        self.costs = KVCosts(kv.block_size)
        self.stashes = None if kv.tiers is None else Stashes(kv, kv.tiers)
        self.choices: Counter[str] = Counter()
        """Requests that had whole blocks to lose, by the way chosen to get them back: `swap` or `recompute`."""
        self.fallbacks: Counter[str] = Counter()
        """Swaps that came to nothing: host memory was `full`, a copy `failed`, or was not whole when it was `lost`."""
        self.ways: Counter[str] = Counter()
        """Preempted requests, by the way in which they came back."""
        self.resumed: list[Resumed] = []
        """Requests that came back, until the shell has counted them."""
        self.loaded_blocks = 0
        """Blocks of preempted requests that came back from a tier."""
        self.load_s = 0.0
        self._mode = config.preemption
        self._kv = kv

    def take_resumed(self) -> list[Resumed]:
        """Return those that came back since the last call."""
        taken, self.resumed = self.resumed, []
        return taken

    @property
    def under_way(self) -> int:
        """Requests whose copies have not ended."""
        return 0 if self.stashes is None else self.stashes.under_way

    @property
    def copied(self) -> dict[str, tuple[int, float]]:
        """Blocks to host memory and back, and the seconds that they took."""
        stashes = self.stashes
        out = (0, 0.0) if stashes is None else (stashes.stored_blocks, stashes.store_s)
        return {"out": out, "in": (self.loaded_blocks, self.load_s)}

    @property
    def freeing(self) -> int:
        """Blocks that can be had when the copies under way have ended."""
        return 0 if self.stashes is None else self.stashes.freeing

    def out(self, request: Request, preempted: Preempted) -> None:
        """Copy what a request that gives its blocks away has computed, and committed, if it is to be swapped."""
        tokens = request.known
        if tokens < self._kv.block_size or (self.stashes and not self.stashes.is_possible(request.lease, tokens)):
            return
        choice = self._choose(request, tokens)
        self.choices[choice] += 1
        if choice == "swap":
            assert self.stashes is not None
            preempted.stash = self.stashes.put(request.lease, tokens)
            self.fallbacks["full"] += preempted.stash is None

    def _choose(self, request: Request, tokens: int) -> str:
        tiers = self._kv.tiers
        if self._mode != "auto" or tiers is None:
            return "swap" if self._mode == "swap" else "recompute"
        assert self.stashes is not None
        copies = self.stashes.missing(request.lease, tokens)
        here = not request.prefill.worker.name
        is_cheaper = self.costs.is_swap_cheaper(tokens, copies, tiers.cost.host_s, here)
        return "swap" if is_cheaper else "recompute"

    def looks_up(self, request: Request) -> bool:
        """Say if a tier is asked for its KV when it comes back."""
        return self._mode == "auto" or request.stash is not None

    def loaded(self, blocks: int, seconds: float, is_whole: bool) -> None:
        """Count blocks that a preempted request has back."""
        self.loaded_blocks += blocks
        self.load_s += seconds
        self.fallbacks["lost"] += not is_whole

    def arrived(self, request: Request, now: float) -> None:
        """Measure what it cost to have all of a request's KV here, and count it where it was preempted."""
        prefill, preempted = request.prefill, request.preempted
        if prefill.local_since is not None:
            self.costs.computed(request.known - prefill.local_from, now - prefill.local_since)
        else:
            self.costs.fetched(prefill.asked_tokens, now - prefill.asked)
        if preempted is not None:
            self.ways[preempted.way] += 1
            seconds = now - preempted.since
            self.resumed.append(Resumed(preempted.way, preempted.lost_tokens, seconds))
            request.preempted = None

    def drop(self, request: Request) -> None:
        """Let its copies go."""
        if request.preempted is not None and request.preempted.stash is not None:
            assert self.stashes is not None
            self.stashes.drop(request.preempted.stash)
            request.preempted.stash = None

    def stored(self, event: Stored, requests: Iterable[Request]) -> None:
        """Take note of copies that have ended. `requests`: all that there are."""
        assert self.stashes is not None
        if not event.error:
            self.costs.stored(event.blocks, event.seconds)
        failed = self.stashes.stored(event)
        for request in requests:
            if request.preempted is not None and request.preempted.stash in failed:
                request.preempted.stash = None
                self.fallbacks["failed"] += 1

    def check(self, requests: list[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        if self.stashes is not None:
            self.stashes.check()
            owned = {r.stash for r in requests if r.stash is not None}
            assert owned == {one for one in self.stashes.kept if not one.dropped}


class KVCosts:
    """Mutable state: the running means. Owner: the scheduler."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.pool_s = 0.0
        """A token from the prefill pool."""
        self.here_s = 0.0
        """A token computed here."""
        self.store_s = 0.0
        """A block copied to host memory."""
        self.lost_share = 1.0
        """The share of its tokens that a preempted request has lost when it comes back."""
        self.predicted = {"recompute": 0.0, "swap": 0.0}
        """Both predicted prices of the latest choice, in seconds."""

    def fetched(self, tokens: int, seconds: float) -> None:
        """Measure tokens from the prefill pool; a few of them say nothing, since asking costs as for many."""
        if tokens >= self._block_size:
            self.pool_s = mean(self.pool_s, seconds / tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Measure tokens computed here; a few of them say nothing, since they cost a step like many."""
        if tokens >= self._block_size:
            self.here_s = mean(self.here_s, seconds / tokens)

    def stored(self, blocks: int, seconds: float) -> None:
        self.store_s = mean(self.store_s, seconds / blocks)

    def resumed(self, tokens: int, lost_tokens: int) -> None:
        """Count a preempted request that comes back, and has lost so many of its tokens."""
        self.lost_share = mean(self.lost_share, lost_tokens / max(1, tokens))

    def tokens_per_s(self, here: bool) -> float:
        """Return how fast KV is had without a tier; slow where that was never measured, so that the tier is tried."""
        price = self.here_s or self.pool_s if here else self.pool_s or self.here_s
        return 1.0 / price if price else 1.0

    def is_swap_cheaper(self, tokens: int, copies: int, load_s: float, here: bool) -> bool:
        """Decide for a request of so many tokens, of which `copies` blocks are to be copied first; `load_s`: a block's
        way back; `here`: computing would not be done by the prefill pool."""
        blocks = tokens // self._block_size
        computing_s = 0.0
        if self.pool_s or self.here_s:
            computing_s = self.lost_share * tokens / self.tokens_per_s(here)
        swapping_s = copies * self.store_s + self.lost_share * blocks * load_s
        self.predicted = {"recompute": computing_s, "swap": swapping_s}
        if swapping_s <= computing_s:
            return True
        self.store_s *= 1 - FADING
        return False
