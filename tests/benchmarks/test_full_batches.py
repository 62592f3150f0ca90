"""The curve of throughput against inter-token latency: its command line, and a point of it through a whole cluster."""

import json
from pathlib import Path

import pytest

from benchmarks.full_batches import main


@pytest.mark.parametrize("targets", ["none,soon", "0", "30,-1", "inf"])
def test_wrong_targets(targets: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--targets", targets])
    assert "milliseconds above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_point_of_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: a cluster with a target is started, asked, measured and stopped."""
    figures = tmp_path / "figures.json"
    arguments = ["--targets", "60", "--rounds", "1", "--requests", "2", "--preset", "C", "--json", str(figures)]
    assert main(arguments) == 0
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["target"], row["summary"]["failed"], row["summary"]["output_tokens"]) == ("60", 0, 256)
    assert row["summary"]["itl_s"]["mean"] > 0
    assert "over 60" in capsys.readouterr().out
