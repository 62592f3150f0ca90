"""`headrace demo`: a real cluster, four questions, the answers as they come, and where the time went."""

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from access.client import ClientCredentials
from cluster.cli.ask import ClientAnswer, ask
from cluster.cli.demo_report import figures, summary, table
from cluster.cli.progress import Bars
from cluster.cli.serve import check_ports, command
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.leftovers import descendants, mapped_segments, running
from cluster.processes.spec import LaunchError
from cluster.resolve import Resolved
from engine.types import SamplingParams
from router.front.api import ChatMessage, GenerateCall
from router.grpc.client import Client

MAX_TOKENS = 80
SAMPLING = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.5)
"""The likeliest token, so that every demo says the same; a model this small goes round in circles without penalties."""
EXIT_TIMEOUT_S = 5.0

SYSTEM_PROMPT = """\
You are the guide of a small museum of water mills, and you answer visitors who stand in front of \
the machines. The museum stands at a bend of a river, in a mill that ground wheat and rye for three \
hundred years. Water is led from a weir along the headrace, a channel cut into the hillside, to the \
top of an overshot wheel four metres across. The wheel turns a horizontal shaft; a wooden gear with \
apple-wood teeth passes the motion to an upright shaft, and that shaft carries the runner stone. The \
lower stone, the bed stone, never moves. Grain falls from a hopper through a shaking shoe into the \
eye of the runner stone, is ground between the two faces, and leaves at the rim as flour. When the \
work is done, the miller closes the sluice, and the water goes past the wheel into the tailrace and \
back to the river. Answer in two or three short sentences. Use plain words, say nothing that you do \
not know, and be friendly to children."""


class Question(msgspec.Struct, frozen=True):
    """One question of the demo. `follows` names the question whose conversation this one continues."""

    name: str
    text: str
    system: str = ""
    follows: str = ""


QUESTIONS = (
    Question("first", "What is the headrace?", system=SYSTEM_PROMPT),
    Question("same system", "Which of the two stones moves?", system=SYSTEM_PROMPT),
    Question("follow-up", "And what is it made of?", follows="same system"),
    Question("alone", "What is the capital of France?"),
)


def run_demo(
    resolved: Resolved,
    json_file: Path | None,
    credentials: ClientCredentials | None = None,
    console: Console | None = None,
    is_verbose: bool = False,
) -> int:
    """Start, ask (with `credentials`, where the settings want them), show (`is_verbose`: every figure that there is),
    stop, and prove that nothing is left. Raises LaunchError, ApiError, ModelError."""
    config = resolved.config
    console = console or Console(highlight=False)
    check_ports(config)
    began_s = time.monotonic()
    pools = f"{config.prefill_workers} prefill and {config.decode_workers} decode worker(s)"
    if not config.prefill_workers:
        pools = f"one pool of {config.decode_workers} worker(s)"
    console.print(
        f"Starting {pools} "
        f"with the {config.launcher} launcher ...",
        style="dim",
    )
    with Bars() as bars, Cluster(config, make_launcher(config.launcher), progress=bars.report) as cluster:
        addresses = cluster.start()
        bars.close()
        start_s = time.monotonic() - began_s
        console.print(Text(f"Ready after {start_s:.1f} s, gRPC at {addresses.grpc}.\n", "dim"))
        answers = _ask_all(Client(addresses.grpc, credentials), console)
        ours = descendants()
        segments = mapped_segments(ours)
        stopping_s = time.monotonic()
    stop_s = time.monotonic() - stopping_s
    console.print(table(answers, is_verbose))
    console.print(f"\n{summary(answers)}")
    if not is_verbose:
        console.print("`--verbose` shows the rest: both workers, their caches, and every stage.", style="dim")
    _prove_clean(ours, segments)
    console.print(
        f"Stopped after {stop_s:.1f} s: no process and no shared-memory segment left.", style="dim"
    )
    console.print(Text(f"\nNext: {command()} up   (then, in another terminal: {command()} chat)"), soft_wrap=True)
    if json_file is not None:
        _write(json_file, config, start_s, stop_s, answers)
    return 0


def _ask_all(client: Client, console: Console) -> dict[str, ClientAnswer]:
    answers: dict[str, ClientAnswer] = {}
    chats: dict[str, list[ChatMessage]] = {}
    with client:
        for question in QUESTIONS:
            chat = list(chats.get(question.follows, ()))
            if question.system:
                chat.append(ChatMessage("system", question.system))
            if question.system and not answers:
                console.print(f"[bold]system[/bold] (before the first two questions): [dim]{question.system}[/dim]\n")
            chat.append(ChatMessage("user", question.text))
            console.print(f"[bold]{question.name}[/bold]: {question.text}")
            call = GenerateCall(prompt=chat, max_tokens=MAX_TOKENS, sampling=SAMPLING)
            answer = ask(
                client, call, lambda text: console.print(Text(text, "cyan"), end="")
            )
            console.print("\n")
            answers[question.name] = answer
            chats[question.name] = [*chat, ChatMessage("assistant", answer.text)]
    return answers


def _prove_clean(ours: dict[int, str], segments: set[str]) -> None:
    """Check that nothing is left. Raises LaunchError naming any process or segment of the cluster that is."""
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while left := running({**ours, **descendants()}):
        if time.monotonic() > deadline_s:
            names = ", ".join(f"{pid} ({name})" for pid, name in left.items())
            raise LaunchError(f"still running: {names}")
        time.sleep(0.05)
    kept = sorted(path for path in segments if Path(path).exists())
    if kept:
        raise LaunchError(f"shared-memory segments still there: {', '.join(kept)}")


def _write(
    path: Path, config: ClusterConfig, start_s: float, stop_s: float, answers: dict[str, ClientAnswer]
) -> None:
    data = {
        "launcher": config.launcher,
        "prefill_workers": config.prefill_workers,
        "decode_workers": config.decode_workers,
        "start_s": start_s,
        "stop_s": stop_s,
        "requests": [
            {"name": name, "text": answer.text, **figures(answer)}
            for name, answer in answers.items()
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
