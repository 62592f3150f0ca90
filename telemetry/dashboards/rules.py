"""Recording rules, and the file that holds them with the alerts."""

from dataclasses import dataclass

from telemetry.dashboards import measures
from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.measures import RULES as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import INFINITY


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A query that Prometheus records. `low` and `high` bound every value that a sound cluster can show."""

    name: str
    expr: str
    low: float = 0.0
    high: float = INFINITY


RECORDINGS = (
    RecordingRule(
        "headrace:request_ttft_seconds:p99", S.quantile(0.99, "request_ttft_seconds", "model")
    ),
    RecordingRule("headrace:request_itl_seconds:p99", S.quantile(0.99, "request_itl_seconds", "model")),
    RecordingRule("headrace:slo_met:ratio", measures.slo_met(S), high=1),
    RecordingRule("headrace:requests_failed:ratio", measures.failed(S), high=1),
    RecordingRule("headrace:requests_rejected:ratio", measures.rejected(S), high=1),
    RecordingRule("headrace:prefill_pressure:ratio", measures.prefill_pressure(S)),
    RecordingRule("headrace:decode_pressure:ratio", measures.decode_pressure(S)),
    RecordingRule("headrace:pool_hint:sign", measures.hint(S), low=-1, high=1),
    RecordingRule("headrace:kv_used:ratio", measures.kv_used(S, TARGET), high=1),
    RecordingRule("headrace:migrations_failed:ratio", measures.migrations_failed(S), high=1),
    RecordingRule("headrace:expected_hits_real:ratio", measures.honesty(S)),
)


def render(hurry: float = 1.0, docs: str = "") -> str:
    """Write the rules as a file of Prometheus; `hurry` divides how long an alert must hold, for tests. `docs`: where
    the pages are served, a URL; else alerts name the file in the project."""
    docs = docs or "docs"
    lines = [
        "# Made by `python -m telemetry.dashboards`: change that, not this.",
        "groups:",
        "  - name: headrace",
        "    rules:",
    ]
    for recording in RECORDINGS:
        lines += [f"      - record: {recording.name}", f"        expr: {_quoted(recording.expr)}"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_quoted(alert.expr)}",
            f"        for: {round(alert.for_s / hurry)}s",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {_quoted(alert.summary)}",
            f"          action: {_quoted(alert.action)}",
            f"          runbook_url: {_quoted(f'{docs}/{alert.runbook}')}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Write a scalar of YAML: within single quotes, only they need care."""
    return "'" + text.replace("'", "''") + "'"
