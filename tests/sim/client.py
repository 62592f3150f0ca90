"""The callers: each compares what it is given, as it comes, with the uninterrupted run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import Fault
from engine.types import Beam, FinishReason, RequestRecord, TokenLogprobs
from router.core.events import Complete
from tests.sim import grammar
from tests.sim.clock import Process, Violation
from tests.sim.uninterrupted import (
    expected_answers,
    expected_logprobs,
    expected_output,
    expected_prompt_logprobs,
    expected_reason,
)

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True)
class Client:
    """One caller. Fulfils `router.hub.Sink`."""

    world: "World"
    record: RequestRecord
    deadline_s: float | None = None
    cancel_at: float | None = None
    stop_after: int | None = None
    tokens_: list[int] = field(default_factory=list)
    want: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    want_logprobs: list[TokenLogprobs] = field(default_factory=list)
    began: bool = False
    left: bool = False
    adrift: bool = False
    """Whether its router died; it comes back, and goes on where it was."""
    kept_by: Process | None = None
    """The decode worker that ran it for the router that died, if both knew so."""
    outcome: str = ""
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.want = self._expected()
        self.want_logprobs = expected_logprobs(self.record, self.world.plan.windows)

    def _expected(self) -> list[int]:
        return expected_output(self.record, self.world.plan.windows)

    @property
    def _comes_to_nothing(self) -> bool:
        """Whether the whole answer ends before its end, since nothing may follow."""
        constraint = self.record.constraint
        if constraint is None or len(self.want) >= self.record.max_tokens:
            return False
        return grammar.is_dead_end(constraint, self.want)

    @property
    def name(self) -> str:
        return self.record.request

    def offered(self, now: float) -> None:
        pass

    def accepted(self, now: float) -> None:
        self.began = True

    def interrupted(self, now: float) -> None:
        self.world.note("interrupted, and placed again")
        self.world.promises.placed_again(self)

    def moved(self, stages: dict[str, float], now: float) -> None:
        self.world.note("request moved")

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        if self.outcome:
            raise Violation(f"{self.name}: tokens {ids} after its end ({self.outcome})")
        before = len(self.tokens_)
        self.tokens_ += ids
        if self.tokens_ != self.want[: len(self.tokens_)]:
            raise Violation(f"{self.name}: got {self.tokens_}, the uninterrupted run is {self.want}")
        self.logprobs += logprobs
        if list(prompt_logprobs) != ([] if before else expected_prompt_logprobs(self.record)):
            raise Violation(f"{self.name}: got {prompt_logprobs} of its prompt after {before} tokens")
        if self.logprobs != self.want_logprobs[: len(self.tokens_)]:
            raise Violation(f"{self.name}: got {self.logprobs}, the uninterrupted run says {self.want_logprobs}")
        if self.stop_after is not None and len(self.tokens_) >= self.stop_after:
            self.world.note("stop string found")
            return self.stop_after
        return None

    def completed(self, end: Complete, now: float) -> None:
        got, reason = self.tokens_, FinishReason.STOP
        if self.stop_after is not None and len(got) >= self.stop_after:
            got = got[: self.stop_after]
        elif got != self.want or self._comes_to_nothing:
            raise Violation(f"{self.name}: ended with {got}, the uninterrupted run is {self.want}")
        else:
            reason = expected_reason(self.record, got)
        if end.reason is not reason:
            raise Violation(f"{self.name}: {got} is said to have ended by {end.reason}, not {reason}")
        constraint = self.record.constraint
        if constraint is not None and not grammar.accepts(constraint, got):
            raise Violation(f"{self.name}: {got} does not keep its constraint")
        if end.stats.output_tokens != len(got):
            raise Violation(f"{self.name}: {end.stats.output_tokens} tokens counted, {len(got)} came")
        self._over(f"complete ({end.reason.value})", now)

    def failed(
        self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float
    ) -> None:
        if fault.code == "DEADLINE_EXCEEDED":
            if self.deadline_s is None or now < self.deadline_s - 1e-9:
                raise Violation(f"{self.name}: DEADLINE_EXCEEDED at {now:.3f}, due {self.deadline_s}")
        elif fault == Fault("INVALID_ARGUMENT", grammar.NOTHING_FOLLOWS, "constraint"):
            if self.tokens_ != self.want or not self._comes_to_nothing:
                raise Violation(f"{self.name}: {fault.message} behind {self.tokens_}; the whole is {self.want}")
            self.world.note("dead end told")
        elif self.name == self.world.plan.giant and fault.code in ("UNAVAILABLE", "OUT_OF_RANGE"):
            self.world.giant_failed(self, fault.message)
        elif fault.code != "UNAVAILABLE":
            raise Violation(f"{self.name}: {fault.code}: {fault.message}")
        else:
            self.world.unavailable(self, fault.message)
        self._over(fault.code, now)

    def leave(self) -> None:
        """The client goes away; nothing more may reach it."""
        if not self.outcome:
            self.left = True
            self._over("CANCELLED", self.world.clock.now)

    def router_lost(self, kept_by: Process | None) -> None:
        if self.outcome or self.adrift:
            return
        if self.record.context and self.began:
            self.adrift, self.kept_by = True, kept_by
            self.world.note("client adrift")
            self.world.clock.at(self.world.rng.uniform(0.001, 0.2), self._come_back)
        else:
            self._over("UNAVAILABLE", self.world.clock.now)

    def _come_back(self) -> None:
        """Ask the router of the time, until one has an answer."""
        world, now = self.world, self.world.clock.now
        if self.outcome:
            return
        if self.deadline_s is not None and now >= self.deadline_s:
            self._over("DEADLINE_EXCEEDED", now)
            return
        front = world.front
        if not front.process.alive or front.process.frozen or not front.hub.is_settled():
            world.clock.at(world.rng.uniform(0.01, 0.05), self._come_back)
            return
        self.adrift = False
        revived = front.revived.get(self.name)
        if revived is not None:
            world.note("client resumed")
            revived.read_on(now)
            front.check()
        else:
            world.lost(self)
            self._over("UNAVAILABLE", now)

    def _over(self, outcome: str, now: float) -> None:
        if self.outcome:
            raise Violation(f"{self.name}: ends twice: {self.outcome}, then {outcome}")
        self.outcome, self.ended_at = outcome, now
        self.world.ended(self)


@dataclass(slots=True)
class Searcher(Client):
    """The caller of a beam search: nothing comes before its end, then what an undisturbed search finds."""

    answers: Sequence[Beam] = ()

    def _expected(self) -> list[int]:
        return []

    def interrupted(self, now: float) -> None:
        Client.interrupted(self, now)
        self.world.note("search placed again")

    def tokens(
        self,
        ids: list[int],
        now: float,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> int | None:
        raise Violation(f"{self.name}: a search says {ids} before it is over")

    def completed(self, end: Complete, now: float) -> None:
        assert self.record.beams is not None
        want = expected_answers(self.record, self.world.plan.windows)[: self.record.beams.answers]
        self.answers = end.beams
        if list(end.beams) != want:
            raise Violation(f"{self.name}: found {end.beams}, the undisturbed search finds {want}")
        if end.stats.output_tokens != sum(len(beam.ids) for beam in want):
            raise Violation(f"{self.name}: {end.stats.output_tokens} tokens counted, {want} came")
        self.world.note("search complete")
        self._over(f"complete ({end.reason.value})", now)
