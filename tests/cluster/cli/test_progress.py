"""Progress bars: on a terminal, and nowhere else."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cluster.cli.progress import Bars
from cluster.config import ClusterConfig
from cluster.processes.hosting import prepared
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.prepare import model_source
from cluster.processes.spec import ModelSource
from engine.config import EngineConfig
from engine.model.prepared.cache import prepare
from engine.model.prepared.shards import by_reference
from tests.cluster.processes.test_launchers import CONFIG, FAKES, LAUNCHERS
from tests.engine.model.test_families import reference, save_hf
from worker.config import DecodeConfig, PrefillConfig


def test_bars_are_for_terminals_only() -> None:
    """Guards a log file that fills with control sequences."""
    plain, terminal = StringIO(), StringIO()
    for file in (plain, terminal):
        with Bars(Console(file=file, force_terminal=file is terminal, width=100)) as bars:
            bars.report("weights", 100 << 20, 400 << 20)
            bars.report("loading", 3 << 30, 8 << 30)
            bars.report("processes", 3, 3)
    assert plain.getvalue() == ""
    assert "100 MiB of 400 MiB" in terminal.getvalue() and "3 GiB of 8 GiB" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_a_start_reports_its_processes() -> None:
    told: list[tuple[str, int, int]] = []

    def report(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    cluster = Cluster(CONFIG, make_launcher("process"), FAKES, model_dir="x", progress=report)
    with cluster:
        cluster.start()
    assert told[0] == ("processes", 0, 3)
    assert ("processes", 3, 3) in told and told[-1] == ("router meets workers", 1, 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_start_reports_what_its_workers_load(launcher: str) -> None:
    """Guards a minute in which nothing seems to happen, and, on Ray, an answer of the actor that nobody asks for."""
    told: list[tuple[str, int, int]] = []
    loading = {**FAKES, "decode": "tests.cluster.fakes:LoadingWorker", "prefill": "tests.cluster.fakes:LoadingWorker"}

    def report(what: str, done: int, total: int) -> None:
        if what == "loading":
            told.append((what, done, total))

    with Cluster(CONFIG, make_launcher(launcher), loading, model_dir="x", progress=report) as cluster:
        cluster.start()
    loaded = [done for _, done, _ in told]
    assert told[-1] == ("loading", 80, 80) and loaded == sorted(loaded) and {20, 40, 60} & {*loaded}


def test_only_workers_on_gpus_leave_the_weights_where_they_are() -> None:
    """Guards a CPU worker that would have to hold what it could map."""
    cpu, gpu = EngineConfig(dtype="bfloat16"), EngineConfig(device="cuda", dtype="bfloat16")
    for prefill, decode, mapped in ((cpu, cpu, True), (gpu, cpu, True), (cpu, gpu, True), (gpu, gpu, False)):
        config = ClusterConfig(prefill=PrefillConfig(engine=prefill), decode=DecodeConfig(engine=decode))
        assert model_source(config).mapped is mapped


@pytest.mark.parametrize("mapped", [True, False])
def test_the_source_says_how_a_host_prepares_it(mapped: bool, tmp_path: Path) -> None:
    source = tmp_path / "model"
    save_hf(reference().bfloat16(), source)
    asked = ModelSource(model=str(source), cache_dir=str(tmp_path / "c"), dtype="bfloat16", mapped=mapped)
    assert by_reference(Path(prepared(asked))) is not mapped


def test_the_cache_home_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards a user who said where caches go. By the standard a relative path says nothing."""
    source = tmp_path / "model"
    save_hf(reference(), source)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    asked = ModelSource(model=str(source))
    assert Path(prepared(asked)).is_relative_to(tmp_path / "xdg" / "headrace" / "models")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    assert Path(prepared(asked)).is_relative_to(tmp_path / "home" / ".cache" / "headrace" / "models")


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
