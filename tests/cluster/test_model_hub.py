"""Models by their names on the hub, against a hub on this machine: found, downloaded with progress, or told why not."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.model_hub import HubModel, hub_model, located
from cluster.processes.prepare import specs
from engine.model.config import ModelError
from engine.model.files.hf_model import folder_name

hub: Any = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "generation_config.json": b'{"temperature": 0.6}',
    "special_tokens_map.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"tools",
    "additional_chat_templates/rag.jinja": b"not wanted",
    "model.safetensors": b"weights" * 400_000,
    "README.md": b"not wanted",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"in another format",
}
NOT_WANTED = {
    *("additional_chat_templates/rag.jinja", "README.md", "consolidated.safetensors", "onnx/model.safetensors")
}


class FakeHub:
    """Answers as the hub does for two repositories of one commit each. Mutable state: what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        repositories = {"org/tiny": FILES, "org/quantized": {"tiny-Q4_0.gguf": b"GGUF", "tiny-Q8_0.gguf": b"GGUF8"}}

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(handler) -> None:
                handler.reply()

            def do_GET(handler) -> None:
                handler.reply()

            def reply(handler) -> None:
                path = handler.path.partition("?")[0].strip("/")
                self.asked.append(f"{handler.command} {path}")
                parts = path.split("/")
                if path.startswith("api/models/"):
                    handler.describe("/".join(parts[2:4]), parts[5:6] or ["main"])
                else:
                    handler.send_file("/".join(parts[:2]), "/".join(parts[4:]))

            def describe(handler, name: str, revision: list[str]) -> None:
                if name == "org/secret":
                    handler.send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask for access"})
                elif name not in repositories:
                    handler.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                elif revision[0] not in ("main", COMMIT):
                    handler.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                else:
                    siblings = [{"rfilename": one, "size": len(data)} for one, data in repositories[name].items()]
                    handler.send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

            def send_file(handler, name: str, file: str) -> None:
                data = repositories[name].get(file)
                if data is None:
                    handler.send(404, b"", {"X-Error-Code": "EntryNotFound"})
                    return
                tag = hashlib.sha256(data).hexdigest()
                handler.send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})

            def send(handler, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
                handler.send_response(status)
                for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                    handler.send_header(key, value)
                handler.end_headers()
                if handler.command == "GET":
                    handler.wfile.write(data)

            def log_message(handler, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    one = FakeHub()
    yield one
    one.close()


LOCATE = """
import sys
from cluster.model_hub import located
from engine.model.config import ModelError
try:
    print(located(sys.argv[1], lambda done, total: print("arrived", done, total)))
except ModelError as error:
    sys.exit(f"{error}")
"""

Located = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def locate(tmp_path: Path) -> Located:
    """Locate in a process of its own: the library reads its variables when it is imported."""

    def run(model: str, endpoint: str, **more: str) -> "subprocess.CompletedProcess[str]":
        environ = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), **more}
        return subprocess.run(
            [sys.executable, "-c", LOCATE, model],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_a_model_is_downloaded_once(fake: FakeHub, locate: Located) -> None:
    """Guards against files that no model needs, a bar without sizes, and a start that needs the network every time."""
    first = locate("org/tiny", fake.endpoint)
    assert first.returncode == 0, first.stderr
    *arrived, path = first.stdout.splitlines()
    folder = Path(path)
    wanted = FILES.keys() - NOT_WANTED
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()} == wanted
    assert all((folder / name).read_bytes() == FILES[name] for name in wanted)
    total = sum(len(FILES[name]) for name in wanted)
    assert (arrived[0], arrived[-1]) == (f"arrived 0 {total}", f"arrived {total} {total}")
    assert folder_name(folder) == "tiny"
    fake.asked.clear()
    again = locate("org/tiny", fake.endpoint)
    assert (again.stdout, fake.asked) == (f"{path}\n", [])
    fake.close()
    assert locate("org/tiny", fake.endpoint, HF_HUB_OFFLINE="1").stdout == f"{path}\n"


def test_half_a_model_is_completed(fake: FakeHub, locate: Located) -> None:
    """Guards against a download that was interrupted and is taken for a model the next time."""
    folder = Path(locate("org/tiny", fake.endpoint).stdout.splitlines()[-1])
    (folder / "model.safetensors").unlink()
    assert locate("org/tiny", fake.endpoint).returncode == 0
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_one_file_of_a_repository_of_gguf_files(fake: FakeHub, locate: Located) -> None:
    found = locate("org/quantized/tiny-Q8_0.gguf", fake.endpoint)
    assert Path(found.stdout.splitlines()[-1]).read_bytes() == b"GGUF8"
    unnamed = locate("org/quantized", fake.endpoint).stderr
    assert "has no config.json; name one of its GGUF files behind it" in unnamed and "tiny-Q4_0.gguf" in unnamed
    assert "has no file other.gguf" in locate("org/quantized/other.gguf", fake.endpoint).stderr


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("org/nothing", "no such file or directory here, and http://127.0.0.1"),
        ("org/secret", "is gated: ask for access at"),
        ("org/tiny@v9", "has no revision v9"),
    ],
)
def test_the_hubs_refusals_are_told_in_one_line(model: str, told: str, fake: FakeHub, locate: Located) -> None:
    said = locate(model, fake.endpoint)
    assert told in said.stderr and said.stderr.count("\n") == 1, said.stderr


@pytest.mark.parametrize("offline", ["", "1"])
def test_without_a_network_the_way_to_bring_it_is_told_at_once(offline: str, free_port: int, locate: Located) -> None:
    """Guards against minutes of retries, and a traceback, on a host that has no network."""
    began_s = time.monotonic()
    said = locate("Qwen/Qwen3-0.6B", f"http://127.0.0.1:{free_port}", HF_HUB_OFFLINE=offline)
    assert time.monotonic() - began_s < 20
    assert "cannot be reached" in said.stderr and said.stderr.count("\n") == 1, said.stderr
    assert "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`" in said.stderr
    assert "--model ./Qwen3-0.6B" in said.stderr


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a path that is looked for on the network: what exists here is meant."""
    assert hub_model("Qwen/Qwen3-0.6B") == HubModel("Qwen/Qwen3-0.6B")
    assert hub_model("org/x@v1.0") == HubModel("org/x", "", "v1.0")
    assert hub_model("org/x/y-Q4_0.gguf") == HubModel("org/x", "y-Q4_0.gguf")
    for path in ("", "x", "./org/x", "/org/x", "~/org/x", "../x", "models/x.gguf", "a/b/c"):
        assert hub_model(path) is None, path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "x").mkdir()
    assert hub_model("org/x") is None
    assert located("org/x") == "org/x"


def test_it_is_served_under_both_of_its_names() -> None:
    """Guards against a model that answers only to the name of a commit."""
    router = specs(ClusterConfig(model="Qwen/Qwen3-0.6B"), "")[-1]
    assert router.config["served_model_names"] == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="pip install huggingface_hub"):
        located("Qwen/Qwen3-0.6B")
