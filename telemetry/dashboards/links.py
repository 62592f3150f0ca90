"""Where each panel leads: the page that explains what it shows, row by row, and the panel to look at next.

A page is a file of docs/ with the heading on it, as GitHub and most others write anchors. The next panel is where the
cause of a bad figure is found, or what a good one is compared with.
"""

from telemetry.dashboards.panel import Dashboard

DOCS = "/public/headrace"
"""Where Grafana serves docs/ in deploy/docker/compose.yaml; elsewhere the dashboards' variable `docs` says it."""

PAGES = {
    "overview": {
        "Is it healthy?": "operations.md#symptoms",
        "Is it fast?": "operations.md#symptoms",
        "What is short?": "observability.md#grafana",
    },
    "requests": {
        "Where does the time go?": "operations.md#symptoms",
        "What do callers see?": "observability.md#grafana",
        "What went wrong?": "operations.md#alerts",
    },
    "pools": {
        "Which pool is short?": "observability.md#grafana",
        "What do the workers do?": "operations.md#symptoms",
    },
    "memory": {
        "Who holds the blocks?": "kv-memory.md#blocks",
        "What are the caches worth?": "kv-memory.md#the-tree",
        "What comes back from below the device?": "kv-memory.md#below-the-device",
        "Is there too little of it?": "kv-memory.md#preemption",
        "Do the books balance?": "observability.md#what-it-costs",
    },
    "migration": {
        "How fast?": "handoff.md#the-two-machines",
        "How well?": "handoff.md#what-is-dropped-and-counted",
        "Are the bytes right?": "handoff.md#digests-all-a-sample-or-none",
        "What does NCCL take? (zero without it)": "observability.md#gpus-nccl-revisions",
    },
    "router": {
        "Where do requests go?": "routing.md#the-price-of-a-placement",
        "Are its beliefs right?": "routing.md#the-index",
        "What does it cost?": "routing.md#what-it-costs",
        "What would other policies choose?": "routing.md#policies",
    },
    "processes": {
        "Who is up?": "operations.md#what-the-supervisor-does-by-itself",
        "What do they use?": "observability.md#what-it-costs",
        "How do ranks share the work?": "tensor-parallel.md#what-is-shown",
        "What are they?": "observability.md#gpus-nccl-revisions",
    },
}

