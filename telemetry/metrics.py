"""What the router and the workers count. Names, units and buckets are those of docs/architecture.md.

`worker` is a stable slot name, never an address or an incarnation; no request id and no tenant is
ever a label. Every known combination exists from the start, so a fresh cluster shows zeros instead
of no data. The methods are called from one thread at a time per family and only add numbers.
"""

from collections.abc import Mapping, Sequence

from telemetry.families import Families

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
DECISION_REASONS = ("affinity", "load", "fallback", "pinned")
MIGRATION_OUTCOMES = ("ok", "retry", "fallback", "failed", "expired")
TRANSPORTS = ("loopback", "shm", "tcp")
ROUTER_DROPPED_KINDS = ("stale", "early", "duplicate", "gap", "overrun")
HANDOFF_DROPS = {
    "sender": {
        "landed: unknown handoff": "It is settled, or of another life of this worker.",
        "landed: unknown chunk": "A chunk that was never offered.",
        "landed: duplicate": "Said twice, or of a chunk that cannot be read.",
        "stop: unknown handoff": "It is settled, or of another life of this worker.",
        "stop: duplicate": "Said twice.",
    },
    "receiver": {
        "offer: unknown handoff": "Of an earlier attempt, placement or life: answered by `Stop`; its bytes are scrap.",
        "offer: duplicate": "Said twice: the bytes have their receive already.",
        "offer: stopped": "Its handoff has failed or is being stopped; its bytes are scrap.",
        "offer: not what was asked for": "Another block, twice one block, or another length: the attempt fails.",
        "first token: unknown handoff": "Of an earlier attempt, placement or life.",
        "first token: stopped": "Its handoff has failed: the next attempt names a token of its own.",
        "first token: duplicate": "Said twice.",
        "prefill failed: unknown handoff": "Of an earlier attempt, placement or life.",
        "prefill failed: stopped": "Its handoff has failed before.",
    },
}
"""What the sides of a handoff drop without harm, each with what it is. Many are a sign of a network that repeats, or of
workers that come and go."""
DIGEST_EVENTS = ("made", "verified", "mismatched")

# fmt: off
TTFT_BUCKETS_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
    2560,
)
ITL_BUCKETS_S = (
    .0005, .001, .002, .004, .006, .008, .01, .015, .02, .03, .05, .075, .1, .2, .5, 1, 5,
)
E2E_BUCKETS_S = tuple(0.01 * 2**power for power in range(16))
STAGE_BUCKETS_S = (
    .0001, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 300,
)
MIGRATION_BUCKETS_S = (.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5)
DECISION_BUCKETS_S = (.00001, .00002, .00005, .0001, .0002, .0005, .001, .002, .005, .01, .05)
QUARANTINE_BUCKETS_S = (.01, .05, .1, .25, .5, 1, 2, 5, 10, 30, 60, 300, 1800)
STEP_BUCKETS_S = (.001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, 1, 2, 5)
# fmt: on


