"""The values that labels take. All of them exist at zero from the start, so that a fresh cluster shows zeros."""

OUTCOMES = ("stop", "length", "cancelled", "deadline", "rejected", "error")
STAGES = (
    "admit",
    "route",
    "reserve",
    "prefill_queue",
    "prefill_run",
    "migrate",
    "decode_queue",
    "decode_run",
    "stream_out",
    "unattributed",
)
BLOCK_STATES = ("free", "cached", "active", "reserved", "quarantined")
SLOT_STATES = ("live", "empty")
ENGINE_STATES = ("busy", "idle")
TOKEN_SOURCES = ("computed", "prefix_hit", "recomputed_after_failure")
SLOS = ("ttft", "itl")
DECISION_REASONS = ("affinity", "load", "fallback", "pinned", "session")
"""Why a placement was chosen: a believed prefix hit, the least load, no prefill worker left, bound to where its KV is,
the workers that its conversation was on."""
REFUSALS = ("full", "deadline")
"""Why a request was not let in: too many wait, or by prediction it would be late."""
MIGRATION_OUTCOMES = ("ok", "retry", "fallback", "failed", "expired")
"""How an attempt to fetch a prompt's blocks ended: all landed; another attempt with the same peer followed; the decode
worker computed the prompt itself; the router was asked for another prefill worker; the request had ended before."""
SHADOW_OUTCOMES = ("same", "other", "missed", "failed")
"""What became of a decision that a shadow policy was to be asked about: it takes the same pair, or another one; it was
not asked, since earlier ones waited; it failed, and is not asked again."""
SHADOW_COSTS = ("dearer", "cheaper")
"""Whether a shadow's pair has the higher or the lower predicted cost."""
LOG_LINES = ("written", "dropped")
TRANSPORTS = ("loopback", "shm", "tcp", "cuda_ipc", "nccl", "none")
"""How blocks travel; `none`: the peer was never reached."""
CONTINUATIONS = ("move", "decode_lost", "prefill_lost", "adopted")
"""Why a request went on elsewhere: its decode worker was leaving, or was lost; its prefill worker was lost; its router
was, and this one took it over."""
WORKER_STATES = ("starting", "ready", "draining", "lost")
LOSSES = ("left", "lost", "given_up")
"""How a worker went: as it was asked to, by itself, or because the router gave it up and had it killed."""
ROLES = ("prefill", "decode")
PROCESS_KINDS = (*ROLES, "router")
DEATH_CAUSES = ("ledger", "audit", "given_up", "start", "signal", "failed", "exit")
"""What a process died of, in the words of `cluster.processes.deaths`."""
FORKS = ("forked", "inherited")
"""How a sample of a shared prompt began: with another one's blocks, or by taking its place."""
PREEMPTED_STATES = ("running", "ready", "local", "forking")
"""What a request was doing when its blocks were taken."""
RESUME_WAYS = ("pool", "here", "shared", "swap")
"""How a preempted request's KV came back: from the prefill pool, computed here, from another sample of its prompt, from
a lower tier."""
SWAP_CHOICES = ("recompute", "swap")
"""How a preempted request's KV was meant to come back."""
SWAP_FALLBACKS = ("full", "failed", "lost")
"""Why a swap came to nothing: host memory was full, a copy failed, or was not whole when it was wanted."""
ROUTER_DROPPED_KINDS = ("stale", "early", "duplicate", "gap", "overrun")
HANDOFF_DROPS = {
    "sender": {
        "landed: unknown handoff": "It is settled, or belongs to another life of this worker.",
        "landed: unknown chunk": "A chunk that was never offered.",
        "landed: duplicate": "Said twice, or about a chunk that cannot be read.",
        "stop: unknown handoff": "It is settled, or belongs to another life of this worker.",
        "stop: duplicate": "Said twice.",
    },
    "receiver": {
        "offer: unknown handoff": (
            "It is from an earlier attempt, placement or life: answered by `Stop`; its bytes are scrap."
        ),
        "offer: duplicate": "Said twice: the bytes have their receive already.",
        "offer: stopped": "Its handoff has failed or is being stopped; its bytes are scrap.",
        "offer: not what was asked for": "Another block, twice one block, or another length: the attempt fails.",
        "first token: unknown handoff": "It is from an earlier attempt, placement or life.",
        "first token: stopped": "Its handoff has failed: the next attempt names a token of its own.",
        "first token: duplicate": "Said twice.",
        "first token: impossible": "It, or its account, cannot be: its worker has failed, and another is asked.",
        "prefill failed: unknown handoff": "It is from an earlier attempt, placement or life.",
        "prefill failed: stopped": "Its handoff has failed before.",
    },
}
"""What the sides of a handoff drop without harm, each with its meaning. Many are a sign of a network that repeats, or
of workers that come and go."""
DRAFT_OUTCOMES = ("drawn", "rejected")
HELD_OUTCOMES = ("filled", "due")
DIGEST_EVENTS = ("made", "verified", "mismatched")
