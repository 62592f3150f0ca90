"""`headrace plan`: capacity on paper, for this configuration's pools or for memory that one does not have."""

from fractions import Fraction

import msgspec

from cluster.config import ClusterConfig, ConfigError, draft_problem
from cluster.defaults import gpu_dtype
from cluster.plan.flags import Asked
from cluster.plan.held import held_bytes, kinds_at_hand
from cluster.plan.planner import (
    PlannedRequest,
    Pool,
    Shape,
    TokenSizes,
    Waste,
    pool_of,
    rank_shape,
    request,
    token_sizes,
    waste,
    weights_bytes,
)
from cluster.plan.shapes import find_shape, is_local
from engine.config import EngineConfig, StepLimits
from engine.kv.groups import layer_groups
from engine.model.config import MOST_CONTEXT_TOKENS, ModelConfig
from engine.model.split import check_split

GPU_RESERVE = Fraction(1, 10)
"""The share of a GPU's memory kept for its runtime, communication buffers and fragmentation."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace plan` prints; with `--json`, as it is here."""

    model: Shape
    dtype: str
    kv_dtype: str
    ranks: int
    weights_bytes: int | None
    """Bytes on each rank; None where only the KV of the model is known."""
    sizes: TokenSizes
    request: PlannedRequest
    many: int
    many_bytes: int
    """Bytes of `many` requests, all ranks together, every head once."""
    pools: tuple[Pool, ...] = ()
    waste: Waste | None = None


def make_plan(asked: Asked, config: ClusterConfig) -> Plan:
    """Plan for these flags and this configuration. Raises ConfigError for flags that do not fit together, and
    ModelError for a model that cannot be read."""
    shape = _shape(asked, config.model)
    own = is_own(asked, config)
    engine = config.decode.engine
    shape = _grouped(shape, engine)
    configured = gpu_dtype(shape.stored) if engine.dtype == "auto" else engine.dtype
    dtype = asked.dtype or configured
    kv_dtype, ranks = asked.kv_dtype or engine.kv_dtype_of(dtype), asked.tp or (engine.tensor_parallel if own else 1)
    if shape.model is not None:
        try:
            check_split(shape.model, ranks)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    sizes = token_sizes(shape, kv_dtype, asked.block_size or engine.block_size, ranks)
    context = asked.context or (config.context_tokens if own else 0) or shape.context_tokens
    if not context:
        raise ConfigError("flag --context: needed, since nothing says how long the model's is")
    if context > MOST_CONTEXT_TOKENS:
        raise ConfigError(f"context_tokens: {context} exceeds {MOST_CONTEXT_TOKENS}")
    if asked.lengths and max(asked.lengths) > context:
        raise ConfigError(f"flag --lengths: {max(asked.lengths)} exceeds the context of {context}")
    one, many = request(sizes, context), asked.requests or 1
    weights = asked.weights
    if weights is None and shape.model is not None:
        weights = _weights(asked, config, shape, shape.model, dtype, ranks)
    plan = Plan(
        model=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        ranks=ranks,
        weights_bytes=weights,
        sizes=sizes,
        request=one,
        many=many,
        many_bytes=many * one.token_bytes,
        waste=waste(sizes, asked.lengths, context) if asked.lengths else None,
    )
    return msgspec.structs.replace(plan, pools=_pools(plan, asked, config, own))


def _grouped(shape: Shape, engine: EngineConfig) -> Shape:
    """Return the shape with its layers in groups, where the engine keeps them so (docs/layer-groups.md)."""
    model = shape.model
    if model is None:
        return shape
    windows = [model.layer(number).window for number in range(model.layers)]
    return msgspec.structs.replace(shape, groups=layer_groups(windows) if engine.groups_layers else ())


def _weights(
    asked: Asked, config: ClusterConfig, shape: Shape, model: ModelConfig, dtype: str, ranks: int
) -> int:
    """Return the bytes of weights on a rank: of a file at hand as workers hold them, of others by their number."""
    on_paper = asked.shape or shape.not_run or not is_local(config.model)
    kinds = {} if on_paper else kinds_at_hand(config.model, dtype)
    if not kinds:
        return weights_bytes(model, dtype, ranks)
    engine = config.decode.engine
    device = engine.device if is_own(asked, config) else "cuda"
    native = device == "cpu" and msgspec.structs.replace(engine, dtype=dtype).kernels == "native"
    return held_bytes(model, dtype, kinds, device, native, ranks)


def is_own(asked: Asked, config: ClusterConfig) -> bool:
    """Say whether the plan is for the pools of this configuration. Any other is for GPUs, and has their defaults."""
    on_paper = asked.shape or asked.gpu_memory is not None or asked.kv_memory is not None
    return not on_paper and is_local(config.model)


def _pools(plan: Plan, asked: Asked, config: ClusterConfig, own: bool) -> tuple[Pool, ...]:
    """Return the one pool of the given memory, or those that this configuration makes of its own model."""
    if asked.kv_memory is not None:
        tail = asked.tail or Fraction(0)
        blocks = plan.request.blocks
        return (pool_of("rank", plan.sizes, blocks, kv_bytes=asked.kv_memory, tail_share=tail),)
    if asked.gpu_memory is not None:
        return (_gpu(plan, asked, config, asked.gpu_memory),)
    if not own:
        return ()
    prefill, decode = config.prefill, config.decode
    return tuple(
        _configured(role, plan, asked, one.engine, one.step_limits, one.tiers.host_bytes)
        for role, one in (("prefill", prefill), ("decode", decode))
        if role == "decode" or config.prefill_workers
    )


