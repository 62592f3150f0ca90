"""Before a cluster starts: its launcher, its model, and the specs of its processes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from cluster.config import ClusterConfig, with_model_dir
from cluster.spec import FACTORIES, ChildReady, ChildSpec, Launcher


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running cluster is reached. `http` is empty without an HTTP front."""

    grpc: str
    http: str
    workers: tuple[ChildReady, ...]


def make_launcher(name: str) -> Launcher:
    """The launcher of that name; Ray is imported only if it is asked for."""
    if name == "process":
        from cluster.process_launcher import ProcessLauncher

        return ProcessLauncher()
    from cluster.ray_launcher import RayLauncher

    return RayLauncher()


def prepare_model(
    config: ClusterConfig, progress: Callable[[str, int, int], None] | None = None
) -> str:
    """Convert the model unless the cache has it; the prepared folder. `progress` hears of weights in bytes. Raises
    engine's ModelError."""
    from engine.model.cache import prepare

    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    report = None if progress is None else partial(progress, "weights")
    return str(prepare(config.model or None, cache_dir, config.prefill.engine.dtype, report))


def specs(
    config: ClusterConfig, model_dir: str, factories: Mapping[str, str] = FACTORIES
) -> list[ChildSpec]:
    """The processes of a cluster, the router last."""
    prefill = msgspec.structs.replace(
        config.prefill, engine=with_model_dir(config.prefill.engine, model_dir)
    )
    decode = msgspec.structs.replace(
        config.decode, engine=with_model_dir(config.decode.engine, model_dir)
    )

    def spec(kind: str, name: str, part: msgspec.Struct, threads: int) -> ChildSpec:
        return msgspec.convert(
            {
                "kind": kind,
                "name": name,
                "factory": factories[kind],
                "config": msgspec.to_builtins(part),
                "host": config.worker_host,
                "model_dir": model_dir,
                "threads": threads,
                "log_level": config.log_level,
                "log_json": config.log_json,
                "tracing": msgspec.to_builtins(config.tracing),
            },
            ChildSpec,
        )

    return [
        *(
            spec("prefill", f"prefill-{slot}", prefill, prefill.engine.threads)
            for slot in range(config.prefill_workers)
        ),
        *(
            spec("decode", f"decode-{slot}", decode, decode.engine.threads)
            for slot in range(config.decode_workers)
        ),
        spec("router", "router", config.router, 1),
    ]
