"""The prefill scheduler alone: who computes when, under a virtual clock, and what is offered when. Its order is tried
in test_order.py, prompts that wait for tokens in test_arriving.py, the handoffs that it serves in
tests/transfer/handoff/test_source.py, all of it with faults in tests/sim."""

import pytest

from engine.kv.manager import KVCacheManager
from engine.messages import (
    FirstToken,
    Handoff,
    Landed,
    Offer,
    PrefillFailed,
    StartPrefill,
    Stop,
)
from engine.step import StepPlan
from engine.types import Incarnation, RequestId, RequestRecord, SamplingParams, TokenLogprobs
from prefill_worker.scheduler.scheduler import PrefillScheduler
from transfer.handoff.commands import (
    Command,
    Emit,
    FromReader,
    Leave,
    Posted,
    PostSend,
    ReaderDead,
    ReaderLost,
    ReaderUp,
    Sent,
)
from worker.config import PrefillConfig

PEER = Incarnation(7)
S_PER_TOKEN = 0.002


class Bench:
    """A scheduler, a clock that advances by what a step computes, and a transfer that is done at once."""

    def __init__(self, blocks: int = 400, remote: bool = True, **config: object) -> None:
        self.scheduler = PrefillScheduler(
            PrefillConfig(**config),  # type: ignore[arg-type]
            KVCacheManager(blocks, 16, "m"),
            fingerprint="m",
            vocab=50_000,
            context_tokens=8192,
            stop_ids=frozenset(),
        )
        self.now = 0.0
        self.first_at: dict[str, float] = {}
        self.offered: dict[str, list[int]] = {}
        self.emitted: list[object] = []
        self.land = True
        self._do(self.scheduler.handle(ReaderUp(PEER, remote), self.now))

    def start(self, name: str, tokens: list[int], have: int = 0, **more: object) -> Handoff:
        handoff = Handoff(RequestId(name), 1, 0, PEER, Incarnation(1))
        record = RequestRecord(
            request=RequestId(name),
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_tokens=8,
            seed=1,
            sampling=SamplingParams(temperature=0.0),
            **more,  # type: ignore[arg-type]
        )
        message = StartPrefill(handoff=handoff, record=record, have_tokens=have)
        self._do(self.scheduler.handle(FromReader(PEER, message), self.now))
        return handoff

    def tell(self, event: object) -> None:
        self._do(self.scheduler.handle(event, self.now))  # type: ignore[arg-type]

    def step(self) -> StepPlan | None:
        self._do(self.scheduler.tick(self.now))
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        if plan is not None:
            self.now += plan.computed_tokens * S_PER_TOKEN
            drawn = [5 for row in plan.rows if row.draw]
            self._do(self.scheduler.complete(plan, drawn, self.now))
        self.scheduler.check()
        return plan

    def run(self) -> None:
        while self.step() is not None:
            pass

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case PostSend(_, move, blocks):
                    name = move.handoff.request
                    self.offered.setdefault(name, []).extend(block.index for block in blocks)
                    digests = tuple(0 for _ in blocks)
                    self.tell(Posted(move.handoff, move.seq, digests))
                    self.tell(Sent(move.handoff, move.seq, "", 0.0))
                    if self.land:
                        self.tell(FromReader(PEER, Landed(move.handoff, move.seq)))
                case Emit(_, FirstToken() as first):
                    self.first_at[first.handoff.request] = self.now
                    self.emitted.append(first)
                case Emit(_, record) if not isinstance(record, Offer):
                    self.emitted.append(record)

    @property
    def pool(self) -> dict[str, int]:
        return self.scheduler.kv.pool.counts()


def _tokens(count: int, seed: int) -> list[int]:
    return [(seed * 7919 + n * 31) % 50_000 for n in range(count)]


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one() -> None:
    """Guards head-of-line blocking: 50 tokens behind 2,000 come out within their own prefill plus one chunk."""
    bench = Bench(chunk_tokens=128)
    bench.start("long", _tokens(2000, 1))
    bench.step()
    arrived = bench.now
    bench.start("short", _tokens(50, 2))
    bench.run()
    assert bench.first_at["short"] - arrived <= (50 + 128) * S_PER_TOKEN
    assert bench.first_at["long"] > bench.first_at["short"]


