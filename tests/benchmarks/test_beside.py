"""Headrace and other servers in one run: what is measured, and that no server outlives its turn."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.beside import OURS, BesideRow, _table, main
from benchmarks.peers import Drafts, PeerServer, free_port, headrace, other, read_drafts, running
from benchmarks.processor import ProcessorTime
from benchmarks.texts import INSTRUCTIONS, TEXTS, text_sessions
from cluster.bench.driver import LoadGenerator, LoadPlan
from cluster.bench.stats import Sample, summarise
from cluster.bench.targets import _body
from cluster.bench.workloads import LoadSession, LoadTurn
from cluster.processes.spec import LaunchError
from engine.text.bundle import TextModel
from router.front.api import ApiError, GenerateCall, GenerateEvent

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


def test_llama_cpp_guesses_where_its_kind_says_so(tmp_path: Path) -> None:
    """Guards two lines of one table that would be the same server."""
    plain, guessing = (other(kind, tmp_path, 1234, 2, tmp_path).argv for kind in ("llama.cpp", "llama.cpp-drafts"))
    assert guessing == (*plain, "drafts")


def test_drafts_are_read_from_the_log_of_llama_cpp(tmp_path: Path) -> None:
    """Guards a column that stays empty, or holds what came before the run."""
    log = tmp_path / "log"
    log.write_text("slot print_timing: id 7 | draft acceptance = 0.28846 (   30 accepted /   104 generated), mean\n")
    peer = PeerServer("llama.cpp-drafts", ())
    before = read_drafts(peer, 0, log)
    assert before == (104, 30)
    with log.open("a") as more:
        more.write("nothing of drafts\ndraft acceptance = 1.00000 (    5 accepted /     6 generated)\n")
    assert read_drafts(peer, 0, log).since(before) == (6, 5)


def test_drafts_of_ours_are_summed_over_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'headrace_draft_tokens_total{outcome="%s",worker="w"} %s\n'
    pages = {
        "http://127.0.0.1:80/sd": '[{"targets": ["a", "b"], "labels": {}}, {"targets": ["a"], "labels": {}}]',
        "http://a/metrics": line % ("drawn", "3.0") + line % ("rejected", "4.0"),
        "http://b/metrics": "# HELP headrace_draft_tokens_total Tokens\n" + line % ("drawn", "1e+01"),
    }
    monkeypatch.setattr(peers.httpx, "get", lambda url, timeout: peers.httpx.Response(200, text=pages[url]))
    assert read_drafts(headrace(80), 80, tmp_path / "log") == (17, 13)


def test_prompts_of_text_are_chats_of_one_length_and_all_different(demo_model: Path) -> None:
    """Guards prompts that begin alike, which a cache would answer, and lengths that no two presets could share."""
    text = TextModel.load(demo_model)
    for preset in TEXTS.values():
        load = preset.workload
        made, again, others = (text_sessions(text, load, 40, seed) for seed in ("0", "0", "1"))
        asked = [list(session.turns[0].tokens()) for session in made]
        assert {len(ids) for ids in asked} == {load.input_tokens}
        assert len({text.text_of(ids) for ids in asked}) == 40
        assert made == again != others
        for ids in asked:
            shown = text.text_of(ids)
            assert shown.startswith("<|im_start|>") and shown.endswith("<|im_start|>assistant\n")
            assert sum(instruction in shown for instruction in INSTRUCTIONS) == 1
    with pytest.raises(ValueError, match="passages"):
        text_sessions(text, load, 100_000, "0")


def test_a_level_sends_the_requests_that_it_is_given() -> None:
    """Guards a preset of text that is measured on random ids."""
    seen: list[object] = []
    bodies: list[dict[str, object]] = []

    class Target:
        async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
            seen.append(call.prompt)
            bodies.append(_body(call))
            raise ApiError("UNAVAILABLE", "it only listens")
            yield

        async def close(self) -> None: ...

    plan = LoadPlan(
        target="http", address="", workload=TEXTS["C-text"].workload, requests=2, concurrency=(1,), warmup=1, seed=0,
        timeout_s=1.0, model=None, temperature=0.7,
    )  # fmt: skip
    made = [LoadSession(0.0, (LoadTurn(([5, 6, at],), 4),)) for at in range(3)]
    asyncio.run(LoadGenerator(Target(), plan).at_once(1, made))
    assert seen == [[5, 6, 0], [5, 6, 1], [5, 6, 2]]
    # Without these every server would draw from other tokens.
    assert bodies[0].items() >= {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}.items()
    asyncio.run(LoadGenerator(Target(), plan).at_once(1))
    assert len(seen) == 5 and len(seen[-1]) == 128  # type: ignore[arg-type]


def test_the_table_tells_drafts_and_the_routers_share() -> None:
    """Guards percentages of one core, or of none, and tokens a step that count the drafts twice."""
    sample = Sample(ttft_s=0.1, itl_s=[0.01] * 29, e2e_s=1.0, prompt_tokens=8, output_tokens=30)
    row = BesideRow(
        round=0, server=OURS, preset="C-text", first_token_s=1.0, peak_pss_bytes=1, drafts=Drafts(20, 10),
        processor=ProcessorTime(all_s=3.0, router_s=0.2, transfer_s=0.1), cores=2, summary=summarise([sample], 2.0),
    )  # fmt: skip
    assert row.step_tokens == 1.5
    cells = [next(iter(column.cells)) for column in _table([row], [OURS], ["C-text"]).columns]
    assert cells[6:10] == ["1.50 (50%)", "75", "5.0", "2.5"]


def test_ours_with_other_settings_is_a_server_of_its_own() -> None:
    """Guards a line of a table whose flags were never given to it."""
    plain, pool = headrace(1234), headrace(1234, "one pool", ("--workers", "2"))
    assert pool.name == "one pool" and pool.argv == (*plain.argv, "--workers", "2")


@pytest.mark.slow
def test_a_cluster_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way for the one server that is always there: started, warmed up, measured, stopped."""
    figures = tmp_path / "figures.json"
    assert main(["--presets", "D", "--rounds", "1", "--requests", "1", "--json", str(figures)]) == 0
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["server"], row["preset"], row["summary"]["failed"]) == ("headrace", "D", 0)
    assert row["summary"]["prompt_tokens"] == 512 and row["peak_pss_bytes"] > 100 << 20
    assert row["first_token_s"] > 0.1
    spent = row["processor"]
    assert 0 < spent["router_s"] < spent["all_s"] and row["drafts"] == [0, 0]
    assert "headrace" in capsys.readouterr().out


def _lives(pid: int) -> bool:
    """Say whether the process runs: it is neither gone, nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
