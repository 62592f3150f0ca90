"""Measures where a request's time went, as the router saw it. Pure: every moment is an argument, in seconds.

The router measures `admit` (received to validated), `route` (to the first offer), `reserve` (to the
acceptance, re-offers included) and `stream_out` (the worker's end to the client's last event). The
decode worker reports the stages between. What none covers is `unattributed`, never folded in.

A request whose decode worker was lost is routed and reserved again, and both add to what they had.
What it did between acceptance and loss only the lost worker knew: that time is `unattributed`. One
that moved off a leaving worker brings along what that worker reports.

What only an earlier router had measured of an adopted request is `unattributed` too. When its first token came is not
known unless it came here: `ttft_s` is 0, and gaps between tokens count from the adoption.

A worker's stages begin when it accepts, the router's `reserve` ends when it hears so. If the worker
accounts for more time than lies between that message and its last one, the yield or the end, the first
was heard late by at least the difference: that time is the worker's, and is taken off the `reserve` of
that placement. An adopted request was received earlier by as much: the age that its worker told was old
when it was heard. So `unattributed` is never negative. No clocks are compared.
"""

from array import array

import msgspec

from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import Finished

WORKER_STAGES = ("prefill_queue", "prefill_run", "migrate", "decode_queue", "decode_run")


class Timeline:
    """The marks of one request on the router's clock."""

    # Mutable state: the marks of the placement under way (None: not reached), and the sums of earlier ones.

    __slots__ = (
        "_accepted_s", "_earlier", "_in_line_s", "_last_reserve_s", "_last_token_s", "_offered_s",
        "_replayed_tokens", "_seconds", "ended_s", "first_token_s", "gaps_s", "received_s",
    )  # fmt: skip

    def __init__(self, received_s: float) -> None:
        self.received_s = received_s
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.gaps_s = array("d")
        self._last_token_s: float | None = None
        self._replayed_tokens = 0
        self._seconds = dict.fromkeys(("admit", "route", "reserve"), 0.0)
        self._in_line_s: float | None = None
        self._offered_s: float | None = None
        self._accepted_s: float | None = None
        self._last_reserve_s = 0.0
        self._earlier = dict.fromkeys(WORKER_STAGES, 0.0)

    @classmethod
    def adopted(cls, age_s: float, tokens: int, now: float) -> "Timeline":
        """Begin with a request accepted `age_s` ago. Its `tokens` output tokens come again, and are not timed."""
        line = cls(now - age_s)
        line._accepted_s = line.received_s
        line._replayed_tokens = tokens
        return line

    def submitted(self, now: float) -> None:
        """The request was validated, and handed to the core."""
        self._seconds["admit"] = now - self.received_s
        self._in_line_s = now

    def offered(self, now: float) -> None:
        """An offer left; of one placement only the first counts."""
        if self._offered_s is None and self._in_line_s is not None:
            self._seconds["route"] += now - self._in_line_s
            self._offered_s = now

    def accepted(self, now: float) -> None:
        if self._offered_s is not None:
            self._last_reserve_s = now - self._offered_s
            self._seconds["reserve"] += self._last_reserve_s
        self._accepted_s = now

    def interrupted(self, now: float) -> None:
        """The decode worker was lost; the request stands in line once more."""
        self._in_line_s, self._offered_s, self._accepted_s = now, None, None

    def moved(self, stages: dict[str, float], now: float) -> None:
        """The decode worker has yielded it, with its own account; the request stands in line once more."""
        self._heard_late(stages, now)
        for name in WORKER_STAGES:
            self._earlier[name] += stages.get(name, 0.0)
        self.interrupted(now)

    def tokens(self, count: int, now: float) -> None:
        """`count` tokens arrived together: the gap since the last ones is shared among them."""
        if self._replayed_tokens:
            self._replayed_tokens = max(0, self._replayed_tokens - count)
            self._last_token_s = now
            return
        if count == 1 and self._last_token_s is not None:
            self.gaps_s.append(now - self._last_token_s)
            self._last_token_s = now
            return
        if self._last_token_s is None:
            self.first_token_s = now
            gap_s, count = 0.0, count - 1
        else:
            gap_s = (now - self._last_token_s) / count
        self.gaps_s.extend([gap_s] * count)
        self._last_token_s = now

    def _heard_late(self, worker_stages: dict[str, float], heard_s: float) -> None:
        """Give the time by which the acceptance was heard late to the worker, whose last word came at `heard_s`."""
        if self._accepted_s is None:
            return
        worker_s = sum(worker_stages.get(name, 0.0) for name in WORKER_STAGES)
        late_s = max(0.0, worker_s - (heard_s - self._accepted_s))
        reserve_s = min(self._last_reserve_s, late_s)
        self._seconds["reserve"] -= reserve_s
        self._last_reserve_s -= reserve_s
        self._accepted_s -= late_s
        if self._offered_s is None:  # it was adopted there
            self.received_s -= late_s

    def _stages(self, worker_stages: dict[str, float], now: float) -> dict[str, float]:
        """Return all nine stages and `unattributed`, which add up to the time since `received_s`."""
        if self.ended_s is not None:
            self._heard_late(worker_stages, self.ended_s)
        stages = dict(self._seconds)
        stages |= {name: self._earlier[name] + worker_stages.get(name, 0.0) for name in WORKER_STAGES}
        stages["stream_out"] = now - self.ended_s if self.ended_s is not None else 0.0
        stages["unattributed"] = now - self.received_s - sum(stages.values())
        return stages

    def finished(self, reason: FinishReason, stats: RequestStats, stop_matched: str, now: float) -> Finished:
        """The account of a request that ended well, closed at `now`."""
        stats = msgspec.structs.replace(stats, stages=self._stages(stats.stages, now))
        gaps = sorted(self.gaps_s)
        first_s = self.first_token_s
        if first_s is None:
            first_s = now if self._last_token_s is None else self.received_s
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