def test_a_stream_of_short_prompts_costs_a_long_one_at_most_half() -> None:
    bench = Bench(chunk_tokens=128)
    bench.start("long", _tokens(1024, 1))
    for number in range(60):
        bench.start(f"s{number}", _tokens(60, number + 2))
        bench.step()
        if "long" in bench.first_at:
            break
    assert bench.first_at["long"] <= 2 * 1024 * S_PER_TOKEN + 128 * S_PER_TOKEN


@pytest.mark.parametrize("cached", [0, 320])
def test_a_crowd_of_short_prompts_shares_half_of_a_long_ones_steps(cached: int) -> None:
    """Guards both: those behind a long prompt had a step each, and the long one keeps half of each step, although hits
    go before it."""
    bench = Bench(chunk_tokens=128, fairness_tokens_per_s=0.0)
    known = _tokens(cached, 1)
    if cached:
        bench.start("known", known)
        bench.run()
    bench.start("long", _tokens(1024, 2))
    bench.step()
    shares = []
    for number in range(9):
        bench.start(f"s{number}", [*known, *_tokens(20, number + 3)])
    while "long" not in bench.first_at:
        plan = bench.step()
        assert plan is not None
        shares.append({row.request: row.end - row.start for row in plan.rows})
    crowds = [[name for name in share if name != "long"] for share in shares[:4]]
    assert [len(crowd) for crowd in crowds] == [3, 3, 3, 0], "as many as 64 tokens hold"
    assert all(share["long"] == 128 - 20 * len(crowd) for share, crowd in zip(shares, crowds, strict=False))
    assert all(bench.first_at[f"s{number}"] < bench.first_at["long"] for number in range(9))


def test_a_crowd_leaves_the_long_prompt_a_row() -> None:
    """Guards starvation by hits: all rows that a step has memory for went to those that slipped in."""
    bench = Bench(chunk_tokens=128, max_prompts=3, fairness_tokens_per_s=0.0)
    known = _tokens(320, 1)
    bench.start("known", known)
    bench.run()
    bench.start("long", _tokens(1024, 2))
    bench.step()
    for number in range(6):
        bench.start(f"s{number}", [*known, number])
    for _ in range(3):
        plan = bench.step()
        assert plan is not None and len(plan.rows) == 3 and "long" in {row.request for row in plan.rows}


def test_a_step_has_no_more_prompts_than_its_memory_was_measured_for() -> None:
    """Guards a GPU's memory: rows that draw take it by the vocabulary, and a burst of prompts that are cached but for
    their last token would all fit one chunk."""
    bench = Bench(chunk_tokens=64, max_prompts=3)
    bench.start("first", _tokens(48, 1))
    bench.run()
    for number in range(8):
        bench.start(f"again{number}", _tokens(48, 1))
    rows = []
    while (plan := bench.step()) is not None:
        rows.append(len(plan.rows))
    assert rows == [3, 3, 2]
    assert len(bench.first_at) == 9
    limits = PrefillConfig(chunk_tokens=64, max_prompts=3).step_limits
    assert (limits.chunk_tokens, limits.prompts) == (64, 3)
    assert PrefillConfig(chunk_tokens=2).step_limits.prompts == 2


def test_order_is_matched_tokens_plus_waiting() -> None:
    """λ = 0 takes the longest cached prefix first, a large λ the one that came first."""
    for fairness, first in ((0.0, "hit"), (1e6, "early")):
        bench = Bench(chunk_tokens=64, fairness_tokens_per_s=fairness)
        known = _tokens(320, 1)
        bench.start("warm", known)
        bench.run()
        bench.start("early", _tokens(300, 2))
        bench.now += 0.01
        bench.start("hit", [*known, *_tokens(280, 3)])
        bench.run()
        assert min(("early", "hit"), key=lambda name: bench.first_at[name]) == first


