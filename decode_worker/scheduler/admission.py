"""With how much room a request is taken, and which requests never are. Pure.

A request is taken with blocks for its tokens and the promise of room for `growth_tokens` more. What it needs beyond is
found as it grows: where the pool is exhausted, somebody is preempted (`decode_worker.scheduler.preemption`). With
preemption off, the promise covers `max_tokens`, and only a search's further hypotheses are ever in want.
"""

from decode_worker.config import DecodeConfig
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Fault
from engine.plan import refusal
from engine.types import RequestRecord


class Admission:
    """Reads the pool, and takes leases from it; keeps nothing."""

    def __init__(
        self, config: DecodeConfig, kv: KVCacheManager, vocab: int, context_tokens: int
    ) -> None:
        self._kv = kv
        self._vocab = vocab
        self._context_tokens = context_tokens
        self._max_rows = config.max_batch
        # A lost handoff may have named a token, which the next one's prompt includes: its room must be there.
        growth = max(config.growth_tokens, MAX_ATTEMPTS)
        self.growth_tokens = context_tokens if config.preemption == "off" else growth

    def refusal(self, record: RequestRecord) -> Fault | None:
        """Why `record` could never be taken, if so."""
        fault = refusal(record, self._vocab, self._context_tokens)
        if fault is not None:
            return fault
        if self._most_blocks(record) > self._kv.pool.total:
            why = "prompt and answer do not fit the decode worker's pool"
            return Fault("OUT_OF_RANGE", why, "max_tokens")
        if record.beams is not None and record.beams.width > self._max_rows:
            why = f"a decode worker's step has {self._max_rows} rows"
            return Fault("INVALID_ARGUMENT", why, "beam_width")
        return None

    def _most_blocks(self, record: RequestRecord) -> int:
        """All that it may hold at one time: of hypotheses, what is the prompt's once, and the rest for each."""
        total = self._kv.blocks_for(record.prompt_tokens + record.max_tokens)
        if record.beams is None:
            return total
        shared = (record.prompt_tokens - 1) // self._kv.block_size
        return shared + record.beams.width * (total - shared)

    def room_tokens(self, record: RequestRecord, tokens: int) -> int:
        """How many tokens a request that has `tokens` is taken with room for."""
        return min(record.prompt_tokens + record.max_tokens, tokens + self.growth_tokens)

    def blocks(self, record: RequestRecord) -> int:
        """As `room_tokens`, in blocks."""
        return self._kv.blocks_for(self.room_tokens(record, len(record.tokens)))

    def acquire(
        self, record: RequestRecord, tokens: list[int], *, migrating: bool = True, spare: int = 0
    ) -> Lease | None:
        """A lease for `tokens`, prompt and output so far, that leaves `spare` blocks to others; None without room."""
        return self._kv.acquire(
            record.namespace,
            tokens,
            match_limit=len(tokens) - 1,
            room_tokens=len(tokens),
            grow_tokens=self.room_tokens(record, len(tokens)),
            migrating=migrating,
            spare=spare,
        )
