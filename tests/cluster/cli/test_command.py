"""What a person types: verbs and options that are almost right, help, versions, ports that are taken, and a reader who
has seen enough."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from cluster.cli import __main__ as cli
from cluster.cli.command import _parsers
from cluster.cli.serve import check_ports, untaken
from cluster.config import ClusterConfig
from cluster.processes.spec import LaunchError
from cluster.resolve import Resolved, Setting
from cluster.rundir import command_line
from router.config import RouterConfig

COMMAND = [sys.executable, "-P", "-m", "cluster.cli"]
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def status_of(words: Sequence[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as ended:
        return int(str(ended.code or 0))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stauts"], "there is no verb 'stauts'; did you mean 'status'?"),
        (["help", "generat"], "did you mean 'generate'?"),
        (["serve", "--model", "x"], "there is no verb 'serve'; did you mean 'up'?"),
        (["up", "--lanucher", "ray"], "up: there is no option '--lanucher'; did you mean '--launcher'?"),
        (["up", "--mod", "x"], "there is no option '--mod'"),
        (["generate", "hi", "--max", "3"], "did you mean '--max-tokens'?"),
        (["generate", "hi", "--temp=0"], "there is no option '--temp'"),
        (["report", "disagg", "--las", "3"], "--las"),
        (["bench", "--reques", "3"], "--reques"),
        (["--bogus", "status"], "'--bogus' comes before the verb: options come after it"),
        (["--name", "app", "status"], "'--name' comes before the verb"),
        (["status", "extra"], "'extra' is one word too many"),
        (["trace", "\udcff"], r"headrace: '\udcff' is not valid UTF-8"),
        (["keys", "add", "acm\udce9"], r"headrace: 'acm\udce9' is not valid UTF-8"),
        (["\udcff"], r"headrace: '\udcff' is not valid UTF-8"),
    ],
)
def test_what_is_almost_right_is_said(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against abbreviations, whose meaning changes with the next option, and a list of all verbs for a slip."""
    assert status_of(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "hi", "--n", "x"], "headrace: generate: --n: 'x' is not a whole number in 1 to "),
        (["generate"], "headrace: generate: the following arguments are required: prompt (`headrace help gen"),
        (["report", "disagg", "--last", "x"], "headrace: report disagg: --last: 'x' is not a whole number in 1 to "),
    ],
)
def test_a_value_that_a_flag_does_not_take_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a slip's one line against a dozen that list every option."""
    assert status_of(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1, said


@pytest.mark.parametrize("verb", ["up", "generate", "bench", "report", "help"])
def test_help_is_also_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["help", verb]) == 0
    assert f"headrace {verb}" in capsys.readouterr().out


def test_no_words_are_answered_with_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([]) == 2
    assert "generate" in capsys.readouterr().err
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace ")


def test_generate_takes_every_sampling_option() -> None:
    """Guards against a value that the server knows and the command cannot say."""
    _, verbs = _parsers()
    wanted = {"--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty"}
    wanted |= {"--frequency-penalty", "--seed", "--stop", "--min-tokens", "--max-tokens", "--ignore-eos"}
    wanted |= {"--logit-bias", "--json-schema", "--regex", "--choice", "--grammar"}
    assert wanted <= set(verbs["generate"].options()) & set(verbs["chat"].options())
    assert "--n" in verbs["generate"].options()


def test_hints_name_the_cluster_that_they_are_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int
) -> None:
    """Guards against a hint that, as pasted, is about another cluster."""
    monkeypatch.setenv("HEADRACE_RUN_DIR", str(tmp_path))
    assert cli.main(["status", "--name", "app"]) == 1
    assert "headrace up --name app)" in capsys.readouterr().err
    assert cli.main(["generate", "hi", "--server", f"127.0.0.1:{free_port}", "--name", "app"]) == 1
    assert "headrace up --name app)" in capsys.readouterr().err
    assert command_line("down", "headrace") == "headrace down"