NEXT = {
    "overview": {
        "Requests within target": "overview: Where the time goes",
        "What to add": "pools: Pressure",
        "Unreachable processes": "processes: Died of",
        "Workers by state": "processes: Lost",
        "Requests ended": "requests: Ends by outcome",
        "Requests that went wrong": "requests: Not let in",
        "Requests under way": "memory: Held",
        "Time to first token": "requests: Time to first token, spread",
        "Between tokens": "pools: Time of a step, mean",
        "Whole request": "requests: Mean time per stage",
        "Where the time goes": "requests: p99 per stage",
        "Tokens out": "pools: Tokens generated, by worker",
        "Prompt tokens in": "memory: Prefix hits",
        "KV blocks held": "memory: Blocks by state",
        "Engines busy": "pools: Busy, by worker",
        "KV moved": "migration: Moved",
    },
    "requests": {
        "Mean time per stage": "requests: Share of each stage",
        "p99 per stage": "pools: Waiting, by worker",
        "Share of each stage": "pools: Pressure",
        "Time that no stage covers": "router: Event loop late",
        "Time to first token": "pools: Waiting, by worker",
        "Between tokens": "pools: Time of a step, p99",
        "Whole request": "requests: Mean time per stage",
        "Time to first token, spread": "pools: Waiting, by worker",
        "Requests within target": "pools: What to add",
        "Ends by outcome": "requests: Failed",
        "Failed": "processes: Lost",
        "Went on elsewhere": "requests: Prompt tokens computed again",
        "Refused as poisonous": "processes: Died of",
        "Not let in": "overview: Requests under way",
        "Prompt tokens computed again": "processes: Lost",
    },
    "pools": {
        "What to add": "pools: Pressure",
        "Pressure": "requests: Share of each stage",
        "Ready workers": "processes: State",
        "Engines busy, by pool": "pools: Demand, prefill to decode",
        "Demand, prefill to decode": "pools: Ready workers",
        "Imbalance": "pools: Busy, by worker",
        "Waiting, by worker": "pools: Running, by worker",
        "Running, by worker": "memory: Held",
        "Busy, by worker": "pools: Time of a step, mean",
        "Time of a step, mean": "pools: Tokens in the latest step",
        "Time of a step, p99": "pools: Tokens in the latest step",
        "Idle between two steps, mean": "processes: Processor",
        "Tokens in the latest step": "pools: Running, by worker",
        "Prompt tokens computed, by worker": "router: Placements by reason",
        "Tokens generated, by worker": "pools: Busy, by worker",
        "Tokens without a step, by worker": "pools: Tokens generated, by worker",
        "Steps that waited for rows": "pools: Time that steps waited",
        "Time that steps waited": "pools: Tokens behind the target",
        "Tokens behind the target": "pools: Time of a step, p99",
        "Drafts": "pools: Tokens of a step, for one request",
        "Drafts drawn, of a request's": "pools: Drafts",
        "Time of the draft model": "pools: Tokens of a step, for one request",
        "Read by the draft model": "pools: Time of the draft model",
        "Tokens of a step, for one request": "pools: Time of a step, mean",
    },
    "memory": {
        "Blocks by state": "memory: Time to full",
        "Held": "memory: Preemptions",
        "Time to full": "pools: What to add",
        "Slots that hold a token": "memory: Held",
        "Held by layer group": "memory: Held",
        "Quarantined": "migration: Let go from quarantine",
        "Prompt tokens by source": "memory: Prefix hits",
        "Prefix hits": "router: Honesty",
        "Evictions": "memory: Blocks loaded instead of computed",
        "Samples that shared a prompt": "router: Placements by reason",
        "Blocks in lower tiers": "memory: Blocks loaded instead of computed",
        "Blocks loaded instead of computed": "memory: Time spent loading",
        "Bytes down and up": "memory: Time spent loading",
        "Time spent loading": "memory: Hits not loaded",
        "Pushed out of a tier": "memory: Blocks in lower tiers",
        "Hits not loaded": "memory: Bytes down and up",
        "The disk's faults": "processes: Open files",
        "Preemptions": "memory: Time out of the batch",
        "Time out of the batch": "memory: Swap or recompute",
        "Tokens lost to preemption": "memory: Swap or recompute",
        "Swap or recompute": "memory: Predicted cost of a preemption",
        "Predicted cost of a preemption": "memory: Time spent swapping",
        "Bytes swapped": "memory: Time spent swapping",
        "Time spent swapping": "pools: Time of a step, p99",
        "Time in audits": "pools: Time of a step, mean",
        "Memory planned": "processes: Memory",
    },
    "migration": {
        "Copying a prompt's blocks": "migration: Speed of a copy",
        "Moved": "migration: Under way",
        "Speed of a copy": "migration: By transport",
        "Share of requests' time": "migration: Copying a prompt's blocks",
        "Under way": "pools: Waiting, by worker",
        "Attempts by outcome": "migration: Attempts without success",
        "Attempts without success": "processes: Lost",
        "By transport": "migration: Attempts by outcome",
        "Records dropped": "processes: Lost",
        "Bytes that came too late": "migration: Attempts by outcome",
        "Digests": "migration: Digests that did not match",
        "Digests that did not match": "migration: By transport",
        "Let go from quarantine": "memory: Quarantined",
        "Communicators": "migration: Pairs made, given up, lost",
        "GPU memory of NCCL": "processes: GPU memory",
        "Pairs made, given up, lost": "migration: Copying a prompt's blocks",
    },
    "router": {
        "Placements by reason": "router: Prefix hits, expected and real",
        "Requests under way": "memory: Held",
        "Refused": "requests: Not let in",
        "Prefix hits, expected and real": "router: Honesty",
        "Honesty": "memory: Evictions",
        "Blocks in the index": "memory: Blocks by state",
        "A decision": "router: Event loop late",
        "Event loop late": "processes: Processor",
        "Records dropped": "processes: Lost",
        "Shadows: otherwise": "router: Shadows: predicted cost",
        "Shadows: predicted cost": "router: Prefix hits, expected and real",
        "Decisions not on record": "router: A decision",
    },
    "processes": {
        "Answers a scrape": "processes: Down",
        "Down": "processes: Died of",
        "State": "processes: Lost",
        "Lost": "processes: Died of",
        "Ejected": "requests: Went on elsewhere",
        "Processes started": "processes: Died of",
        "Died of": "processes: Memory",
        "Running since": "processes: Processes started",
        "Requests left to nobody": "requests: Went on elsewhere",
        "Processor": "pools: Busy, by worker",
        "Memory": "memory: Memory planned",
        "GPU memory": "memory: Memory planned",
        "Kernels compiled while serving": "pools: Time of a step, p99",
        "Open files": "overview: Requests under way",
        "Weights by rank": "memory: Memory planned",
        "Processor by rank": "processes: Rank 0 waits",
        "Rank 0 waits": "pools: Time of a step, p99",
        "Versions": "processes: Running since",
        "Workers' settings": "processes: Versions",
        "Router's settings": "router: Placements by reason",
    },
}


def page(dashboard: Dashboard, row: str) -> str:
    """Return the page about a row, with its anchor. Raises KeyError where none is named."""
    return PAGES[dashboard.name][row]


def following(dashboard: Dashboard, title: str) -> tuple[str, str]:
    """Return the dashboard and the title of the panel to look at next. Raises KeyError where none is named."""
    name, _, panel = NEXT[dashboard.name][title].partition(": ")
    return name, panel
