"""What a launcher is asked to start and what comes back: plain records, the same for both launchers."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from engine.messages import PeerAddress, RankUse
from engine.model.prepared.cache import default_cache_dir
from engine.types import Incarnation
from router.core.escalation import Verdict
from telemetry.tracing import TracingConfig
from transfer.config import TransferConfig, nccl_environment

Kind = Literal["prefill", "decode", "router"]

FACTORIES: dict[str, str] = {
    "prefill": "prefill_worker.role:open_prefill_worker",
    "decode": "decode_worker.role:open_decode_worker",
    "router": "router.server:RouterServer",
}


class LaunchError(Exception):
    """A process could not be started, or died; the message is one line for a person."""


class OrderLateError(LaunchError):
    """An order is not carried out yet; it goes on."""


class Sealed(msgspec.Struct, frozen=True):
    """Secrets on their way to a child, in hexadecimal. Never printed."""

    values: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Sealed({len(self.values)} secrets)"

    @classmethod
    def of(cls, valid: tuple[bytes, ...]) -> "Sealed":
        return cls(tuple(secret.hex() for secret in valid))

    def open(self) -> tuple[bytes, ...]:
        return tuple(bytes.fromhex(value) for value in self.values)


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and the cache folder, from which a host other than ours prepares it. Empty strings mean the defaults.
    """

    model: str = ""
    cache_dir: str = ""
    dtype: str = "float32"
    context_tokens: int = 0
    mapped: bool = True
    """Whether any worker maps the weights, as those on a CPU do (`engine.model.prepared.cache.prepare`)."""


def model_cache(cache_dir: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Return where prepared models are kept: `cache_dir`, or the user's cache folder where it is empty."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return default_cache_dir(Path.home(), environ.get("XDG_CACHE_HOME", ""))


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start. `config` is its config struct as plain data; `factory` is `module:callable`."""

    kind: Kind
    name: str
    factory: str
    config: dict[str, object]
    host: str = "127.0.0.1"
    """The address a worker listens on; empty: the one that Ray knows its node by, on a host of its own."""
    port: int = 0
    """The port of a worker's gRPC server; 0 takes a free one."""
    model_dir: str = ""
    source: ModelSource | None = None
    """What a host that may not have `model_dir` prepares it from."""
    draft: ModelSource | None = None
    """The same of the draft model, where the worker has one."""
    threads: int = 1
    log_level: str = "warning"
    log_json: bool = False
    tracing: TracingConfig = TracingConfig()
    secrets: Sealed = Sealed()
    """Those by which the processes of this cluster know each other."""


class ChildReady(msgspec.Struct, frozen=True, kw_only=True):
    """Where a started process is reached."""

    name: str
    pid: int
    address: str
    http: str = ""
    own: str = ""
    """Where one of several routers serves HTTP alone; empty for the only one."""
    incarnation: Incarnation = Incarnation(0)
    """Which life of a worker this process is; 0 for a router."""
    host: str = ""
    """The host on which `pid` means this process (`transfer.liveness.host_id`)."""
    ranks: list[RankUse] = []
    """The processes of a tensor-parallel worker, this one first."""


class Child(Protocol):
    """A process that a launcher has begun to start."""

    spec: ChildSpec

    def started_within(self, timeout_s: float) -> ChildReady | None:
        """Return where the process is reached once it is up, None if that takes over `timeout_s` seconds.

        Raises LaunchError with the reason if it could not start. May be called again after None.
        """

    def loading(self) -> tuple[int, int] | None:
        """Return the bytes of weights that a worker has loaded, and of how many, as last heard; None where it has said
        nothing of it. Never blocks."""

    def failure(self) -> str | None:
        """Return why it ended, or None while it runs. Never blocks."""

    def left(self) -> bool:
        """Say whether a worker has ended because it was asked to leave. Never blocks."""

    def leave(self, grace_s: float) -> None:
        """Ask a worker to take no new work and to end by itself, within `grace_s` seconds."""

    def set_workers(self, prefill: list[PeerAddress], decode: list[PeerAddress]) -> None:
        """Tell a router the workers to use from now on."""

    def set_routers(self, routers: list[PeerAddress]) -> None:
        """Tell a router all routers that there are, itself among them, by where each serves alone."""

    def set_secrets(self, secrets: Sealed) -> None:
        """Tell it the secrets that are valid from now on. Raises LaunchError if it cannot be told."""

    def ready(self) -> bool:
        """Say whether a router can serve. Raises LaunchError if it died."""

    def condemned(self) -> list[Verdict] | None:
        """Return the lives of workers that a router had given up when it was last asked, and ask again; None while it
        owes the answer. Never blocks."""

    def ask(self, what: str, argument: str) -> bytes:
        """Return the answer to one of `cluster.processes.hosting.QUESTIONS`, as JSON. From any thread. Raises
        LaunchError if there is none within a few seconds."""

    def kill(self) -> None:
        """End this very process, by its pid, whatever state it is in; `failure` says so a moment later."""

    def stop(self, grace_s: float) -> None:
        """Stop it and wait until it is gone; kills it if it takes over `grace_s` seconds."""


class Launcher(Protocol):
    """Starts processes on this machine or on a Ray cluster."""

    def open(self) -> None:
        """Start whatever must run before the first process. Raises LaunchError."""

    def launch(self, spec: ChildSpec) -> Child:
        """Begin to start a process; does not wait. Raises LaunchError if that cannot even begin."""

    def close(self) -> None:
        """Stop whatever `open` started and prove that nothing of it is left. Raises LaunchError if something is."""


def environment_of(spec: ChildSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return all variables that a process needs beside `environ`; of NCCL's, those that are not set there."""
    found = child_environment(spec.threads, environ)
    if spec.kind == "router":
        return found
    transfer = msgspec.convert(spec.config.get("transfer", {}), TransferConfig)
    wanted = nccl_environment(transfer.nccl, spec.name)
    return {name: value for name, value in wanted.items() if name not in environ} | found


def child_environment(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs before torch is imported in it.

    Threads are explicit, and wait passively: threads that spin between two small operations starve
    the other workers of the host.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = environ.get("PYTHONPATH", "")
    if not root.endswith("-packages") and root not in path.split(os.pathsep):
        path = os.pathsep.join(part for part in (root, path) if part)
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": path,
    }
