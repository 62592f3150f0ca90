"""The public schema against buf: its style, and that nothing that clients rely on has changed since the baseline."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = shutil.which("buf", path=str(Path(sys.executable).parent))
BASELINE = "tests/protos/baseline"

pytestmark = pytest.mark.skipif(BUF is None, reason="needs buf (PyPI: buf-bin, in the extra `dev`)")


def buf(*command: str) -> subprocess.CompletedProcess[str]:
    assert BUF is not None
    return subprocess.run([BUF, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


def test_the_schema_has_buf_s_style() -> None:
    done = buf("lint", "protos")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_client_is_broken() -> None:
    """Guards clients that were generated from the baseline: what they send is read, and what they read is sent."""
    done = buf("breaking", "protos", "--against", BASELINE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("optional int64 max_tokens = 5;", ""),
        ("optional int64 max_tokens = 5;", "optional string max_tokens = 5;"),
        ("rpc Cancel(CancelRequest) returns (CancelResponse);", ""),
    ],
)
def test_a_break_is_seen(tmp_path: Path, old: str, new: str) -> None:
    """Guards the check itself."""
    text = (ROOT / "protos" / "headrace.proto").read_text()
    assert old in text
    (tmp_path / "headrace.proto").write_text(text.replace(old, new))
    assert buf("breaking", str(tmp_path), "--against", BASELINE).returncode != 0
