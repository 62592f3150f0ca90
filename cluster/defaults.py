"""Defaults by device: what takes the place of a struct's own default, a CPU's, where a pool computes on a GPU.

Whatever is set, in a file, a variable or a flag, wins. The numbers follow from data sheets (989 TFLOP/s in 16 bits and
3.35 TB/s of an H100, 362 and 0.86 of an L40S) and from a model of 8 billion parameters; none has been measured:

- From about 300 tokens on an H100, and 420 on an L40S, a chunk is bound by arithmetic, not by reading the weights.
  Ten times as many make that reading, and what each step costs the host, a small part of it. Still more would hold up
  short prompts, which wait for one chunk, and the migration, which begins when the first chunk ends: 4,096 tokens are
  66 TFLOP, so at least 66 ms on the one and 180 ms on the other.
- A decode step reads all weights for one row as for 256: below those 300, more rows cost little but the reading of
  their KV. Handoffs, and the placements after a loss, are in proportion to a full batch.
- 512 tokens beside a batch take at least 8 ms on an H100 and 23 ms on an L40S: with 5 and 19 ms for the weights, less
  than `router.slo_itl_s`.
- A block of 64 tokens is what the kernels' table of configurations is for (docs/kernels.md).
- A host tier of 4 GiB has room for 32,768 tokens, where 128 MiB would have it for 1,024.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cluster.config import ClusterConfig, ConfigError
from cluster.model_hub import located
from engine.config import EngineConfig

Pool = Literal["prefill", "decode"]
POOLS: tuple[Pool, ...] = ("prefill", "decode")

ON_GPU: dict[str, int | float | str] = {
    "engine.block_size": 64,
    "engine.pool_bytes": "auto",
    "engine.threads": 4,
    "tiers.host_bytes": 4 << 30,
}
"""Defaults of a pool on a GPU, prefill or decode."""
PREFILL_ON_GPU: dict[str, int | float | str] = {"chunk_tokens": 4096}
DECODE_ON_GPU: dict[str, int | float | str] = {
    "max_batch": 256,
    "max_handoffs": 128,
    "local_chunk_tokens": 512,
}
WITH_GPU: dict[str, int | float | str] = {
    "start_timeout_s": 600.0,
    "router.retry_reserve": 1024,
}
"""Defaults of the cluster where one of its pools is on a GPU. A checkpoint is larger there, and kernels are compiled.
"""


CPU_DTYPE = "float32"
"""The type in which a pool on the CPU computes: its own kernels do so, and multiply with what a quantized file holds
(docs/cpu.md)."""


def defaults_on(devices: Mapping[Pool, str]) -> dict[str, int | float | str]:
    """Return, by setting, the defaults that are not the structs' own, for pools on these devices."""
    found: dict[str, int | float | str] = {}
    own: tuple[tuple[Pool, dict[str, int | float | str]], ...] = (
        ("prefill", PREFILL_ON_GPU), ("decode", DECODE_ON_GPU)
    )
    for pool, more in own:
        if devices[pool] != "cpu":
            found |= {f"{pool}.{key}": value for key, value in (ON_GPU | more).items()}
    return found | (WITH_GPU if found else {})


def gpu_dtype(stored: str) -> str:
    """Return the type in which a GPU computes a model that is kept as `stored`, unless a setting says another."""
    return stored if stored in ("float16", "bfloat16") else "bfloat16"


def stored_in(model: str) -> str:
    """Return how the configured model keeps its weights (`engine.model.prepared.cache.stored_dtype`).

    Raises ModelError.
    """
    from engine.model.prepared.cache import find_demo_model, stored_dtype

    return stored_dtype(Path(located(model)).expanduser() if model else find_demo_model())


def model_dtype(config: ClusterConfig) -> str:
    """Return the one type in which the model is prepared for both pools. Reads the model's headers only where a setting
    is "auto" on a GPU. Raises ConfigError where the pools differ, and ModelError."""
    prefill, decode = (_dtype(engine, config.model) for engine in engines(config).values())
    if prefill != decode:
        raise ConfigError(
            f"prefill.engine.dtype is {prefill!r} and decode.engine.dtype {decode!r}: both pools must agree"
        )
    return prefill


def _dtype(engine: EngineConfig, model: str) -> str:
    if engine.dtype != "auto":
        return engine.dtype
    return CPU_DTYPE if engine.device == "cpu" else gpu_dtype(stored_in(model))


def device_share(config: ClusterConfig, pool: Pool) -> float:
    """Return the part of its card's memory that a worker of this pool may count on.

    On a Ray cluster it is what the worker asks for, where it asks. Elsewhere all workers are on this host, and see all
    of its GPUs.
    """
    device = engines(config)[pool].device
    if device == "cpu":
        return 1.0
    if config.launcher == "ray" and config.ray.address != "local":
        asked = config.ray.gpus_per_worker if device == "cuda" else 1.0
        return min(1.0, asked or 1.0)
    counts = {"prefill": config.prefill_workers, "decode": config.decode_workers}
    cards = {name: _cards(engine) for name, engine in engines(config).items()}
    workers = [sum(counts[name] for name, own in cards.items() if card in own) for card in cards[pool]]
    return 1.0 / max(1, *workers)


def shares_cores(config: ClusterConfig) -> bool:
    """Return True where workers of both pools compute on one host's processor, and lend each other their cores while
    they wait: those of native kernels do."""
    is_one_host = config.launcher != "ray" or config.ray.address == "local"
    have_workers = config.prefill_workers > 0 and config.decode_workers > 0
    return is_one_host and have_workers and all(map(_lends, engines(config).values()))


def _lends(engine: EngineConfig) -> bool:
    is_native = engine.attention != "torch" and engine.dtype in ("auto", CPU_DTYPE)
    return engine.device == "cpu" and engine.lend_cores and is_native


def _cards(engine: EngineConfig) -> range:
    """Return the numbers of the GPUs of a worker: one for each rank (`worker.rank_devices.gpu_of`)."""
    if engine.device == "cpu":
        return range(0)
    first = int(engine.device.partition(":")[2] or 0)
    return range(first, first + engine.tensor_parallel)


def engines(config: ClusterConfig) -> dict[Pool, EngineConfig]:
    return {"prefill": config.prefill.engine, "decode": config.decode.engine}
