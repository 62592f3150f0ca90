"""A request of a dead router at the one that came after it, until its client is back and from then on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.messages import Fault
from engine.types import FinishReason, TokenLogprobs
from router.core.events import Complete
from tests.sim.clock import Violation

if TYPE_CHECKING:
    from tests.sim.client import Client


class Revived:
    """Fulfils `router.hub.Sink` as a resumable stream does: keeps the output, and gives the client what it lacks."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: Complete | Fault | None = None
        self._outcome = FinishReason.ERROR
        self._is_read = False

    def offered(self, now: float) -> None:
        pass

    def accepted(self, now: float) -> None:
        pass

    def interrupted(self, now: float) -> None:
        self._client.interrupted(now)

    def moved(self, stages: dict[str, float], now: float) -> None:
        self._client.moved(stages, now)

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        client = self._client
        self._tokens += ids
        self._logprobs += logprobs
        if self._tokens != client.want[: len(self._tokens)]:
            raise Violation(f"{client.name}: adopted with {self._tokens}, not {client.want}")
        self._pass_on(now)
        stop = client.stop_after
        return stop if stop is not None and len(self._tokens) >= stop else None

    def replayed(self, ids: list[int], now: float, logprobs: Sequence[TokenLogprobs] = ()) -> int | None:
        return self.tokens(ids, now, logprobs)

    def completed(self, end: Complete, now: float) -> None:
        self._end = end
        self._pass_on(now)

    def failed(
        self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float
    ) -> None:
        self._end, self._outcome = fault, outcome
        self._pass_on(now)

    def read_on(self, now: float) -> None:
        """Come back as a client and read what was missed."""
        self._is_read = True
        self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        client = self._client
        if not self._is_read or client.outcome:
            return
        fresh = self._tokens[len(client.tokens_) :]
        if fresh:
            client.tokens(fresh, now, self._logprobs[len(client.tokens_) :])
        if isinstance(self._end, Complete):
            client.completed(self._end, now)
        elif self._end is not None:
            client.failed(self._end, self._outcome, None, now)
