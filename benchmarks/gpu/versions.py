"""Lists what a machine has of what the GPU's path stands on, as JSON: `python3 -m benchmarks.gpu.versions`

Status 2 where torch sees no GPU. A question without an answer is told with the reason, and costs no other.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.bench.environment import describe
from telemetry.build import revision

PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "flash-attn", "flashinfer-python", "vllm",
    "xxhash", "protobuf", "prometheus-client", "safetensors", "pytest", "hypothesis", "gguf",
)  # fmt: skip
"""Packages that are listed beside those of `cluster.bench.environment`."""
TOOLS = ("nvidia-smi", "ncu", "cc", "git", "python")
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def main() -> int:
    facts: dict[str, Any] = {"revision": revision(), **describe()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts["tools"] = {tool: shutil.which(tool) or "not there" for tool in TOOLS}
    facts["device files"] = sorted(map(str, Path("/dev").glob("nvidia*")))
    facts["shared memory, free bytes"] = shutil.disk_usage("/dev/shm").free
    facts["open files"] = _asked(lambda: os.sysconf("SC_OPEN_MAX"))
    facts["smi"] = _asked(_smi)
    facts["driver"] = _asked(_driver)
    facts["cuda"] = _asked(_cuda)
    facts["cupy"] = _asked(_cupy)
    facts["gpus"] = facts["cuda"].pop("gpus") if isinstance(facts["cuda"], dict) else []
    print(json.dumps(facts, indent=1))
    return 0 if facts["gpus"] else 2


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # whatever is broken here is what is asked for
        return f"{type(error).__name__}: {error}"


def _smi() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()


def _driver() -> int:
    """Return the CUDA version that the driver speaks, as 13000."""
    found = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def _cuda() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size")
    gpus = [torch.cuda.get_device_properties(at) for at in range(count)]
    return {
        "torch was built for": str(torch.version.cuda),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _asked(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if count else "not asked",
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "gpus": [{name: getattr(gpu, name) for name in names} for gpu in gpus],
        "free bytes": torch.cuda.mem_get_info(0)[0] if count else 0,
    }


def _cupy() -> dict[str, Any]:
    import cupy
    from cupy.cuda import nccl

    return {
        "version": cupy.__version__,
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "nccl": nccl.get_version() if nccl.available else "not there",
    }


if __name__ == "__main__":
    sys.exit(main())
