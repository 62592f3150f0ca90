"""What memory there is, as files under `/proc` and `/sys` say."""

from pathlib import Path

import pytest

from cluster.memory import available_bytes

MACHINE = 1000 * 1024


def tree(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(at: str, limit: str, usage: int, idle: int) -> dict[str, str]:
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {idle}\n",
    }


def old_group(at: str, limit: int, usage: int, idle: int) -> dict[str, str]:
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {idle}\n",
    }


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, {})) == MACHINE


@pytest.mark.parametrize(
    ("cgroup", "groups", "want"),
    [
        ("0::/a/b\n", group("sys/fs/cgroup/a/b", "max", 5, 0), MACHINE),
        ("0::/a/b\n", group("sys/fs/cgroup/a/b", "6000", 5000, 300), 1300),
        ("0::/a/b\n", group("sys/fs/cgroup/a", "6000", 5000, 0), 1000),
        ("0::/\n", group("sys/fs/cgroup", "6000", 5000, 0), 1000),
        ("0::/gone/here\n", group("sys/fs/cgroup", "6000", 5000, 0), 1000),
        ("0::/a\n", group("sys/fs/cgroup/a", "5000", 6000, 0), 0),
        ("4:memory:/x\n0::/\n", old_group("sys/fs/cgroup/memory/x", 6000, 5000, 250), 1250),
        ("4:cpu:/x\n", old_group("sys/fs/cgroup/memory/x", 6000, 5000, 250), MACHINE),
        ("4:memory:/x\n", old_group("sys/fs/cgroup/memory/x", 1 << 62, 5000, 0), MACHINE),
    ],
)
def test_the_tightest_enclosing_group_counts(
    tmp_path: Path, cgroup: str, groups: dict[str, str], want: int
) -> None:
    """Guards against a pool sized by a machine of which a container may use a tenth, and against file pages that would
    be given back counting as used."""
    assert available_bytes(tree(tmp_path, {"proc/self/cgroup": cgroup, **groups})) == want


def test_this_machine_has_some() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