def test_blocks_are_offered_as_chunks_finish_and_only_what_is_wanted() -> None:
    bench = Bench(chunk_tokens=32)
    bench.start("r", _tokens(70, 1), have=16)
    bench.step()
    assert bench.offered["r"] == [1]
    bench.step()
    assert bench.offered["r"] == [1, 2, 3]
    bench.step()
    assert bench.offered["r"] == [1, 2, 3, 4]
    (first,) = bench.emitted
    assert isinstance(first, FirstToken) and first.chunks == 3 and first.cached_tokens == 0


def test_prompts_that_wait_find_what_the_first_has_computed() -> None:
    """Guards duplicate work: of eight prompts with one prefix that arrive together, one computes it."""
    bench = Bench(chunk_tokens=64)
    prefix = _tokens(512, 1)
    for number in range(8):
        bench.start(f"r{number}", [*prefix, *_tokens(32, number + 2)])
    bench.run()
    firsts = [record for record in bench.emitted if isinstance(record, FirstToken)]
    assert sorted(first.cached_tokens for first in firsts) == [0] + [512] * 7


def test_a_cached_prefix_is_offered_before_anything_is_computed() -> None:
    bench = Bench(chunk_tokens=32)
    known = _tokens(64, 1)
    bench.start("a", known)
    bench.run()
    bench.start("b", [*known, *_tokens(60, 2)])
    _, commands = bench.scheduler.plan(bench.now)
    (send,) = (command for command in commands if isinstance(command, PostSend))
    assert [block.index for block in send.blocks] == [0, 1, 2, 3]


def test_a_prompt_waits_until_all_its_blocks_can_be_leased() -> None:
    """Guards the partial-fill deadlock: nothing starts that could not finish."""
    bench = Bench(blocks=8, chunk_tokens=16)
    bench.land = False
    one = bench.start("one", _tokens(96, 1))
    bench.start("two", _tokens(64, 2))
    bench.run()
    assert list(bench.first_at) == ["one"] and bench.scheduler.waiting_requests == 1
    bench.tell(FromReader(PEER, Stop(one)))
    bench.run()
    assert list(bench.first_at) == ["one", "two"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 9])
def test_stop_frees_everything_at_any_time(steps: int) -> None:
    bench = Bench(chunk_tokens=32)
    bench.land = False
    handoff = bench.start("r", _tokens(100, 1))
    for _ in range(steps):
        bench.step()
    bench.tell(FromReader(PEER, Stop(handoff)))
    bench.run()
    assert bench.scheduler.is_idle
    assert bench.pool["active"] == bench.pool["quarantined"] == 0
    bench.tell(FromReader(PEER, Stop(handoff)))  # again: dropped, and counted
    assert bench.scheduler.sender.dropped


def test_a_lost_reader_quarantines_until_it_is_proven_dead() -> None:
    """Guards the bug family of this field: a block reused while somebody may still read it."""
    bench = Bench(chunk_tokens=256)
    bench.land = False
    bench.start("r", _tokens(100, 1))
    bench.run()
    bench.tell(ReaderLost(PEER))
    assert bench.pool["quarantined"] == 7 and not bench.scheduler.is_idle
    lost_at, bench.now = bench.now, bench.now + 3.0
    assert bench.scheduler.source.take_quarantined() == []
    bench.tell(ReaderDead(PEER))
    assert bench.pool["quarantined"] == 0 and bench.scheduler.is_idle
    assert bench.scheduler.source.take_quarantined() == [lost_at], "how long it took is not known"
    bench.scheduler.check()


