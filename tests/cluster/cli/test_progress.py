"""Progress bars: on a terminal, and nowhere else."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from cluster.cli.progress import Bars
from cluster.processes.launch import Cluster, make_launcher
from engine.model.cache import prepare
from tests.cluster.processes.test_launchers import CONFIG, FAKES


def test_bars_are_for_terminals_only() -> None:
    """Guards a log file that fills with control sequences."""
    plain, terminal = StringIO(), StringIO()
    for file in (plain, terminal):
        with Bars(Console(file=file, force_terminal=file is terminal, width=100)) as bars:
            bars.report("weights", 100 << 20, 400 << 20)
            bars.report("processes", 3, 3)
    assert plain.getvalue() == ""
    assert "100 MiB of 400 MiB" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_a_start_reports_its_processes() -> None:
    told: list[tuple[str, int, int]] = []

    def report(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    cluster = Cluster(CONFIG, make_launcher("process"), FAKES, model_dir="x", progress=report)
    with cluster:
        cluster.start()
    assert told[0] == ("processes", 0, 3)
    assert ("processes", 3, 3) in told and told[-1] == ("router meets workers", 1, 1)


def test_a_conversion_reports_every_byte_once(tmp_path: Path) -> None:
    """Guards a bar that stops short, or jumps: the steps grow, and end with the whole."""
    told: list[tuple[int, int]] = []
    prepare(None, tmp_path, progress=lambda done, total: told.append((done, total)))
    totals = {total for _, total in told}
    assert len(totals) == 1 and [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] and len(told) > 100
    again: list[tuple[int, int]] = []
    prepare(None, tmp_path, progress=lambda done, total: again.append((done, total)))
    assert again == []
