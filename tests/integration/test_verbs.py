"""The command line against a real cluster that it starts, looks at, changes and stops: what an operator types."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.processes.leftovers import descendants, running
from cluster.rundir import start_of
from tests.cluster.processes.test_launchers import eventually

pytestmark = pytest.mark.slow

VERB_S = 90.0


class Shell:
    """Runs verbs on one cluster name of its own."""

    def __init__(self, folder: Path, cache: Path, launcher: str = "process") -> None:
        self.folder = folder
        settings = {
            "NAME": "tested",
            "RUN_DIR": str(folder / "run"),
            "CACHE_DIR": str(cache),
            "LAUNCHER": launcher,
            "ROUTER__GRPC_PORT": str(_free_port()),
            "ROUTER__HTTP_PORT": "-1",
            "STOP_GRACE_S": "2",
        }
        self.server = f"127.0.0.1:{settings['ROUTER__GRPC_PORT']}"
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
        self.environ |= {f"HEADRACE_{key}": value for key, value in settings.items()}
        self.supervisor = 0

    def __call__(
        self, *words: str, said: str = "", fails: int | None = 0
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "cluster.cli", *words],
            input=said,
            capture_output=True,
            text=True,
            timeout=VERB_S,
            env=self.environ,
            check=False,
        )
        assert fails is None or done.returncode == fails, (words, done.stdout, done.stderr)
        return done

    def status(self) -> dict[str, dict[str, Any]]:
        told = json.loads(self("status", "--json").stdout)
        self.supervisor = told["pid"]
        return {one["name"]: one for one in told["processes"]}

    def clean_up(self) -> None:
        """What a failed test has left."""
        if self.supervisor and start_of(self.supervisor) is not None:
            below = descendants(self.supervisor)
            os.kill(self.supervisor, signal.SIGKILL)
            for pid in running(below):
                os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def shell(tmp_path: Path, demo_cache: Path) -> Iterator[Shell]:
    one = Shell(tmp_path, demo_cache)
    try:
        yield one
    finally:
        one.clean_up()


def test_a_cluster_from_up_to_down(shell: Shell) -> None:
    """Guards the whole way of an operator: each verb against what the others say."""
    assert "no cluster named 'tested' runs here" in shell("status", fails=1).stderr
    up = shell("up", "--detach")
    assert f"gRPC  {shell.server}" in up.stdout and "prefill-0, decode-0" in up.stdout
    before = shell.status()
    assert {name: one["state"] for name, one in before.items()} == {
        **dict.fromkeys(("prefill-0", "decode-0", "router"), "up")
    }

    again = shell("up", "--decode", "3")
    assert f"runs already, under process {shell.supervisor}" in again.stdout
    assert "`headrace scale decode=3 --name tested` changes that" in again.stdout
    assert "not taken" not in again.stdout, "the variables are those that it was started with"
    assert shell.status() == before, "the second up has changed something"

    answer = shell("chat", "--server", shell.server, "--max-tokens", "8", said="Hello\nAnd?\n")
    assert len(answer.stdout.splitlines()) >= 2
    frame = shell("top", "--once").stdout
    assert "ended: 2 length" in frame and "prefill-0" in frame and "TTFT         –" not in frame
    latest = shell("trace").stdout
    request = next(word for word in latest.split() if len(word) == 16 and word.isalnum())
    told = json.loads(shell("trace", request, "--json").stdout)
    assert {f["worker"] for f in told["flights"]} >= {"router", "decode-0"} and not told["silent"]
    text = shell("trace", f"chatcmpl-{request}").stdout
    assert f"{request} on router" in text and "ended" in text
    assert "no process remembers 'nobody'" in shell("trace", "nobody", fails=1).stderr

    os.kill(before["decode-0"]["pid"], signal.SIGKILL)
    assert eventually(lambda: shell.status()["decode-0"]["deaths"] == 1, 20.0)
    assert eventually(lambda: shell.status()["decode-0"]["state"] == "up", 40.0)
    reborn = shell.status()["decode-0"]
    assert reborn["incarnation"] != before["decode-0"]["incarnation"]
    assert reborn["why"] == "killed by SIGKILL"

    shell("scale", "decode=2")
    assert shell.status()["decode-1"]["state"] == "up"
    shell("drain", "decode-0")
    written = (Path(shell.environ["HEADRACE_RUN_DIR"]) / "tested.log").read_text()
    asked_for = ("decode-0 is gone: ended", "decode-0 closed its stream")
    assert not any(line in written for line in asked_for), "what was asked for is no warning"
    assert "decode-0" not in shell.status()
    assert "is the last decode worker" in shell("drain", "decode-1", fails=1).stderr
    assert "decode: 0 does not lie in 1 to 1024" in shell("scale", "decode=0", fails=2).stderr
    assert shell("generate", "--max-tokens", "4", "Hi").stdout, "it was not found by its name"
    little = ("--requests", "2", "--concurrency", "1", "--input-tokens", "16", "--output-tokens", "4")
    assert shell.server in shell("bench", *little).stdout, "it was not found by its name"
    none = shell("bench", "--target", "http", *little, fails=1).stderr
    assert none == "headrace: the cluster 'tested' is running and serves no http\n"
    shown = shell("dump-config", "--running").stdout
    assert "variable HEADRACE_LAUNCHER" in shown

    pids = [one["pid"] for one in shell.status().values()] + [shell.supervisor]
    assert len(pids) == 4
    down = shell("down").stdout
    assert "no shared memory is left" in down and "Killing" not in down
    assert [pid for pid in pids if start_of(pid) is not None] == []
    assert "No cluster named 'tested' runs here." in shell("down").stdout
    assert sorted(p.name for p in (shell.folder / "run").iterdir()) == ["tested.key", "tested.lock", "tested.log"]


def test_ctrl_c_ends_a_drain_and_an_up_behind_it_quietly(shell: Shell) -> None:
    """Guards against a page of Python for who will not wait for a worker to leave, or has seen it leave and is done."""
    up = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "up", "--decode", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=shell.environ,
    )  # fmt: skip
    try:

        def is_ready() -> bool:
            told = shell("status", "--json", fails=None).stdout
            processes = json.loads(told)["processes"] if told else []
            return len(processes) == 4 and all(one["state"] == "up" for one in processes)

        assert eventually(is_ready, VERB_S)
        shell("drain", "decode-0")
        shell("scale", "decode=2")
        frozen = max(name for name in shell.status() if name.startswith("decode"))
        os.kill(shell.status()[frozen]["pid"], signal.SIGSTOP)
        command = [sys.executable, "-m", "cluster.cli", "drain", frozen]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=shell.environ
        ) as drain:
            assert eventually(lambda: shell.status()[frozen]["state"] != "up", 20.0), "nobody waits for it"
            drain.send_signal(signal.SIGINT)
            assert drain.stderr is not None and drain.stderr.read() == ""
        assert drain.returncode == 128 + signal.SIGINT
        up.send_signal(signal.SIGINT)
        told, _ = up.communicate(timeout=VERB_S)
        assert up.returncode == 0 and "Traceback" not in told, told
        assert "No cluster named 'tested' runs here." in shell("down").stdout
    finally:
        up.kill()
        up.communicate()


def test_down_ends_a_frozen_supervisor_and_a_frozen_worker(shell: Shell) -> None:
    """Guards a `down` that asks, hears nothing, and leaves the processes that it was called for."""
    shell("up", "--detach")
    processes = shell.status()
    assert eventually(lambda: len(_written(shell)) == 4, 10.0)
    frozen = [processes["decode-0"]["pid"], shell.supervisor]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    assert eventually(lambda: {_state(pid) for pid in frozen} == {"T"}, 5.0), "not frozen"
    began_s = time.monotonic()
    down = shell("down").stdout
    assert time.monotonic() - began_s < 60
    assert "cannot be asked" in down
    assert f"Killing {shell.supervisor} (supervisor)" in down
    assert f"Killing {frozen[0]} (decode-0)" in down
    pids = [one["pid"] for one in processes.values()] + [shell.supervisor]
    assert [pid for pid in pids if start_of(pid) is not None] == []


LEAKY = """
import sys
from cluster.cli import __main__ as cli
from cluster.cli import serve
from cluster.processes.process_launcher import ProcessLauncher
from cluster.processes.spec import LaunchError

