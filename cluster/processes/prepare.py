"""Prepares a start: makes the launcher, the model, and the specs of the processes."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from cluster.config import ClusterConfig, ConfigError, draft_problem, with_model_dir
from cluster.defaults import model_dtype
from cluster.model_hub import hub_model
from cluster.processes.hosting import prepared
from cluster.processes.placement import RayConfig
from cluster.processes.spec import FACTORIES, ChildReady, ChildSpec, Launcher, ModelSource
from engine.model.config import ModelConfig, ModelError
from engine.model.split import check_split
from engine.text.alike import check_alike
from engine.text.files import TextFiles


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running cluster is reached. `http` is empty without an HTTP front."""

    grpc: str
    http: str
    workers: tuple[ChildReady, ...]


def make_launcher(name: str, ray: RayConfig | None = None) -> Launcher:
    """Make the launcher of that name; Ray is imported only if it is asked for."""
    if name == "process":
        from cluster.processes.process_launcher import ProcessLauncher

        return ProcessLauncher()
    if ray is not None and ray.address != "local":
        from cluster.processes.ray_cluster import RayClusterLauncher

        return RayClusterLauncher(ray)
    from cluster.processes.ray_launcher import RayLauncher

    return RayLauncher()


def model_source(config: ClusterConfig) -> ModelSource:
    """Return the model as the configuration names it. Raises as `model_dtype` does."""
    engines = (config.prefill.engine, config.decode.engine)
    return ModelSource(
        model=config.model,
        cache_dir=config.cache_dir,
        dtype=model_dtype(config),
        context_tokens=config.context_tokens,
        # Ranks read their parts of weights that are prepared as a whole.
        mapped=any(engine.device == "cpu" or engine.tensor_parallel > 1 for engine in engines),
    )


def draft_source(config: ClusterConfig) -> ModelSource | None:
    """Return the draft model of the decode workers as the configuration names it; None: there is none. Raises
    ConfigError where it cannot be used, and as `model_dtype` does."""
    if (reason := draft_problem(config.decode.engine)) is not None:
        raise ConfigError(f"decode.engine.speculation {reason}")
    if config.decode.engine.speculation != "model":
        return None
    named = config.decode.engine.draft_model
    return ModelSource(model=named, cache_dir=config.cache_dir, dtype=model_dtype(config))


def served_name(model_dir: str) -> str:
    """Return the name of a prepared model, by which every process labels its metrics; empty where there is none, as in
    a cluster of stand-ins."""
    try:
        return TextFiles.load(Path(model_dir)).settings.name
    except ModelError:
        return ""


def prepare_model(
    config: ClusterConfig, progress: Callable[[str, int, int], None] | None = None
) -> str:
    """Convert the model unless the cache has it; returns the prepared folder. `progress` hears of weights in bytes.
    Raises engine's ModelError, and ConfigError for pools that cannot share a model, or cannot divide it as they are to
    (workers would say so too, once all of them have started)."""
    report = None if progress is None else partial(progress, "weights")
    folder = prepared(model_source(config), report)
    shape = ModelConfig.load(Path(folder))
    for engine in (config.prefill.engine, config.decode.engine) if config.prefill_workers else (config.decode.engine,):
        try:
            check_split(shape, engine.tensor_parallel)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return folder


def prepare_draft(
    config: ClusterConfig, model_dir: str, progress: Callable[[str, int, int], None] | None = None
) -> str:
    """Convert the draft model, if there is one, unless the cache has it; returns the prepared folder, or nothing.
    Raises ConfigError for one that cannot be read, and for another tokenizer than that of the model in `model_dir`."""
    source = draft_source(config)
    if source is None:
        return ""
    try:
        folder = prepared(source, None if progress is None else partial(progress, "weights"))
        check_alike(Path(model_dir), Path(folder), source.model)
    except ModelError as error:
        raise ConfigError(f"decode.engine.draft_model: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return folder


def specs(
    config: ClusterConfig,
    model_dir: str,
    factories: Mapping[str, str] = FACTORIES,
    source: ModelSource | None = None,
    supervisor_metrics_port: int = 0,
    draft_dir: str = "",
) -> list[ChildSpec]:
    """Return the processes of a cluster, the routers last. `source`: where other hosts get `model_dir` from;
    `supervisor_metrics_port`: of the page of the process that starts them, on the router's host; `draft_dir`: the
    prepared draft model of decode workers."""
    prefill = msgspec.structs.replace(
        config.prefill, engine=with_model_dir(config.prefill.engine, model_dir), access=config.access
    )
    decode = msgspec.structs.replace(
        config.decode, engine=with_model_dir(config.decode.engine, model_dir, draft_dir), access=config.access
    )
    asked = hub_model(config.model)
    names = config.router.served_model_names or (asked.names if asked else ())
    router = msgspec.structs.replace(
        config.router,
        access=config.access,
        supervisor_metrics_port=supervisor_metrics_port,
        served_model_names=names,
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
                "source": source,
                "draft": draft_source(config) if kind == "decode" and source is not None else None,
                "threads": threads,
                "log_level": config.log_level,
                "log_json": config.log_json,
                "tracing": msgspec.to_builtins(config.tracing),
            },
            ChildSpec,
        )

    def of_several(slot: int) -> ChildSpec:
        name = f"router-{slot}"
        # Ties are broken by each in its own way, so that they do not all run to the same worker at once.
        own = msgspec.structs.replace(
            router,
            name=name,
            own_port=0,
            seed=config.router.seed + slot,
            decision_log=f"{router.decision_log}.{name}" if router.decision_log else "",
        )
        return spec("router", name, own, 1)

    routers = [spec("router", "router", router, 1)]
    if config.routers > 1:
        routers = [of_several(slot) for slot in range(config.routers)]
    return [
        *(
            spec("prefill", f"prefill-{slot}", prefill, prefill.engine.threads)
            for slot in range(config.prefill_workers)
        ),
        *(
            spec("decode", f"decode-{slot}", decode, decode.engine.threads)
            for slot in range(config.decode_workers)
        ),
        *routers,
    ]
