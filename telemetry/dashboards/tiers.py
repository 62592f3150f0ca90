"""Panels of the tiers below a worker's device. Zero is what a pool that is large enough shows."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import Panel, PanelRow, Proof, Query, one

ROW = PanelRow(
    "What comes back from below the device?",
    (
        one(
            "Blocks in lower tiers",
            "In host memory and on disk; a block may be in both.",
            "none",
            S.sum("kv_tier_blocks", f"{TARGET}, tier"),
            "{{worker}} {{tier}}",
            proof=Proof.SHOWN,
        ),
        one(
            "Blocks loaded instead of computed",
            "Per second. Few, while many are stored: what is evicted is not asked for again.",
            "suffix: blocks/s",
            S.rate("kv_tier_hit_blocks_total", "tier"),
            "{{tier}}",
            proof=Proof.SHOWN,
        ),
        Panel(
            "Bytes down and up",
            "Per second.",
            "Bps",
            (
                Query(S.rate("kv_tier_stored_bytes_total", "tier"), "{{tier}} stored"),
                Query(S.rate("kv_tier_loaded_bytes_total", "tier"), "{{tier}} loaded"),
            ),
            proof=Proof.SHOWN,
        ),
        one(
            "Time spent loading",
            "The share of the time in which a tier thread copies and reads, mean of the workers.",
            "percentunit",
            measures.spent(S, "kv_tier_load_seconds_total", "tier"),
            "{{tier}}",
            high=1,
            proof=Proof.SHOWN,
        ),
        one(
            "Pushed out of a tier",
            "Blocks per second that left for others. Many from the last tier: it is too small.",
            "suffix: blocks/s",
            S.rate("kv_tier_evicted_blocks_total", "tier"),
            "{{tier}}",
            proof=Proof.SHOWN,
        ),
        one(
            "Hits not loaded",
            "Per second, since computing was predicted to be sooner: the tier is slow.",
            "suffix: hits/s",
            S.rate("kv_tier_refused_total", TARGET),
            "{{worker}}",
            proof=Proof.SHOWN,
        ),
        Panel(
            "The disk's faults",
            "Blocks and segments that were not whole, and 1 where the disk tier was given up: it is full, or broken.",
            "none",
            (
                Query(S.sum("kv_tier_broken_total", f"{TARGET}, what"), "{{worker}} {{what}}"),
                Query(S.sum("kv_tier_disk_given_up", TARGET), "{{worker}} given up"),
            ),
            proof=Proof.SHOWN,
        ),
    ),
)
