"""`headrace doctor`: checks that this host can run a cluster, and says what was found and what to do about it.

A check looks; it changes nothing but a probe of its own, which it takes away.
"""

import ctypes
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cluster.config import ClusterConfig, ConfigError
from cluster.doctor.access import access_checks
from cluster.doctor.check import Check, Level
from cluster.doctor.gpu import allocator_checks, gpu_checks
from cluster.doctor.models import configured_model, model_checks
from cluster.memory import available_bytes
from cluster.processes.processors import usable_cores
from cluster.processes.spec import model_cache
from cluster.rundir import RunDir
from cluster.sizes import format_size
from engine.config import EngineConfig, TierConfig
from transfer.config import is_exported

FILES = (1024, 8192)
"""Limits on the open files of a process: fewer than the first fail under load, fewer than the second may with many
workers."""
RAY_OLDEST = (2, 50)
RAY_STORE_BYTES = 80 << 20
RAY_SOCKET_BYTES = 60
"""Roughly what Ray adds to its folder's path for its longest socket."""
NOISY_RAY = ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK", "RAY_LOCAL_MODE")
DISK_BYTES = 2 << 30


def examine(config: ClusterConfig, environ: Mapping[str, str], deep: bool = False) -> list[Check]:
    """Run every check, in the order in which a start would fail; `deep` ones read gigabytes."""
    groups: list[Callable[[], Iterator[Check]]] = [
        _system,
        lambda: _ports(config, environ),
        lambda: _memory(config),
        _shared_memory,
        _files,
        _kernels,
        _clocks,
        lambda: _folders(config, environ),
        lambda: access_checks(config),
        lambda: iter([configured_model(config.model)]),
        lambda: _draft_model(config),
        lambda: model_checks(model_cache(config.cache_dir, environ)) if deep else iter(()),
        lambda: _ray(config, environ),
        lambda: gpu_checks(_gpu_wanted(config)),
        lambda: allocator_checks(
            any(is_exported(pool.engine.device, pool.transfer) for pool in (config.prefill, config.decode)),
            environ,
        ),
    ]
    return [check for group in groups for check in group()]


def _draft_model(config: ClusterConfig) -> Iterator[Check]:
    engine = config.decode.engine
    if engine.speculation == "model":
        yield configured_model(engine.draft_model, "draft model", "--set engine.draft_model=FILE")


def _gpu_wanted(config: ClusterConfig) -> str:
    """Return the setting that puts workers on a GPU of this host, if any: on a Ray cluster they are on others."""
    if config.launcher == "ray" and config.ray.address != "local":
        return ""
    engines = {"prefill": config.prefill.engine, "decode": config.decode.engine}
    wanting = (f"{pool}.engine.device is {e.device}" for pool, e in engines.items() if e.device != "cpu")
    return next(wanting, "")


