"""Refuses at once a request that by prediction cannot end before its caller's deadline. Pure: time is an argument.

    line                                requests before it · time between two that workers took of late
    + first token                       queue, prompt, move and pressure of the cheapest workers, by placement's terms
    + (tokens - 1) · s per token        of the quickest decode worker, at the rows that it has now and one more

Every term is the least that it may be: what a worker has not measured itself takes no time there, fitted factors only
make it shorter, the line is shared as by weight alone, and an answer has only as many tokens as nine of ten late ones
had. And a request is refused only when the sum is more than `router.deadline_margin` times what is left. So a poor
prediction lets in what will be late, rather than refuse what would not be. A request whose caller has named no deadline
is never refused here; nor one that comes while the router holds no other, so that workers measure again, however poor
the figures are by which all are refused.
"""

from collections import deque

from engine.messages import Fault
from engine.types import FinishReason
from router.config import RouterConfig
from router.core.call import Call
from router.core.call_table import CallTable
from router.core.events import Fail, Submit
from router.core.placement import Placer
from router.core.waiting_queue import WaitingQueue

ANSWERS = 256
"""Answers of late whose lengths are known."""
FEWEST_ANSWERS = 32
"""Below so many nothing is known of the next one's length."""


class DeadlineGate:
    """The router core owns it."""

    # Mutable state: the lengths of the latest answers, in tokens.

    def __init__(self, config: RouterConfig, table: CallTable, placer: Placer, queue: WaitingQueue) -> None:
        self._calls = table.calls
        self._margin = config.deadline_margin
        self._retry_after_s = config.retry_after_s
        self._placer = placer
        self._queue = queue
        self._lengths: deque[int] = deque(maxlen=ANSWERS)

    def __repr__(self) -> str:
        return f"DeadlineGate({len(self._lengths)} answers, margin {self._margin:g})"

    def answered(self, tokens: int) -> None:
        """An answer has ended well, after so many tokens."""
        self._lengths.append(tokens)

    def refusal(self, call: Call, event: Submit, now: float) -> Fail | None:
        """Return why `call`, which is new, is refused, with the time after which it may come again; None if it may be
        in time."""
        if event.least_tokens is None or call.deadline_s is None or not self._margin:
            return None
        if all(other is call for other in self._calls.values()):
            return None  # what it meets is measured
        first = self._placer.soonest(call, now)
        if first is None:
            return None
        left_s = call.deadline_s - now
        line_s = self._queue.wait_s(event.tenant, event.weight, call.record.priority, now)
        decode_s = (self._tokens(call, event.least_tokens) - 1) * first.s_per_token
        needed_s = line_s + first.first_token_s + decode_s
        if needed_s <= self._margin * left_s:
            return None
        told = f"the answer is predicted to take {needed_s:.2f} s; its deadline is in {max(left_s, 0.0):.2f} s"
        retry_after_s = max(self._retry_after_s, needed_s - left_s)
        fault = Fault("RESOURCE_EXHAUSTED", f"{told}: try later")
        return Fail(call.record.request, fault, FinishReason.REJECTED, retry_after_s, "deadline")

    def _tokens(self, call: Call, least: int) -> int:
        """Return how many tokens the answer will have, at the least."""
        if len(self._lengths) >= FEWEST_ANSWERS:
            usual = sorted(self._lengths)[len(self._lengths) // 10]
            least = max(least, min(usual, call.record.max_tokens))
        return max(least, 1)