def _gpu(plan: Plan, asked: Asked, config: ClusterConfig, memory: int) -> Pool:
    limits = StepLimits(
        chunk_tokens=config.prefill.chunk_tokens,
        batch=config.decode.max_batch,
        context_tokens=plan.request.tokens,
    )
    reserve = GPU_RESERVE if asked.reserve is None else asked.reserve
    return pool_of(
        "GPU",
        plan.sizes,
        plan.request.blocks,
        memory_bytes=memory,
        reserve_bytes=int(memory * reserve) if isinstance(reserve, Fraction) else reserve,
        weights=plan.weights_bytes,
        workspace=_workspace(plan, asked, limits, plan.sizes.block_size, "cuda"),
        tail_share=asked.tail or Fraction(0),
    )


def _configured(
    role: str,
    plan: Plan,
    asked: Asked,
    engine: EngineConfig,
    limits: StepLimits,
    host_tier_bytes: int = 0,
) -> Pool:
    """Return the pool that a worker of this configuration makes on this machine. Raises ConfigError where only a GPU
    knows."""
    if engine.device != "cpu" and engine.pool_bytes == "auto":
        raise ConfigError(
            f"flag --gpu-memory: needed, since {role}.engine.pool_bytes is 'auto' on {engine.device}, and the card's "
            "memory is not known here"
        )
    block_size = asked.block_size or engine.block_size
    sizes = token_sizes(_grouped(plan.model, engine), plan.kv_dtype, block_size, plan.ranks)
    draft = _draft(engine, plan.dtype, plan.kv_dtype, block_size) if role == "decode" else (0, 0)
    ahead = (limits.chunk_tokens + 1) * (2 if engine.plans_ahead else 1)
    together = engine.tensor_parallel  # ranks of one host's memory share its pool
    workspace = _workspace(plan, asked, limits, block_size, engine.device)
    kv_bytes = engine.kv_bytes((plan.weights_bytes or 0) * together, workspace or 0, host_tier_bytes, sum(draft))
    pool = pool_of(
        role,
        sizes,
        request(sizes, plan.request.tokens, 1 + ahead).blocks,
        kv_bytes=kv_bytes // together,
        weights=plan.weights_bytes,
        workspace=workspace,
        tail_share=asked.tail or Fraction(0),
    )
    return msgspec.structs.replace(pool, draft_weights_bytes=draft[0], draft_kv_bytes=draft[1])


def _draft(engine: EngineConfig, dtype: str, kv_dtype: str, block_size: int) -> tuple[int, int]:
    """Return the bytes of a draft model's weights, and of its KV; it is whole in one rank. Raises ConfigError where it
    is set and cannot be used, and ModelError."""
    if (reason := draft_problem(engine)) is not None:
        raise ConfigError(f"decode.engine.speculation {reason}")
    if engine.speculation != "model":
        return 0, 0
    shape = find_shape(engine.draft_model)
    if shape.model is None:
        why = shape.not_run or "its sizes are not known"
        raise ConfigError(f"decode.engine.draft_model: {engine.draft_model}: {why}")
    kinds = kinds_at_hand(engine.draft_model, dtype) if is_local(engine.draft_model) and not shape.not_run else {}
    native = msgspec.structs.replace(engine, dtype=dtype).kernels == "native"
    weights = (
        held_bytes(shape.model, dtype, kinds, engine.device, native) if kinds else weights_bytes(shape.model, dtype)
    )
    block_bytes = token_sizes(shape, kv_dtype, block_size).block_bytes
    return weights, engine.draft_pool_bytes // block_bytes * block_bytes


def _workspace(
    plan: Plan, asked: Asked, limits: StepLimits, block_size: int, device: str
) -> int | None:
    """Return the workspace as given, or estimated where every size of the model is known. Attention kernels on a GPU
    read KV where it lies."""
    if asked.workspace is not None or plan.model.model is None:
        return asked.workspace
    # Imports torch, which the arithmetic does without.
    from engine.backends.workspace import estimate_workspace

    shape = rank_shape(plan.model.model, plan.ranks)
    in_place = device != "cpu"
    return estimate_workspace(shape, plan.dtype, block_size, limits, in_place, plan.kv_dtype)


def _shape(asked: Asked, named: str) -> Shape:
    """Return the model's shape, with what the flags say instead; flags for all three sizes need no model."""
    given = asked.shape
    if len(given) == 3 and not named:
        return Shape(
            name="by flags",
            layers=given["layers"],
            kv_heads=given["kv_heads"],
            head_dim=given["head_dim"],
        )
    shape = find_shape(named)
    if not given:
        return shape
    # Nobody has the weights of such a model: only its KV is planned.
    name = f"{shape.name}, changed by flags"
    return msgspec.structs.replace(shape, name=name, model=None, **given)
