"""The program that times loading, small: it runs, and says what it should."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import loading


@pytest.mark.parametrize("cold", [[], ["--cold"]])
def test_every_way_is_told_beside_plain_reading(
    cold: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SIZES", {**loading.SIZES, "vocab_size": 64, "intermediate_size": 64})
    file = tmp_path / "figures.json"
    given = ["--mebibytes", "1", "--shards", "3", "--rounds", "2", "--json", str(file), *cold]
    monkeypatch.setattr(sys, "argv", ["loading", *given])
    loading.main()
    ((title, lines),) = json.loads(file.read_text())["rows"].items()
    assert "in 3 shards to meta" in title and ("disk" in title) is bool(cold)
    assert [line["way"] for line in lines] == [
        "readinto", "streamed and hashed", "streamed", "readinto, then hashed in a second pass",
    ]  # fmt: skip
    assert lines[0]["of readinto's"] == 1 and all(line["best GB/s"] >= line["median GB/s"] > 0 for line in lines)
