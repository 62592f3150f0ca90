"""KV memory: who holds the blocks, how soon they are used up, what the caches are worth."""

from telemetry.dashboards import measures, swaps, tiers
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import Dashboard, Panel, PanelRow, Proof, Query, one
from telemetry.dashboards.promql import share

_AVAILABLE = S.sum("kv_blocks", TARGET, state="free|cached")

MEMORY = Dashboard(
    "memory",
    "Headrace: KV memory",
    "Blocks by state, time to full, prefix hits",
    (
        PanelRow(
            "Who holds the blocks?",
            (
                one(
                    "Blocks by state",
                    "Stacked, the states add up to the pool. Cached blocks are evictable; quarantined ones wait for "
                    "proof that a lost peer does not read them.",
                    "none",
                    S.sum("kv_blocks", f"{TARGET}, state"),
                    "{{worker}} {{state}}",
                    width=12,
                    stacked=True,
                ),
                one(
                    "Held",
                    "The share of blocks that no eviction frees.",
                    "percentunit",
                    measures.kv_used(S, TARGET),
                    "{{worker}}",
                    high=1,
                    width=12,
                ),
                one(
                    "Time to full",
                    "At the present rate, cut off at an hour. Growing shows as an hour.",
                    "s",
                    f"clamp_max({_AVAILABLE} / clamp_min(-deriv(({_AVAILABLE})[5m:]), 0.001), 3600)",
                    "{{worker}}",
                    high=3600,
                ),
                one(
                    "Slots that hold a token",
                    "Of the token slots in held blocks: the rest is room for prompts under way and the ends of last "
                    "blocks.",
                    "percentunit",
                    share(S.sum("kv_slots", TARGET, state="live"), S.sum("kv_slots", TARGET)),
                    "{{worker}}",
                    high=1,
                ),
                one(
                    "Held by layer group",
                    "Stacked, the groups add up to what is held. Of layers with a sliding window requests hold their "
                    "windows alone.",
                    "none",
                    S.sum("kv_group_blocks", f"{TARGET}, group"),
                    "{{worker}} {{group}}",
                    stacked=True,
                ),
                one(
                    "Quarantined",
                    "Blocks of ended requests that a lost peer may still read.",
                    "none",
                    S.sum("kv_blocks", TARGET, state="quarantined"),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "What are the caches worth?",
            (
                one(
                    "Prompt tokens by source",
                    "Per second: computed, found in a cache, or computed again after a loss.",
                    "suffix: tok/s",
                    S.rate("prompt_tokens_total", "source"),
                    "{{source}}",
                    stacked=True,
                ),
                one(
                    "Prefix hits",
                    "The share of prompt tokens that nobody computed.",
                    "percentunit",
                    share(
                        S.rate("prompt_tokens_total", source="prefix_hit"),
                        S.rate("prompt_tokens_total"),
                    ),
                    "hit",
                    high=1,
                ),
                one(
                    "Evictions",
                    "Cached blocks given to others, per second. Many, with few hits: the caches are too small.",
                    "suffix: blocks/s",
                    S.rate("kv_evicted_blocks_total", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Samples that shared a prompt",
                    "Per second: began with another one's blocks, or took its place.",
                    "reqps",
                    S.rate("forks_total", "kind"),
                    "{{kind}}",
                ),
            ),
        ),
        tiers.ROW,
        swaps.ROW,
        PanelRow(
            "Do the books balance?",
            (
                one(
                    "Time in audits",
                    "The share of the engine's time in which it recounts who owns which block. A worker whose books do "
                    "not add up ends at once, and is started again: see the causes of deaths.",
                    "percentunit",
                    S.rate("audit_seconds_total", TARGET),
                    "{{worker}}",
                    high=0.02,
                ),
                Panel(
                    "Memory planned",
                    "At a worker's start: weights (one copy for all workers of a host), the pool, and the workspace "
                    "of the largest step where it was measured.",
                    "bytes",
                    (
                        Query(
                            S.sum("memory_planned_bytes", f"{TARGET}, purpose"),
                            "{{worker}} {{purpose}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
