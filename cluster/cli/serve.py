"""`headrace up`: one supervisor of a name on a host, in the foreground or detached; the second finds the first."""

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cluster.admin import AdminServer, Status
from cluster.admin_client import AdminClient
from cluster.cli.progress import Bars
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.signals import Interrupted, check, on_hangup
from cluster.processes.spec import LaunchError, child_environment
from cluster.resolve import Resolved, Setting
from cluster.rundir import RunDir, command_line
from cluster.sizes import format_size
from telemetry import logs

ASK_AGAIN_S = 0.1
UNCOMPARED = frozenset({"name", "run_dir", "prefill_workers", "decode_workers", "router.namespace_key"})
"""By the first two the cluster was found, the next two are told apart, the last is made at the first start."""

log = logging.getLogger(__name__)


def serve(resolved: Resolved, environ: Mapping[str, str]) -> int:
    """Be the supervisor until interrupted, or until `headrace down`; if there is one already, say where it serves.
    Raises LaunchError, ModelError, OSError, ConfigError."""
    config = resolved.config
    rundir = RunDir(config, environ)
    if rundir.is_held:
        return _runs_already(rundir, resolved)
    check_ports(config)
    logs.configure("supervisor", config.log_level, config.log_json)
    os.environ.update(rundir.mark)  # every process started from here has it
    with on_hangup(_pass_over_hangup), rundir.hold(), Bars() as bars:
        config, settings = _keyed(resolved, rundir)
        cluster = Cluster(config, make_launcher(config.launcher, config.ray), progress=bars.report)
        admin = AdminServer(
            cluster, rundir, settings, config.launcher, lambda: _interrupt(os.getpid())
        )
        admin.start()
        try:
            with cluster:
                addresses = cluster.start()
                admin.ready(addresses)
                bars.close()
                _say_ready(admin.status(), config)
                try:
                    with on_hangup(cluster.roll):
                        cluster.watch()
                except Interrupted:
                    with suppress(OSError):
                        print("stopping", flush=True)
        except Interrupted:
            if not admin.down.is_set():
                raise
        except LaunchError as error:
            if admin.down.is_set():
                rundir.tell_fault(str(error))
            raise
        finally:
            admin.stop()
    return 0


def _pass_over_hangup() -> None:
    log.warning("SIGHUP replaces workers while the cluster serves: now that it starts or stops, nothing is done")


def _keyed(resolved: Resolved, rundir: RunDir) -> tuple[ClusterConfig, tuple[Setting, ...]]:
    """Return the configuration with a key of cache namespaces: where none is set, the one kept from an earlier start.
    Raises ConfigError."""
    config = resolved.config
    if config.router.namespace_key:
        return config, resolved.settings
    router = msgspec.structs.replace(config.router, namespace_key=rundir.namespace_key())
    kept = Setting("router.namespace_key", router.namespace_key, "made at the first start")
    settings = tuple(kept if setting.key == kept.key else setting for setting in resolved.settings)
    return msgspec.structs.replace(config, router=router), settings