@pytest.mark.parametrize(("port", "flag"), [("grpc_port", "--grpc-port"), ("http_port", "--http-port")])
def test_a_port_that_is_taken_names_the_flag(port: str, flag: str) -> None:
    """Guards against an errno after all workers have loaded the model."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router = RouterConfig(**{"grpc_port": 0, "http_port": -1, port: taken.getsockname()[1]})
        with pytest.raises(LaunchError, match=f"{flag} PORT takes another one"):
            check_ports(ClusterConfig(router=router, launcher="process"))
    check_ports(ClusterConfig(router=router, launcher="process"))


@pytest.mark.parametrize("host", ["no such name", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_not_blamed_on_its_port(host: str) -> None:
    """Guards against advice that cannot help: no other port of it could be listened on either."""
    router = RouterConfig(host=host, grpc_port=50051, http_port=-1)
    with pytest.raises(LaunchError, match=f"^{host} cannot be listened on: .*; --host ADDRESS") as raised:
        check_ports(ClusterConfig(router=router, launcher="process"))
    assert "Unknown error" not in str(raised.value) and "--grpc-port" not in str(raised.value)


def test_an_up_beside_a_running_cluster_says_what_it_did_not_take() -> None:
    """Guards against a second `up` whose model, ports and limits are silently another's."""
    asked = (
        Setting("model", "/x", "flag --model"),
        Setting("router.http_port", 77, "variable HEADRACE_ROUTER__HTTP_PORT"),
        Setting("decode.max_batch", 5, "flag --set"),
        Setting("prefill.chunk_tokens", 64, "file my.toml"),
        Setting("router.served_model_names", ("a", "b"), "flag --served-model-name"),
        Setting("engine.jump_forward", False, "flag --set"),
        Setting("log_level", "info", "flag --log-level"),
        Setting("decode.engine.threads", 9, "computed: cores / 2 workers"),
        Setting("prefill_workers", 4, "flag --prefill"),
    )
    running = {setting.key: {"value": 0} for setting in asked} | {"log_level": {"value": "info"}}
    running |= {"router.served_model_names": {"value": []}, "engine.jump_forward": {"value": True}}
    assert untaken(Resolved(ClusterConfig(), asked), msgspec.to_builtins(running)) == [
        "--model /x  (it has 0)",
        "HEADRACE_ROUTER__HTTP_PORT=77  (it has 0)",
        "--set decode.max_batch=5  (it has 0)",
        "prefill.chunk_tokens = 64  (it has 0)",
        "--served-model-name a,b  (it has none)",
        "--set engine.jump_forward=false  (it has true)",
    ]


@pytest.mark.parametrize("words", [["dump-config"], ["help", "up"], ["doctor"]])
def test_a_reader_who_has_seen_enough_ends_it_quietly(words: list[str]) -> None:
    """Guards against a traceback, or `Exception ignored`, after `headrace dump-config | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [*COMMAND, *words], env=ENVIRON, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.stderr == ""
    # argparse passes over what it cannot print, and rich ends with 1.
    assert done.returncode in (cli.UNREAD, 0, 1)


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a quiet end although somebody reads: the pipe to another process has broken."""

    def broken(arguments: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("cluster.cli.command.run", broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["status"])


SLOW_LOADING = """
import sys, time
sys.path.insert(0, {root!r})
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "cluster.cli.command":
            print("loading", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
from cluster.cli.__main__ import main
main(["status"])
"""


def test_an_early_ctrl_c_ends_quietly() -> None:
    """Guards against a page of imports for who presses Ctrl-C in the first second."""
    program = SLOW_LOADING.format(root=ENVIRON["PYTHONPATH"])
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as loading:
        assert loading.stdout is not None and loading.stderr is not None
        assert loading.stdout.readline() == b"loading\n"
        loading.send_signal(signal.SIGINT)
        assert loading.stderr.read() == b""
    assert loading.returncode == -signal.SIGINT
