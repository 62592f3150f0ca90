"""The name `kernels`, the list of packages, the pins.

PyPI has a package named `kernels` that transformers asks for by import name and version. Ours is
harmless under four rules: run-time code does not import transformers (`test_imports`), we build with
setuptools at version 0.1.x, `kernels/__init__.py` stays empty, and theirs is never installed beside
ours.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from telemetry.build import VERSION

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pairs}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_kernels_is_ours() -> None:
    """Guards against the PyPI package of that name being found first."""
    found = importlib.util.find_spec("kernels")
    assert found is not None and found.origin is not None
    assert Path(found.origin).resolve() == ROOT / "kernels" / "__init__.py"
    assert Path(found.origin).read_bytes() == b""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution("kernels")


def test_tests_are_ours(tmp_path: Path) -> None:
    """Guards `tests/gpu` on a machine where some package has brought its own `tests` along: that would be found before
    a folder of ours that is no package."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    command = [sys.executable, "-c", "import tests.benchmarks.slim"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def test_transformers_does_not_take_ours_for_theirs() -> None:
    """Guards against `import` of any transformers model class failing in the parity tests."""
    pytest.importorskip("transformers")
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() is False


def test_version_keeps_clear_of_theirs() -> None:
    """Guards against a version that transformers would accept as the other package."""
    assert PROJECT["project"]["version"] == VERSION
    assert VERSION.startswith("0.1.")
    assert PROJECT["build-system"]["build-backend"] == "setuptools.build_meta"


def test_every_package_is_listed() -> None:
    """Guards against a wheel that lacks a package which the checkout happens to have on its path."""
    listed = PROJECT["tool"]["setuptools"]["packages"]
    there = [
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("*/**/__init__.py")
        if not init.relative_to(ROOT).parts[0].startswith((".", "build", "tests"))
    ]
    assert sorted(listed) == sorted(there)


def test_pins_are_plain_and_cover_what_is_asked_for() -> None:
    """Guards against a dependency that floats, or a pin such as 2.13.0+cpu that exists in one index. (An epoch before a
    version, as Grafana's SDK has, is part of it.)"""
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    assert [name for name, version in pinned.items() if not re.fullmatch(r"(\d+!)?[\w.]+", version)] == []
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    # Our own extra in a list of ours stands for what it holds.
    asked = [*project["dependencies"], *extras["dev"], *extras["otel"]]
    asked = [line for line in asked if not line.startswith("headrace[")]
    names = [normal(re.split(r"[<>=;\[ ]", line, maxsplit=1)[0]) for line in asked]
    assert [name for name in names if name not in pinned] == []
