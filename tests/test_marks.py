"""`make slow` and its like look for their marks in the text of the files (`tests/conftest.py`)."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
MARKS = re.compile(r"mark\.(slow|parity|chaos|observe|rayup|clients)\b")


def test_marks_stand_in_the_files_of_their_tests() -> None:
    """Guards a test that has its mark from elsewhere, and that no step would find."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}
    assert sum(bool(MARKS.search(text)) for text in texts.values()) > 50
    assert not [path for path, text in texts.items() if MARKS.search(text) and not path.name.startswith("test_")]
    # Nor has a mark another name, or is put together.
    assert not [path for path, text in texts.items() if re.search(r"pytest import .*\bmark\b|attr\(pytest\.mark", text)]


def test_a_step_reads_what_has_its_mark_and_no_other_file() -> None:
    """Guards against a mark that finds nothing any more, and against five hundred files imported for one test."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", "-q"]
    listed = subprocess.run(
        [*command, "-m", "rayup"], cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    *tests, _, last = listed.stdout.splitlines()
    assert {test.partition("::")[0] for test in tests} == {"tests/deploy/test_ray_up.py"}
    assert "deselected" not in last, "others were read as well"
