"""What leaves a real cluster's processes: no pickle on a wire, no secret where others of its host, or readers of its
logs, could find it, and nothing that a caller has said in a log."""

import base64
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.processes.leftovers import descendants
from cluster.secret import SecretFile
from engine.text.bundle import TextModel
from protos import headrace_pb2, headrace_pb2_grpc
from tests.cluster.processes.test_launchers import eventually
from tests.integration.test_verbs import Shell, _free_port

pytestmark = pytest.mark.slow

HOOK = Path(__file__).parent / "pickle_hook"
RANKS = 3
"""How many processes the prefill worker has."""
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
    ranks: list[int]
    """The processes of the prefill worker's other ranks."""
    ids: list[int]
    """The marker as the model reads it."""
    refused: int
    told: list[str]
    """Where a secret was found while it ran, and in what it has left."""
    looked_at: set[str]


class Secrets:
    """Looks for what must not be told, however it is written."""

    def __init__(self, **secrets: bytes) -> None:
        self._forms = {
            f"{name}, {how}": form
            for name, secret in secrets.items()
            for how, form in (
                ("raw", secret),
                ("hex", secret.hex().encode()),
                ("upper hex", secret.hex().upper().encode()),
                ("base64", base64.b64encode(secret).rstrip(b"=")),
                ("base64 of URLs", base64.urlsafe_b64encode(secret).rstrip(b"=")),
                ("repr", repr(secret).encode()[2:-1]),
            )
        }
        self.looked_at: set[str] = set()

    def of_processes(self, pids: Iterable[int]) -> list[str]:
        """Look at what any user may see of a process, and what this one may."""
        return self._of(Path(f"/proc/{pid}/{what}") for pid in pids for what in ("cmdline", "environ", "comm"))

    def of_files(self, folder: Path, own: Collection[Path]) -> list[str]:
        """Look at all files but the secrets' own."""
        return self._of(path for path in folder.rglob("*") if path.is_file() and path not in own)

    def _of(self, paths: Iterable[Path]) -> list[str]:
        found = []
        for path in paths:
            with suppress(FileNotFoundError, ProcessLookupError):
                content = path.read_bytes()
                self.looked_at.add(str(path))
                found += [f"{how} in {path}" for how, form in self._forms.items() if form in content]
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_cache: Path, demo_model: Path) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("sealed")
    pickles = folder / "pickles"
    pickles.mkdir()
    shell = Shell(folder, demo_cache)
    http = _free_port()
    shell.environ |= {
        "HEADRACE_ROUTER__HTTP_PORT": str(http),
        "HEADRACE_PREFILL__ENGINE__TENSOR_PARALLEL": str(RANKS),
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
        ranks = [pid for pid in descendants(processes["prefill-0"]) if b"worker.rank" in _command(pid)]
        own = [folder / "run" / "tested.secret", folder / "run" / "tested.key"]
        (secret,), key = SecretFile(own[0]).valid(), bytes.fromhex(own[1].read_text())
        refused, (token, lost) = _talk(shell.server, f"http://127.0.0.1:{http}", processes)
        secrets = Secrets(secret=secret, token=token.encode(), lost=lost.encode(), key=key)
        told = secrets.of_processes([supervisor.pid, *descendants(supervisor.pid)]) + secrets.of_files(folder, own)
        shell("down")
        supervisor.wait(30)
    finally:
        shell.clean_up()
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
    seen = {int(path.stem): path.read_text().splitlines() for path in pickles.iterdir()}
    ids = TextModel.load(demo_model).encode(MARKER, add_special=False)
    told += secrets.of_files(folder, own)
    yield Run(log.read_text(), seen, processes, ranks, ids, refused, told, secrets.looked_at)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _talk(server: str, base: str, processes: dict[str, int]) -> tuple[int, list[str]]:
    """Ask what is answered, what is refused and what fails; returns how much was refused or failed, and the tokens
    by which an answer was resumed, and one under which its worker died."""
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
            resumable = headrace_pb2.GenerateRequest(prompt=MARKER, max_tokens=400, ignore_eos=True, resumable=True)
            broken = stub.Generate(resumable, timeout=60.0)
            tokens = [next(broken).started.resume_token]
            broken.cancel()
            resumed = stub.Resume(headrace_pb2.ResumeRequest(resume_token=tokens[0]), timeout=60.0)
            assert [one for one in resumed if one.WhichOneof("event") == "finished"], "it was not resumed"
            under_fire = stub.Generate(resumable, timeout=60.0)
            tokens.append(next(under_fire).started.resume_token)
            assert all(tokens)
            answers = stub.Generate(request, timeout=60.0)
            next(answers)
            next(answers)
            os.kill(processes["decode-0"], 9)
            try:
                for _ in answers:
                    pass
            except grpc.RpcError:
                refused += 1
            for lost in (tokens[0], tokens[1], tokens[0][:-1]):
                try:
                    list(stub.Resume(headrace_pb2.ResumeRequest(resume_token=lost, next_index=10_000), timeout=60.0))
                except grpc.RpcError:
                    refused += 1
            request.prompt, request.n = MARKER, 10_000
            try:
                list(stub.Generate(request, timeout=60.0))
            except grpc.RpcError:
                refused += 1
    time.sleep(1.0)
    return refused, tokens


def test_no_process_of_a_cluster_uses_pickle(run: Run) -> None:
    """Guards against bytes that run code where they are read. Ray's own messages between its actors are outside of
    this (docs/security.md)."""
    watched = [run.processes[name] for name in ("router", "prefill-0", "decode-0")] + run.ranks
    assert len(run.ranks) == RANKS - 1 and len(set(watched)) == 2 + RANKS
    for pid in watched:
        assert run.pickles[pid][0].startswith("watched"), pid
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


def test_no_secret_is_where_others_could_read_it(run: Run) -> None:
    """Guards the cluster's secret, the key of namespaces and a resume token: on no command line and in no environment
    of any process, in no log, and in no file of the run folder but the two that are there to keep them."""
    seen = {path.split("/")[2] for path in run.looked_at if path.startswith("/proc/") and path.endswith("/cmdline")}
    started = {str(pid) for name, pid in run.processes.items() if name != "decode-0"}
    assert seen > started and len(seen) > len(started) + 1, "a new decode-0 and the supervisor are there, too"
    assert {Path(path).name for path in run.looked_at} >= {"environ", "log", "tested.json", "tested.lock"}
    assert run.told == []


@pytest.mark.parametrize("form", ["raw", "hex", "upper hex", "base64", "base64 of URLs", "repr"])
def test_a_secret_is_found_however_it_is_told(tmp_path: Path, form: str) -> None:
    """The test above would pass with a search that finds nothing."""
    secret = bytes(range(200, 232))
    secrets = Secrets(secret=secret)
    told = secrets._forms[f"secret, {form}"]
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "log").write_bytes(b"so " + told + b" it is")
    (tmp_path / "own").write_bytes(told)
    assert secrets.of_files(tmp_path, [tmp_path / "own"]) == [f"secret, {form} in {tmp_path}/below/log"]
    for arguments, environ in (([told], {}), ([], {b"IT": told})):
        # The shell waits, with nothing said to it.
        command = ["/bin/sh", "-c", "read line", *arguments]
        with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as process:
            try:
                where = "environ" if environ else "cmdline"
                assert eventually(lambda: bool(secrets.of_processes([process.pid])), 10.0)
                assert secrets.of_processes([process.pid]) == [f"secret, {form} in /proc/{process.pid}/{where}"]
            finally:
                process.communicate(b"\n")
