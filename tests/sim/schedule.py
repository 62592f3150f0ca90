"""Random schedules: from a number to a workload with faults, run, and judged whether it counts."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Literal

from msgspec.structs import replace

from engine.kv.groups import LayerGroup
from engine.kv.manager import KVCacheManager
from engine.types import (
    BeamParams,
    Constraint,
    ConstraintKind,
    EarlyStopping,
    RequestId,
    RequestRecord,
    SamplingParams,
)
from router.config import RouterConfig
from tests.sim.clock import Violation
from tests.sim.faults import DATA_KINDS, KINDS, SHM_KINDS, Fault
from tests.sim.forgeries import ROUTER_KINDS
from tests.sim.plan import Ask, Going, Plan
from tests.sim.shadow import ADAPTERS, VOCAB
from tests.sim.world import World
from worker.config import DecodeConfig, PrefillConfig

WEIGHTS = {
    "crash prefill": 6,
    "crash decode": 6,
    "freeze prefill": 4,
    "freeze decode": 5,
    "crash router": 3,
    "freeze router": 1,
    "cut handoff": 6,
    "cut router": 3,
    "partition handoff": 4,
    "partition router": 2,
    "duplicate": 4,
    "reorder": 4,
    "drop": 4,
    "misdirect": 3,
    "corrupt": 3,
    "send_fails": 2,
    "recv_fails": 2,
    "cut data": 4,
    "silence data": 4,
    "misstate": 3,
    "overwrite": 3,
    "early word": 2,
    "stale word": 3,
    "stale order": 3,
    "stop rank": 0,
}
"""Ranks are stopped where there are several: `stop_a_rank`."""
ON = ("StartPrefill", "Offer", "Offer", "FirstToken", "Landed", "Stop", "copy", "copy", "copy", "move")
SEARCHES = 0.2
"""Share of the requests that are beam searches where they fit."""
OWN_ENDS = 0.15
"""Share of the requests without a grammar that name tokens which end them."""
CONSTRAINED = 0.3
"""Share of the requests that are held to a constraint."""
LARGE, MOST_OF_A_GIANT = 0.3, 80
"""Share of the plans whose decode workers differ in size, where the small ones have room for at most so many tokens."""
SHARED = 0.3
"""Share of the schedules whose tenants have shares of the cache."""
WINDOWS: tuple[tuple[int, ...], ...] = (*[()] * 8, (3,), (6,), (9, 5), (20, 2))
"""The layer groups with a window that a schedule may have."""
MIN_OVERLAP = 4
RECOVERS = True
"""Whether lost workers and broken streams must be recovered from, exactly and without a trace."""


RANKS = (*[{"prefill": 1, "decode": 1}] * 6, *[{"prefill": p, "decode": d} for p, d in ((2, 2), (1, 2), (2, 1))])
"""The ranks of workers: mostly one."""


def make_plan(seed: int, *, strict: bool = RECOVERS) -> Plan:
    """Draw everything from `seed`."""
    rng = Random(seed)
    goings = [_going(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]
    moving = any(going.role == "decode" for going in goings)
    size = rng.choice((2, 4, 4))
    sizes = {"prefill": size if rng.random() < 0.75 else rng.choice((2, 3, 6)), "decode": size}
    crowded = rng.random() < 0.25
    asks = _asks(rng, size, (4, 8, 12, 16) if moving or crowded else (1, 2, 3, 4, 6, 8))
    longest = max(a.record.prompt_tokens + a.record.max_tokens for a in asks)
    transport = rng.choice(("shm", "shm", "tcp"))
    # Of their own, so that everything else is as it was before there was swapping.
    swaps = Random(f"swap {seed}")
    mode, below = swaps.choice(("recompute", "swap", "swap", "auto")), swaps.choice((0, 4, 12, 24))
    windows = Random(f"windows {seed}").choice(WINDOWS)
    if windows:
        sizes["prefill"] = size  # with layer groups, workers cut blocks alike
    most = {role: -(-longest // tokens) for role, tokens in sizes.items()}
    plan = Plan(
        seed=rng.getrandbits(32),
        asks=asks,
        faults=_faults(rng, moving, transport),
        workers={"prefill": rng.choice((2, 2, 3)), "decode": rng.choice((2, 2, 3))},
        blocks={
            "prefill": most["prefill"] + rng.randint(0, 1),
            "decode": most["decode"] * rng.choice((1, 3 if moving else 1)) + rng.randint(0, 8 if crowded else 2),
        },
        block_size=sizes,
        transport=transport,
        slow_copies=rng.choice((0.0, 0.05, 0.3)),
        tier_blocks=Random(f"tiers {seed}").choice((0, 0, 4, 12)),
        decode_tier_blocks=below,
        decode=DecodeConfig(
            max_batch=rng.choice((2, 8)),
            max_handoffs=rng.choice((2, 16)),
            orphan_s=rng.choice((30.0, 30.0, 0.004)),
            preemption=_mode(rng.choice((True, True, False)), mode, below),
            growth_tokens=rng.choice((4, 4, 8)),
            local_chunk_tokens=rng.choice((2, 8, 64)),
            itl_target_ms=Random(f"held {seed}").choice(("off", "auto", 4.0, 50.0)),
        ),
        prefill=PrefillConfig(chunk_tokens=rng.choice((4, 8, 8, 16))),
        router=_router(Random(f"router {seed}")),
        strict=strict,
        ahead=Random(f"ahead {seed}").choice((True, False)),
        drafts=Random(f"drafts {seed}").choice((True, False)),
        ranks=dict(Random(f"ranks {seed}").choice(RANKS)),
        goings=goings,
        windows=windows,
        escalate_s=rng.choice((0.5, 5.0)),
        stall_s=rng.choice((0.3, 1.0)),
        announced=rng.random() < 0.6,
    )
    stop_a_rank(plan, seed)
    _keep_groups(plan, longest)
    _search(plan, Random(f"searches {seed}"))
    _constrain(plan, Random(f"constraints {seed}"))
    _end(plan, Random(f"ends {seed}"))
    _share(plan, Random(f"shares {seed}"))
    _enlarge(plan, Random(f"large {seed}"))
    return plan


def _keep_groups(plan: Plan, longest: int) -> None:
    """Make room for the blocks of layer groups with windows, where the plan has any."""
    if not plan.windows:
        return
    for role, config in (("prefill", plan.prefill), ("decode", plan.decode)):
        plan.blocks[role] += _held(plan, config.step_limits.chunk_tokens, longest)


def stop_a_rank(plan: Plan, seed: int) -> None:
    """Stop, in some of the plans whose workers have two ranks, one of them, for a while or until it is noticed."""
    rng = Random(f"stopped rank {seed}")
    if max(plan.ranks.values()) > 1 and rng.random() < 0.5:
        on, lasts_s = rng.choice(("Offer", "copy", "copy", "Landed")), rng.choice((rng.uniform(0.002, 0.1), 1.0))
        plan.faults.append(Fault("stop rank", on, rng.randint(1, 4), delay_s=rng.uniform(0, 0.002), lasts_s=lasts_s))


def _held(plan: Plan, chunk_tokens: int, tokens: int) -> int:
    """Return the most blocks that a sequence of so many tokens holds of the groups with windows."""
    size = plan.block_size["decode"]
    groups = tuple(LayerGroup((at,), window) for at, window in enumerate((0, *plan.windows)))
    kv = KVCacheManager(1, size, "", None, groups, (chunk_tokens + 1) * (2 if plan.ahead else 1))
    return kv.pool_blocks_for(tokens) - kv.blocks_for(tokens)


def _constrain(plan: Plan, rng: Random) -> None:
    """Hold some of the requests to a grammar, samples of one call to the same."""
    asked: dict[str, Constraint | None] = {}
    for ask in plan.asks:
        record = ask.record
        constraint = Constraint(ConstraintKind.REGEX, "x" * rng.randint(1, 40)) if rng.random() < CONSTRAINED else None
        if record.group:
            constraint = asked.setdefault(record.group, constraint)
        if constraint is not None and record.beams is None:
            ask.record = replace(record, constraint=constraint, ignore_eos=False)


def _end(plan: Plan, rng: Random) -> None:
    """Let some of the requests end by tokens of their own, or later than they might; samples of one call alike."""
    drawn: dict[str, tuple[tuple[int, ...], int]] = {}
    for ask in plan.asks:
        record = ask.record
        ends: tuple[tuple[int, ...], int] = (), record.min_tokens
        if rng.random() < OWN_ENDS:
            ends = tuple(rng.sample(range(VOCAB), rng.randint(1, 12))), rng.choice((0, 0, 1, 2, record.max_tokens))
        if record.group:
            ends = drawn.setdefault(record.group, ends)
        if record.constraint is None:
            ask.record = replace(record, stop_token_ids=ends[0], min_tokens=ends[1])


def _share(plan: Plan, rng: Random) -> None:
    """Give tenants shares of the cache in some of the plans."""
    if rng.random() < SHARED:
        shares = {ask.record.namespace: rng.choice((0.0, 0.1, 0.3, 0.6)) for ask in plan.asks}
        for ask in plan.asks:
            ask.record = replace(ask.record, cache_share=shares[ask.record.namespace])


def _enlarge(plan: Plan, rng: Random) -> None:
    """Give, in some of the plans, one decode worker a larger pool than the others, and it alone room for a request."""
    size = plan.block_size["decode"]
    fit = plan.blocks["decode"] * size
    alone = [ask for ask in plan.asks if not ask.record.group and ask.record.beams is None]
    if plan.windows or fit > MOST_OF_A_GIANT or not alone or rng.random() >= LARGE:
        return
    ask = rng.choice(alone)
    plan.giant = ask.record.request
    tokens = fit + rng.randint(1, 3 * size) - ask.record.prompt_tokens
    ask.record = replace(ask.record, max_tokens=tokens, min_tokens=rng.choice((0, tokens)), constraint=None)
    plan.large_blocks = -(-(fit + 3 * size) // size) + rng.randint(0, 4)


def _search(plan: Plan, rng: Random) -> None:
    """Turn some of the requests into beam searches, as wide as the decode workers' pools and steps allow."""
    size, blocks = plan.block_size["decode"], plan.blocks["decode"]
    for ask in plan.asks:
        record = ask.record
        shared = (record.prompt_tokens - 1) // size
        tokens = record.prompt_tokens + record.max_tokens
        rest = -(-tokens // size) - shared
        if plan.windows:
            rest += _held(plan, plan.decode.step_limits.chunk_tokens, tokens)
        copied = len(plan.windows)
        width = min(rng.randint(2, 4), plan.decode.max_batch, (blocks - shared + copied) // (rest + copied))
        if rng.random() < SEARCHES and width >= 2 and not record.group:
            beams = BeamParams(
                width=width,
                answers=rng.randint(1, width),
                length_penalty=rng.choice((1.0, 0.0, 2.0)),
                early_stopping=rng.choice(list(EarlyStopping)),
            )
            # Where nothing is said before the end, there is no stop string to be found, and nothing to resume.
            ask.record = replace(record, beams=beams, context=b"", logprobs=None, prompt_logprobs=None)
            ask.stop_after = None


def _mode(preempts: bool, mode: str, tier_blocks: int) -> Literal["recompute", "swap", "auto", "off"]:
    if not preempts:
        return "off"
    if mode == "swap" and tier_blocks:
        return "swap"
    return "auto" if mode == "auto" else "recompute"


def _router(rng: Random) -> RouterConfig:
    """Draw how much a router may spend on losses: mostly enough for all, sometimes hardly anything."""
    return RouterConfig(
        max_placements=rng.choice((3,) * 8 + (1, 2)), retry_reserve=rng.choice((128,) * 10 + (0, 1, 2))
    )


def _going(rng: Random) -> Going:
    return Going(
        rng.choice(("prefill", "decode", "decode")),
        at_s=rng.uniform(0.0, 0.06),
        grace_s=rng.choice((10.0, 10.0, 10.0, rng.uniform(0.001, 0.02))),
        pause_s=rng.uniform(0.005, 0.2),
    )


def _asks(rng: Random, size: int, lengths: tuple[int, ...]) -> list[Ask]:
    stems = [[rng.randrange(VOCAB - 1) for _ in range(rng.randint(size, 4 * size))] for _ in range(3)]
    asks = []
    for number in range(rng.randint(5, 8)):
        stem = rng.choice(([], *stems))
        prompt = [*stem, *(rng.randrange(VOCAB - 1) for _ in range(rng.randint(1, 2 * size)))]
        record = RequestRecord(
            request=RequestId(f"r{number}"),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=rng.choice(lengths),
            seed=rng.getrandbits(64),
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=rng.random() < 0.5,
            min_tokens=rng.choice((0, 0, 0, 1)),
            adapter=("", "", "", *ADAPTERS)[number % 5],
            namespace=rng.choice((b"", b"", b"", b"tenant")),
            priority=rng.choice((0, 0, 0, 1)),
            context=rng.choice((b"", b"resumable")),
            logprobs=number if number % 2 else None,
        )
        if number % 3 == 1 and not record.context:
            record = replace(record, prompt_logprobs=number)
        at_s = rng.uniform(0, 0.01)
        asks += (
            Ask(
                one,
                at_s=at_s,
                deadline_s=rng.uniform(0.004, 0.08) if rng.random() < 0.12 else None,
                cancel_s=rng.uniform(0.001, 0.03) if rng.random() < 0.15 else None,
                stop_after=rng.randint(1, 3) if rng.random() < 0.12 else None,
            )
            for one in samples(record, rng.choice((1, 1, 1, 1, 1, 2, 3)))
        )
    return asks


def samples(record: RequestRecord, count: int) -> list[RequestRecord]:
    """Make samples as `router.front.frontend` does."""
    if count == 1:
        return [record]
    return [
        replace(
            record,
            request=RequestId(f"{record.request}.{at}"),
            sample_index=at,
            group=record.request,
            prompt_logprobs=None if at else record.prompt_logprobs,
        )
        for at in range(count)
    ]


def _faults(rng: Random, moving: bool, transport: str) -> list[Fault]:
    number = rng.choice((1, 1, 2, 2, 3, 4))
    faults = [_fault(rng, moving, transport, alone=number == 1) for _ in range(number)]
    if rng.random() < 0.08:
        # The router dies while it takes a decode worker for lost: two workers may hold one request, and one that stays
        # frozen is never met by the next router.
        kinds = ("cut router", "cut router", "freeze decode", "freeze decode", "partition router")
        kind = rng.choice(kinds)
        is_cut, count = kind == "cut router", rng.randint(1, 4)
        lasts_s = 0.05 if is_cut else rng.uniform(2.0, 4.0)
        if kind == "freeze decode" and rng.random() < 0.5:
            lasts_s += 4.0
        delay_s = rng.uniform(0.004, 0.035) if is_cut else rng.uniform(1.0, 2.1)
        return [
            Fault(kind, "Landed", count, lasts_s=lasts_s),
            Fault("crash router", "Landed", count, delay_s=delay_s, lasts_s=0.002),
        ]
    return faults


def _fault(rng: Random, moving: bool, transport: str, alone: bool) -> Fault:
    """Draw a fault. One that is `alone` should find its occasion, or the schedule does not count."""
    without = ("reorder",) * alone + (SHM_KINDS if transport == "tcp" else DATA_KINDS)
    kind = rng.choices(KINDS, [0 if k in without else WEIGHTS[k] for k in KINDS])[0]
    lasts = rng.choice((rng.uniform(0.002, 0.03), rng.uniform(0.03, 0.4)))
    if rng.random() < 0.25 and kind.partition(" ")[0] in ("freeze", "partition"):
        lasts = rng.uniform(2.0, 4.0)
    if kind == "silence data" and rng.random() < 0.5:
        lasts = rng.uniform(0.3, 3.0)  # some longer than anybody waits
    if kind == "crash router" and rng.random() < 0.5:
        lasts = rng.uniform(0.0, 0.004)  # back while its requests still run
    if rng.random() < 0.15 and not alone:
        return Fault(kind, "time", at_s=0.05 + rng.uniform(0, 0.04), lasts_s=lasts)
    on = "copy" if kind in DATA_KINDS else rng.choice(ON if moving else ON[:-1])
    if kind in ROUTER_KINDS:
        on = "Tokens"
    return Fault(
        kind,
        on,
        count=1 if on == "move" else rng.choice((1, 2, 3, rng.randint(1, 3 if alone else 8))),
        delay_s=rng.choice((0.0, rng.uniform(0, 0.001), rng.uniform(0, 0.006))),
        lasts_s=lasts,
    )


@dataclass(slots=True)
class Result:
    """The result of one schedule. `failure` is empty if all promises held."""

    seed: int
    failure: str
    counts: bool
    struck: Counter[str]
    effective: Counter[str]
    notes: Counter[str]
    events: int
    virtual_s: float


def run_schedule(seed: int, *, strict: bool = RECOVERS) -> Result:
    """Run the schedule of one seed."""
    world = World(make_plan(seed, strict=strict))
    failure = ""
    try:
        world.run()
    except Violation as violation:
        failure = str(violation)
    counts = (
        world.overlap >= MIN_OVERLAP
        and bool(world.faults.effective)
        and bool(world.notes["Refused"] or world.notes["cache evicted"] or world.notes["prompt waits for blocks"])
    )
    return Result(
        seed,
        failure,
        counts,
        world.faults.struck,
        world.faults.effective,
        world.notes,
        world.clock.events,
        world.clock.now,
    )


