"""A plan, and a check of it, as text."""

from collections.abc import Iterable, Sequence

from cluster.plan.check import TOLERANCE, Compared
from cluster.plan.plan import Plan
from cluster.plan.planner import Pool, Waste, active_parameters, parameters
from cluster.sizes import format_size

Row = tuple[str, ...]


def check_text(compared: Sequence[Compared]) -> str:
    """Write every figure, and by how much plan and worker differ."""
    rows = [("worker", "figure", "planned", "found", "")]
    for one in compared:
        show = "{:,}".format if one.what == "blocks" else format_size
        verdict = "" if one.fits else f"  beyond {TOLERANCE:.0%}"
        figure = one.what.removesuffix("_bytes")
        rows.append(
            (
                one.worker,
                figure,
                show(one.planned),
                show(one.found),
                f"{one.deviation:+.2%}{verdict}",
            )
        )
    return _aligned(rows)


def plan_text(plan: Plan) -> str:
    """Write the plan for a person; every size of memory in powers of 1024."""
    parts = [_aligned(_sizes(plan))]
    if plan.pools:
        parts.append(_aligned(_pools(plan)))
    if plan.waste is not None:
        parts.append(_aligned(_waste(plan.waste, plan.request.tokens)))
    if plan.model.not_run:
        parts.append(plan.model.not_run)
    short = [pool for pool in plan.pools if pool.missing_bytes]
    for pool in short:
        parts.append(f"{pool.name}: {format_size(pool.missing_bytes)} short of a single block")
    return "\n\n".join(parts)


def _sizes(plan: Plan) -> Iterable[Row]:
    model, sizes, request = plan.model, plan.sizes, plan.request
    yield (
        "model",
        f"{model.name}: {model.layers} layers x {model.kv_heads} KV heads of {model.head_dim}",
    )
    if plan.weights_bytes is not None:
        yield "weights", plan.dtype
    if (whole := model.model) is not None and whole.experts is not None:
        every, active = parameters(whole) / 1e9, active_parameters(whole) / 1e9
        chosen = f"{whole.experts.chosen} of {whole.experts.count} experts"
        yield "parameters", f"{every:.2f} billion; a token is multiplied with {active:.2f}, by {chosen}"
    yield "KV", f"{plan.kv_dtype}, blocks of {sizes.block_size} tokens"
    if plan.ranks > 1:
        held = sizes.kv_heads_per_rank
        copies = held * plan.ranks // model.kv_heads
        note = f", every head on {copies} ranks" if copies > 1 else ""
        yield "ranks", f"{plan.ranks}, each with {held} KV heads{note}"
    if sizes.groups:
        windows = ", ".join(sorted({f"{group.window:,}" for group in sizes.windows}))
        each = f"{len(sizes.groups)} of up to {sizes.block_layers} layers, a block table for each"
        yield "layer groups", f"{each}; {len(sizes.windows)} keep a window of {windows} tokens"
    yield "a token", _each(plan, sizes.token_bytes, sizes.rank_token_bytes)
    yield "a block on a rank", format_size(sizes.rank_block_bytes)
    one = f"{request.tokens:,} tokens: "
    yield (
        "a request",
        one + _each(plan, request.token_bytes, request.rank_token_bytes),
    )
    yield (
        "  in blocks",
        f"{request.blocks:,}{_of_windows(plan)}; tail {request.tail_tokens} tokens, "
        f"{format_size(request.rank_tail_bytes)}",
    )
    if plan.many > 1:
        yield f"{plan.many:,} requests", format_size(plan.many_bytes)
    if plan.weights_bytes is not None and not plan.pools:
        yield "weights on a rank", format_size(plan.weights_bytes)


def _of_windows(plan: Plan) -> str:
    return f", {plan.request.window_blocks:,} of them windows'" if plan.sizes.groups else ""


def _each(plan: Plan, whole: int, rank: int) -> str:
    text = format_size(whole)
    return text if plan.ranks == 1 else f"{text}; on each rank {format_size(rank)}"


def _pools(plan: Plan) -> Iterable[Row]:
    pools = plan.pools
    yield ("on each rank", *(pool.name for pool in pools))
    if any(pool.memory_bytes is not None for pool in pools):
        yield ("memory", *(_known(pool.memory_bytes) for pool in pools))
        yield ("reserve", *(format_size(pool.reserve_bytes) for pool in pools))
    yield ("weights", *(_known(pool.weights_bytes) for pool in pools))
    if any(pool.draft_kv_bytes for pool in pools):
        yield ("draft model's weights", *(format_size(pool.draft_weights_bytes) for pool in pools))
        yield ("draft model's KV", *(format_size(pool.draft_kv_bytes) for pool in pools))
    yield ("workspace", *(_known(pool.workspace_bytes) for pool in pools))
    yield ("KV memory", *(format_size(pool.kv_bytes) for pool in pools))
    yield ("  blocks", *(f"{pool.blocks:,}" for pool in pools))
    yield ("  tokens", *(f"{pool.tokens:,}" for pool in pools))
    if any(pool.tail_bytes for pool in pools):
        yield ("  tail waste", *(_tail(pool) for pool in pools))
    yield (f"requests of {plan.request.tokens:,}", *(f"{pool.requests:,}" for pool in pools))


def _known(size: int | None) -> str:
    return "not known" if size is None else format_size(size)


def _tail(pool: Pool) -> str:
    return f"{format_size(pool.tail_bytes)} ({pool.tail_share:.1%})"


def _waste(waste: Waste, reserved: int) -> Iterable[Row]:
    yield "live tokens", f"{waste.live_tokens:,}", format_size(waste.live_bytes), ""
    for name, tokens, size, share in (
        (
            f"reserving {reserved:,} each",
            waste.reserved_tokens,
            waste.reserved_bytes,
            waste.reserved_waste,
        ),
        ("in blocks", waste.paged_tokens, waste.paged_bytes, waste.paged_waste),
    ):
        yield name, f"{tokens:,}", format_size(size), f"{share:.1%} wasted"


def _aligned(rows: Iterable[Sequence[str]]) -> str:
    """Align columns as wide as they must be; the first is of words, the others of figures."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
