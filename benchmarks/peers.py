"""The servers that `benchmarks.beside` compares, each as the command that starts it. All speak `/v1/completions`.

Each gets both cores, the same model, room for eight requests of 2,048 tokens, and its own defaults for the rest.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, NamedTuple

import httpx

from benchmarks import checkpoint
from cluster.admin_client import AdminClient
from cluster.config import ClusterConfig
from cluster.processes.spec import LaunchError
from cluster.rundir import RunDir
from engine.model.prepared.cache import find_demo_model

SLOTS, CONTEXT = 8, 2048
READY_S, STOP_S = 600.0, 30.0
KINDS = ("vllm", "vllm-bf16", "llama.cpp", "llama.cpp-drafts", "transformers")
TOLD = re.compile(r"draft acceptance = \S+ \( *(\d+) accepted / *(\d+) generated\)")
"""What llama.cpp prints of a request that had drafts."""


@dataclass(frozen=True)
class PeerServer:
    """A server as the command that starts it. `stdin` is held open while the server is to run."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False


class Drafts(NamedTuple):
    """Tokens that a server has guessed since it began, and how many of them its model drew."""

    guessed: int = 0
    drawn: int = 0

    def since(self, before: "Drafts") -> "Drafts":
        return Drafts(self.guessed - before.guessed, self.drawn - before.drawn)


def headrace(port: int, name: str = "headrace", flags: tuple[str, ...] = ()) -> PeerServer:
    """Return Headrace from this environment, with one prefill and one decode worker unless `flags` say otherwise."""
    argv = [str(Path(sys.executable).with_name("headrace")), "up", "--launcher", "process"]
    argv += ["--name", f"beside-{port}", "--grpc-port", "0", "--http-port", str(port)]
    return PeerServer(name, (*argv, *flags), is_ours=True)


def metrics_page(port: int) -> str:
    """Return where the only decode worker of `headrace(port)` shows its metrics."""
    with AdminClient(RunDir(ClusterConfig(name=f"beside-{port}"), os.environ)) as admin:
        (decode,) = [worker for worker in admin.overview().workers if worker.role == "decode"]
    return f"http://{decode.metrics_address}/metrics"


def other(kind: str, venv: Path, port: int, threads: int, hf_model: Path) -> PeerServer:
    """Return a server of `KINDS`, installed in `venv`; `hf_model` is what `checkpoint.write` wrote."""
    environment = {"PYTHONPATH": "", "OMP_NUM_THREADS": str(threads)}
    if kind.startswith("vllm"):
        dtype = "bfloat16" if kind == "vllm-bf16" else "float32"
        argv = [venv / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", hf_model]
        argv += ["--host", "127.0.0.1", "--port", port, "--dtype", dtype, "--max-model-len", CONTEXT]
        # Settings of vLLM's CPU backend: which cores, and the size of its KV memory in GiB.
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return PeerServer(kind, tuple(map(str, argv)), environment)
    if kind == "transformers":
        argv = [venv / "bin/python", "-m", "benchmarks.transformers_server", port, threads, SLOTS]
        return PeerServer(kind, tuple(map(str, argv)), environment)
    script = Path(__file__).with_name("llama_server.py")
    argv = [venv / "bin/python", script, find_demo_model(), port, threads, SLOTS, CONTEXT]
    argv += ["drafts"] if kind == "llama.cpp-drafts" else []
    return PeerServer(kind, tuple(map(str, argv)), environment)


def read_drafts(peer: PeerServer, port: int, log: Path) -> Drafts:
    """Return what a server tells of its drafts: ours in its workers' metrics, llama.cpp in its log, others nowhere."""
    if not peer.is_ours:
        told = TOLD.findall(log.read_text(errors="replace"))
        return Drafts(sum(int(guessed) for _, guessed in told), sum(int(drawn) for drawn, _ in told))
    counts = dict.fromkeys(("drawn", "rejected"), 0)
    groups = httpx.get(f"http://127.0.0.1:{port}/sd", timeout=60).json()
    for target in {target for group in groups for target in group["targets"]}:
        page = httpx.get(f"http://{target}/metrics", timeout=60).text
        for outcome, value in re.findall(r'^headrace_draft_tokens_total\{.*?outcome="(\w+)".*?\} (\S+)', page, re.M):
            counts[outcome] += int(float(value))
    return Drafts(sum(counts.values()), counts["drawn"])


def make_checkpoint(kinds: tuple[str, ...], folder: Path) -> None:
    """Write the model for servers that read no GGUF file."""
    if any(kind.startswith("vllm") for kind in kinds):
        checkpoint.write(folder)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_ready(port: int, path: str) -> bool:
    """True if an HTTP server of this host answers 200 there."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def running(peer: PeerServer, port: int, log: IO[bytes]) -> Iterator[tuple[int, float]]:
    """Start a server; yields its process and the seconds from its start to the first token of its first answer. Raises
    LaunchError if there is none within `READY_S`; what it printed is in `log`."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        peer.argv,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, **peer.environment},
        start_new_session=True,
    )
    try:
        while not _answers(port):
            if process.poll() is not None or time.monotonic() - began_s > READY_S:
                raise LaunchError(f"{peer.name} does not serve")
            time.sleep(0.1)
        yield process.pid, time.monotonic() - began_s
    finally:
        _stop(process)


def _answers(port: int) -> bool:
    body = {"prompt": [1000, 1001], "max_tokens": 1, "temperature": 0}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the server, which leads a process group of its own: what does not end when asked is killed with all of its
    group."""
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
