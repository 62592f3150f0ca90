"""Alerts. Each compares one value with one bound, so that a test can ask for the value of a sound cluster too: a rule
whose query finds nothing never fires, and nobody notices."""

from dataclasses import dataclass
from typing import Literal

from telemetry.dashboards import measures
from telemetry.dashboards.measures import RULES as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import INFINITY

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when `value operator bound` has held for `for_s` seconds. `action` is what to do about it."""

    name: str
    value: str
    operator: Literal[">", "<", "==", "!="]
    bound: float
    for_s: int
    severity: Severity
    summary: str
    action: str
    low: float = 0.0
    high: float = INFINITY

    @property
    def expr(self) -> str:
        return f"{self.value} {self.operator} {self.bound:g}"

    @property
    def runbook(self) -> str:
        """The page about it, below docs/."""
        return f"operations.md#{self.name.lower()}"


ALERTS = (
    Alert(
        "HeadraceProcessDown",
        measures.UP,
        "==",
        0,
        30,
        "critical",
        "{{ $labels.worker }} does not answer",
        "Its log says why it ended. The supervisor starts it again with growing pauses, and ends the cluster if it "
        "dies too often.",
        high=1,
    ),
    Alert(
        "HeadracePoolEmpty",
        S.sum("pool_ready_workers", "model, role"),
        "==",
        0,
        15,
        "critical",
        "No {{ $labels.role }} worker takes requests",
        "Without decode workers requests wait, then fail; without prefill workers decode workers read the prompts.",
    ),
    Alert(
        "HeadraceWorkerRestarts",
        S.grown("process_starts_total", "15m", "peer", role="prefill|decode"),
        ">",
        2,
        0,
        "warning",
        "{{ $labels.peer }} was started {{ $value }} times in 15 minutes",
        "Look for what it dies of: memory first, then requests refused as poisonous.",
    ),
    Alert(
        "HeadraceRequestsFail",
        "headrace:requests_failed:ratio",
        ">",
        0.05,
        120,
        "critical",
        "{{ $value | humanizePercentage }} of requests fail",
        "By outcome: errors are in the router's log; deadlines mean that the pools are too slow for what is asked.",
        high=1,
    ),
    Alert(
        "HeadraceRequestsRefused",
        "headrace:requests_rejected:ratio",
        ">",
        0.05,
        120,
        "warning",
        "{{ $value | humanizePercentage }} of requests are refused",
        "A full line (router.max_waiting) wants more workers; anything else is a client that sends nonsense.",
        high=1,
    ),
    Alert(
        "HeadracePoisonousRequest",
        S.grown("requests_poisonous_total", "10m", "model"),
        ">",
        0,
        0,
        "critical",
        "A request was refused after two workers had died of it",
        "The router's log names the request and the workers.",
    ),
    Alert(
        "HeadraceFirstTokenLate",
        'headrace:slo_met:ratio{slo="ttft"}',
        "<",
        measures.GOAL,
        300,
        "warning",
        "Only {{ $value | humanizePercentage }} of requests get their first token in time",
        "Stages: prefill_queue wants prefill workers, route or reserve decode workers, migrate a faster transport.",
        high=1,
    ),
    Alert(
        "HeadraceTokensSlow",
        'headrace:slo_met:ratio{slo="itl"}',
        "<",
        measures.GOAL,
        300,
        "warning",
        "Only {{ $value | humanizePercentage }} of requests get their tokens fast enough",
        "Add a decode worker, or make its batch smaller (decode.max_batch).",
        high=1,
    ),
    Alert(
        "HeadraceAddPrefill",
        "headrace:pool_hint:sign",
        ">",
        0,
        600,
        "info",
        "Prompts wait longer than the target: the prefill pool is short",
        "Add a prefill worker, or turn a decode worker into one.",
        low=-1,
        high=1,
    ),
    Alert(
        "HeadraceAddDecode",
        "headrace:pool_hint:sign",
        "<",
        0,
        600,
        "info",
        "Tokens come slower than the target, or requests wait for room: the decode pool is short",
        "Add a decode worker, or turn a prefill worker into one.",
        low=-1,
        high=1,
    ),
    Alert(
        "HeadraceRequestsWait",
        f"min_over_time({S.series('queue_depth', pool='router')}[2m])",
        ">",
        0,
        60,
        "warning",
        "Requests have been waiting for room for minutes",
        "Decode workers have no blocks left: look at KV memory, and at requests with a large max_tokens.",
    ),
    Alert(
        "HeadraceKvNearlyFull",
        "headrace:kv_used:ratio",
        ">",
        0.95,
        300,
        "warning",
        "{{ $labels.worker }} has {{ $value | humanizePercentage }} of its blocks in use",
        "Requests are about to wait. Add workers, give the pool more memory, or lower max_tokens.",
        high=1,
    ),
    Alert(
        "HeadraceKvLedgerBroken",
        S.grown("process_deaths_total", "10m", "role", cause="ledger"),
        ">",
        0,
        0,
        "critical",
        "A {{ $labels.role }} worker had KV blocks with two owners, or with none",
        "A fault of ours: its answers just before may be wrong. It has ended by itself and is started again. Report it "
        "with its log, which names the blocks.",
    ),
    Alert(
        "HeadraceAuditFailed",
        S.grown("process_deaths_total", "10m", "role", cause="ledger|audit"),
        ">",
        0,
        0,
        "critical",
        "A {{ $labels.role }} worker has found its ledgers broken",
        "It has ended by itself and is started again. Report it with its log.",
    ),
    Alert(
        "HeadraceBlocksQuarantined",
        f"min_over_time({S.series('kv_blocks', state='quarantined')}[2m])",
        ">",
        0,
        120,
        "warning",
        "{{ $labels.worker }} keeps {{ $value }} blocks for a lost peer",
        "The peer is frozen or cut off, and nobody has ended it: look at its host.",
    ),
    Alert(
        "HeadraceMigrationsFail",
        "headrace:migrations_failed:ratio",
        ">",
        0.05,
        120,
        "warning",
        "{{ $value | humanizePercentage }} of attempts to fetch a prompt's blocks fail",
        "Answers are right, and late. Look at lost workers first, then at the network between the pools.",
        high=1,
    ),
    Alert(
        "HeadraceDigestMismatch",
        S.grown("handoff_digests_total", "10m", TARGET, what="mismatched"),
        ">",
        0,
        0,
        "critical",
        "Blocks arrived at {{ $labels.worker }} with other bytes than were sent",
        "No wrong answer came of it. Memory, network card, or a fault of ours: take the host out and report it.",
    ),
    Alert(
        "HeadraceRouterSlow",
        S.quantile(0.99, "event_loop_lag_seconds", "worker"),
        ">",
        0.1,
        120,
        "warning",
        "The router's event loop comes round {{ $value | humanizeDuration }} late",
        "Every stream waits for it. Give the router a core of its own, or run two.",
    ),
    Alert(
        "HeadraceCacheBeliefsWrong",
        "headrace:expected_hits_real:ratio",
        "<",
        0.5,
        600,
        "warning",
        "Only {{ $value | humanizePercentage }} of the expected prefix hits come true",
        "Requests are sent after caches that are gone: evictions, restarts, or a namespace key that changed.",
    ),
    Alert(
        "HeadraceFilesRunOut",
        measures.files_used(S),
        ">",
        0.8,
        60,
        "warning",
        "{{ $labels.worker }} has {{ $value | humanizePercentage }} of its file descriptors open",
        "Raise the limit of open files for the process.",
        high=1,
    ),
    Alert(
        "HeadraceCertificateEnds",
        measures.certificate_left_s(S),
        "<",
        14 * 86_400,
        60,
        "warning",
        "The {{ $labels.certificate }} certificate of {{ $labels.worker }} ends in {{ $value | humanizeDuration }}",
        "Put a renewed certificate and its key in the same files; nothing is to be restarted.",
    ),
)