class RouterMetrics:
    """The families of a router: requests as their callers saw them, and its own decisions."""

    def __init__(self, model: str, worker: str = "router") -> None:
        self._families = families = Families(model=model, pool="router", worker=worker)
        self._requests = families.counter(
            "requests_total", "Requests ended, by outcome.", outcome=OUTCOMES
        )
        self._ttft = families.histogram(
            "request_ttft_seconds", "Arrival to first output token.", TTFT_BUCKETS_S
        )[()]
        self._itl = families.histogram(
            "request_itl_seconds", "Gaps between output tokens of one request.", ITL_BUCKETS_S
        )[()]
        self._e2e = families.histogram(
            "request_e2e_seconds", "Arrival to the end of the answer.", E2E_BUCKETS_S
        )[()]
        self._stages = families.histogram(
            "request_stage_seconds",
            "Time of a request in each stage; the stages add up to its end-to-end time.",
            STAGE_BUCKETS_S,
            stage=STAGES,
        )
        self._decision = families.histogram(
            "router_decision_seconds", "Time to choose the workers.", DECISION_BUCKETS_S
        )[()]
        self._decisions = families.counter(
            "router_decisions_total", "Placements, by main reason.", reason=DECISION_REASONS
        )
        self._expected = families.counter(
            "router_expected_hit_tokens_total", "Prefix tokens expected to be cached."
        )[()]
        self._actual = families.counter(
            "router_actual_hit_tokens_total", "Prefix tokens that were reused."
        )[()]
        self._dropped = families.counter(
            "dropped_records_total", "Records ignored, by kind.", kind=ROUTER_DROPPED_KINDS
        )

    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: Sequence[float],
        e2e_s: float,
        stages: Mapping[str, float],
    ) -> None:
        """A request ended. `ttft_s` is None if no token came; `stages` are seconds by stage name."""
        self._requests[outcome].inc()
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        for gap_s in itl_s:
            self._itl.observe(gap_s)
        self._e2e.observe(e2e_s)
        for stage, stage_s in stages.items():
            self._stages[stage].observe(stage_s)

    def decision(self, seconds: float, reason: str) -> None:
        """Workers were chosen for a request."""
        self._decision.observe(seconds)
        self._decisions[reason].inc()

    def hits(self, expected_tokens: int, actual_tokens: int) -> None:
        """What the router believed to be cached for a request, and what its workers reused."""
        self._expected.inc(expected_tokens)
        self._actual.inc(actual_tokens)

    def dropped(self, kind: str) -> None:
        """A record was ignored."""
        self._dropped[kind].inc()

    def render(self) -> bytes:
        """All families in the Prometheus text format."""
        return self._families.render()

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve `/metrics` from a thread and return the port. Raises OSError if it is taken."""
        return self._families.serve(host, port)

    def close(self) -> None:
        self._families.close()


class WorkerMetrics:
    """The families of a prefill or decode worker (`pool`): tokens, blocks and migrations."""

    def __init__(self, model: str, worker: str, pool: str) -> None:
        self._families = families = Families(model=model, pool=pool, worker=worker)
        self._prompt = families.counter(
            "prompt_tokens_total",
            "Prompt tokens, by where their KV came from.",
            source=("computed", "prefix_hit"),
        )
        self._generated = families.counter("generated_tokens_total", "Tokens sampled.")[()]
        self._blocks = families.gauge(
            "kv_blocks", "KV blocks by state; the states add up to the pool.", state=BLOCK_STATES
        )
        self._migration = families.histogram(
            "kv_migration_seconds",
            "First offer received to last block verified.",
            MIGRATION_BUCKETS_S,
        )[()]
        self._bytes = families.counter("kv_migration_bytes_total", "KV bytes received.")[()]
        self._migrations = families.counter(
            "kv_migrations_total",
            "Migrations ended.",
            outcome=MIGRATION_OUTCOMES,
            transport=TRANSPORTS,
        )
        self._step = families.histogram("step_seconds", "Time of an engine step.", STEP_BUCKETS_S)[
            ()
        ]
        self._batch = families.gauge("batch_tokens", "Tokens in the latest engine step.")[()]
        self._dropped = families.counter(
            "handoff_dropped_total", "Records of handoffs ignored.", side=(), what=()
        )
        for side, kinds in HANDOFF_DROPS.items():
            for kind in kinds:
                self._dropped[side, kind].inc(0)
        self._digests = families.counter(
            "handoff_digests_total", "Digests of KV blocks.", what=DIGEST_EVENTS
        )
        self._scrapped = families.counter(
            "handoff_scrapped_bytes_total", "KV bytes that came too late and landed nowhere."
        )[()]
        self._quarantine = families.histogram(
            "handoff_quarantine_seconds",
            "Lost receiver to proof that its source blocks are not read any more.",
            QUARANTINE_BUCKETS_S,
        )[()]
        self._seen: dict[tuple[str, str], int] = {}
        self._audit_failures = families.counter(
            "audit_failures_total", "Ledgers of KV blocks that did not add up."
        )[()]

    def blocks(self, states: Mapping[str, int]) -> None:
        """The pool's blocks by state, as of now."""
        for state, count in states.items():
            self._blocks[state].set(count)

    def prompt_tokens(self, computed: int, prefix_hit: int) -> None:
        """A prompt was prefilled: so many of its tokens computed, so many found in the cache."""
        self._prompt["computed"].inc(computed)
        self._prompt["prefix_hit"].inc(prefix_hit)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def migration(self, outcome: str, transport: str, seconds: float, nbytes: int) -> None:
        """A migration ended. Its time and bytes count whatever the outcome."""
        self._migrations[outcome, transport].inc()
        self._migration.observe(seconds)
        self._bytes.inc(nbytes)

    def step(self, tokens: int, seconds: float) -> None:
        """The engine ran one step over `tokens` tokens."""
        self._batch.set(tokens)
        self._step.observe(seconds)

    def handoffs_dropped(self, side: str, totals: Mapping[str, int]) -> None:
        """What the sending or receiving side has dropped since it started."""
        for what, total in totals.items():
            self._dropped[side, what].inc(self._grown((side, what), total))

    def transferred(self, made: int, verified: int, mismatched: int, scrapped_bytes: int) -> None:
        """Totals of the transfer thread since it started: digests, and late bytes."""
        for what, total in zip(DIGEST_EVENTS, (made, verified, mismatched), strict=True):
            self._digests[what].inc(self._grown(("digests", what), total))
        self._scrapped.inc(self._grown(("bytes", "scrapped"), scrapped_bytes))

    def quarantined(self, seconds: float) -> None:
        """A handoff's blocks, held for a receiver that was lost, could be let go after so long."""
        self._quarantine.observe(seconds)

    def _grown(self, name: tuple[str, str], total: int) -> int:
        grown = total - self._seen.get(name, 0)
        self._seen[name] = total
        return grown

    def audit_failed(self) -> None:
        """A ledger did not add up."""
        self._audit_failures.inc()

    def render(self) -> bytes:
        """All families in the Prometheus text format."""
        return self._families.render()

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve `/metrics` from a thread and return the port. Raises OSError if it is taken."""
        return self._families.serve(host, port)

    def close(self) -> None:
        self._families.close()
