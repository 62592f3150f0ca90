"""When a decode step waits for rows that are about to join it. Pure.

A step of eight rows takes little longer than one of two, so rows that come one by one cost most when each step begins
at once. With a target for inter-token latency, a step waits while a prompt is being filled in by another worker, as
long as every stream still has its next token in time:

    due = the oldest of the streams' latest tokens + target - what the step will take - margin

What a step takes is measured by its rows (`decode_worker.scheduler.drafting.StepCosts`). The margin is what tokens of
held steps came too late by: it grows at once by that, and fades with each step that was in time. A handoff that takes
several times as long as they do is no longer about to land. Without a target, no step waits.

Where those that compute the prompts lie on the same cores (`itl_target_ms = "auto"`), a core that waits is one more for
them, and what a full batch saves is worth a bounded wait to everybody: the target is then AUTO_STEPS times what the
step will take, at most AUTO_MOST_S. It is nobody's promise: no token is counted as late, and there is no margin.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from decode_worker.scheduler.request import Request
from engine.plan import mean

NEVER = float("inf")
LATE = 3.0
"""A row that has been under way for so many times the mean is not waited for."""
FADING = 0.98
"""What is left of the margin after a step that was in time."""
MOST_MARGIN = 0.5
"""The margin is at most this share of the target."""
AUTO_STEPS, AUTO_MOST_S = 3.0, 0.1


class StepHold:
    """Mutable state: since when the next step is held and until when, the margin, how long rows take to land; what is
    counted, until the shell has taken it. Owner: the batch."""

    def __init__(self, target_s: float | Literal["auto"] | None) -> None:
        self.is_auto = target_s == "auto"
        self.target_s = None if isinstance(target_s, str) else target_s
        self.due = NEVER
        """When the step that is held begins at the latest; `NEVER`: none is held."""
        self.held_s = 0.0
        self.filled = self.expired = self.missed_tokens = 0
        """Steps that a row has joined, or ended the wait for; steps that were due; tokens behind the target."""
        self._since: float | None = None
        self._was_held = False
        self._margin_s = 0.0
        self._landing_s = 0.0

    def __repr__(self) -> str:
        target = "auto" if self.is_auto else self.target_s
        return f"StepHold(target {target}, due {self.due}, margin {self._margin_s * 1e3:.1f} ms)"

    def landed(self, seconds: float) -> None:
        """Note that a row has landed, so long after it was asked for."""
        self._landing_s = mean(self._landing_s, seconds)

    def is_about_to_land(self, waiting_s: float) -> bool:
        """Return True for a row that was asked for so long ago."""
        return not self._landing_s or waiting_s < LATE * self._landing_s

    def followed(self, request: Request, now: float) -> None:
        """Note that the next tokens of a stream are sent on."""
        before, request.told_s = request.told_s, now
        if self.target_s is not None and before is not None:
            self.missed_tokens += now - before > self.target_s

    def _target_of(self, step_s: float) -> float | None:
        """Return the target for a step that takes so long; None: it does not wait."""
        return min(AUTO_STEPS * step_s, AUTO_MOST_S) if self.is_auto else self.target_s

    def may_wait(self, step_s: float) -> bool:
        """Return True if there is any time between such a step and the one before."""
        target_s = self._target_of(step_s)
        return target_s is not None and step_s < target_s - self._margin_s

    def holds(self, streams: Sequence[Request], landing: bool, step_s: float, now: float) -> bool:
        """Return True if the next step, which is ready to begin and will take `step_s`, waits until `due`, or until it
        is asked about again. `landing`: rows are about to join it."""
        target_s = self._target_of(step_s)
        if target_s is not None and landing and streams and self.may_wait(step_s):
            oldest = min(r.accepted if r.told_s is None else r.told_s for r in streams)
            due = oldest + target_s - step_s - self._margin_s
            if now < due:
                self._since = now if self._since is None else self._since
                self.due = due
                return True
            self.expired += self._since is not None
        else:
            self.filled += self._since is not None
        self._was_held = self._since is not None
        if self._since is not None:
            self.held_s += now - self._since
        self.due, self._since = NEVER, None
        return False

    def stepped(self, streams: Iterable[Request], now: float) -> None:
        """Learn of a step that has ended, before its tokens are sent on."""
        if self.target_s is None:
            return
        gaps = [now - r.told_s for r in streams if r.told_s is not None]
        late_s = max(gaps, default=0.0) - self.target_s
        if late_s <= 0.0:
            self._margin_s *= FADING
        elif self._was_held:
            self._margin_s = min(self._margin_s + late_s, MOST_MARGIN * self.target_s)
