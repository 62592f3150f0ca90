"""Memory of a process tree as summed PSS: a page that n processes share counts 1/n in each, so the sum is exact.

RSS would count the shared weights and KV pools once per process. Linux only.
"""

from pathlib import Path

PROC = Path("/proc")


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """`pid` and all its living descendants, `pid` first. Empty if there is no such process."""
    children: dict[int, list[int]] = {}
    known: set[int] = set()
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        parent = _parent(entry)
        if parent is not None:
            known.add(int(entry.name))
            children.setdefault(parent, []).append(int(entry.name))
    if pid not in known:
        return []
    found = [pid]
    for member in found:
        found.extend(sorted(children.get(member, ())))
    return found


def pss_bytes(pid: int, proc: Path = PROC) -> int:
    """PSS of one process; 0 if it has ended. Raises `PermissionError` for another user's process."""
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.removesuffix("kB")) * 1024
    return 0  # a process that is ending has no memory map left


def tree_pss_bytes(pid: int, proc: Path = PROC) -> int:
    """Summed PSS of `pid` and its descendants. Raises `ProcessLookupError` if there is no such process."""
    members = tree(pid, proc)
    if not members:
        raise ProcessLookupError(f"no process {pid}")
    return sum(pss_bytes(member, proc) for member in members)


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command between parentheses may itself hold spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[1])
