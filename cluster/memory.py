"""How much memory this machine, or the container that this process runs in, can still give. Linux."""

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Return what can be used now without swapping: the least of what the machine and every enclosing control group
    have left.

    Clean file pages (mapped weights among them) count as available. `root` holds `proc` and `sys`. Raises OSError
    where `/proc/meminfo` cannot be read.
    """
    return max(0, min([_machine(root), *_groups(root)]))


def _machine(root: Path) -> int:
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(found["MemAvailable"].split()[0]) * 1024


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of the control groups that this process is in, version 2 and version 1, each from its own up
    to the mount's root; a container may see only the upper part of its own path, or only the end."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_dir():
                yield group
            if group == mount:
                break


def _groups(root: Path) -> Iterator[int]:
    """Return what each control group that this process is in has left; none where there is no limit."""
    new = ("memory.max", "memory.current", "inactive_file")
    old = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for group in control_groups(root, "memory"):
        room = _room(group, *(new if (group / new[0]).exists() else old))
        if room is not None:
            yield room


def _room(group: Path, limit_name: str, usage_name: str, idle_name: str) -> int | None:
    """Return limit − usage + file pages that nobody has touched lately; None without a limit."""
    try:
        limit = (group / limit_name).read_text(encoding="ascii").strip()
        usage = int((group / usage_name).read_text(encoding="ascii"))
        statistics = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return None
    if limit == "max":
        return None
    idle = dict(zip(statistics[::2], statistics[1::2], strict=True)).get(idle_name, "0")
    return int(limit) - usage + int(idle)
