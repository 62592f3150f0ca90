"""The router's choices, what they rest on, and what it costs to make them."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.panel import Dashboard, Panel, PanelRow, Proof, Query, one
from telemetry.dashboards.promql import share
from telemetry.labels import SHADOW_COSTS

_SHADOWED = S.rate("router_shadow_decisions_total", "policy", what="same|other")

ROUTER = Dashboard(
    "router",
    "Headrace: router",
    "Placements, beliefs about caches, the router's own time",
    (
        PanelRow(
            "Where do requests go?",
            (
                one(
                    "Placements by reason",
                    "affinity: a prefix was believed to be cached; load: none was; pinned: beside another sample, or "
                    "behind its KV; fallback: no prefill worker was left.",
                    "reqps",
                    S.rate("router_decisions_total", "reason"),
                    "{{reason}}",
                    stacked=True,
                ),
                Panel(
                    "Requests under way",
                    "Waiting for room at the router, and placed on workers.",
                    "none",
                    (
                        Query(S.sum("queue_depth", pool="router"), "waiting"),
                        Query(S.sum("running_requests", pool="router"), "placed"),
                    ),
                ),
                one(
                    "Refused",
                    "The share of requests: callers' mistakes, or a full line.",
                    "percentunit",
                    measures.rejected(S),
                    "rejected",
                    high=1,
                    proof=Proof.FAULT,
                ),
            ),
        ),
        PanelRow(
            "Are its beliefs right?",
            (
                Panel(
                    "Prefix hits, expected and real",
                    "Tokens per second.",
                    "suffix: tok/s",
                    (
                        Query(S.rate("router_expected_hit_tokens_total"), "expected"),
                        Query(S.rate("router_actual_hit_tokens_total"), "real"),
                    ),
                ),
                one(
                    "Honesty",
                    "Real hits over expected ones. Well below 1, requests are sent after caches that are gone.",
                    "none",
                    measures.honesty(S),
                    "real / expected",
                ),
                one(
                    "Blocks in the index",
                    "Believed to be cached, by worker.",
                    "none",
                    S.seen("router_index_blocks", "peer"),
                    "{{peer}}",
                ),
            ),
        ),
        PanelRow(
            "What does it cost?",
            (
                Panel(
                    "A decision",
                    "Taking a request in and choosing its workers.",
                    "s",
                    tuple(
                        Query(S.quantile(q, "router_decision_seconds"), f"p{q * 100:.0f}")
                        for q in (0.5, 0.99)
                    ),
                ),
                Panel(
                    "Event loop late",
                    "How late the loop comes round: what every stream waits for.",
                    "s",
                    tuple(
                        Query(S.quantile(q, "event_loop_lag_seconds"), f"p{q * 100:.0f}")
                        for q in (0.5, 0.99)
                    ),
                ),
                one(
                    "Records dropped",
                    "From workers, by kind: of another placement or worker (stale), before the acceptance (early), "
                    "repeated (duplicate), with tokens missing (gap), behind the end (overrun).",
                    "ops",
                    S.rate("dropped_records_total", "kind"),
                    "{{kind}}",
                ),
            ),
        ),
        PanelRow(
            "What would other policies choose?",
            (
                one(
                    "Shadows: otherwise",
                    "The share of decisions for which a shadow policy would have taken another pair. Empty without "
                    "router.shadow_policies.",
                    "percentunit",
                    share(S.rate("router_shadow_decisions_total", "policy", what="other"), _SHADOWED),
                    "{{policy}}",
                    high=1,
                ),
                Panel(
                    "Shadows: predicted cost",
                    "How much dearer or cheaper a shadow's pairs are than those taken, per decision and as least-cost "
                    "predicts it. Empty without router.shadow_policies.",
                    "s",
                    tuple(
                        Query(
                            share(S.rate("router_shadow_cost_seconds_total", "policy", way=way), _SHADOWED),
                            f"{{{{policy}}}}: {way}",
                        )
                        for way in SHADOW_COSTS
                    ),
                ),
                Panel(
                    "Decisions not on record",
                    "Log lines dropped, since the disk is full or slow, and decisions that no shadow was asked about.",
                    "ops",
                    (
                        Query(S.rate("router_decision_log_lines_total", what="dropped"), "log"),
                        Query(
                            S.rate("router_shadow_decisions_total", "policy", what="missed|failed"), "shadow {{policy}}"
                        ),
                    ),
                    proof=Proof.SHOWN,
                ),
            ),
        ),
    ),
)