def test_a_reader_that_comes_back_says_what_it_still_reads() -> None:
    """Guards a leak without end: a peer that was cut off, but lives, is never proven dead."""
    bench = Bench(chunk_tokens=256)
    bench.land = False
    gone, kept = bench.start("gone", _tokens(100, 1)), bench.start("kept", _tokens(60, 2))
    bench.run()
    bench.tell(ReaderLost(PEER))
    bench.tell(ReaderUp(PEER, True, (kept,)))
    assert bench.scheduler.sender.unsettled == [kept] and gone != kept
    bench.tell(FromReader(PEER, Stop(kept)))
    assert bench.scheduler.is_idle and bench.pool["quarantined"] == bench.pool["active"] == 0
    bench.scheduler.check()


def test_a_reader_that_was_pushed_to_needs_no_proof() -> None:
    bench = Bench(remote=False, chunk_tokens=256)
    bench.land = False
    bench.start("r", _tokens(100, 1))
    bench.run()
    bench.tell(ReaderLost(PEER))
    assert bench.pool["quarantined"] == 0 and bench.scheduler.is_idle


def test_a_passed_deadline_is_told_and_fenced() -> None:
    bench = Bench(chunk_tokens=16)
    bench.land = False
    handoff = bench.start("r", _tokens(100, 1), remaining_s=0.05)
    bench.run()
    (failed,) = bench.emitted
    assert isinstance(failed, PrefillFailed) and failed.fault.code == "DEADLINE_EXCEEDED"
    assert not bench.scheduler.is_idle, "blocks went before the reader said stop"
    bench.tell(FromReader(PEER, Stop(handoff)))
    assert bench.scheduler.is_idle and bench.pool["active"] == 0


def test_bad_records_are_refused_by_name() -> None:
    bench = Bench(blocks=8)
    bench.start("big", _tokens(129, 1))
    bench.start("id", [60_000])
    faults = [record.fault for record in bench.emitted if isinstance(record, PrefillFailed)]
    assert [(fault.code, fault.field) for fault in faults] == [
        ("OUT_OF_RANGE", "prompt"),
        ("INVALID_ARGUMENT", "token_ids"),
    ]
    assert bench.scheduler.is_idle


@pytest.mark.parametrize(("have", "code"), [(-1, "INTERNAL"), (0, ""), (127, ""), (128, "INTERNAL")])
def test_what_just_fits_is_taken_and_what_the_reader_cannot_have_is_not(have: int, code: str) -> None:
    """Guards the borders: the pool's last block, and the last token, whose row is never had."""
    bench = Bench(blocks=8)
    bench.start("r", _tokens(128, 1), have=have)
    faults = [record.fault.code for record in bench.emitted if isinstance(record, PrefillFailed)]
    assert faults == ([code] if code else [])
    bench.run()
    assert list(bench.first_at) == ([] if code else ["r"])


def test_a_full_line_says_so() -> None:
    bench = Bench(max_waiting=2)
    for number in range(3):
        bench.start(f"r{number}", _tokens(20, number))
    (failed,) = bench.emitted
    assert isinstance(failed, PrefillFailed) and failed.fault.code == "RESOURCE_EXHAUSTED"
    assert failed.handoff.request == "r2" and bench.scheduler.waiting_requests == 2


def test_a_worker_that_leaves_gives_up_what_it_has_not_begun_and_ends_the_rest() -> None:
    """Guards both: a prompt half computed is not thrown away, and nobody waits for a worker that is to go."""
    bench = Bench(chunk_tokens=32, fairness_tokens_per_s=1e6)
    bench.start("begun", _tokens(200, 1))
    bench.step()
    waiting = bench.start("waits", _tokens(100, 2))
    bench.tell(Leave(30.0))
    bench.start("late", _tokens(20, 3))
    faults = [(r.handoff.request, r.fault.code) for r in bench.emitted if isinstance(r, PrefillFailed)]
    assert faults == [("waits", "UNAVAILABLE"), ("late", "UNAVAILABLE")]
    bench.tell(FromReader(PEER, Stop(waiting)))
    bench.run()
    assert list(bench.first_at) == ["begun"] and bench.scheduler.is_idle


