"""The whole cluster's configuration: the structs of every package, composed.

How a value gets here (file, variable, flag) is `cluster.resolve`'s business; this file says what
there is, what is allowed, and what is worked out from the machine.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from access.config import AccessConfig, AccessError, check_exposed, check_transport
from cluster.processes.placement import RayConfig
from cluster.processes.processors import usable_cores
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig
from engine.kv.layout import DTYPE_BYTES
from router.config import RouterConfig
from router.core.policies import POLICIES
from telemetry.tracing import TracingConfig
from worker.config import DecodeConfig, PrefillConfig


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace up` starts, and how."""

    name: str = "headrace"
    """The cluster's name on its host: by it the other verbs find it."""
    run_dir: str = ""
    """The folder of its socket; empty means $XDG_RUNTIME_DIR/headrace, or a private folder in the temporary one."""
    model: str = ""
    """A GGUF file, a Hugging Face directory, or a name on the hub (`Qwen/Qwen3-0.6B`), which is downloaded; empty means
    the demo model."""
    context_tokens: int = 0
    """The longest context that is served, where it is to be shorter than the model's own; 0: the model's. A model with
    LongRoPE has its short table up to the context that it was first trained with (docs/models.md)."""
    secret_file: str = ""
    """The file of the secret by which its processes know each other: one a line, two while one replaces the other; made
    where there is none. Empty: one is drawn at each start. Workers that are started alone need it."""
    launcher: Literal["ray", "process"] = "ray"
    """What starts the workers: Ray, which a cluster of several machines needs, or plain processes of this one."""
    ray: RayConfig = RayConfig()
    prefill_workers: int = 1
    """0: one pool of decode workers, each of which reads its prompts itself, beside its running requests."""
    decode_workers: int = 1
    """At least 1."""
    routers: int = 1
    """Routers behind the same ports, one process each: as many cores as the front may use."""
    worker_host: str = "127.0.0.1"
    """The address workers listen on; on a Ray cluster each takes its node's instead."""
    cache_dir: str = ""
    """Where converted models are kept; empty means the user's cache folder."""
    start_timeout_s: float = 180.0
    """How long all processes together may take until they serve, the conversion of a model included."""
    stop_grace_s: float = 5.0
    """How long running requests may take to end before their process is killed."""
    leave_grace_s: float = 60.0
    """How long a worker that is to leave the running cluster may take to finish, or to hand over, what it has."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """The least that every process of the cluster writes to standard error."""
    log_json: bool = False
    """Log one JSON object a line, with worker and request, instead of plain lines."""
    tracing: TracingConfig = TracingConfig()
    restart: RestartConfig = RestartConfig()
    access: AccessConfig = AccessConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and where it came from."""


# The launcher fills these in; nobody sets them.
INTERNAL = frozenset(
    {
        *("prefill.engine.model_dir", "decode.engine.model_dir"),
        *("prefill.engine.draft_dir", "decode.engine.draft_dir"),
        *("prefill.access", "decode.access", "router.access", "router.supervisor_metrics_port"),
        *("router.name", "router.own_port"),
    }
)
MEMORY_KEYS = {
    "prefill.engine.memory_bytes": "prefill.engine.pool_bytes",
    "decode.engine.memory_bytes": "decode.engine.pool_bytes",
}
"""Settings worked out from the machine where the pool of the same engine is "auto", on the CPU."""
SHARE_KEYS: dict[Literal["prefill", "decode"], tuple[str, str]] = {
    "prefill": ("prefill.engine.device_share", "prefill.transfer.nccl.drain_s"),
    "decode": ("decode.engine.device_share", "decode.transfer.nccl.drain_s"),
}
"""Settings worked out from the workers that have one GPU together: the first is divided, the second multiplied."""
THREAD_KEYS = ("prefill.engine.threads", "decode.engine.threads")
DEVICE_KEYS = ("prefill.engine.device", "decode.engine.device")
DTYPE_KEYS = ("prefill.engine.dtype", "decode.engine.dtype")

