"""Headrace and other servers in one run: what is measured, and that no server outlives its turn."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.beside import main
from benchmarks.peers import PeerServer, free_port, headrace, other, running
from cluster.processes.spec import LaunchError

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--presets", "A,Z"],
        ["--peer", "vllm=/nowhere"],
        ["--peer", f"other={sys.prefix}"],
        ["--also", "headrace=--workers 2"],
        ["--also", "one pool"],
    ],
    ids=["preset", "environment", "kind", "name taken", "no flags"],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[-1].rpartition(",")[2] in capsys.readouterr().err


def test_a_server_is_ended_with_all_of_its_processes(tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "log").open("w+b") as log:
        with running(PeerServer("small", (sys.executable, "-c", SERVER, str(port))), port, log) as (pid, first_token_s):
            assert 0 < first_token_s < 60
            log.seek(0)
            child = int(log.readline())
            assert _lives(pid) and _lives(child)
        assert not _lives(pid)
        deadline = time.monotonic() + 5
        while _lives(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _lives(child)


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "READY_S", 60.0)
    began_s = time.monotonic()
    with (
        (tmp_path / "log").open("w+b") as log,
        pytest.raises(LaunchError, match="broken does not serve"),
        running(PeerServer("broken", (sys.executable, "-c", "raise SystemExit(3)")), free_port(), log),
    ):
        pass
    assert time.monotonic() - began_s < 30


def test_others_get_both_cores_and_nothing_of_this_environment(tmp_path: Path) -> None:
    for kind in peers.KINDS:
        peer = other(kind, tmp_path, 1234, 2, tmp_path / "model")
        assert peer.argv[0] == str(tmp_path / "bin/python") and "1234" in peer.argv
        assert peer.environment["PYTHONPATH"] == "" and peer.environment["OMP_NUM_THREADS"] == "2"


def test_vllm_computes_in_what_its_kind_says(tmp_path: Path) -> None:
    """Guards two lines of one table that would be the same server."""
    for kind, dtype in (("vllm", "float32"), ("vllm-bf16", "bfloat16")):
        argv = other(kind, tmp_path, 1234, 2, tmp_path).argv
        assert argv[argv.index("--dtype") + 1] == dtype


def test_ours_with_other_settings_is_a_server_of_its_own() -> None:
    """Guards a line of a table whose flags were never given to it."""
    plain, pool = headrace(1234), headrace(1234, "one pool", ("--workers", "2"))
    assert pool.name == "one pool" and pool.argv == (*plain.argv, "--workers", "2")


def test_a_cluster_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way for the one server that is always there: started, warmed up, measured, stopped."""
    figures = tmp_path / "figures.json"
    assert main(["--presets", "D", "--rounds", "1", "--requests", "1", "--json", str(figures)]) == 0
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["server"], row["preset"], row["summary"]["failed"]) == ("headrace", "D", 0)
    assert row["summary"]["prompt_tokens"] == 512 and row["peak_pss_bytes"] > 100 << 20
    assert row["first_token_s"] > 0.1
    assert "headrace" in capsys.readouterr().out


def _lives(pid: int) -> bool:
    """Say whether the process runs: it is neither gone, nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
