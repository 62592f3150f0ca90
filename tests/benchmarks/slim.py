"""An environment that holds torch and few packages besides, as a machine with a GPU may."""

import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

NAMED = ("triton", "numpy", "tokenizers", "safetensors", "grpcio", "protobuf", "prometheus-client")
"""What `benchmarks.gpu` says that it needs, beside torch and what torch itself needs."""


def make(folder: Path) -> Path:
    """The interpreter of a new environment, whose packages are links to those of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    for found in [*_closure("torch", {}).values(), *map(distribution, NAMED)]:
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = site / top
            if not link.exists():
                link.symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"


def _closure(name: str, known: dict[str, Distribution]) -> dict[str, Distribution]:
    try:
        known[name] = distribution(name)
    except PackageNotFoundError:
        return known  # of another platform
    for text in known[name].requires or ():
        needed = Requirement(text)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if wanted and needed.name not in known:
            _closure(needed.name, known)
    return known
