"""Ledgers that are checked in slices, beside whatever goes on: they must not cry wolf."""

from engine.kv.cache_ledger import CacheLedger
from engine.kv.ledger import BlockLedger
from engine.kv.manager import KVCacheManager


class KVSlices:
    """Mutable state: where the check of each ledger is."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._ledgers = [BlockLedger(kv), CacheLedger(kv)]

    def go_on(self, slices: int = 3, limit: int = 1) -> None:
        """Check slices of this size, here the smallest that there are."""
        for _ in range(slices):
            for ledger in self._ledgers:
                ledger.check_some(limit)
