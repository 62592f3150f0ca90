"""Stands in for packages that a machine with a GPU may not have, though the workers import them: `stand_ins` has what
they use."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = str(Path(__file__).with_name("stand_ins"))
PACKAGES = ("msgspec", "xxhash")


def stand_in() -> list[str]:
    """Stand in for absent packages, in this process and all that it starts. To be called before anything of ours is
    imported. Where one package is absent all are stood in for, since workers must agree. Returns the names of those
    that are."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        sys.path.insert(0, FOLDER)
        known = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (FOLDER, known) if part)
    return list(PACKAGES) if absent else []
