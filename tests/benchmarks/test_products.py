"""Products by arithmetic: every side is timed, and its error is the one of its own arithmetic."""

import json
from pathlib import Path

import pytest

from benchmarks.products import ARITHMETICS, main
from kernels.native import native


@pytest.mark.skipif(native() is None, reason="the native kernels were not built here: they need a C++ compiler")
@pytest.mark.parametrize("bits", ["4", "8"])
def test_each_arithmetic_is_the_one_it_is_called(bits: str, tmp_path: Path) -> None:
    """Guards columns that are one and the same kernel: 16 bits lose a hundred times what 23 and floats lose."""
    figures = tmp_path / "figures.json"
    size = ["--width", "64", "--columns", "64", "--rows", "1,7", "--turns", "2"]
    assert main([*size, "--bits", bits, "--json", str(figures)]) == 0
    lines = json.loads(figures.read_text())["rows"]
    assert [line["rows"] for line in lines] == [1, 7]
    for line in lines:
        assert set(line["seconds"]) == set(ARITHMETICS) and min(line["seconds"].values()) > 0
        errors = line["errors"]
        assert errors["integer"] < 1e-6 and errors["float32"] < 1e-6 < 1e-6 * 5 < errors["integer16"] < 1e-4
        assert errors["integer"] != errors["float32"]
