"""Where the time of a request goes, and what happened to it on the way."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.overview import quantiles
from telemetry.dashboards.panel import Dashboard, PanelRow, Proof, one

REQUESTS = Dashboard(
    "requests",
    "Headrace: requests and stages",
    "The nine stages of a request, and how requests end",
    (
        PanelRow(
            "Where does the time go?",
            (
                one(
                    "Mean time per stage",
                    "Stacked, the stages add up to the whole request. `migrate` is what the overlap with computing did "
                    "not hide; `unattributed` is what no stage covers.",
                    "s",
                    S.mean("request_stage_seconds", "stage"),
                    "{{stage}}",
                    width=12,
                    stacked=True,
                ),
                one(
                    "p99 per stage",
                    "The slowest hundredth of each stage; these do not add up.",
                    "s",
                    S.quantile(0.99, "request_stage_seconds", "stage"),
                    "{{stage}}",
                    width=12,
                ),
                one(
                    "Share of each stage",
                    "Of all time that requests spent.",
                    "percentunit",
                    f"{S.rate('request_stage_seconds', 'stage', 'sum')} / ignoring (stage) group_left () "
                    f"({S.rate('request_stage_seconds', '', 'sum')} > 0)",
                    "{{stage}}",
                    high=1,
                    width=12,
                    stacked=True,
                ),
                one(
                    "Time that no stage covers",
                    "Its share of requests' time. Above a few hundredths, a request met something that the stages do "
                    "not know, such as a worker that was lost.",
                    "percentunit",
                    f"{S.rate('request_stage_seconds', '', 'sum', stage='unattributed')} / "
                    f"({S.rate('request_stage_seconds', '', 'sum')} > 0)",
                    "unattributed",
                    high=1,
                    width=12,
                ),
            ),
        ),
        PanelRow(
            "What do callers see?",
            (
                quantiles("Time to first token", "Arrival to first token.", "request_ttft_seconds"),
                quantiles(
                    "Between tokens", "Gaps between a request's tokens.", "request_itl_seconds"
                ),
                quantiles("Whole request", "Arrival to the end.", "request_e2e_seconds"),
                one(
                    "Time to first token, spread",
                    "Requests per second by bucket.",
                    "s",
                    S.rate("request_ttft_seconds", "le", "bucket"),
                    "{{le}}",
                    kind="heatmap",
                    width=12,
                ),
                one(
                    "Requests within target",
                    "By target.",
                    "percentunit",
                    measures.slo_met(S),
                    "{{slo}}",
                    high=1,
                    width=12,
                ),
            ),
        ),
        PanelRow(
            "What went wrong?",
            (
                one(
                    "Ends by outcome",
                    "Per second.",
                    "reqps",
                    S.rate("requests_total", "outcome"),
                    "{{outcome}}",
                    stacked=True,
                ),
                one(
                    "Failed",
                    "The share of requests that ended in an error or too late.",
                    "percentunit",
                    measures.failed(S),
                    "failed",
                    high=1,
                    proof=Proof.FAULT,
                ),
                one(
                    "Went on elsewhere",
                    "Requests whose worker left (move) or was lost, or whose router was (adopted). Their clients saw "
                    "a pause, and every token.",
                    "reqps",
                    S.rate("request_continuations_total", "cause"),
                    "{{cause}}",
                    proof=Proof.FAULT,
                ),
                one(
                    "Refused as poisonous",
                    "Requests that two workers died of. Look at their records in the router's log.",
                    "none",
                    S.grown("requests_poisonous_total", "1h"),
                    "in the last hour",
                    proof=Proof.SHOWN,
                    width=12,
                ),
                one(
                    "Not let in",
                    "Requests refused because too many wait (full), or because they would be late (deadline).",
                    "reqps",
                    S.rate("requests_refused_total", "why"),
                    "{{why}}",
                    proof=Proof.SHOWN,
                ),
                one(
                    "Prompt tokens computed again",
                    "Because a worker that had computed them was lost.",
                    "suffix: tok/s",
                    S.rate("prompt_tokens_total", "pool", source="recomputed_after_failure"),
                    "{{pool}}",
                    proof=Proof.FAULT,
                    width=12,
                ),
            ),
        ),
    ),
)
