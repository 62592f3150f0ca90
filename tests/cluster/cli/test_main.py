"""The command's edges: signals, the demo's table, and clean-up that can be proven."""

import io
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from cluster.cli import __main__ as cli
from cluster.cli import command
from cluster.cli.ask import ClientAnswer
from cluster.cli.demo_report import figures, summary, table
from cluster.processes.leftovers import descendants, running
from cluster.processes.signals import Interrupted, interruptible
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import Finished
from telemetry.labels import STAGES

STATS = RequestStats(
    stages={stage: 0.001 * number for number, stage in enumerate(STAGES)},
    migrated_blocks=15,
    migrated_bytes=15 * 720 * 1024,
    migration_s=0.0123,
    transport="shm",
    prefill_cached_tokens=17,
    decode_cached_tokens=16,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)
ANSWER = ClientAnswer(
    "Hi.",
    (1, 2),
    230,
    Finished(
        reason=FinishReason.STOP,
        prompt_tokens=230,
        output_tokens=2,
        cached_tokens=17,
        stats=STATS,
        ttft_s=0.2,
        itl_mean_s=0.05,
        itl_p99_s=0.07,
        e2e_s=0.5,
    ),
)


def test_the_second_signal_does_not_cut_the_clean_up_short() -> None:
    """Guards against an impatient Ctrl-C that leaves processes behind."""
    before = signal.getsignal(signal.SIGTERM)
    cleaned = False
    with pytest.raises(Interrupted) as caught, interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned
    assert caught.value.status == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_table_shows_every_stage_and_fits_a_terminal() -> None:
    """Guards against a stage that is measured but never shown, and a table cut off at 80 columns."""
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        answers = dict.fromkeys(("first", "same system", "follow-up", "alone"), ANSWER)
        console.print(table(answers, is_verbose=True))
    text = console.export_text()
    for stage in STAGES:
        assert f"stage {stage}, ms" in text
    assert "…" not in text and text.count("10.55") == 4 and text.count("12.3") == 4


def test_the_table_begins_with_what_a_person_wants() -> None:
    """Guards against thirty rows for who has just begun: the short table is the beginning of the long one."""
    answers = dict.fromkeys(("first", "same system", "follow-up", "alone"), ANSWER)
    shown = []
    for is_verbose in (False, True):
        console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with console.file:
            console.print(table(answers, is_verbose))
        lines = console.export_text().splitlines()
        shown.append(["".join(line.split()) for line in lines if line.startswith("│")])
    short, long = shown
    assert len(short) == 8 and long[:8] == short
    assert len(long) == 8 + 7 + len(STAGES)


def test_a_sentence_says_what_the_demo_has_shown() -> None:
    """Guards against a sentence that says more than the figures: with one pool nothing migrates."""
    late = msgspec.structs.replace(ANSWER, finished=msgspec.structs.replace(ANSWER.finished, ttft_s=0.9))
    said = summary({"first": late, "second": ANSWER})
    assert said.startswith("prefill-0 read the first prompt and sent 15 blocks of KV (10.55 MiB) to decode-0")
    assert said.endswith("17 of 230 tokens were cached, so that its first token came after 200.0 ms, not 900.0.")
    alone = msgspec.structs.replace(STATS, migrated_blocks=0)
    one = msgspec.structs.replace(ANSWER, finished=msgspec.structs.replace(ANSWER.finished, stats=alone))
    assert summary({"first": one, "second": one}).startswith("Both prompts were read, and answered, by decode-0;")


