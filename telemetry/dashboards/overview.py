"""The first page to open: is the cluster healthy, is it fast, what is short?"""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.panel import Dashboard, Panel, PanelRow, Proof, Query, one


def quantiles(title: str, text: str, name: str) -> Panel:
    """p50, p95 and p99 of a histogram of seconds."""
    queries = tuple(Query(S.quantile(q, name), f"p{q * 100:.0f}") for q in (0.5, 0.95, 0.99))
    return Panel(title, text, "s", queries)


HINT = one(
    "What to add",
    "Which pool is short, while one is above its target: prefill by the time until a prompt is read, decode by the gap "
    "between tokens or the wait for room. Neither, and yet a tenth of the requests miss a target: the time goes "
    "elsewhere, or into few requests.",
    "none",
    measures.verdict(S),
    low=-1,
    high=2,
    proof=Proof.SHOWN,
    kind="stat",
    width=4,
    names=measures.HINTS,
)

OVERVIEW = Dashboard(
    "overview",
    "Headrace: overview",
    "Health, speed and the pools at a glance",
    (
        PanelRow(
            "Is it healthy?",
            (
                one(
                    "Requests within target",
                    "Goodput: the share of requests that met the targets for the first token (ttft) and for the mean "
                    "gap between tokens (itl). Counted request by request.",
                    "percentunit",
                    measures.slo_met(S),
                    "{{slo}}",
                    high=1,
                    kind="stat",
                    width=4,
                ),
                HINT,
                one(
                    "Unreachable processes",
                    "Processes that are listed for scraping and do not answer. Lost workers stay listed.",
                    "none",
                    f"sum(1 - {measures.UP})",
                    proof=Proof.FAULT,
                    kind="stat",
                    width=4,
                ),
                one(
                    "Workers by state",
                    "As the router sees them: a worker that is connected and says nothing counts as lost.",
                    "none",
                    S.seen("worker_state", "peer, state", over="state"),
                    "{{state}}",
                    kind="stat",
                    width=12,
                ),
                one(
                    "Requests ended",
                    "By outcome. `stop` and `length` are good ends.",
                    "reqps",
                    S.rate("requests_total", "outcome"),
                    "{{outcome}}",
                    stacked=True,
                ),
                one(
                    "Requests that went wrong",
                    "Errors, deadlines and refusals. A refusal is a caller's mistake or a full line.",
                    "reqps",
                    S.rate("requests_total", "outcome", outcome="error|deadline|rejected"),
                    "{{outcome}}",
                    proof=Proof.FAULT,
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
            ),
        ),
        PanelRow(
            "Is it fast?",
            (
                quantiles("Time to first token", "Arrival to first token.", "request_ttft_seconds"),
                quantiles(
                    "Between tokens", "Gaps between a request's tokens.", "request_itl_seconds"
                ),
                quantiles("Whole request", "Arrival to the end.", "request_e2e_seconds"),
                one(
                    "Where the time goes",
                    "Mean time of a request in each stage, stacked.",
                    "s",
                    S.mean("request_stage_seconds", "stage"),
                    "{{stage}}",
                    stacked=True,
                ),
                one(
                    "Tokens out",
                    "Sampled by decode and prefill workers.",
                    "suffix: tok/s",
                    S.rate("generated_tokens_total"),
                    "generated",
                ),
                one(
                    "Prompt tokens in",
                    "By where their KV came from.",
                    "suffix: tok/s",
                    S.rate("prompt_tokens_total", "source"),
                    "{{source}}",
                    stacked=True,
                ),
            ),
        ),
        PanelRow(
            "What is short?",
            (
                one(
                    "KV blocks held",
                    "The share of each pool's blocks that requests hold, and no eviction frees.",
                    "percentunit",
                    measures.kv_used(S, "pool"),
                    "{{pool}}",
                    high=1,
                ),
                one(
                    "Engines busy",
                    "The share of time in steps, mean of each pool's workers.",
                    "percentunit",
                    measures.busy(S, "pool"),
                    "{{pool}}",
                    high=1,
                ),
                one(
                    "KV moved",
                    "Bytes that landed on decode workers.",
                    "Bps",
                    S.rate("kv_migration_bytes_total"),
                    "migrated",
                ),
            ),
        ),
    ),
)