def detach(resolved: Resolved, environ: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Start a supervisor that outlives this process, with the same arguments, and return when it serves. Its output
    goes to NAME.log beside its socket. Raises as `serve` does."""
    config = resolved.config
    rundir = RunDir(config, environ)
    if rundir.is_held:
        return _runs_already(rundir, resolved)
    check_ports(config)
    rundir.make()
    output = rundir.folder / f"{config.name}.log"
    with output.open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "cluster.cli", *_attached(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environ, "PYTHONPATH": child_environment(1, environ)["PYTHONPATH"]},
            start_new_session=True,
        )
    try:
        status = _wait_running(rundir, config, supervisor, output)
    except BaseException:
        if supervisor.poll() is None:
            _interrupt(supervisor.pid)
            supervisor.wait()
        raise
    print_ready(status)
    print(f"\nIts log is {output}. `{command_line('down', config.name)}` stops everything.", flush=True)
    return 0


def _say_ready(status: Status, config: ClusterConfig) -> None:
    """Tell whoever has started the cluster. A cluster whose output is on a full disk serves all the same."""
    try:
        print_ready(status)
        print(
            f"\nCtrl-C, or `{command_line('down', config.name)}`, stops everything. "
            "SIGHUP replaces every worker in turn, and drops no request.",
            flush=True,
        )
    except OSError as error:
        log.warning("the cluster is ready; its output cannot be written: %s", error)


def print_ready(status: Status) -> None:
    workers = ", ".join(p.name for p in status.processes if p.kind != "router")
    print(f"headrace is ready: {workers}")
    print(f"  gRPC  {status.grpc}")
    if status.http:
        print(f"  HTTP  {_url(status.http)}")
    print("\nTry, in another terminal:")
    print(f"  {command()} generate --server {status.grpc} 'Why is the sky blue?'")
    if status.http:
        body = json.dumps(
            {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
        )
        print(
            f"  curl -N {_url(status.http)}/v1/chat/completions "
            f"-H 'content-type: application/json' -d '{body}'"
        )


def check_ports(config: ClusterConfig) -> None:
    """Find out at once, and not when all workers have loaded the model, whether the router's ports are free. Raises
    LaunchError naming the flag that takes another one."""
    if config.launcher == "ray" and config.ray.address != "local":
        return  # its host may be another one
    for flag, port in (("--grpc-port", config.router.grpc_port), ("--http-port", config.router.http_port)):
        if port < 1:
            continue
        try:
            family = socket.AF_INET6 if ":" in config.router.host else socket.AF_INET
            socket.create_server((config.router.host, port), family=family).close()
        except OSError as error:
            number = error.errno or 0
            # Those below zero are of looking a name up.
            reason = os.strerror(number) if number > 0 else "nobody knows this name" if number else str(error)
            if number < 0 or number == errno.EADDRNOTAVAIL:
                why = f"{config.router.host} cannot be listened on: {reason}"
                raise LaunchError(f"{why}; --host ADDRESS takes another one, which must be of this host") from error
            why = f"port {port} of {config.router.host} cannot be listened on: {reason}"
            raise LaunchError(f"{why}; {flag} PORT takes another one, and {flag} 0 any that is free") from error


def untaken(resolved: Resolved, running: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Say of each setting that was asked for by flag, variable or file which one the running cluster has instead. The
    sizes of pools are left out: they can be changed while it runs."""
    told = []
    for setting in resolved.settings:
        asked = msgspec.json.decode(msgspec.json.encode(setting.public))
        has = running.get(setting.key, {}).get("value")
        origin = setting.origin.partition(",")[0]
        kind, _, where = origin.partition(" ")
        if asked == has or kind not in ("flag", "variable", "file") or setting.key in UNCOMPARED:
            continue
        shown = _typed(asked)
        words = {"flag": f"{where} {shown}", "variable": f"{where}={shown}"}.get(kind, f"{setting.key} = {shown}")
        if where == "--set":
            words = f"--set {setting.key}={shown}"
        told.append(f"{words}  (it has {_typed(has) or 'none'})")
    return told


def _typed(value: object) -> str:
    """Return a setting's value as one would type it."""
    return ",".join(map(_typed, value)) if isinstance(value, list) else json.dumps(value).strip('"')


def _runs_already(rundir: RunDir, resolved: Resolved) -> int:
    config = resolved.config
    status = _wait_running(rundir, config, None, None)
    print(f"The cluster {config.name!r} runs already, under process {status.pid}.")
    for kind, wanted in (("prefill", config.prefill_workers), ("decode", config.decode_workers)):
        count = sum(p.kind == kind for p in status.processes)
        if count != wanted:
            change = command_line(f"scale {kind}={wanted}", config.name)
            print(f"It has {count} {kind} worker(s), not {wanted}: `{change}` changes that.")
    with AdminClient(rundir) as client:
        left_out = untaken(resolved, client.config())
    if left_out:
        print("It was started with other settings, and these are not taken:")
        print("\n".join(f"  {line}" for line in left_out))
        print(f"`{command_line('down', config.name)}` and the same `up` again would start it with them.")
    print_ready(status)
    return 0


def _wait_running(
    rundir: RunDir,
    config: ClusterConfig,
    supervisor: "subprocess.Popen[bytes] | None",
    output: Path | None,
) -> Status:
    """Wait until the supervisor serves. Raises LaunchError with what it said last if it ends before."""
    deadline_s = time.monotonic() + config.start_timeout_s + ASK_AGAIN_S
    with AdminClient(rundir) as client, Bars() as bars:
        while True:
            try:
                status = client.status()
            except LaunchError as error:
                why = str(error)
            else:
                if status.state == "running":
                    return status
                why = f"the cluster {config.name!r} is {status.state}"
                up = sum(p.state == "up" for p in status.processes)
                bars.report("processes", up, len(status.processes))
            check()
            if supervisor is not None and output is not None and supervisor.poll() is not None:
                raise LaunchError(_last_line(output) or f"it ended with {supervisor.returncode}{_unsaid(output)}")
            if supervisor is None and not rundir.is_held:
                raise LaunchError(f"the cluster {config.name!r} has just ended")
            if time.monotonic() > deadline_s:
                raise LaunchError(f"not ready in {config.start_timeout_s:.0f} s: {why}")
            time.sleep(ASK_AGAIN_S)


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("headrace: ") if lines else ""


def _unsaid(output: Path) -> str:
    """Say where a supervisor's word should be, and whether there was room for it."""
    return f", and {output} is empty; of its disk {format_size(shutil.disk_usage(output.parent).free)} are free"


def _attached(arguments: Sequence[str]) -> list[str]:
    return [word for word in arguments if word not in ("-d", "--detach")]


def _interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _url(address: str) -> str:
    return address if address.startswith("http") else f"http://{address}"


def command() -> str:
    """Return how this command was called, so that the printed line works from the same folder."""
    called = Path(sys.argv[0])
    if called.name != "headrace":
        return "headrace"
    directory = os.environ.get("PATH", "").split(os.pathsep)
    if str(called.parent.absolute()) in directory:
        return "headrace"
    try:
        return str(called.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(called)
