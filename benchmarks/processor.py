"""Processor time of a server's processes, and of a cluster's router and transfer threads, as the kernel counts it, so
that it hardly matters who else uses the cores. Linux only.
"""

import os
from pathlib import Path

import msgspec

from cluster.bench.memory import PROC, tree

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHILD = "cluster.processes.child"


class ProcessorTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of all processes, of the routers among them, and of the threads that copy blocks. The last two are 0 for
    servers that are none of ours."""

    all_s: float
    router_s: float = 0.0
    transfer_s: float = 0.0

    def since(self, before: "ProcessorTime") -> "ProcessorTime":
        return ProcessorTime(
            all_s=self.all_s - before.all_s,
            router_s=self.router_s - before.router_s,
            transfer_s=self.transfer_s - before.transfer_s,
        )


def processor_time(pid: int, proc: Path = PROC) -> ProcessorTime:
    """Read what `pid` and all below it have used, threads that have ended included."""
    spent = {"all_s": 0.0, "router_s": 0.0, "transfer_s": 0.0}
    for member in tree(pid, proc):
        folder = proc / str(member)
        _, used_s = _stat(folder / "stat")
        spent["all_s"] += used_s
        if _is_router(folder):
            spent["router_s"] += used_s
        for thread in _entries(folder / "task"):
            name, used_s = _stat(thread / "stat")
            spent["transfer_s"] += used_s if name == "transfer" else 0.0
    return ProcessorTime(**spent)


def _is_router(folder: Path) -> bool:
    try:
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return CHILD in words and words[words.index(CHILD) + 1].startswith("router")


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _stat(path: Path) -> tuple[str, float]:
    """Return the name and the user and system seconds; none of a process or thread that has ended."""
    try:
        head, _, rest = path.read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return "", 0.0
    fields = rest.split()
    return head.partition("(")[2], (int(fields[11]) + int(fields[12])) / TICKS_PER_S
