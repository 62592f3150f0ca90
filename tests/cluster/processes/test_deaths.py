"""What a process is said to have died of, and the page that says so when the process is gone."""

import threading
import urllib.request
from pathlib import Path

import msgspec
import pytest

from cluster.processes.deaths import cause_of
from cluster.processes.events import Accused, ProcessEnded, TimePassed, Up
from cluster.processes.hosting import one_line
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.supervisor import RestartConfig
from engine.types import Incarnation
from telemetry.audit import AuditError
from tests.chaos.faults import kill
from tests.cluster.processes.test_launchers import CONFIG, FAKES, eventually
from tests.cluster.processes.test_supervisor import supervisor, up


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("killed by SIGKILL", "signal"),
        ("the worker died: its process was ended by signal 11 (SIGSEGV)", "signal"),
        ("ended with status 3", "exit"),
        ("ended", "exit"),
        ("", "exit"),
        ("RuntimeError: the transfer thread is stuck in one call", "failed"),
        ("no such model file: /nowhere", "failed"),
        (one_line(AuditError("the kv ledger does not add up: LedgerError: 1 leaked (block 3)")), "ledger"),
        (one_line(AuditError("the cache ledger does not add up: AssertionError")), "ledger"),
        (one_line(AuditError("the scheduler ledger does not add up: AssertionError")), "audit"),
        ("not started in 180 s", "given_up"),
        ("did not end when it was to leave", "given_up"),
    ],
)
def test_a_reason_has_one_cause(why: str, cause: str) -> None:
    """Guards the label: a reason has any length and content, a cause is one of a few words."""
    assert cause_of(why, was_up=True, was_accused=False) == cause


def test_what_was_known_before_its_end_counts_first() -> None:
    """Guards against a kill of ours that is told as somebody else's, and a bad start as a crash."""
    assert cause_of("killed by SIGKILL", was_up=True, was_accused=True) == "given_up"
    assert cause_of("killed by SIGKILL", was_up=False, was_accused=False) == "start"
    assert cause_of("OSError: no model", was_up=False, was_accused=False) == "start"


def test_the_supervisor_counts_every_death_once() -> None:
    """Guards the count against a death that is told twice, and a worker that left as it was asked to."""
    pure = supervisor()
    pure.handle(ProcessEnded("decode-0", "killed by SIGSEGV"), 1.0)
    pure.handle(ProcessEnded("decode-0", "killed by SIGSEGV"), 1.1)
    assert dict(pure.deaths) == {("decode", "signal"): 1}
    pure.handle(TimePassed(), 9.0)
    pure.handle(ProcessEnded("decode-0", "no room"), 9.5)
    assert pure.deaths["decode", "start"] == 1
    pure.handle(TimePassed(), 19.0)
    pure.handle(Up(up("decode-0", 2, life=7)), 20.0)
    pure.handle(Accused("decode-0", Incarnation(7), "silent"), 21.0)
    pure.handle(ProcessEnded("decode-0", "killed by SIGKILL"), 21.5)
    assert pure.deaths["decode", "given_up"] == 1 and pure.deaths.total() == 3


def test_the_page_outlives_the_process(tmp_path: Path) -> None:
    """Guards the alerts about deaths and starts: a count in the process that dies is gone before anybody scrapes it,
    and one of a router's is of what it has met."""
    config = msgspec.structs.replace(CONFIG, restart=RestartConfig(first_pause_s=0.1))
    stop = threading.Event()
    with Cluster(config, make_launcher("process"), FAKES, model_dir=str(tmp_path)) as cluster:
        cluster.start()
        port = cluster.supervisor_metrics_port
        watcher = threading.Thread(target=cluster.watch, args=(stop,))
        watcher.start()
        try:
            own = 'model="",pool="supervisor"'
            line = f'headrace_process_deaths_total{{cause="signal",{own},role="%s",worker="supervisor"}}'
            assert f"{line % 'decode'} 0.0" in page(port) and f"{line % 'router'} 0.0" in page(port)
            kill(cluster.workers["decode-0"].pid)
            assert eventually(lambda: f"{line % 'decode'} 1.0" in page(port), 10.0)
            kill(cluster.router.pid)
            assert eventually(lambda: f"{line % 'router'} 1.0" in page(port), 10.0)
            for name, kind, starts in (("router", "router", 2), ("decode-0", "decode", 2), ("prefill-0", "prefill", 1)):
                said = f'_starts_total{{model="",peer="{name}",pool="supervisor",role="{kind}",worker="supervisor"}}'
                assert eventually(lambda said=said, starts=starts: f"{said} {starts}.0" in page(port), 10.0), name
        finally:
            stop.set()
            watcher.join()
    with pytest.raises(OSError):
        page(port)


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text