def test_the_account_of_a_prompt_says_how_long_it_waited_and_what_it_found() -> None:
    """Guards the stages that a client is shown: waiting, computing, and what was not computed because it was there."""
    bench = Bench(chunk_tokens=64)
    known = _tokens(64, 1)
    bench.start("a", known)
    bench.run()
    bench.start("long", _tokens(128, 2))
    bench.start("b", [*known, *_tokens(64, 3)])
    began = bench.now
    plans = []
    while (plan := bench.step()) is not None:
        plans.append(plan)
    firsts = {one.handoff.request: one for one in bench.emitted if isinstance(one, FirstToken)}
    assert firsts["a"].cached_tokens == 0 and firsts["b"].cached_tokens == 64
    for name in ("long", "b"):
        took_s = bench.first_at[name] - began
        assert firsts[name].queue_s + firsts[name].run_s == pytest.approx(took_s)
    assert firsts["b"].queue_s == 0.0 and firsts["b"].run_s == pytest.approx(64 * S_PER_TOKEN)
    assert firsts["long"].queue_s == pytest.approx(64 * S_PER_TOKEN), "the hit went first"
    assert bench.scheduler.hit_tokens == 64
    assert [plan.number for plan in plans] == [2, 3, 4]
    assert bench.scheduler.line.order.speed == pytest.approx(1 / S_PER_TOKEN)


def test_cached_output_is_not_a_part_of_the_prompt() -> None:
    """Guards the account of an answer that goes on here: its prompt has ten tokens, whatever was cached behind them."""
    bench = Bench()
    tokens = _tokens(64, 1)
    bench.start("a", tokens)
    bench.run()
    handoff = Handoff(RequestId("b"), 1, 0, PEER, Incarnation(1))
    record = RequestRecord(request=RequestId("b"), tokens=tokens, prompt_tokens=10, max_tokens=80, seed=1)
    bench.tell(FromReader(PEER, StartPrefill(handoff=handoff, record=record, have_tokens=0)))
    bench.run()
    firsts = [one for one in bench.emitted if isinstance(one, FirstToken)]
    assert [one.cached_tokens for one in firsts] == [0, 10] and bench.scheduler.hit_tokens == 10


def test_a_deadline_is_over_when_it_is_reached() -> None:
    bench = Bench(chunk_tokens=16)
    bench.start("r", _tokens(100, 1), remaining_s=2.0)
    bench.now = 1.9
    assert bench.scheduler.tick(bench.now) == []
    bench.now = 2.0
    bench._do(bench.scheduler.tick(bench.now))
    (failed,) = bench.emitted
    assert isinstance(failed, PrefillFailed) and failed.fault.code == "DEADLINE_EXCEEDED"


def test_slots_are_those_of_leases_and_live_where_something_is_computed() -> None:
    """Guards utilization: a prompt that waits holds nothing yet."""
    bench = Bench(chunk_tokens=32, fairness_tokens_per_s=1e6)
    assert bench.scheduler.slots == (0, 0)
    bench.start("r", _tokens(100, 1))
    bench.step()
    bench.start("waits", _tokens(60, 2))
    assert bench.scheduler.slots == (32, 7 * 16)


def test_a_quarantine_lasts_from_when_its_reader_was_first_lost() -> None:
    """Guards the age that the ladder goes by: a reader that comes, claims its blocks and goes again keeps them all the
    time."""
    bench = Bench(chunk_tokens=256)
    bench.land = False
    kept = bench.start("kept", _tokens(60, 2))
    bench.run()
    bench.now = 10.0
    bench.tell(ReaderLost(PEER))
    bench.tell(ReaderUp(PEER, True, (kept,)))
    bench.now = 20.0
    bench.tell(ReaderLost(PEER))
    bench.tell(ReaderDead(PEER))
    assert bench.scheduler.source.take_quarantined() == [10.0]


@pytest.mark.parametrize(("length", "fields"), [(8184, []), (8185, ["max_tokens"])])
def test_what_just_fits_the_context_is_taken(length: int, fields: list[str]) -> None:
    """Guards the border: the answer has eight tokens, the context 8192."""
    bench = Bench(blocks=600)
    bench.start("r", _tokens(length, 1))
    assert [r.fault.field for r in bench.emitted if isinstance(r, PrefillFailed)] == fields