def print_checks(checks: list[Check], console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        line = Text(f"{check.level:5}", styles[check.level])
        console.print(line.append(f"{check.name}: {check.found}", ""), soft_wrap=True)
        if check.fix:
            console.print(Text(f"      → {check.fix}"), soft_wrap=True)
    failed = sum(check.level == "fail" for check in checks)
    warned = sum(check.level == "warn" for check in checks)
    console.print(f"{len(checks)} checks: {failed} failed, {warned} warned")


def _system() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    yield Check("python", "ok" if fine else "fail", version, "" if fine else "use 3.11 or later")
    linux = sys.platform == "linux"
    found = f"{sys.platform}, {os.uname().machine}"
    yield Check("system", "ok" if linux else "fail", found, "" if linux else "run it on Linux")


def _ports(config: ClusterConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    router = config.router
    try:
        ours = RunDir(config, environ).is_held
    except ConfigError as error:
        ours = False
        yield Check("run_dir", "fail", str(error), "set run_dir to a short path of your own")
    for name, port in (("grpc_port", router.grpc_port), ("http_port", router.http_port)):
        if port > 0:
            yield _port(f"router.{name}", router.host, port, ours)
    yield _port("worker_host", config.worker_host, 0, ours)


def _port(name: str, host: str, port: int, ours: bool) -> Check:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if ours and port:
                return Check(name, "ok", f"{host}:{port} is in use by the cluster that runs")
            flag = name.rpartition(".")[2].replace("_", "-")
            fix = f"free it, or take another: --{flag} 0 picks a free one"
            if not port:
                fix = f"set {name} to an address of this host"
            return Check(name, "fail", f"{host}:{port}: {error.strerror}", fix)
    return Check(name, "ok", f"{host}:{port} is free" if port else f"{host} can be bound")


def _memory(config: ClusterConfig) -> Iterator[Check]:
    free = available_bytes()
    wanted = config.prefill_workers * _taken_bytes(config.prefill.engine, config.prefill.tiers)
    engine = config.decode.engine
    draft_bytes = engine.draft_pool_bytes if engine.speculation == "model" else 0
    wanted += config.decode_workers * (_taken_bytes(engine, config.decode.tiers) + draft_bytes)
    found = f"{format_size(free)} available, workers take {format_size(wanted)} at start"
    fix = "fewer workers, or smaller engine.pool_bytes (on a GPU: tiers.host_bytes) of prefill and decode"
    yield Check("memory", "ok" if wanted < free else "fail", found, "" if wanted < free else fix)
    workers = config.prefill_workers + config.decode_workers
    cores = usable_cores()
    threads = config.prefill_workers * config.prefill.engine.threads * config.prefill.engine.tensor_parallel
    threads += config.decode_workers * config.decode.engine.threads * config.decode.engine.tensor_parallel
    most = max(config.prefill.engine.threads, config.decode.engine.threads)
    crowded = threads > cores and most > 1
    found = f"{cores} cores for {workers} workers with {threads} compute threads"
    fix = "lower prefill.engine.threads and decode.engine.threads: crowded threads cost latency"
    yield Check("cores", "warn" if crowded else "ok", found, fix if crowded else "")


def _taken_bytes(engine: EngineConfig, tiers: TierConfig) -> int:
    """Return what a worker takes of this host's memory before it serves: its pool, or beside a GPU the host tier, which
    is locked. A pool that is sized by what is available fits by itself."""
    if engine.device != "cpu":
        return tiers.host_bytes
    return 0 if engine.pool_bytes == "auto" else engine.pool_bytes


def _shared_memory() -> Iterator[Check]:
    try:
        os.close(os.memfd_create("headrace-doctor"))
    except OSError as error:
        fix = "allow memfd_create (a seccomp profile may forbid it)"
        yield Check("memfd", "fail", f"{error.strerror}: KV pools lie in one", fix)
    else:
        yield Check("memfd", "ok", "can be made: KV pools lie in one")
    folder = Path("/dev/shm")
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    enough = free > RAY_STORE_BYTES
    found = f"{format_size(free)} free in /dev/shm (Ray's store takes {format_size(RAY_STORE_BYTES)})"
    fix = "start the container with --shm-size=256m, or use --launcher process"
    yield Check("shared memory", "ok" if enough else "warn", found, "" if enough else fix)


def _files() -> Iterator[Check]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level: Level = "ok" if soft >= FILES[1] else "warn" if soft >= FILES[0] else "fail"
    found = f"{soft} open files (hard limit {hard})"
    fix = f"ulimit -n {min(65536, hard)}, or LimitNOFILE= in its unit"
    yield Check("file limit", level, found, "" if level == "ok" else fix)


def _kernels() -> Iterator[Check]:
    from kernels.native import native

    found = native()
    fix = "install a C++ compiler (g++), then Headrace again: PyTorch's kernels serve meanwhile, more slowly"
    told = "not built here, or from other sources" if found is None else f"built, for {found.variant}"
    yield Check("CPU kernels", "warn" if found is None else "ok", told, fix if found is None else "")


def _clocks() -> Iterator[Check]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown"
    slow = name in ("hpet", "acpi_pm", "jiffies")
    fix = "boot with a working TSC: reading this clock takes microseconds, and steps read it often"
    yield Check("clock source", "warn" if slow else "ok", name, fix if slow else "")
    synchronized = _is_synchronized()
    if synchronized is None:
        yield Check("wall clock", "warn", "the kernel does not say whether it is synchronized")
    else:
        found = "synchronized" if synchronized else "not synchronized"
        fix = "run chrony or ntpd; only traces and logs of several hosts need it, never a request"
        yield Check(
            "wall clock", "ok" if synchronized else "warn", found, "" if synchronized else fix
        )


def _is_synchronized() -> bool | None:
    """Return what the kernel's clock discipline says (adjtimex); None where it cannot be asked."""
    unsynchronized, error_state = 0x40, 5
    buffer = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    # struct timex on 64-bit Linux: modes (padded to 8), then offset, freq, maxerror, esterror, status.
    status = ctypes.c_int.from_buffer(buffer, 40).value
    return state != error_state and not status & unsynchronized


def _folders(config: ClusterConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    cache = model_cache(config.cache_dir, environ)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Check("model cache", "fail", f"{existing} cannot be written", "set cache_dir")
    else:
        low = free < DISK_BYTES
        found = f"{cache}, {format_size(free)} free"
        fix = "free some, or set cache_dir to a larger disk: weights are kept there as they are used"
        yield Check("model cache", "warn" if low else "ok", found, fix if low else "")
    try:
        rundir = RunDir(config, environ)
        rundir.make()
    except (ConfigError, OSError) as error:
        yield Check("run_dir", "fail", str(error), "remove it, or set run_dir to another")
    else:
        held = "a cluster runs" if rundir.is_held else "no cluster runs"
        stale = [] if rundir.is_held else rundir.processes()
        left = ", ".join(f"{p.pid} ({p.name})" for p in stale)
        found = f"{rundir.folder}, {held} under the name {rundir.name!r}"
        if stale:
            yield Check("run_dir", "warn", f"{found}, but left: {left}", "headrace down")
        else:
            yield Check("run_dir", "ok", found)


def _ray(config: ClusterConfig, environ: Mapping[str, str]) -> Iterator[Check]:
    if config.launcher != "ray":
        yield Check("ray", "ok", f"not used by the {config.launcher} launcher")
        return
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        yield Check("ray", "fail", "not installed", "pip install ray, or --launcher process")
        return
    new = tuple(int(part) for part in version.split(".")[:2]) >= RAY_OLDEST
    fix = f"pip install 'ray>={'.'.join(map(str, RAY_OLDEST))}'"
    yield Check("ray", "ok" if new else "fail", version, "" if new else fix)
    set_here = [name for name in NOISY_RAY if environ.get(name)]
    found = f"set: {', '.join(set_here)}" if set_here else "none that would interfere"
    fix = "unset them: headrace says itself which Ray it uses"
    yield Check("ray variables", "warn" if set_here else "ok", found, fix if set_here else "")
    folder = tempfile.gettempdir()
    deep = len(folder) + RAY_SOCKET_BYTES > 107
    found = f"{folder} is too deep for Ray's sockets; /tmp is used" if deep else folder
    usable = os.access("/tmp" if deep else folder, os.W_OK)
    fix = "" if usable else "make /tmp writable, or set TMPDIR to a short path"
    yield Check("ray folder", "ok" if usable else "fail", found, fix)
