"""The figures in docs/gpu.md are those of the results, or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import tables
from benchmarks.gpu.parts import PARTS
from kernels.configs import DRY_RUN

TOLD: dict[str, Any] = {
    "benchmark": "gpu",
    "date": "2001-02-03",
    "revision": "0123456789ab",
    "card": {
        "gpu": "NVIDIA Imaginary",
        "memory_bytes": 1 << 37,
        "multiprocessors": 7,
        "l2_bytes": 1,
        "cuda": "13.0",
    },
    "environment": {"cpu": "a processor", "cores": 16, "python": "3.12.3", "torch": "2.11.0"},
    "results": {
        "decode": [{"id": "K1", "us": 123.456}, {"id": "K1", "absent": "no | such\nthing"}],
        "cluster": [],
    },
    "parts": {"decode": {"took_s": 12.3, "limit_s": 40}, "cluster": {"took_s": 1.0, "limit_s": 40}},
    "failures": {"cluster": "its process died: SIGKILL"},
    "logs": {},
    "goals": [{"id": "K1", "asks": "TB/s", "met": "not measured"}],
}


def page() -> str:
    return tables.PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_results_say() -> None:
    """Guards figures that were typed in, and a page that somebody forgot to write anew."""
    told = json.loads(tables.RESULTS.read_text()) if tables.RESULTS.exists() else None
    assert tables.written(page(), told) == page()


def test_without_results_it_says_so_and_has_no_figure() -> None:
    empty = tables.written(page(), None)
    assert "no GPU could be had" in empty
    assert all(f"| `{name}` |  |" in empty for name in PARTS)


def test_results_are_shown_as_they_are() -> None:
    full = tables.written(page(), TOLD)
    assert "no GPU could be had" not in full
    for line in (
        "NVIDIA Imaginary (128 GiB, 7 multiprocessors), CUDA 13.0, a processor (16 cores), python 3.12.3, torch 2.11.0",
        "| id | us | absent |",
        "| K1 | 123.5 |  |",
        "| K1 | TB/s | not measured |",
        "| K1 |  | no \\| such thing |",
        "Failed: its process died: SIGKILL",
        "revision 0123456789ab, 2001-02-03.",
    ):
        assert line in full
    before, after = page().partition(tables.BEGIN)[0], page().partition(tables.END)[2]
    assert full.startswith(before) and full.endswith(after), "what people wrote was changed"
    assert tables.written(full, None) == tables.written(page(), None)


def test_a_dry_run_is_no_result() -> None:
    with pytest.raises(ValueError, match="mean nothing"):
        tables.written(page(), {**TOLD, "card": {"gpu": DRY_RUN}})
    with pytest.raises(ValueError, match="no lines"):
        tables.written("a page", None)


def test_a_page_that_drifted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "gpu.md"
    copy.write_text(tables.written(page(), None).replace("`copy_rate` |  |", "`copy_rate` | 4.0 TB/s |"))
    monkeypatch.setattr(tables, "PAGE", copy)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "none.json")
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 1 and "4.0 TB/s" in copy.read_text()
    monkeypatch.setattr("sys.argv", ["tables"])
    assert tables.main() == 0 and "4.0 TB/s" not in copy.read_text()
