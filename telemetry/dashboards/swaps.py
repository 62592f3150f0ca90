"""Panels of preemption on decode workers: how often, at what cost, and by which way back."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import Panel, PanelRow, Query, one

ROW = PanelRow(
    "Is there too little of it?",
    (
        one(
            "Preemptions",
            "Per second: requests whose blocks were taken for others, by what they did.",
            "reqps",
            S.rate("preemptions_total", "state"),
            "{{state}}",
        ),
        one(
            "Time out of the batch",
            "Seconds per second from a preemption to all of the KV being back, by the way it came back.",
            "short",
            S.rate("preemption_seconds", "way", "sum"),
            "{{way}}",
        ),
        one(
            "Tokens lost to preemption",
            "Per second: tokens whose KV had to be computed, fetched or copied back.",
            "suffix: tok/s",
            S.rate("preemption_lost_tokens_total", "way"),
            "{{way}}",
        ),
        Panel(
            "Swap or recompute",
            "Per second: what was chosen, and the swaps that came to nothing (host memory was full, a copy failed, or "
            "was not whole when it was wanted).",
            "reqps",
            (
                Query(S.rate("preemption_choices_total", "choice"), "{{choice}}"),
                Query(S.rate("swap_fallbacks_total", "why"), "not swapped: {{why}}"),
            ),
        ),
        one(
            "Predicted cost of a preemption",
            "By worker, for the latest request that both ways could be chosen for, from measured prices.",
            "s",
            S.sum("preemption_predicted_seconds", f"{TARGET}, choice"),
            "{{worker}} {{choice}}",
        ),
        one(
            "Bytes swapped",
            "Per second, to host memory and back.",
            "Bps",
            S.rate("swap_bytes_total", "way"),
            "{{way}}",
        ),
        one(
            "Time spent swapping",
            "The share of the time in which a tier thread copies for preempted requests, with the digests, mean of the "
            "workers.",
            "percentunit",
            measures.spent(S, "swap_seconds_total", "way"),
            "{{way}}",
            high=1,
        ),
    ),
)