def test_all_that_wait_are_given_up_when_the_worker_leaves() -> None:
    bench = Bench(chunk_tokens=32, fairness_tokens_per_s=1e6)
    bench.start("begun", _tokens(200, 1))
    bench.step()
    for number in range(4):
        bench.start(f"r{number}", _tokens(100, 2 + number))
    assert (bench.scheduler.running_requests, bench.scheduler.waiting_requests) == (1, 4)
    bench.tell(Leave(30.0))
    assert bench.scheduler.waiting_requests == 0 and len(bench.emitted) == 4


@pytest.mark.parametrize("steps", [0, 1])
def test_nothing_is_computed_for_a_reader_that_is_dead(steps: int) -> None:
    """Guards a step with rows in blocks that were let go: the proof of death may come before the loss of its stream."""
    bench = Bench(chunk_tokens=32)
    bench.start("r", _tokens(100, 1))
    for _ in range(steps):
        bench.step()
    bench.tell(ReaderDead(PEER))
    assert bench.scheduler.is_idle and bench.step() is None


def test_a_tenants_share_of_the_cache_comes_with_its_prompts() -> None:
    """Guards a tenant whose cache others would flush: it has the most of all, and half of the blocks are its own."""
    bench = Bench(blocks=8)
    mine = _tokens(60, 1)
    bench.start("mine", mine, namespace=b"t", cache_share=0.5)
    bench.run()
    for number in range(4):
        bench.start(f"r{number}", _tokens(20, 2 + number), namespace=b"%d" % number)
        bench.run()
    assert bench.scheduler.kv.matched_tokens(b"t", mine, 60) == 60


@pytest.mark.parametrize(("length", "slips_in"), [(50, True), (51, False)])
def test_a_prompt_of_half_the_length_slips_in(length: int, slips_in: bool) -> None:
    """The first in line has 100 tokens left when it comes."""
    bench = Bench(chunk_tokens=64)
    bench.start("long", _tokens(164, 1))
    bench.step()
    bench.start("short", _tokens(length, 2))
    plan = bench.step()
    assert plan is not None
    assert ("short" in {row.request for row in plan.rows}) == slips_in
    running = {job.handoff.request for job in bench.scheduler.line.running}
    assert ("short" in running) == slips_in, "who has no row takes no blocks either"


def test_the_first_in_line_may_be_one_that_slipped_in() -> None:
    """Guards the order among those that run: a hit goes before the long prompt beside which it slipped in, has the
    step, and is the one that further prompts are compared with."""
    bench = Bench(chunk_tokens=64, fairness_tokens_per_s=0.0)
    known = _tokens(160, 1)
    bench.start("known", known)
    bench.run()
    bench.start("long", _tokens(1000, 2))
    bench.step()
    bench.start("hit", [*known, *_tokens(200, 3)])
    plan = bench.step()
    assert plan is not None and [(row.request, row.end - row.start) for row in plan.rows] == [("hit", 64)]
    bench.start("short", _tokens(60, 4))
    bench.step()
    assert {job.handoff.request for job in bench.scheduler.line.running} == {"long", "hit", "short"}


@pytest.mark.parametrize("first", ["whole", "part"])
def test_the_last_token_of_a_prompt_counts_as_not_cached(first: str) -> None:
    """Guards the order: of a prompt that is cached to its end, 32 tokens are spared, as of one with more behind them.
    The first to come goes first."""
    bench = Bench(chunk_tokens=256, fairness_tokens_per_s=0.0)
    known = _tokens(33, 1)
    bench.start("known", known)
    bench.run()
    prompts = {"whole": known, "part": [*known[:32], *_tokens(60, 2)]}
    for name in (first, *(other for other in prompts if other != first)):
        bench.start(name, prompts[name])
    plan = bench.step()
    assert plan is not None and plan.rows[0].request == first