def test_figures_hold_what_the_table_shows() -> None:
    data = figures(ANSWER)
    assert data["stages_s"] == STATS.stages
    assert (data["prefill_cached_tokens"], data["decode_cached_tokens"]) == (17, 16)


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    """Guards against a traceback for the commonest mistake: nothing is running."""
    assert cli.main(["generate", "--server", f"127.0.0.1:{free_port}", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace: UNAVAILABLE: ") and captured.err.count("\n") == 1


def test_a_missing_model_file_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_RUN_DIR", str(tmp_path / "run"))
    # `up` sets this process's log up; not for the tests behind this one.
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers[:])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    before = descendants()
    status = cli.main(["up", "--launcher", "process", "--model", "/nowhere/model.gguf"])
    assert status == 1
    error = capsys.readouterr().err
    assert "/nowhere/model.gguf" in error and error.count("\n") == 1
    assert descendants() == before


def test_a_process_left_behind_is_seen() -> None:
    """Guards against a demo that proves nothing: its check must find a process that does run."""
    before = descendants()
    left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with left:
        found = {pid: name for pid, name in descendants().items() if pid not in before}
        assert left.pid in found and left.pid in running(found)
        left.kill()
    assert running(found) == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["top", "--interval", "0"], "'0' is not a number of seconds above zero"),
        (["top", "--interval", "nan"], "'nan' is not a number of seconds above zero"),
        (["drain", "decode-0", "--timeout", "-1"], "'-1' is not a number of seconds"),
        (["scale", "decode=2", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["scale", "decode=1", "decode=2"], "decode is given twice"),
        (["scale", "decode=99999999999"], "decode: 99999999999 does not lie in 1 to 1024"),
        (["scale", "decode=0"], "decode: 0 does not lie in 1 to 1024"),
        (["scale", "prefill=" + "9" * 5000], "99' is not a whole number in 0 to 1024"),
        (["scale", "router=2"], "'router=2' is not prefill=N, or decode=N"),
        (["report", "disagg", "--last", "-3"], "-3 does not lie in 1 to"),
        (["up", "--decode", "99999999999"], "99999999999 is more than 1024"),
        (["plan", "--set", "decode.max_batch=1000000000"], "1000000000 is more than 8192"),
        (["plan", "--set", "engine.block_size=1000000000"], "1000000000 is more than 4096"),
        (["plan", "--set", "engine.pool_bytes=" + "9" * 400], "a number of that size is more than 9007199254740992"),
        (["up", "--set", "prefill.engine.device=gpu"], "'gpu' is not cpu, cuda or cuda:N"),
        (["worker", "decode", "--port", "70000"], "70000 does not lie in 0 to 65535"),
        (["generate", "hi", "--seed", "-1"], "-1 does not lie in 0 to 18446744073709551615"),
        (["generate", "hi", "--max-tokens", "0"], "0 does not lie in 1 to"),
        (["chat", "--max-tokens", "many"], "'many' is not a whole number"),
        (["bench", "--seed", "-1"], "-1 does not lie in 0 to"),
        (["bench", "--json", "/nonexistent/x.json"], "there is no such folder"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_slip_is_told_at_once(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against numbers that wrap round, wait for ever, or start more processes than a host has."""
    try:
        status = cli.main(words)
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_in_plain_words(
    free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a newcomer's first error being a gRPC library's."""
    assert cli.main(["generate", "hi", "--server", f"127.0.0.1:{free_port}"]) == 1
    assert capsys.readouterr().err == (
        f"headrace: UNAVAILABLE: nobody answers at 127.0.0.1:{free_port}: Connection refused "
        "(start a cluster with: headrace up)\n"
    )


CLOSED = """
import os, sys
from types import SimpleNamespace
from cluster.cli.__main__ import main

def run(words):
    null = os.stat(os.devnull).st_rdev
    for fd in map(int, words):
        assert os.fstat(fd).st_rdev == null and os.get_inheritable(fd)
    told = open(os.environ["TOLD"], "w")
    assert told.fileno() > 2
    assert not sys.stdin.isatty()
    print("out", flush=True)
    print("err", file=sys.stderr, flush=True)
    told.write("done")
    return 0

sys.modules["cluster.cli.command"] = SimpleNamespace(run=run)
sys.exit(main())
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_a_verb_whose_input_or_output_is_closed_does_its_work(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Guards `headrace down >&-` and cron jobs: a traceback behind work that was done, or a socket that is printed to.
    """
    script = 'exec "$0" "$@" ' + " ".join(f"{descriptor}>&-" for descriptor in closed)
    told = tmp_path / "told"
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, "-c", CLOSED, *map(str, closed)],
        env={**os.environ, "TOLD": str(told)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0 and told.read_text() == "done"
    assert done.stdout == (b"" if 1 in closed else b"out\n")
    assert done.stderr == (b"" if 2 in closed else b"err\n")


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("latin-1", "strict", b"caf\xe9 ???"),
        ("ascii", "surrogateescape", b"caf? ???"),
        ("utf-8", "strict", b"caf\xc3\xa9 \xe2\x96\x88\xe2\x86\x92?"),
        ("ascii", "backslashreplace", rb"caf\xe9 \u2588\u2192\udcff"),
    ],
)
def test_nothing_that_is_printed_ends_a_verb(
    encoding: str, errors: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `top`, `doctor` and answers on a terminal that is not UTF-8: tracebacks at the first bar, tick or emoji.
    """
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding, errors))
    monkeypatch.setattr(command, "run", lambda words: print("café █→\udcff", end="") or 0)
    assert cli.main([]) == 0
    assert output.getvalue() == shown
