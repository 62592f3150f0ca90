"""The light client as a wheel of its own (docs/client.md): built from this project, installed alone and beside it."""

import asyncio
import shutil
import socket
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from router.app import RouterApp
from router.config import RouterConfig
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteText, FakeWorkers, until
from tests.secrets_of_tests import SECRETS

ROOT = Path(__file__).parents[3]
NEEDS = {"grpcio", "protobuf", "typing-extensions", "headrace-client"}
"""What is installed with it: grpcio itself needs `typing-extensions`."""
ASKS = """
import sys
from headrace_client import ApiError, SyncClient, SyncProgram
assert not {"msgspec", "torch", "numpy", "router", "protos"} & set(sys.modules), "it drags something in"
with SyncClient(sys.argv[1], timeout_s=20.0) as client:
    print(client.generate("hi").text)
    print(SyncProgram(client).text("hi").gen("one"))
    try:
        client.generate("hi", max_tokens=0)
    except ApiError as error:
        print(error.field)
"""
BESIDE = """
import headrace_client
from headrace_client import headrace_pb2 as light
from protos import headrace_pb2 as whole
from router.grpc.client import Client
assert light is not whole and light.DESCRIPTOR.serialized_pb == whole.DESCRIPTOR.serialized_pb
asked = light.GenerateRequest(prompt="x", max_tokens=3, sampling=light.Sampling(top_k=2))
assert whole.GenerateRequest.FromString(asked.SerializeToString()).sampling.top_k == 2
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A build leaves a folder of its own beside its sources.
    for part in ("headrace-client", "router/client", "protos"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / "headrace-client")], check=True, timeout=120)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_no_file_is_in_both_wheels(wheel: Path) -> None:
    """Guards whoever installs both: what one overwrites or removes, the other misses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert folders == {"headrace_client", f"headrace_client-{project['project']['version']}.dist-info"}
    assert not folders & ours
    modules = {path.name for path in (ROOT / "router" / "client").glob("*.py")}
    assert {f"headrace_client/{name}" for name in modules} <= set(names)


@pytest.mark.slow
def test_both_are_imported_in_one_process(wheel: Path, tmp_path: Path) -> None:
    """Guards the schema: protobuf knows each message by its name, and two of one name clash."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", BESIDE], env=environment, check=True, timeout=60)


def is_offline() -> bool:
    """Return whether pip finds nothing here, tried on what the wheel needs."""
    command = [sys.executable, "-m", "pip", "index", "versions", "protobuf"]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode != 0


@pytest.mark.slow
def test_it_works_alone(wheel: Path, tmp_path: Path) -> None:
    """Guards the promise of two dependencies: in an environment of its own it asks a router."""
    if is_offline():
        pytest.skip("pip finds no packages here: grpcio and protobuf cannot be installed apart")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True, timeout=300)
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], check=True, timeout=60, capture_output=True, text=True
    )
    installed = {line.split("==")[0].lower().replace("_", "-") for line in listed.stdout.split()}
    assert installed - {"pip", "setuptools"} == NEEDS
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def asked() -> str:
        app = RouterApp(RouterConfig(grpc_port=port, http_port=-1), ByteText(), NullObserver(), SECRETS)
        workers = FakeWorkers()
        try:
            await app.start()
            await workers.start()
            await app.set_workers(*workers.peers)
            await until(app.hub.ready)
            command = [python, "-c", ASKS, f"127.0.0.1:{port}"]
            child = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=subprocess.PIPE)
            async with asyncio.timeout(60):
                out, _ = await child.communicate()
            return out.decode()
        finally:
            await app.stop(0.0)
            await workers.stop()

    assert asyncio.run(asked()).split("\n") == ["hello world", "hello world", "max_tokens", ""]
