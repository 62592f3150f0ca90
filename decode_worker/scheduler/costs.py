"""What it costs a decode worker to have KV again, in seconds, all of it as measured here. Pure.

Computing: from asking for KV to having it, per token, on the prefill pool with its line and the transfer, or here.
Swapping: per block, the copy to host memory, which is paid at once, and the copy back, which is paid for what is gone
from the device when the request comes back. What was never measured counts as free, so that it is tried; each time that
swapping is refused its price fades a little, so that it is tried again.
"""

from engine.kv.tier_cost import FADING
from engine.measure import mean


class Costs:
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
        """Of the tokens of a preempted request, when it comes back."""
        self.predicted = {"recompute": 0.0, "swap": 0.0}
        """For the latest request that either could have been chosen for."""

    def fetched(self, tokens: int, seconds: float) -> None:
        """So many tokens have come from the prefill pool; a few of them say nothing, since asking costs as for many."""
        if tokens >= self._block_size:
            self.pool_s = mean(self.pool_s, seconds / tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """So many were computed here; a few of them say nothing, since they cost a step like many."""
        if tokens >= self._block_size:
            self.here_s = mean(self.here_s, seconds / tokens)

    def stored(self, blocks: int, seconds: float) -> None:
        self.store_s = mean(self.store_s, seconds / blocks)

    def resumed(self, tokens: int, lost_tokens: int) -> None:
        """A preempted request comes back, and has lost so many of its tokens."""
        self.lost_share = mean(self.lost_share, lost_tokens / max(1, tokens))

    def tokens_per_s(self, here: bool) -> float:
        """As fast KV is had without a tier; slow where that was never measured, so that the tier is tried."""
        price = self.here_s or self.pool_s if here else self.pool_s or self.here_s
        return 1.0 / price if price else 1.0

    def is_swap_cheaper(self, tokens: int, copies: int, load_s: float, here: bool) -> bool:
        """For a request of so many tokens, of which `copies` blocks are to be copied first; `load_s`: a block's way
        back; `here`: computing would not be done by the prefill pool."""
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
