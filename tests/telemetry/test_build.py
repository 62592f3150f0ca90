"""Which revision a process says it runs: of a note, of a checkout, of neither."""

import subprocess
from pathlib import Path

import pytest

from telemetry import build
from telemetry.metrics import WorkerMetrics
from tests.telemetry.pages import samples


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    git(tmp_path, "tag", "v9")
    return tmp_path


def test_a_checkout_names_its_commit_and_that_it_was_changed(checkout: Path) -> None:
    """Guards against a tag, which may move, and against changes that look like what was committed."""
    commit = git(checkout, "rev-parse", "HEAD")[:12]
    assert build.of_checkout(checkout) == commit
    (checkout / "file").write_text("two")
    assert build.of_checkout(checkout) == f"{commit}-dirty"


def test_another_projects_checkout_is_not_ours(checkout: Path) -> None:
    """Guards against the revision of a user's own repository, in which our environment happens to be."""
    below = checkout / "lib"
    below.mkdir()
    assert build.of_checkout(below) == ""


def test_a_note_of_the_build_is_read(tmp_path: Path) -> None:
    assert build.noted(tmp_path / build.NOTE) == ""
    (tmp_path / build.NOTE).write_text("0123456789ab\n")
    assert build.noted(tmp_path / build.NOTE) == "0123456789ab"


def test_every_process_says_what_it_runs() -> None:
    """Guards against two revisions in one cluster that nobody can see."""
    seen = samples(WorkerMetrics("m", "decode-0", "decode").render())
    labels = (("revision", build.revision()), ("version", build.VERSION))
    assert seen["headrace_build_info", labels] == 1
    assert build.revision() and " " not in build.revision()
