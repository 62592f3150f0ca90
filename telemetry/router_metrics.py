"""Counts of a router: requests as their callers saw them, its own decisions, and the state of its workers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telemetry import buckets
from telemetry.families import QUEUE_TEXT, RUNNING_TEXT, ProcessMetrics
from telemetry.labels import (
    CONTINUATIONS,
    DECISION_REASONS,
    LOG_LINES,
    LOSSES,
    OUTCOMES,
    REFUSALS,
    ROLES,
    ROUTER_DROPPED_KINDS,
    SHADOW_COSTS,
    SHADOW_OUTCOMES,
    SLOS,
    STAGES,
    WORKER_STATES,
)


class WorkerView(NamedTuple):
    """One worker as the router sees it; `index_blocks` are those that it believes to be cached there."""

    peer: str
    role: str
    state: str
    index_blocks: int


class RouterMetrics(ProcessMetrics):
    """The families of a router. `slo_ttft_s` and `slo_itl_s` are the targets of `slo_requests_total`."""

    def __init__(
        self,
        model: str,
        worker: str = "router",
        *,
        policy: str = "",
        shadows: Sequence[str] = (),
        slo_ttft_s: float = 0.5,
        slo_itl_s: float = 0.05,
    ) -> None:
        super().__init__(model=model, pool="router", worker=worker)
        families = self.families
        self._slo_s = {"ttft": slo_ttft_s, "itl": slo_itl_s}
        families.info("router_config_info", "Always 1; settings are labels.", policy=policy)
        targets = families.gauge(
            "slo_target_seconds", "What slo_requests_total calls met.", slo=SLOS
        )
        for slo, target_s in self._slo_s.items():
            targets[slo].set(target_s)
        self._requests = families.counter(
            "requests_total", "Requests ended, by outcome.", outcome=OUTCOMES
        )
        self._ttft = families.histogram(
            "request_ttft_seconds", "Arrival to first output token.", buckets.TTFT_S
        )[()]
        self._itl = families.histogram(
            "request_itl_seconds", "Gaps between output tokens of one request.", buckets.ITL_S
        )[()]
        self._e2e = families.histogram(
            "request_e2e_seconds", "Arrival to the end of the answer.", buckets.E2E_S
        )[()]
        self._stages = families.histogram(
            "request_stage_seconds",
            "Time of a request in each stage; the stages add up to its end-to-end time.",
            buckets.STAGE_S,
            stage=STAGES,
        )
        self._slos = families.counter(
            "slo_requests_total",
            "Requests by whether they met a target: TTFT, or the mean gap between tokens.",
            slo=SLOS,
            met=("true", "false"),
        )
        self._decision = families.histogram(
            "router_decision_seconds", "Time to choose the workers.", buckets.DECISION_S
        )[()]
        self._decisions = families.counter(
            "router_decisions_total", "Placements, by main reason.", reason=DECISION_REASONS
        )
        self._logged = families.counter(
            "router_decision_log_lines_total", "Decisions for the log, by whether they are in it.", what=LOG_LINES
        )
        self._shadows = families.counter(
            "router_shadow_decisions_total",
            "Decisions that a shadow policy was to be asked about, by what became of them.",
            policy=shadows,
            what=SHADOW_OUTCOMES,
        )
        self._shadow_cost = families.counter(
            "router_shadow_cost_seconds_total",
            "Predicted cost of a shadow policy's pairs above that of the pairs taken, or below it.",
            policy=shadows,
            way=SHADOW_COSTS,
        )
        self._expected = families.counter(
            "router_expected_hit_tokens_total", "Prefix tokens expected to be cached."
        )[()]
        self._actual = families.counter(
            "router_actual_hit_tokens_total", "Prefix tokens that were reused."
        )[()]
        self._dropped = families.counter(
            "dropped_records_total", "Records ignored, by kind.", kind=ROUTER_DROPPED_KINDS
        )
        self._continued = families.counter(
            "request_continuations_total",
            "Requests that went on with other workers, by cause.",
            cause=CONTINUATIONS,
        )
        self._poisonous = families.counter(
            "requests_poisonous_total", "Requests refused because workers died of them."
        )[()]
        self._refused = families.counter(
            "requests_refused_total", "Requests that the line did not take, by why.", why=REFUSALS
        )
        self._lag = families.histogram(
            "event_loop_lag_seconds", "How late the event loop came round.", buckets.LAG_S
        )[()]
        self._queue = families.gauge("queue_depth", QUEUE_TEXT)[()]
        self._running = families.gauge("running_requests", RUNNING_TEXT)[()]
        self._states = families.gauge(
            "worker_state",
            "1 for the state that a worker is in.",
            peer=(),
            role=(),
            state=(),
        )
        self._pools = set(ROLES)
        self._shown: dict[tuple[str, str], WorkerView] = {}
        self._ready = families.gauge(
            "pool_ready_workers", "Workers that take requests.", role=ROLES
        )
        self._index = families.gauge(
            "router_index_blocks", "Blocks believed to be cached on a worker.", peer=()
        )
        self._lives = families.counter(
            "worker_lives_total", "Processes that a worker's name has had.", peer=(), role=()
        )
        self._losses = families.counter(
            "worker_losses_total", "Workers gone, by how.", peer=(), role=(), how=()
        )
        self._ejections = families.counter(
            "worker_ejections_total", "Workers that got no requests for a while, having failed.", peer=(), role=()
        )

    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: Sequence[float],
        e2e_s: float,
        stages: Mapping[str, float],
    ) -> None:
        """Count a request that ended. `ttft_s` is None if no token came; `stages` are seconds by stage name, and one
        that is below zero by rounding counts as zero: a sum that shrinks would be read as a restart.

        One that failed before its first token has missed the target; one that was refused or whose client left has
        none to meet.
        """
        self._requests[outcome].inc()
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
            self._slo("ttft", ttft_s)
        elif outcome in ("deadline", "error"):
            self._slo("ttft", float("inf"))
        for gap_s in itl_s:
            self._itl.observe(gap_s)
        if itl_s:
            self._slo("itl", sum(itl_s) / len(itl_s))
        self._e2e.observe(e2e_s)
        for stage, stage_s in stages.items():
            self._stages[stage].observe(max(0.0, stage_s))

    def decided(self, seconds: float) -> None:
        """Count a new request that was taken in and for which workers were looked for."""
        self._decision.observe(seconds)

    def placed(self, reason: str) -> None:
        """Count a request that was offered to workers."""
        self._decisions[reason].inc()

    def logged(self, written: int, dropped: int) -> None:
        """Count decisions that were written to the log, and those that were not. From any thread."""
        self._logged["written"].inc(written)
        self._logged["dropped"].inc(dropped)

    def shadowed(self, policy: str, what: str, cost_s: float) -> None:
        """Count a decision that a shadow policy was to be asked about, and by how many seconds its pair's predicted
        cost is above that of the pair taken. From any thread."""
        self._shadows[policy, what].inc()
        self._shadow_cost[policy, "dearer"].inc(max(0.0, cost_s))
        self._shadow_cost[policy, "cheaper"].inc(max(0.0, -cost_s))

    def hits(self, expected_tokens: int, actual_tokens: int) -> None:
        """Count what the router believed to be cached for a request, and what its workers reused."""
        self._expected.inc(expected_tokens)
        self._actual.inc(actual_tokens)

    def dropped(self, kind: str) -> None:
        """Count a record that was ignored."""
        self._dropped[kind].inc()

    def continued(self, cause: str) -> None:
        """Count a request that goes on with other workers."""
        self._continued[cause].inc()

    def poisonous(self) -> None:
        """Count a request that is refused because workers were lost while they held it."""
        self._poisonous.inc()

    def refused(self, why: str) -> None:
        """Count a request that the line did not take."""
        self._refused[why].inc()

    def ejected(self, peer: str, role: str) -> None:
        """Count a worker that gets no requests for a while."""
        self._ejections[peer, role].inc()

    def lag(self, seconds: float) -> None:
        """Observe how much later than planned the event loop came round."""
        self._lag.observe(seconds)

    def expected_worker(self, peer: str, role: str) -> None:
        """Create the counters of a worker whose name was announced."""
        self._lives[peer, role].inc(0)
        self._ejections[peer, role].inc(0)
        for how in LOSSES:
            self._losses[peer, role, how].inc(0)

    def joined(self, peer: str, role: str) -> None:
        """Count a new life of a worker that is connected."""
        self._lives[peer, role].inc()

    def lost(self, peer: str, role: str, how: str) -> None:
        """Count a worker that is no longer connected."""
        self._losses[peer, role, how].inc()

    def cluster(self, waiting: int, running: int, workers: Sequence[WorkerView]) -> None:
        """Show the state of queue, requests and workers as the page is rendered."""
        self._queue.set(waiting)
        self._running.set(running)
        # Gauges are made anew only where other workers are there: of a thousand that takes a tenth of a second.
        shown = {(worker.peer, worker.role): worker for worker in workers}
        if shown.keys() != self._shown.keys():
            self._states.clear()
            self._index.clear()
            self._shown = {}
        # A cluster without prefill workers has no such pool that could be empty.
        pools = {role for role in ROLES if role == "decode" or any(w.role == role for w in workers)}
        if pools != self._pools:
            self._ready.clear()
        self._pools = pools
        for role in pools:
            self._ready[role].set(sum(w.role == role and w.state == "ready" for w in workers))
        for name, worker in shown.items():
            before = self._shown.get(name)
            if before is None or before.state != worker.state:
                for state in WORKER_STATES:
                    self._states[*name, state].set(state == worker.state)
            if before is None or before.index_blocks != worker.index_blocks:
                self._index[worker.peer].set(worker.index_blocks)
        self._shown = shown

    def _slo(self, slo: str, seconds: float) -> None:
        self._slos[slo, "true" if seconds <= self._slo_s[slo] else "false"].inc()
