"""Counts of the workers: tokens, blocks, migrations, steps."""

from collections.abc import Callable, Mapping

from telemetry import buckets
from telemetry.families import QUEUE_TEXT, RUNNING_TEXT, Growth, ProcessMetrics
from telemetry.labels import (
    BLOCK_STATES,
    DIGEST_EVENTS,
    DRAFT_OUTCOMES,
    FORKS,
    HANDOFF_DROPS,
    HELD_OUTCOMES,
    MIGRATION_OUTCOMES,
    PREEMPTED_STATES,
    RESUME_WAYS,
    SLOT_STATES,
    TOKEN_SOURCES,
    TRANSPORTS,
)


class WorkerMetrics(ProcessMetrics):
    """The families of a prefill or decode worker (`pool`). Families of what only some workers have are registered
    through `families` by whoever feeds them."""

    def __init__(self, model: str, worker: str, pool: str) -> None:
        super().__init__(model=model, pool=pool, worker=worker)
        families = self.families
        self._prompt = families.counter(
            "prompt_tokens_total",
            "Prompt tokens, by where their KV came from.",
            source=TOKEN_SOURCES,
        )
        self._generated = families.counter("generated_tokens_total", "Output tokens.")[()]
        self._forced = families.counter(
            "forced_tokens_total", "Output tokens that a constraint forced, and that took no step of their own."
        )[()]
        self._drafts = families.counter(
            "draft_tokens_total",
            "Tokens that were guessed, by whether the model drew them.",
            outcome=DRAFT_OUTCOMES,
        )
        self._draft_model_s = families.counter(
            "draft_model_seconds_total", "Time that steps waited for their drafts: a draft model's own."
        )[()]
        self._draft_model_read = families.counter(
            "draft_model_read_tokens_total", "Tokens that a draft model read of requests that it was behind with."
        )[()]
        self._held_s = families.counter("held_seconds_total", "Time that steps waited for rows about to land.")[()]
        self._held = families.counter(
            "held_steps_total",
            "Steps that waited for rows about to land, by what ended it: nothing more to wait for, or the target.",
            outcome=HELD_OUTCOMES,
        )
        self._missed = families.counter(
            "itl_target_missed_total", "Times that a stream's next tokens came later than decode.itl_target_ms."
        )[()]
        self._acceptance = families.histogram(
            "request_draft_acceptance_ratio",
            "The share of a request's drafts that were drawn, where it had any; observed as it leaves the batch.",
            buckets.RATIO,
        )[()]
        self._step_tokens = families.histogram(
            "request_tokens_per_step",
            "Tokens that a step has drawn of a request, over its steps; observed as it leaves the batch.",
            buckets.STEP_TOKENS,
        )[()]
        self._blocks = families.snapshot(
            "kv_blocks",
            "KV blocks by state, counted anew: unless they add up to the pool, one is lost or in two places.",
            "state",
            BLOCK_STATES,
        )
        self._groups = families.snapshot(
            "kv_group_blocks",
            "KV blocks that are held, by layer group and its window: the active, reserved and quarantined ones.",
            "group",
            ("0 all",),
        )
        self._pool = families.gauge("kv_pool_blocks", "KV blocks that there are.")[()]
        self._slots = families.snapshot(
            "kv_slots",
            "Token slots in the blocks that requests hold, by whether a token's KV is in them.",
            "state",
            SLOT_STATES,
        )
        self._evicted = families.counter(
            "kv_evicted_blocks_total", "Cached blocks that were given to others."
        )[()]
        self._migration = families.histogram(
            "kv_migration_seconds",
            "Copying and verifying the blocks of a prompt that landed.",
            buckets.MIGRATION_S,
        )[()]
        self._bytes = families.counter("kv_migration_bytes_total", "KV bytes that landed.")[()]
        self._migrations = families.counter(
            "kv_migrations_total",
            "Attempts to fetch a prompt's blocks, by how they ended.",
            outcome=MIGRATION_OUTCOMES,
            transport=TRANSPORTS,
        )
        self._inflight = families.gauge(
            "kv_migrations_inflight", "Handoffs open on the receiving side."
        )[()]
        self._outstanding = families.gauge(
            "transfers_outstanding", "Copies and streams that the transfer thread has under way."
        )[()]
        self._step = families.histogram("step_seconds", "Time of an engine step.", buckets.STEP_S)[
            ()
        ]
        self._idle = families.counter(
            "step_idle_seconds_total", "Time between two steps in which the device had nothing to compute."
        )[()]
        self._batch = families.gauge("batch_tokens", "Tokens in the latest engine step.")[()]
        self._queue = families.gauge("queue_depth", QUEUE_TEXT)[()]
        self._running = families.gauge("running_requests", RUNNING_TEXT)[()]
        self._forks = families.counter(
            "forks_total", "Samples that shared a prompt's blocks.", kind=FORKS
        )
        self._preemptions = families.counter(
            "preemptions_total",
            "Requests whose KV blocks were taken for others, by what they did.",
            state=PREEMPTED_STATES,
        )
        self._preemption = families.histogram(
            "preemption_seconds",
            "A request's preemption to all of its KV being back, by the way in which it came back.",
            buckets.STAGE_S,
            way=RESUME_WAYS,
        )
        self._lost = families.counter(
            "preemption_lost_tokens_total",
            "Tokens whose KV was gone when a preempted request came back.",
            way=RESUME_WAYS,
        )
        self._orphans = families.counter(
            "orphans_expired_total", "Requests of a lost router that no other took in time."
        )[()]
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
            buckets.QUARANTINE_S,
        )[()]
        self._auditing = families.counter(
            "audit_seconds_total", "Time of the engine in which it recomputed its ledgers."
        )[()]
        self._growth = Growth()

    def opened(
        self,
        *,
        block_size: int,
        blocks: int,
        dtype: str,
        transport: str,
        memory: Mapping[str, int],
    ) -> None:
        """Show the pool's sizes. `memory`: planned bytes by what they are for. Called once."""
        self._pool.set(blocks)
        self.families.info(
            "worker_config_info",
            "Always 1; settings are labels.",
            block_size=str(block_size),
            dtype=dtype,
            transport=transport,
        )
        planned = self.families.gauge(
            "memory_planned_bytes", "Memory planned for, by purpose.", purpose=list(memory)
        )
        for purpose, nbytes in memory.items():
            planned[purpose].set(nbytes)

    def blocks(self, states: Mapping[str, int], held: Mapping[str, int]) -> None:
        """Show the pool's blocks by state, and those that are held by layer group."""
        self._blocks.set(states)
        self._groups.set(held)

    def slots(self, live: int, held: int) -> None:
        """Show the token slots of the blocks that requests hold, and those of them with a token's KV. A block that
        several requests share counts for each."""
        self._slots.set({"live": live, "empty": held - live})

    def evicted(self, blocks: int) -> None:
        self._evicted.inc(blocks)

    def load(self, waiting: int, running: int, outstanding: int) -> None:
        """Show the requests that wait and that run, and the transfers under way."""
        self._queue.set(waiting)
        self._running.set(running)
        self._outstanding.set(outstanding)

    def inflight(self, handoffs: int) -> None:
        """Show the handoffs open on the receiving side."""
        self._inflight.set(handoffs)

    def prompt_tokens(self, computed: int, prefix_hit: int, recomputed: int = 0) -> None:
        """Count prompt tokens: computed, found in the cache, or computed once more because a worker was lost."""
        self._prompt["computed"].inc(computed)
        self._prompt["prefix_hit"].inc(prefix_hit)
        self._prompt["recomputed_after_failure"].inc(recomputed)

    def generated(self, tokens: int, forced: int) -> None:
        """Count output tokens; `forced` of them took no step."""
        self._generated.inc(tokens)
        self._forced.inc(forced)

    def drafts(self, drafted: int, drawn: int) -> None:
        """Count guessed tokens, `drawn` of which the model drew."""
        self._drafts["drawn"].inc(drawn)
        self._drafts["rejected"].inc(drafted - drawn)

    def draft_model(self, seconds: float, read_tokens: int) -> None:
        """Count what a draft model took, and what it read to catch up."""
        self._draft_model_s.inc(seconds)
        self._draft_model_read.inc(read_tokens)

    def held(self, seconds: float, filled: int, expired: int, missed: int) -> None:
        """Count steps that waited, and what came later than the target."""
        self._held_s.inc(seconds)
        self._held["filled"].inc(filled)
        self._held["due"].inc(expired)
        self._missed.inc(missed)

    def drafts_of_request(self, drafted: int, drawn: int, tokens_per_step: float) -> None:
        """Observe what a request that leaves the batch has had of its drafts, if any."""
        if drafted:
            self._acceptance.observe(drawn / drafted)
        self._step_tokens.observe(tokens_per_step)

    def migration(self, outcome: str, transport: str, seconds: float, nbytes: int) -> None:
        """Count an attempt that ended after `nbytes` had landed. Its time counts if all did."""
        self._migrations[outcome, transport or "none"].inc()
        self._bytes.inc(nbytes)
        if outcome == "ok":
            self._migration.observe(seconds)

    def engine(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Show what `read` returns, in any thread: the engine's seconds by ENGINE_STATES. Called once."""
        self.families.asked(
            "engine_seconds_total",
            "Time of the engine: in steps, the one under way included, and without. The two add up to all of it.",
            "state",
            read,
        )

    def step(self, tokens: int, seconds: float, idle_s: float | None) -> None:
        """Count one step of the engine over `tokens` tokens, which came `idle_s` behind the one before it; None: behind
        a time without work."""
        self._batch.set(tokens)
        self._step.observe(seconds)
        self._idle.inc(idle_s or 0.0)

    def forks(self, forked: int, inherited: int) -> None:
        """Take over the totals of forked samples since the worker started."""
        for kind, total in zip(FORKS, (forked, inherited), strict=True):
            self._forks[kind].inc(self._growth.of(("forks", kind), total))

    def preempted(self, totals: Mapping[str, int]) -> None:
        """Take over the totals of preempted requests since the worker started, by what they were doing."""
        for state, total in totals.items():
            self._preemptions[state].inc(self._growth.of(("preempted", state), total))

    def resumed(self, way: str, lost_tokens: int, seconds: float) -> None:
        """Count a preempted request that decodes again."""
        self._preemption[way].observe(seconds)
        self._lost[way].inc(lost_tokens)

    def orphans_expired(self, total: int) -> None:
        """Take over the total of expired orphans since the worker started."""
        self._orphans.inc(self._growth.of(("orphans", "expired"), total))

    def handoffs_dropped(self, side: str, totals: Mapping[str, int]) -> None:
        """Take over the totals that the sending or receiving side has dropped since it started."""
        for what, total in totals.items():
            self._dropped[side, what].inc(self._growth.of((side, what), total))

    def transferred(self, made: int, verified: int, mismatched: int, scrapped_bytes: int) -> None:
        """Take over the totals of the transfer thread since it started: digests, and late bytes."""
        for what, total in zip(DIGEST_EVENTS, (made, verified, mismatched), strict=True):
            self._digests[what].inc(self._growth.of(("digests", what), total))
        self._scrapped.inc(self._growth.of(("bytes", "scrapped"), scrapped_bytes))

    def quarantined(self, seconds: float) -> None:
        """Observe how long a handoff's blocks were held for a receiver that was lost, until they could be let go."""
        self._quarantine.observe(seconds)

    def audited(self, seconds: float) -> None:
        """Count the time in which a ledger was recomputed. One that does not add up ends the process, whose supervisor
        counts that."""
        self._auditing.inc(seconds)
