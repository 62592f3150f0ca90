"""Where a request's time went, as the router saw it. Pure: every moment is an argument, in seconds.

The router measures `admit` (received to validated), `route` (to the first offer), `reserve` (to the
acceptance, re-offers included) and `stream_out` (the worker's end to the client's last event). The
decode worker reports the stages between. What none covers is `unattributed`, never folded in.

The worker's stages begin when it accepts, the router's `reserve` ends when it hears so. If the worker
accounts for more time than lies between the two messages heard here, the first was heard late by at
least the difference: that time is the worker's, and is taken off `reserve`. No clocks are compared.
"""

import msgspec

from engine.messages import RequestStats
from engine.types import FinishReason
from router.api import Finished

WORKER_STAGES = ("prefill_queue", "prefill_run", "migrate", "decode_queue", "decode_run")


class Timeline:
    """The marks of one request on the router's clock."""

    def __init__(self, received_s: float) -> None:
        self.received_s = received_s
        self.submitted_s: float | None = None
        self.offered_s: float | None = None
        self.accepted_s: float | None = None
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.gaps_s: list[float] = []
        self._last_token_s = 0.0

    def offered(self, now: float) -> None:
        """An offer left; only the first counts."""
        if self.offered_s is None:
            self.offered_s = now

    def tokens(self, count: int, now: float) -> None:
        """`count` tokens arrived together: the gap since the last ones is shared among them."""
        if self.first_token_s is None:
            self.first_token_s = now
            gap_s, count = 0.0, count - 1
        else:
            gap_s = (now - self._last_token_s) / count
        self.gaps_s.extend([gap_s] * count)
        self._last_token_s = now

    def stages(self, worker_stages: dict[str, float], now: float) -> dict[str, float]:
        """All nine stages and `unattributed`, which add up to the time since `received_s`."""
        marks = [self.received_s, self.submitted_s, self.offered_s, self.accepted_s]
        stages = {}
        for name, begin_s, end_s in zip(
            ("admit", "route", "reserve"), marks, marks[1:], strict=False
        ):
            known = begin_s is not None and end_s is not None
            stages[name] = end_s - begin_s if known else 0.0  # type: ignore[operator]
        stages |= {name: worker_stages.get(name, 0.0) for name in WORKER_STAGES}
        if self.accepted_s is not None and self.ended_s is not None:
            worker_s = sum(stages[name] for name in WORKER_STAGES)
            late_s = worker_s - (self.ended_s - self.accepted_s)
            stages["reserve"] -= min(stages["reserve"], max(0.0, late_s))
        stages["stream_out"] = now - self.ended_s if self.ended_s is not None else 0.0
        stages["unattributed"] = now - self.received_s - sum(stages.values())
        return stages

    def finished(
        self, reason: FinishReason, stats: RequestStats, stop_matched: str, now: float
    ) -> Finished:
        """The account of a request that ended well, closed at `now`."""
        gaps = sorted(self.gaps_s)
        first_s = self.first_token_s if self.first_token_s is not None else now
        stats = msgspec.structs.replace(stats, stages=self.stages(stats.stages, now))
        return Finished(
            reason=reason,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            cached_tokens=stats.prefill_cached_tokens,
            stats=stats,
            ttft_s=first_s - self.received_s,
            itl_mean_s=sum(gaps) / len(gaps) if gaps else 0.0,
            itl_p99_s=gaps[-(-99 * len(gaps) // 100) - 1] if gaps else 0.0,
            e2e_s=now - self.received_s,
            stop_matched=stop_matched,
        )