def test_the_source_of_a_copy_is_let_go_when_it_is_made() -> None:
    """Guards the cache: a block that is copied from once would be held as long as the prompt is read."""
    bench = Bench()
    known = _tokens(20, 1)
    bench.start("known", known)
    bench.run()
    bench.land = False
    bench.start("r", [*known, *_tokens(30, 2)])
    plan = bench.step()
    assert plan is not None and len(plan.copies) == 1
    assert bench.scheduler.kv.pool.refs(plan.copies[0][0]) == 0


class AheadBench(Bench):
    """A bench that completes a step when the next one has been planned."""

    plan: StepPlan | None = None

    def step(self) -> StepPlan | None:
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        ended, self.plan = self.plan, plan
        if ended is not None:
            self.now += ended.computed_tokens * S_PER_TOKEN
            drawn = [5 for row in ended.rows if row.draw]
            self._do(self.scheduler.complete(ended, drawn, self.now))
        self.scheduler.check()
        return plan


def test_the_next_chunk_is_planned_behind_the_one_that_runs() -> None:
    bench = AheadBench(chunk_tokens=64)
    bench.start("a", list(range(160)))
    spans = [[(row.start, row.end) for row in plan.rows] if (plan := bench.step()) else None for _ in range(5)]
    assert spans == [[(0, 64)], [(64, 128)], [(128, 160)], None, None]
    assert "a" in bench.first_at and sorted(bench.offered["a"]) == list(range(10))


def test_a_short_prompt_slips_in_beside_the_last_chunk_of_another() -> None:
    """Guards the rule that it waits for no more than one chunk of a long one: who is computed but for the step under
    way is no longer the shortest of those that run."""
    bench = AheadBench(chunk_tokens=64, fairness_tokens_per_s=0.0)
    bench.start("a", list(range(60)))
    bench.step()
    bench.start("long", list(range(1000, 2200)))
    bench.start("short", list(range(3000, 3010)))
    plan = bench.step()
    assert plan is not None and {row.request for row in plan.rows} == {"long", "short"}


def test_what_a_prompt_that_was_given_up_has_computed_is_cached() -> None:
    """Guards the chunk that was under way: another one with this beginning finds it; its blocks are held until then."""
    bench = AheadBench(chunk_tokens=64)
    handoff = bench.start("a", list(range(160)))
    bench.step()
    bench.tell(FromReader(PEER, Stop(handoff)))
    kv = bench.scheduler.kv
    assert kv.pool.counts()["active"] == 10 and not bench.scheduler.line.running
    assert bench.step() is None
    assert kv.matched_tokens(b"", list(range(160)), 160) == 64 and kv.available == kv.pool.total


def test_what_a_prompt_computed_is_cached_although_its_lost_reader_may_still_read() -> None:
    """Guards the chunk that was under way when the reader was lost: nobody was offered it, and others may go on behind
    it; all its blocks are held until the reader is proven dead."""
    bench = AheadBench(chunk_tokens=64)
    bench.land = False
    bench.start("a", list(range(160)))
    bench.step()
    bench.step()
    assert sorted(bench.offered["a"]) == list(range(4))
    bench.tell(ReaderLost(PEER))
    assert bench.step() is None and bench.pool["quarantined"] == 10
    kv = bench.scheduler.kv
    assert kv.matched_tokens(b"", list(range(160)), 160) == 128
    bench.tell(ReaderDead(PEER))
    assert kv.matched_tokens(b"", list(range(160)), 160) == 128 and kv.available == kv.pool.total
    bench.scheduler.check()


def test_what_was_computed_behind_a_copy_is_cached_when_its_prompt_is_given_up() -> None:
    """Guards the chunk behind a block that began as a copy, and the copy's source, which would be held for good."""
    bench = AheadBench(chunk_tokens=64)
    known = _tokens(20, 1)
    bench.start("known", known)
    bench.run()
    prompt = [*known, *_tokens(140, 2)]
    handoff = bench.start("a", prompt)
    plan = bench.step()
    assert plan is not None and len(plan.copies) == 1
    bench.tell(FromReader(PEER, Stop(handoff)))
    assert bench.step() is None
    kv = bench.scheduler.kv
    assert kv.matched_tokens(b"", prompt, 160) == 80 and kv.available == kv.pool.total
    assert kv.pool.counts()["active"] == 0


