"""Over Ray: no secret where others of a host, or readers of its logs, could find it, and nothing but plain data in what
Ray carries for us."""

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import httpx
import msgspec
import pytest

from cluster.processes.actors import ACTORS
from cluster.processes.keeper import Keeper
from cluster.processes.leftovers import descendants
from cluster.processes.ray_launcher import processes_of
from cluster.processes.spec import ChildReady, ChildSpec, Sealed
from cluster.secret import SecretFile
from engine.messages import PeerAddress
from router.core.escalation import Verdict
from tests.cluster.processes.test_launchers import eventually
from tests.integration.test_sealed import Secrets
from tests.integration.test_verbs import Shell, _free_port

READY_S = 180.0
PLAIN = {bool, int, float, str, bytes, NoneType}


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Where Ray has its session. The names of its sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.ray
@pytest.mark.slow
def test_no_secret_is_where_others_could_read_it(tmp_path: Path, ray_folder: Path, demo_cache: Path) -> None:
    """Guards the cluster's secret, the key of namespaces and an API key that is in use: Ray carries the first from the
    supervisor to each actor, and keeps logs and command lines of its own."""
    shell = Shell(tmp_path, demo_cache, launcher="ray")
    http = f"http://127.0.0.1:{_free_port()}"
    shell.environ |= {
        "TMPDIR": str(ray_folder),
        "HEADRACE_ROUTER__HTTP_PORT": http.rpartition(":")[2],
        "HEADRACE_ACCESS__KEYS_FILE": str(tmp_path / "keys.json"),
        "HEADRACE_ACCESS__INSECURE": "plaintext",
    }
    api_key = shell("keys", "add", "acme").stdout.strip()
    log = tmp_path / "log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "up"], stdout=output, stderr=output, env=shell.environ
        )
    try:
        assert eventually(lambda: "headrace is ready" in log.read_text() or supervisor.poll() is not None, READY_S)
        assert supervisor.poll() is None, log.read_text()
        before = shell.status()
        # The last part alone would do: the others are its name.
        assert _asked(http, api_key) == 200 and _asked(http, api_key[:-1]) == 401
        os.kill(before["decode-0"]["pid"], 9)
        assert eventually(lambda: _asked(http, api_key) == 200 and "decode-0 is gone" in log.read_text(), READY_S)
        own = [tmp_path / "run" / "tested.secret", tmp_path / "run" / "tested.key"]
        (secret,), key = SecretFile(own[0]).valid(), bytes.fromhex(own[1].read_text())
        secrets = Secrets(secret=secret, key=key, api_key=api_key.rpartition("_")[2].encode())
        ours = {supervisor.pid, *descendants(supervisor.pid), *processes_of(str(ray_folder))}
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in ours}
        for needle in (b"raylet/raylet", b"gcs_server", b"ray::PrefillActor", b"ray::DecodeActor", b"ray::RouterActor"):
            assert any(needle in command for command in commands.values()), (needle, commands)
        told = secrets.of_processes(ours) + secrets.of_files(tmp_path, own) + secrets.of_files(ray_folder, [])
        assert told == []
        seen = {Path(path).name for path in secrets.looked_at}
        assert seen >= {"raylet.out", "gcs_server.out", "log", "tested.json"}
        assert any(name.startswith("worker-") for name in seen), "no log of an actor was looked at"
        # The search would find one: in the folder of Ray's logs, and on a command line.
        (planted,) = {Path(path).parent for path in secrets.looked_at if path.endswith("/raylet.out")}
        (planted / "planted.err").write_text(f"it is {secret.hex()}\n")
        assert secrets.of_files(ray_folder, []) == [f"secret, hex in {planted / 'planted.err'}"]
        with subprocess.Popen(["/bin/sh", "-c", "read line", api_key], stdin=subprocess.PIPE) as process:
            assert eventually(lambda: secrets.of_processes([process.pid]) != [], 10.0)
            process.communicate(b"\n")
        shell("down")
        supervisor.wait(60)
        assert secrets.of_files(tmp_path, own) == []
    finally:
        shell.clean_up()
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()


def _asked(http: str, api_key: str) -> int:
    body = {"prompt": "One, two,", "max_tokens": 2}
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.post(f"{http}/v1/completions", json=body, headers=headers, timeout=60.0).status_code


def test_what_ray_carries_for_us_is_plain_data() -> None:
    """Guards against an object of ours, which Ray would pickle, with code of its own in it; strict types hold the calls
    to what is written here."""
    records: set[type] = set()
    for actor in (*ACTORS.values(), Keeper):
        for name, method in inspect.getmembers(actor, inspect.isfunction):
            if name == "__init__" or not name.startswith("_"):
                for hint in get_type_hints(method).values():
                    assert _is_plain(hint, records), (actor, name, hint)
    assert records >= {ChildSpec, ChildReady, Sealed, PeerAddress, Verdict}
    for wrong in (Secrets, list[Secrets], dict[str, Any], object, type, Path):
        assert not _is_plain(wrong, set()), wrong


def _is_plain(hint: Any, records: set[type]) -> bool:
    """Say whether values of this type are plain data, or records (noted in `records`) and collections of such."""
    of = get_args(hint)
    if get_origin(hint) in (Union, UnionType, list, tuple):
        return all(one is Ellipsis or _is_plain(one, records) for one in of)
    if get_origin(hint) is Literal:
        return True
    if hint == dict[str, object]:
        # A process's settings: the other launcher sends the very same as JSON.
        return True
    if get_origin(hint) is dict:
        return all(_is_plain(one, records) for one in of)
    if (base := getattr(hint, "__supertype__", None)) is not None:
        return _is_plain(base, records)
    if isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or hasattr(hint, "_fields")):
        if hint in records:
            return True
        records.add(hint)
        return all(_is_plain(one, records) for one in get_type_hints(hint).values())
    return hint in PLAIN
