"""Packages that travel with the project to a machine without a network, and are used there where it lacks them.

A wheel is a zip file of what is to be imported, so unpacking it into a folder on the path is all there is to do: no
pip, and nothing of the machine's own is changed. Needs nothing but the standard library.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "grpcio": "grpc",
    "hypothesis": "hypothesis",
    "iniconfig": "iniconfig",
    "msgspec": "msgspec",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
    "pygments": "pygments",
    "pytest": "pytest",
    "safetensors": "safetensors",
    "sortedcontainers": "sortedcontainers",
    "tokenizers": "tokenizers",
    "typing-extensions": "typing_extensions",
    "xxhash": "xxhash",
}
"""Packages that `benchmarks.gpu` and `tests/gpu` import beside torch, Triton, numpy and CuPy, which are too large to
bring, and what these packages import themselves; each with a module that shows whether it works."""
IMPORT_S = 60.0
MINOR = sys.version_info.minor
"""The minor version of this Python 3."""


class Wheel(NamedTuple):
    path: Path
    name: str
    version: str
    python: str
    abi: str
    platform: str

    def fits(self) -> bool:
        """Say whether the wheel is for this interpreter and this kind of machine."""
        exact = self.abi == f"cp3{MINOR}" == self.python
        stable = self.abi == "abi3" and any(
            int(tag[3:]) <= MINOR for tag in self.python.split(".") if re.fullmatch(r"cp3\d+", tag)
        )
        pure = self.abi == "none" and "py3" in self.python.split(".")
        here = sys.platform == "linux" and self.platform.endswith(platform.machine())
        return (exact or stable or pure) and (self.platform == "any" or here)


def parsed(path: Path) -> Wheel:
    """Split a wheel's file name. Raises ValueError for a file whose name is none of a wheel."""
    parts = path.name.removesuffix(".whl").split("-")
    if not path.name.endswith(".whl") or len(parts) not in (5, 6):
        raise ValueError(f"{path} is no wheel")
    return Wheel(path, normal(parts[0]), parts[1], *parts[-3:])


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def least_versions() -> dict[str, str]:
    """Return the least versions of the packages that the project names, by `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found = (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in asked)
    return {normal(one[1]): one[2] for one in found if one}


def unpack(wheels: Iterable[Path], folder: Path) -> dict[str, str]:
    """Put into `folder` those of `wheels` that this machine lacks or has too old, and that can be imported from there.
    Returns what became of each package, by name."""
    least = least_versions()
    told: dict[str, str] = {}
    fresh: list[Wheel] = []
    for wheel in sorted(map(parsed, wheels)):
        if (there := _installed(wheel.name)) and _number(there) >= _number(least.get(wheel.name, "0")):
            told[wheel.name] = f"{there}, of this machine"
        elif wheel.fits():
            fresh.append(wheel)
        else:
            told.setdefault(wheel.name, f"{wheel.path.name} is for another interpreter or machine")
    for wheel in fresh:
        with zipfile.ZipFile(wheel.path) as file:
            file.extractall(folder)
    for wheel in fresh:
        why = _fails(PACKAGES.get(wheel.name, wheel.name.replace("-", "_")), folder)
        told[wheel.name] = f"{wheel.path.name} cannot be imported: {why}" if why else f"{wheel.version}, of its wheel"
        if why:
            _remove(wheel, folder)
    return told


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _number(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))


def _fails(module: str, folder: Path) -> str:
    command = [sys.executable, "-c", f"import {module}"]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, env=environment(folder), timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return f"not within {IMPORT_S:g} s"
    return "" if not tried.returncode else (tried.stderr.splitlines() or [f"status {tried.returncode}"])[-1]


def _remove(wheel: Wheel, folder: Path) -> None:
    with zipfile.ZipFile(wheel.path) as file:
        names = file.namelist()
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for top in {Path(name).parts[0] for name in names}:
        left = folder / top
        if left.is_dir() and not any(path.is_file() and path.suffix != ".pyc" for path in left.rglob("*")):
            shutil.rmtree(left)


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment, changed for one that finds packages in `folder` first."""
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in (str(folder), known) if part)}
