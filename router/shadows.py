"""Policies that are asked on live traffic and do not act: what they would have chosen is counted.

Each has a thread of its own, with the very views that the acting policy had, after that one has chosen. So no request
waits for one: what comes too fast for a shadow is missed, and one that raises is not asked again; both are counted.
What they compute still takes the processor's time of this process.
"""

import logging
from collections.abc import Callable

from router.background import CLOSE_S, BackgroundQueue
from router.core.decisions import Decision, RepeatablePolicy, compare

log = logging.getLogger(__name__)


class ShadowPolicy:
    """Owner: the router's event loop, which calls `put`."""

    # Mutable state: the policy's, which its thread changes, and whether it has failed.

    def __init__(self, policy: RepeatablePolicy, counted: Callable[[str, str, float], None]) -> None:
        """`counted` is told of the policy's name, of what became of a decision (same, other, missed, failed), and by
        how many seconds the shadow's pair has the higher predicted cost; from either thread."""
        self._policy = policy
        self._counted = counted
        self._failed = False
        self._queue = BackgroundQueue(f"shadow {policy.name}", self._ask)

    def put(self, decision: Decision) -> None:
        """Have the shadow asked, unless there is nothing to choose. Never waits and never raises."""
        if decision.choice is None or self._failed:
            return
        if not self._queue.put(decision, decision.views):
            self._counted(self._policy.name, "missed", 0.0)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Ask about what waits, for at most `limit_s`, and end."""
        self._queue.close(limit_s)

    def _ask(self, decision: Decision) -> None:
        if self._failed:
            return
        try:
            other = compare(decision, self._policy.choose(decision.demand, decision.prefills, decision.decodes))
        except Exception:
            self._failed = True
            log.exception("the shadow policy %s failed, and is not asked again", self._policy.name)
            self._counted(self._policy.name, "failed", 0.0)
            return
        self._counted(self._policy.name, "same" if other.same else "other", other.cost_s)
