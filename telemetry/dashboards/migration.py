"""KV on its way from prefill to decode workers."""

from telemetry.dashboards import measures
from telemetry.dashboards.measures import PANELS as S
from telemetry.dashboards.measures import TARGET
from telemetry.dashboards.panel import Dashboard, Panel, PanelRow, Proof, Query, one
from telemetry.dashboards.promql import share

MIGRATION = Dashboard(
    "migration",
    "Headrace: migration",
    "How fast blocks move, how often attempts fail, what the digests say",
    (
        PanelRow(
            "How fast?",
            (
                Panel(
                    "Copying a prompt's blocks",
                    "From the first copy to the last, without waiting: chunks are copied while the next ones compute.",
                    "s",
                    tuple(
                        Query(S.quantile(q, "kv_migration_seconds"), f"p{q * 100:.0f}")
                        for q in (0.5, 0.99)
                    ),
                ),
                one(
                    "Moved",
                    "Bytes per second that landed, by worker.",
                    "Bps",
                    S.rate("kv_migration_bytes_total", TARGET),
                    "{{worker}}",
                ),
                one(
                    "Speed of a copy",
                    "Bytes over the seconds that copying them took.",
                    "Bps",
                    share(
                        S.rate("kv_migration_bytes_total"),
                        S.rate("kv_migration_seconds", part="sum"),
                    ),
                    "while copying",
                ),
                one(
                    "Share of requests' time",
                    "What the overlap with computing did not hide.",
                    "percentunit",
                    share(
                        S.rate("request_stage_seconds", part="sum", stage="migrate"),
                        S.rate("request_stage_seconds", part="sum"),
                    ),
                    "migrate",
                    high=1,
                ),
                Panel(
                    "Under way",
                    "Handoffs open on the receiving side, and transfers that the transfer threads have.",
                    "none",
                    (
                        Query(S.sum("kv_migrations_inflight", TARGET, pool="decode"), "{{worker}}"),
                        Query(S.sum("transfers_outstanding", TARGET), "{{worker}} transfers"),
                    ),
                    width=16,
                ),
            ),
        ),
        PanelRow(
            "How well?",
            (
                one(
                    "Attempts by outcome",
                    "ok; retry: another attempt with the same worker; failed: the router was asked for another; "
                    "fallback: the decode worker computed the prompt; expired: the request was over before.",
                    "reqps",
                    S.rate("kv_migrations_total", "outcome"),
                    "{{outcome}}",
                ),
                one(
                    "Attempts without success",
                    "Of those that were not given up with their request.",
                    "percentunit",
                    measures.migrations_failed(S),
                    "failed",
                    high=1,
                    proof=Proof.FAULT,
                ),
                one(
                    "By transport",
                    "Attempts per second; `none` never reached its peer.",
                    "reqps",
                    S.rate("kv_migrations_total", "transport"),
                    "{{transport}}",
                ),
                one(
                    "Records dropped",
                    "Of handoffs, by what they were: repeated, or of an attempt or life that is over. Harmless; many "
                    "are a sign of a bad network or of workers that come and go.",
                    "ops",
                    S.rate("handoff_dropped_total", "side, what"),
                    "{{side}}: {{what}}",
                    proof=Proof.SHOWN,
                    width=16,
                ),
                one(
                    "Bytes that came too late",
                    "Per second, over tcp: nobody wanted them any more.",
                    "Bps",
                    S.rate("handoff_scrapped_bytes_total", TARGET),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "Are the bytes right?",
            (
                one(
                    "Digests",
                    "Per second, of blocks: made by senders, verified by receivers.",
                    "ops",
                    S.rate("handoff_digests_total", "what", what="made|verified"),
                    "{{what}}",
                ),
                one(
                    "Digests that did not match",
                    "The attempt fails, never the answer. Memory, network or a fault of ours.",
                    "none",
                    S.grown("handoff_digests_total", "1h", TARGET, what="mismatched"),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
                one(
                    "Let go from quarantine",
                    "Handoffs per second whose lost receiver was proven not to read any more.",
                    "ops",
                    S.rate("handoff_quarantine_seconds", TARGET, "count"),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
        PanelRow(
            "What does NCCL take? (zero without it)",
            (
                one(
                    "Communicators",
                    "By worker; each is with one other worker. At the limit (transfer.nccl.communicators) pairs take "
                    "them from each other.",
                    "none",
                    S.sum("nccl_communicators", TARGET),
                    "{{worker}}",
                    proof=Proof.SHOWN,
                ),
                Panel(
                    "GPU memory of NCCL",
                    "Of a worker's communicators (what the latest one took, times their number), and of the slots "
                    "that all its pairs share.",
                    "bytes",
                    (
                        Query(
                            f"{S.sum('nccl_memory_bytes', TARGET, what='communicator')}"
                            f" * {S.sum('nccl_communicators', TARGET)}",
                            "{{worker}} communicators",
                        ),
                        Query(
                            S.sum("nccl_memory_bytes", TARGET, what="slots"), "{{worker}} slots"
                        ),
                    ),
                    proof=Proof.SHOWN,
                ),
                one(
                    "Pairs made, given up, lost",
                    "In the last hour. Many given up: more pairs than transfer.nccl.communicators. Lost: a peer, or "
                    "an operation that took too long.",
                    "none",
                    S.grown("nccl_pairs_total", "1h", "what"),
                    "{{what}}",
                    proof=Proof.SHOWN,
                ),
            ),
        ),
    ),
)
