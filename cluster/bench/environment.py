"""Where a benchmark ran: a figure without its machine and versions means nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("headrace", "torch", "triton", "ray", "grpcio", "msgspec", "tokenizers", "numpy")


def describe() -> dict[str, str | int]:
    """Processor, cores this process may use, memory, system, Python and package versions of *this* machine.

    For a server on another machine, say so beside the figures.
    """
    facts: dict[str, str | int] = {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def cpu_model(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except FileNotFoundError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
