"""Builds the worker or router that a spec names, inside the process that a launcher made for it."""

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cluster.model_hub import located
from cluster.processes.collector import spare_collector
from cluster.processes.spec import ChildReady, ChildSpec, LaunchError, ModelSource, model_cache
from engine.handshake import Secrets
from engine.messages import PeerAddress
from engine.model.config import ModelError
from engine.native_identity import use_native_identities
from router.background import give_way_soon
from router.config import RouterConfig
from router.core.escalation import Verdict
from telemetry import logs, tracing
from transfer.config import is_exported, without_handles
from transfer.liveness import host_id
from worker.config import DecodeConfig, PrefillConfig

log = logging.getLogger(__name__)

_CONFIGS = {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}


QUESTIONS = ("flights", "overview", "traffic")
"""What a process may be asked while it runs: methods of the hosted class that take one text and return what msgspec can
write. `flights` of a request, or of the latest ones (every process); `overview` and `traffic` (the router)."""


class Hosted:
    """The one object that runs in a child process; both launchers' shells only call it. A worker is opened when this is
    made.

    `stop` and `wait` may be called from different threads, as the hosted classes allow.
    """

    def __init__(
        self, spec: ChildSpec, secrets: Secrets, report: Callable[[int, int], None] | None = None
    ) -> None:
        """Open the worker, for those who have one of `secrets`. `report` hears of weights that are loaded, in bytes.
        Raises whatever stops a worker from opening."""
        self._spec = spec
        logs.configure(spec.name, spec.log_level, spec.log_json)
        tracing.configure(spec.tracing, spec.name)
        use_native_identities()
        if spec.kind == "router":
            give_way_soon()
        _check_model(spec)
        module, _, attribute = spec.factory.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        config: Any = msgspec.convert(spec.config, _CONFIGS[spec.kind])
        if spec.kind != "router":
            _check_allocator(config)
        self._server: Any = (
            factory(config, spec.model_dir, secrets)
            if spec.kind == "router"
            else factory(spec.name, config, spec.host, spec.port, secrets, report)
        )

    def start(self) -> ChildReady:
        """Start it and return where it is reached. Raises whatever stops it from starting."""
        up = self._server.start()
        spare_collector()
        if self._spec.kind == "router":
            return ChildReady(
                name=self._spec.name,
                pid=os.getpid(),
                address=up.grpc,
                http=up.http,
                own=up.own,
                host=host_id(),
            )
        return ChildReady(
            name=up.name,
            pid=os.getpid(),
            address=up.address,
            incarnation=up.incarnation,
            host=host_id(),
            ranks=up.ranks,
        )

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        self._router("set_workers").set_workers(prefill, decode)

    def set_routers(self, routers: list[PeerAddress]) -> None:
        self._router("set_routers").set_routers(routers)

    def ready(self) -> bool:
        return bool(self._router("ready").ready())

    def condemned(self) -> list[Verdict]:
        return list(self._router("condemned").condemned())

    def ask(self, what: str, argument: str) -> bytes:
        """Return the answer to one of QUESTIONS, as JSON. Raises LaunchError for a question that it does not know."""
        method = getattr(self._server, what, None) if what in QUESTIONS else None
        if method is None:
            raise LaunchError(f"{self._spec.name} cannot be asked for {what!r}")
        return msgspec.json.encode(method(argument))

    def leave(self, grace_s: float) -> None:
        """Take no new work (workers only): `wait` returns as soon as nothing is held, at the latest after `grace_s`
        seconds."""
        self._server.leave(grace_s)

    def wait(self) -> None:
        """Block until stopped, or left. Raises if the engine died."""
        try:
            self._server.wait()
        finally:
            tracing.shut()

    def stop(self, grace_s: float) -> None:
        self._server.stop(grace_s)
        tracing.shut()

    def _router(self, verb: str) -> Any:
        if self._spec.kind != "router":
            raise LaunchError(f"{self._spec.name} is no router: it has no {verb}")
        return self._server


def _check_allocator(config: PrefillConfig | DecodeConfig) -> None:
    """Refuse an allocator that other processes cannot read from, before a model is loaded and with a reason: the
    library's own error has none. Raises LaunchError."""
    why = without_handles(os.environ) if is_exported(config.engine.device, config.transfer) else ""
    if why:
        raise LaunchError(why)


def _check_model(spec: ChildSpec) -> None:
    """See that the prepared model still holds what was written, or make it again. Raises ModelError where it does not
    and cannot be made."""
    from engine.model.prepared.checked import check_once

    engine: Any = spec.config.get("engine", {})
    for source, folder in ((spec.source, spec.model_dir), (spec.draft, engine.get("draft_dir", ""))):
        if source is None:
            continue  # whoever gave it has prepared it, and nobody here knows from what
        try:
            check_once(Path(folder))
        except ModelError as error:
            log.warning("%s; the model is prepared again", error)
            if (found := prepared(source)) != folder:
                raise ModelError(folder, f"is damaged, and its source is another model now, in {found}") from error


def prepared(source: ModelSource, report: Callable[[int, int], None] | None = None) -> str:
    """Return the folder of the model on this host, converted unless the cache has it. `report` hears of weights in
    bytes. Raises engine's ModelError."""
    from engine.model.prepared.cache import prepare

    cache = model_cache(source.cache_dir)
    model = located(source.model) or None
    return str(prepare(model, cache, source.dtype, report, source.mapped, source.context_tokens))


def moved(spec: ChildSpec, host: str) -> ChildSpec:
    """Return the spec of a process that landed on this host: at its address, with its copy of the model."""
    spec = msgspec.structs.replace(spec, host=host)
    if spec.source is None:
        return spec
    model_dir = prepared(spec.source)
    config: Any = dict(spec.config)
    if "engine" in config:
        config["engine"] = {**config["engine"], "model_dir": model_dir}
        if spec.draft is not None:
            config["engine"]["draft_dir"] = prepared(spec.draft)
    return msgspec.structs.replace(spec, config=config, model_dir=model_dir)


def one_line(error: BaseException) -> str:
    """Write an error as one line for a person: its last line, with the type where the text alone says little."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError | LaunchError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
