"""`headrace collect-env`: what a bug report needs to say of a host. Secrets are shown as set or not."""

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from cluster.memory import available_bytes
from cluster.resolve import Resolved
from cluster.sizes import format_size
from telemetry.build import VERSION, revision

PACKAGES = (
    "torch",
    "triton",
    "ray",
    "grpcio",
    "protobuf",
    "msgspec",
    "numpy",
    "tokenizers",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "opentelemetry-sdk",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
VARIABLES = ("OMP_", "MKL_", "CUDA_", "NCCL_", "RAY_", "TORCH_", "TRITON_", "HEADRACE_", "PYTHON")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")

Found = dict[str, dict[str, str]]


def collect(resolved: Resolved, environ: Mapping[str, str]) -> Found:
    """Return sections of names and values. Nothing here imports torch or Ray: a broken one must not stop the report."""
    return {
        "headrace": {"version": VERSION, "revision": revision()},
        "host": _host(),
        "limits": _limits(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": _gpus(),
        "variables": _variables(environ),
        "settings that are not defaults": {
            setting.key: f"{setting.public!r} ({setting.origin})"
            for setting in resolved.settings
            if setting.origin != "default"
        },
    }


def print_environment(found: Found) -> None:
    for section, rows in found.items():
        print(f"{section}:")
        for name, value in rows.items():
            print(f"  {name}: {value}")


def _host() -> dict[str, str]:
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory available": format_size(available_bytes()),
        "shared memory": format_size(shm.free) + " free" if shm else "no /dev/shm",
        "container": "yes" if Path("/.dockerenv").exists() else "not seen",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _limits() -> dict[str, str]:
    names = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
    }
    return {name: "{} (hard {})".format(*resource.getrlimit(of)) for name, of in names.items()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> dict[str, str]:
    if shutil.which(GPU_QUERY[0]) is None:
        return {"nvidia-smi": "not found"}
    try:
        told = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return {"nvidia-smi": "no answer in 20 s"}
    lines = (told.stdout or told.stderr).strip().splitlines()
    return {str(number): line for number, line in enumerate(lines)}


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(set)" if any(word in name.upper() for word in SECRETS) else value
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLES)
    }
