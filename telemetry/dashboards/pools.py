"""The balance between the two pools, and between the workers of each."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.overview import HINT
from telemetry.dashboards.panel import Dashboard, Panel, PanelRow, Proof, Query, one
from telemetry.dashboards.promql import share

_BUSY = measures.busy(S, TARGET)

POOLS = Dashboard(
    "pools",
    "Headrace: pools and balance",
    "Prefill against decode, and worker against worker",
    (
        PanelRow(
            "Which pool is short?",
            (
                HINT,
                Panel(
                    "Pressure",
                    "1 is the target. Prefill: mean time until a prompt is read, over the TTFT target. Decode: mean "
                    "gap between tokens over its target, or the wait for room over the TTFT target.",
                    "none",
                    (
                        Query(measures.prefill_pressure(S), "prefill"),
                        Query(measures.decode_pressure(S), "decode"),
                    ),
                    width=12,
                ),
                one(
                    "Ready workers",
                    "Those that take requests.",
                    "none",
                    S.seen("pool_ready_workers", "role", over="role"),
                    "{{role}}",
                    kind="stat",
                ),
                one(
                    "Engines busy, by pool",
                    "The share of time in steps, mean of the pool's workers.",
                    "percentunit",
                    measures.busy(S, "pool"),
                    "{{pool}}",
                    high=1,
                ),
                one(
                    "Demand, prefill to decode",
                    "Busy prefill engines per busy decode engine. Compare with the workers that there are.",
                    "none",
                    share(
                        S.rate("engine_seconds_total", state="busy", pool="prefill"),
                        S.rate("engine_seconds_total", state="busy", pool="decode"),
                    ),
                    "prefill per decode",
                ),
                one(
                    "Imbalance",
                    "The busiest worker of a pool over its mean worker: 1 is even.",
                    "none",
                    f"max by (pool) ({_BUSY}) / (avg by (pool) ({_BUSY}) > 0)",
                    "{{pool}}",
                    low=0.999,
                ),
            ),
        ),
        PanelRow(
            "What do the workers do?",
            (
                one(
                    "Waiting, by worker",
                    "Requests accepted and not being computed.",
                    "none",
                    S.sum("queue_depth", TARGET, pool="prefill|decode"),
                    "{{worker}}",
                ),
                one(
                    "Running, by worker",
                    "Requests being computed.",
                    "none",
                    S.sum("running_requests", TARGET, pool="prefill|decode"),
                    "{{worker}}",
                ),
                one(
                    "Busy, by worker",
                    "The share of time in steps.",
                    "percentunit",
                    _BUSY,
                    "{{worker}}",
                    high=1,
                ),
                one(
                    "Time of a step, mean",
                    "A decode step is the gap between tokens of all that run there.",
                    "s",
                    S.mean("step_seconds", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Time of a step, p99",
                    "Long steps hold up everybody in the batch.",
                    "s",
                    S.quantile(0.99, "step_seconds", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Idle between two steps, mean",
                    "What the device waited for its next step while there was something to compute.",
                    "s",
                    share(S.rate("step_idle_seconds_total", TARGET), S.rate("step_seconds", TARGET, "count")),
                    "{{worker}}",
                ),
                one(
                    "Tokens in the latest step",
                    "Of a prefill worker: its chunk. Of a decode worker: its batch.",
                    "none",
                    S.sum("batch_tokens", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Prompt tokens computed, by worker",
                    "Per second.",
                    "suffix: tok/s",
                    S.rate(
                        "prompt_tokens_total", TARGET, source="computed|recomputed_after_failure"
                    ),
                    "{{worker}}",
                    width=12,
                ),
                one(
                    "Tokens generated, by worker",
                    "Per second.",
                    "suffix: tok/s",
                    S.rate("generated_tokens_total", TARGET),
                    "{{worker}}",
                    width=12,
                    proof=Proof.LOAD,
                ),
                one(
                    "Tokens without a step, by worker",
                    "Those of them that a constraint forced, per second.",
                    "suffix: tok/s",
                    S.rate("forced_tokens_total", TARGET),
                    "{{worker}}",
                    width=12,
                ),
                one(
                    "Steps that waited for rows",
                    "Decode steps per second that waited for rows about to land, by what ended the wait: nothing more "
                    "to wait for, or decode.itl_target_ms.",
                    "ops",
                    S.rate("held_steps_total", "outcome"),
                    "{{outcome}}",
                    width=8,
                ),
                one(
                    "Time that steps waited",
                    "Seconds per second that decode steps waited for rows about to land.",
                    "s",
                    S.rate("held_seconds_total", TARGET),
                    "{{worker}}",
                    width=8,
                ),
                one(
                    "Tokens behind the target",
                    "Times per second that a stream's next tokens came later than decode.itl_target_ms.",
                    "ops",
                    S.rate("itl_target_missed_total", TARGET),
                    "{{worker}}",
                    width=8,
                ),
                one(
                    "Drafts",
                    "Tokens that were guessed, per second, by whether the model drew them: each that it drew saved a "
                    "row of a step.",
                    "suffix: tok/s",
                    S.rate("draft_tokens_total", "outcome"),
                    "{{outcome}}",
                    width=12,
                ),
                one(
                    "Drafts drawn, of a request's",
                    "The share of its drafts that the model drew, mean of the requests that left the batch.",
                    "percentunit",
                    S.mean("request_draft_acceptance_ratio", TARGET),
                    "{{worker}}",
                    high=1.0,
                    width=12,
                ),
                one(
                    "Tokens of a step, for one request",
                    "What drafts gain: 1 without any. Mean of the requests that left the batch.",
                    "short",
                    S.mean("request_tokens_per_step", TARGET),
                    "{{worker}}",
                    low=1.0,
                    width=12,
                ),
                one(
                    "Time of the draft model",
                    "Seconds per second that steps waited for a draft model to propose.",
                    "percentunit",
                    S.rate("draft_model_seconds_total", TARGET),
                    "{{worker}}",
                    width=12,
                    high=1,
                    proof=Proof.SHOWN,
                ),
                one(
                    "Read by the draft model",
                    "Tokens per second that it read of requests that it was behind with: new ones, and those that had "
                    "had no drafts for a while.",
                    "suffix: tok/s",
                    S.rate("draft_model_read_tokens_total", TARGET),
                    "{{worker}}",
                    width=12,
                    proof=Proof.SHOWN,
                ),
            ),
        ),
    ),
)
