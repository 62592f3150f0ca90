"""What can be said of a card's tests without a card."""

import subprocess
import sys
from pathlib import Path


def test_every_test_of_a_card_finds_its_fixtures() -> None:
    """Guards a fixture that a suite of `tests/transfer` has got and this folder has not: without a GPU, tests that
    need one are skipped before anybody asks for their fixtures."""
    folder = str(Path(__file__).parent)
    # A machine may bring plugins along, and packages that warn.
    options = ["-q", "-W", "default", *(f"-pno:{name}" for name in ("benchmark", "cacheprovider", "xdist"))]
    options += ["--setup-plan", "-m", "gpu", folder]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout
    assert "test_ranks_of_any_degree" in run.stdout and " skipped" not in run.stdout, run.stdout
