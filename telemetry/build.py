"""Says which Headrace this process runs: the version, and the git revision that it was built from."""

import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

VERSION = "0.1.0"
UNKNOWN = "unknown"
NOTE = "REVISION"
"""The file beside this one in which a build notes its revision (`setup.py`, `deploy/docker/Dockerfile`)."""
GIT = ("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
GIT_TIMEOUT_S = 5.0


@cache
def revision() -> str:
    """Return twelve digits of the commit, `-dirty` behind those of a checkout with changes; UNKNOWN where nobody can
    tell."""
    package = Path(__file__).resolve().parent
    return noted(package / NOTE) or of_checkout(package.parent) or of_install() or UNKNOWN


def noted(note: Path) -> str:
    """Return the revision that a build has written down, or an empty text."""
    try:
        return note.read_text().strip()
    except OSError:
        return ""


def of_checkout(root: Path) -> str:
    """Return the revision of the git checkout whose top is `root`, or an empty text. A folder somewhere below another
    project's top is no checkout."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "--no-optional-locks", "-C", str(root), *GIT]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""


def of_install() -> str:
    """Return the revision of a package that was installed from a repository's address (PEP 610), or an empty text."""
    try:
        origin = metadata.distribution("headrace").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    found = json.loads(origin or "{}").get("vcs_info", {})
    return str(found.get("commit_id", ""))[:12]
