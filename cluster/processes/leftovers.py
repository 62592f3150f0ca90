"""Finds what a cluster could leave behind: processes below this one, and the shared memory they map."""

import os
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"


def descendants(root: int | None = None) -> dict[int, str]:
    """Return the running processes started by `root` (this process when None), directly or not: pid to name."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name is in parentheses and may hold spaces and parentheses itself.
        name, _, rest = stat.rpartition(")")
        state, parent = rest.split()[:2]
        if state != "Z":
            parents[int(entry.name)] = int(parent)
            names[int(entry.name)] = name.partition("(")[2]
    found: set[int] = set()
    wave = {os.getpid() if root is None else root}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave} - found
        found |= wave
    return {pid: names[pid] for pid in sorted(found)}


def mapped_segments(pids: dict[int, str]) -> set[str]:
    """Return the paths of the named shared-memory segments that these processes map."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for line in lines:
            path = line[line.find("/") :] if "/" in line else ""
            if path.startswith(SHARED_MEMORY) and not path.endswith(" (deleted)"):
                found.add(path)
    return found


def running(pids: dict[int, str]) -> dict[int, str]:
    """Return those that still run."""
    left = {}
    for pid, name in pids.items():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        before, _, rest = stat.rpartition(")")
        # A pid may have been given to somebody else by now.
        if rest.split()[0] != "Z" and before.partition("(")[2] == name:
            left[pid] = name
    return left