def test_a_step_takes_the_time_since_the_one_before_it_or_since_it_was_planned() -> None:
    """Guards the measured speed: a step that waited behind another would seem slow, one after a rest slower still."""
    bench = Bench(chunk_tokens=64)
    scheduler, ran = bench.scheduler, list[tuple[int, float]]()
    scheduler.line.order.ran = lambda tokens, seconds: ran.append((tokens, seconds))  # type: ignore[method-assign]
    bench.start("a", _tokens(128, 1))
    first, _ = scheduler.plan(1.0)
    second, _ = scheduler.plan(1.25)
    assert first is not None and second is not None
    scheduler.complete(first, [], 2.0)
    scheduler.complete(second, [5], 2.5)
    bench.start("b", _tokens(64, 2))
    third, _ = scheduler.plan(8.0)
    assert third is not None
    scheduler.complete(third, [5], 8.125)
    assert ran == [(64, 1.0), (64, 0.5), (64, 0.125)]


def test_what_a_step_says_of_a_prompts_tokens_is_that_prompts() -> None:
    """Guards log probabilities that would be told of another prompt: the next step is under way by then."""
    bench = Bench(chunk_tokens=64)
    scheduler = bench.scheduler
    for number, name in enumerate("ab"):
        bench.start(name, _tokens(64, number), prompt_logprobs=1)
    first, _ = scheduler.plan(0.0)
    second, _ = scheduler.plan(0.0)
    assert first is not None and second is not None
    assert [row.request for plan in (first, second) for row in plan.rows] == ["a", "b"]
    jobs = {job.handoff.request: job for job in scheduler.line.running}
    said = TokenLogprobs(7, -0.5)
    scheduler.scored(first, [[said]])
    assert [jobs[RequestId(name)].scores for name in "ab"] == [[said], []]


def test_what_nobody_had_to_wait_for_was_no_quarantine() -> None:
    """Guards the histogram of quarantines, and the worker that fills it: most handoffs have had none."""
    bench = Bench(chunk_tokens=256)
    stopped = bench.start("stopped", _tokens(100, 1))
    bench.tell(FromReader(PEER, Stop(stopped)))
    bench.start("whole", _tokens(100, 2))
    bench.run()
    assert bench.scheduler.is_idle and bench.scheduler.source.take_quarantined() == []


def test_a_prompt_that_is_computed_leaves_the_line_before_it_has_landed() -> None:
    """Guards whoever comes next: a prompt whose reader takes its time would be counted among those that compute."""
    bench = Bench(chunk_tokens=64)
    bench.land = False
    handoff = bench.start("a", _tokens(48, 1))
    bench.run()
    line = bench.scheduler.line
    assert "a" in bench.first_at and bench.pool["active"] == 3
    assert not line.running and not line.waiting and not line.backlog_tokens
    bench.tell(FromReader(PEER, Stop(handoff)))
    assert bench.pool["active"] == 0


def test_a_step_under_way_is_still_to_be_computed() -> None:
    """Guards a router's queues: a worker in the midst of a long step was reported as one that has nothing to do."""
    bench = Bench(chunk_tokens=64)
    bench.start("a", _tokens(100, 1))
    scheduler, left = bench.scheduler, [bench.scheduler.backlog_tokens]
    first, _ = scheduler.plan(bench.now)
    left.append(scheduler.backlog_tokens)
    second, _ = scheduler.plan(bench.now)
    left.append(scheduler.backlog_tokens)
    assert first is not None and second is not None and scheduler.line.backlog_tokens == 0
    for plan, drawn in ((first, []), (second, [7])):
        scheduler.complete(plan, drawn, bench.now)
        left.append(scheduler.backlog_tokens)
    assert left == [100, 100, 100, 36, 0]