_MAY_BE_ZERO = frozenset(
    {
        "context_tokens",
        "prefill_workers",
        "stop_grace_s",
        "restart.limit",
        "tracing.sample",
        "ray.gpus_per_worker",
        "router.seed",
        "router.grpc_port",
        "router.http_port",
        "router.limits.grpc_connections",
        "router.max_waiting",
        "router.retry_after_s",
        "router.settle_s",
        "router.tokenize_inline_bytes",
        "router.unplaceable_s",
        "router.conversation_tokens",
        "router.deadline_margin",
        "prefill.engine.memory_bytes",
        "prefill.engine.one_shot_bytes",
        "prefill.engine.reserve_bytes",
        "decode.engine.memory_bytes",
        "decode.engine.one_shot_bytes",
        "decode.engine.reserve_bytes",
        "prefill.fairness_tokens_per_s",
        "decode.orphan_s",
        "prefill.tiers.host_bytes",
        "prefill.tiers.disk_bytes",
        "decode.tiers.host_bytes",
        "decode.tiers.disk_bytes",
    }
)
MAX_WORKERS = 1024
"""The most workers of a pool: more is a slip of the keyboard."""
_MOST = {".max_batch": 1 << 13, ".block_size": 1 << 12, "": 1 << 53}
"""The most that settings with these ends may be; sizes in bytes are exact in every language up to the last."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_SHARES = (".digest_sample", "tracing.sample", ".device_share")
_POOL_SIZES = ("prefill_workers", "decode_workers", "routers")
_PORTS = {"router.grpc_port": 0, "router.http_port": -1}


def fields(
    struct: type[msgspec.Struct] = ClusterConfig, prefix: str = ""
) -> Iterator[tuple[str, Any, object]]:
    """Every setting as (dotted key, type, default), in the order of the structs."""
    for field in msgspec.structs.fields(struct):
        key = prefix + field.name
        if key in INTERNAL:
            continue
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from fields(field.type, key + ".")
        else:
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            yield key, field.type, default


def build(values: dict[str, object]) -> ClusterConfig:
    """Make the struct from values by dotted key; keys left out keep their defaults."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return msgspec.convert(tree, ClusterConfig)


def problem(key: str, value: object) -> str | None:
    """Return why a value of the right type is still not usable, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        if key == "name" and (not value or "/" in str(value) or str(value).startswith(".")):
            return f"{value!r} cannot name a cluster's files"
        if key.endswith(".dtype") and value not in (*DTYPE_BYTES, "auto"):
            return f"{value!r} is not one of {', '.join(DTYPE_BYTES)}, auto"
        if key.endswith("engine.device") and not _DEVICE.fullmatch(str(value)):
            return f"{value!r} is not cpu, cuda or cuda:N"
        for origin in value if key == "router.cors_origins" and isinstance(value, tuple) else ():
            if not _ORIGIN.fullmatch(origin):
                return f"{origin!r} is neither * nor an origin such as https://example.org"
        for name in _policies(key, value):
            if name not in POLICIES:
                return f"{name!r} is not one of {', '.join(POLICIES)}"
        return None
    if key in _PORTS:
        least = _PORTS[key]
        return None if least <= value <= 65535 else f"{value} is not in {least}..65535"
    if value != value or value in (float("inf"), float("-inf")):
        return f"{value} is not a finite number"
    if key in _POOL_SIZES and value > MAX_WORKERS:
        return f"{value} is more than {MAX_WORKERS}"
    if value < 0:
        return f"{value} is negative"
    most = next(most for end, most in _MOST.items() if key.endswith(end))
    if value > most:
        return f"{value if value < 1e30 else 'a number of that size'} is more than {most}"
    if key.endswith(_SHARES) and value > 1:
        return f"{value} is more than all: a share is at most 1"
    if value == 0 and key not in _MAY_BE_ZERO:
        return "0 is too small"
    return None


def _policies(key: str, value: object) -> tuple[str, ...]:
    """Return the routing policies that a setting names."""
    if key == "router.policy":
        return (str(value),)
    return value if key == "router.shadow_policies" and isinstance(value, tuple) else ()


def check_listening(config: ClusterConfig) -> None:
    """Raises ConfigError for a cluster that would serve strangers, or in plain text, without having been told to by
    name, or would send KV blocks so although its streams have TLS."""
    hosts = {"the router": config.router.host, "each worker's page of metrics": config.worker_host}
    if config.launcher == "ray" and config.ray.address != "local":
        # Each listens on its node's address.
        hosts["each worker's page of metrics"] = ""
    try:
        for what, host in hosts.items():
            check_exposed(host, config.access, what)
        for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
            check_transport(config.access, pool.transfer.transport, f"{role}.transfer.transport")
    except AccessError as error:
        raise ConfigError(str(error)) from error


def default_threads(workers: int) -> int:
    """Return how many compute threads each of `workers` workers on this host gets."""
    return max(1, usable_cores() // max(1, workers))


def with_model_dir(engine: EngineConfig, model_dir: str, draft_dir: str = "") -> EngineConfig:
    return msgspec.structs.replace(engine, model_dir=model_dir, draft_dir=draft_dir)


def draft_problem(engine: EngineConfig) -> str | None:
    """Return why a decode worker with these settings has no draft model though one is spoken of, or None."""
    if engine.speculation == "model" and not engine.draft_model:
        return "is 'model', but engine.draft_model names none"
    if engine.draft_model and engine.speculation != "model":
        return f"is {engine.speculation!r}, but engine.draft_model is set, which only 'model' uses"
    if engine.speculation == "model" and (engine.device != "cpu" or engine.attention == "triton"):
        return f"is 'model', and a draft model computes on the CPU, not on {engine.device} with Triton's kernels"
    return None