class Leaky(ProcessLauncher):
    def close(self):
        super().close()
        raise LaunchError("decode-0 (process 7 on 10.0.0.12) may still run: its host does not answer")

serve.make_launcher = lambda *_: Leaky()
sys.exit(cli.main(["up"]))
"""


def test_down_tells_what_is_left_on_another_host(shell: Shell) -> None:
    """Guards a `down` that proves this host clean and keeps what the supervisor found elsewhere to itself."""
    command = [sys.executable, "-c", LEAKY]
    with subprocess.Popen(command, env=shell.environ, stdout=subprocess.DEVNULL) as up:
        assert eventually(lambda: shell_is_up(shell), 60.0)
        down = shell("down", fails=1)
        assert up.wait(20.0) == 1
    fault = "decode-0 (process 7 on 10.0.0.12) may still run: its host does not answer"
    assert down.stderr == f"headrace: nothing of it is left on this host, but {fault}\n"
    assert "No cluster named 'tested' runs here." in shell("down").stdout, "told twice"


def shell_is_up(shell: Shell) -> bool:
    command = [sys.executable, "-m", "cluster.cli", "status", "--json"]
    told = subprocess.run(command, env=shell.environ, capture_output=True, text=True)
    return told.returncode == 0 and json.loads(told.stdout)["state"] == "running"


def test_a_start_that_fails_is_told_and_leaves_nothing(shell: Shell) -> None:
    """Guards a detached start whose reason is only in a log that nobody reads."""
    with socket.create_server(("127.0.0.1", int(shell.server.rpartition(":")[2]))):
        failed = shell("up", "--detach", fails=1)
    assert "127.0.0.1 cannot be listened on" in failed.stderr and "--grpc-port" in failed.stderr
    assert "No cluster named 'tested' runs here." in shell("down").stdout


def _written(shell: Shell) -> list[Any]:
    return list(json.loads((shell.folder / "run" / "tested.json").read_text()))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
