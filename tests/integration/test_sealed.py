"""What leaves a real cluster's processes: no pickle on a wire, and nothing that a caller has said in a log."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from engine.text.bundle import TextModel
from protos import headrace_pb2, headrace_pb2_grpc
from tests.cluster.processes.test_launchers import eventually
from tests.integration.test_verbs import Shell, _free_port

pytestmark = pytest.mark.slow

HOOK = Path(__file__).parent / "pickle_hook"
MARKER = "xylographzebra"
"""Stands in every prompt, and is no word of ours."""
TENANT = "quillwort"


@dataclass
class Run:
    """A cluster that has answered, refused and failed, and is over."""

    output: str
    pickles: dict[int, list[str]]
    """What each process's hook has written, by pid."""
    processes: dict[str, int]
    ids: list[int]
    """The marker as the model reads it."""
    refused: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_cache: Path, demo_model: Path) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("sealed")
    pickles = folder / "pickles"
    pickles.mkdir()
    shell = Shell(folder, demo_cache)
    http = _free_port()
    shell.environ |= {
        "HEADRACE_ROUTER__HTTP_PORT": str(http),
        "PICKLE_NOTES": str(pickles),
        "PYTHONPATH": os.pathsep.join((str(HOOK), os.environ.get("PYTHONPATH", ""))),
    }
    log = folder / "log"
    # In the foreground: all of its output, that of its children included, is in one file.
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "up"], stdout=output, stderr=output, env=shell.environ
        )
    try:
        assert eventually(lambda: "headrace is ready" in log.read_text() or supervisor.poll() is not None, 90.0)
        assert supervisor.poll() is None, log.read_text()
        processes = {name: one["pid"] for name, one in shell.status().items()}
        refused = _talk(shell.server, f"http://127.0.0.1:{http}", processes)
        shell("down")
        supervisor.wait(30)
    finally:
        shell.clean_up()
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
    seen = {int(path.stem): path.read_text().splitlines() for path in pickles.iterdir()}
    ids = TextModel.load(demo_model).encode(MARKER, add_special=False)
    yield Run(log.read_text(), seen, processes, ids, refused)


def _talk(server: str, base: str, processes: dict[str, int]) -> int:
    """Ask what is answered, what is refused and what fails; returns how much was refused or failed."""
    refused = 0
    bodies: list[tuple[str, object]] = [
        ("/v1/completions", {"prompt": f"A {MARKER} is", "max_tokens": 8, "tenant": TENANT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": MARKER * 3000, "max_tokens": 4}),
        ("/v1/completions", {"prompt": MARKER, "max_tokens": 4, MARKER: 1}),
        ("/v1/completions", {"prompt": MARKER, "max_tokens": 4, "temperature": MARKER}),
        ("/v1/completions", {"prompt": MARKER, "model": MARKER}),
        ("/v1/completions", {"prompt": MARKER, "stop": [MARKER * 100]}),
        ("/v1/chat/completions", {"messages": [{"role": MARKER, "content": MARKER}]}),
        ("/v1/completions", MARKER),
        ("/v1/" + MARKER, {}),
    ]
    with httpx.Client(base_url=base, timeout=60.0) as client:
        for path, body in bodies:
            answer = client.post(path, json=body, headers={"x-request-id": "r", "authorization": f"Bearer {MARKER}"})
            refused += answer.status_code != 200
        # Its body is no JSON, no UTF-8, and cut short.
        refused += client.post("/v1/completions", content=MARKER.encode() + b'\xff{"').status_code != 200
        # The client leaves in the middle, and the worker dies under the next.
        body = {"prompt": MARKER, "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as one:
            next(one.iter_bytes())
        with grpc.insecure_channel(server) as channel:
            stub = headrace_pb2_grpc.HeadraceStub(channel)
            request = headrace_pb2.GenerateRequest(prompt=MARKER, max_tokens=400, ignore_eos=True, tenant=TENANT)
            answers = stub.Generate(request, timeout=60.0)
            next(answers)
            next(answers)
            os.kill(processes["decode-0"], 9)
            try:
                for _ in answers:
                    pass
            except grpc.RpcError:
                refused += 1
            request.prompt, request.n = MARKER, 10_000
            try:
                list(stub.Generate(request, timeout=60.0))
            except grpc.RpcError:
                refused += 1
    time.sleep(1.0)
    return refused


def test_no_process_of_a_cluster_uses_pickle(run: Run) -> None:
    """Guards against bytes that run code where they are read. Ray's own messages between its actors are outside of
    this: Ray pickles what it starts actors with, on its own authenticated channels (docs/security.md)."""
    for name in ("router", "prefill-0", "decode-0"):
        assert run.pickles[run.processes[name]][0].startswith("watched"), name
    used = {line for lines in run.pickles.values() for line in lines if line.startswith("used") and _is_ours(line)}
    assert used == set()


def _is_ours(line: str) -> bool:
    """Say whether a use of pickle has anything to do with us: a library that copies its own objects while it is
    imported reads nothing that came from outside."""
    return "importlib._bootstrap" not in line


def test_the_hook_sees_a_pickle(tmp_path: Path) -> None:
    """The test above would pass with a hook that sees nothing."""
    code = (
        "import pickle, io, collections; pickle.loads(pickle.dumps(1)); "
        "pickle.Unpickler(io.BytesIO(b'ccollections\\nCounter\\n.')).load()"
    )
    environ = os.environ | {"PICKLE_NOTES": str(tmp_path), "PYTHONPATH": str(HOOK)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=60)
    (told,) = [path.read_text() for path in tmp_path.iterdir()]
    assert [line.split()[1][:10] for line in told.splitlines()[1:]] == ["dumps", "loads", "find_class"]


def test_nothing_that_a_caller_says_is_in_a_log(run: Run) -> None:
    """Guards against prompts, their tokens, tenants' credentials in what operators keep for months: at the level that
    is set unless somebody asks for another."""
    assert run.refused >= 8, "the faults took no effect"
    assert "headrace is ready" in run.output and "decode-0 is gone" in run.output, "the log is not there"
    assert MARKER not in run.output
    assert TENANT not in run.output
    listed = r"\W+".join(map(str, run.ids))
    assert len(run.ids) > 2 and re.search(listed, run.output) is None
