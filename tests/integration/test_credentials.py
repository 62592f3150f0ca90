"""A cluster that asks for credentials and has TLS, from the making of its keys to the Prometheus that reads it."""

import json
import os
import shutil
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cluster.processes.leftovers import descendants, running
from tests.access.certificates import make_authority, make_certificate
from tests.cluster.processes.test_launchers import eventually
from tests.integration.prometheus import BINARY, PROMTOOL, Prometheus
from tests.integration.test_verbs import Shell

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "deploy/prometheus/prometheus-tls.yml"


class Secured:
    """A cluster to be started, its keys and the clients' side of them."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.shell = Shell(folder, cache)
        self.keys, http = folder / "keys.json", folder / "http"
        self.ca = make_authority(folder)
        server = make_certificate(folder, self.ca, "headrace", san="DNS:headrace")
        self.settings = {
            "HEADRACE_ACCESS__KEYS_FILE": str(self.keys),
            "HEADRACE_ACCESS__CERT_FILE": server.cert,
            "HEADRACE_ACCESS__KEY_FILE": server.key,
            "HEADRACE_ROUTER__HTTP_PORT": "0",
        }
        self.shell.environ |= self.settings
        http.mkdir()

    def new(self, *words: str) -> str:
        return self.shell("keys", "add", *words).stdout.strip()

    def client(self, key: str) -> dict[str, str]:
        return {"HEADRACE_API_KEY": key, "HEADRACE_CA": self.ca.cert, "HEADRACE_SERVER_NAME": "headrace"}

    def run(self, key: str, *words: str, said: str = "", fails: int = 0) -> "subprocess.CompletedProcess[str]":
        plain, self.shell.environ = self.shell.environ, self.shell.environ | self.client(key)
        try:
            return self.shell(*words, said=said, fails=fails)
        finally:
            self.shell.environ = plain


def test_a_cluster_with_credentials(tmp_path: Path, demo_cache: Path) -> None:
    """Guards the whole way: keys made, every client with and without one, all pages of metrics, a key revoked."""
    site = Secured(tmp_path, demo_cache)
    shell = site.shell
    acme, monitor = site.new("acme", "--concurrency", "4"), site.new("--monitor")
    assert stat.S_IMODE(site.keys.stat().st_mode) == 0o600 and acme not in site.keys.read_text()
    try:
        shell("up", "--detach")
        below = descendants(shell.status()["router"]["pid"] and shell.supervisor)
        asked = ("generate", "--max-tokens", "4", "Hello")
        assert site.run(acme, *asked).stdout.strip()
        for key, why in (("", "UNAUTHENTICATED"), (monitor, "PERMISSION_DENIED"), ("hr_x_y", "UNAUTHENTICATED")):
            assert why in site.run(key, *asked, fails=1).stderr
        assert "UNAVAILABLE" in shell(*asked, fails=1).stderr, "it speaks TLS alone"
        assert site.run(acme, "chat", "--max-tokens", "4", said="Hello\n").stdout.strip()
        load = ("bench", "--requests", "2", "--concurrency", "1", "--input-tokens", "8", "--output-tokens", "2")
        for target in ("grpc", "http"):
            report = tmp_path / f"{target}.json"
            site.run(acme, *load, "--target", target, "--json", str(report))
            assert acme not in report.read_text()
        _all_pages(site, monitor, acme)
        if BINARY is not None:
            _prometheus_sees_all(site, monitor, tmp_path)
        shell("keys", "remove", acme.split("_")[1])
        assert eventually(lambda: "UNAUTHENTICATED" in _said(site, acme, asked), 20.0)
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            assert acme.encode() not in _read(line), "a key on a command line is everybody's"
        shell("down")
        assert not running(below)
        log = (tmp_path / "run" / "tested.log").read_text()
        assert acme not in log and monitor not in log and acme.split("_", 2)[2] not in log
    finally:
        shell.clean_up()


def _said(site: Secured, key: str, asked: tuple[str, ...]) -> str:
    environ = site.shell.environ | site.client(key)
    command = [sys.executable, "-m", "cluster.cli", *asked]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False).stderr


def _all_pages(site: Secured, monitor: str, acme: str) -> None:
    """Every page of metrics that discovery names is for monitors alone."""
    http = json.loads(site.shell("status", "--json").stdout)["http"]
    assert http.startswith("https://")
    context = ssl.create_default_context(cafile=site.ca.cert)
    context.check_hostname = False
    with httpx.Client(verify=context) as web:
        assert web.get(f"{http}/health").status_code == web.get(f"{http}/ready").status_code == 200
        known = {"authorization": f"Bearer {monitor}"}
        targets = [target["targets"][0] for target in web.get(f"{http}/sd", headers=known).json()]
        assert len(targets) >= 3
        for target in targets:
            url = f"https://{target}/metrics"
            assert web.get(url).status_code == 401
            assert web.get(url, headers={"authorization": f"Bearer {acme}"}).status_code == 403
            assert "headrace_build_info" in web.get(url, headers=known).text
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://{target}/metrics").raise_for_status()


def _prometheus_sees_all(site: Secured, monitor: str, folder: Path) -> None:
    """The shipped configuration, with the router's address, scrapes every process."""
    where = folder / "prometheus"
    where.mkdir()
    (where / "monitor.key").write_text(monitor + "\n")
    shutil.copy(site.ca.cert, where / "ca.pem")
    http = json.loads(site.shell("status", "--json").stdout)["http"]
    text = CONFIG.read_text().replace("https://127.0.0.1:8000", http).replace("  - rules/headrace.yml", "  []")
    if PROMTOOL is not None:
        (where / "checked.yml").write_text(text)
        subprocess.run([PROMTOOL, "check", "config", str(where / "checked.yml")], check=True, capture_output=True)
    server = Prometheus(where, text)
    try:

        def up() -> set[str]:
            got = server.get("/api/v1/query", query="up == 1")["result"]
            return {one["metric"]["instance"] for one in got}

        assert eventually(lambda: {"router", "prefill-0", "decode-0"} <= up(), 40.0), server.get("/api/v1/targets")
    finally:
        server.close()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_listening_elsewhere_is_refused_before_anything_starts(tmp_path: Path, demo_cache: Path) -> None:
    shell = Shell(tmp_path, demo_cache)
    refused = shell("up", "--host", "0.0.0.0", fails=2)
    assert "access.insecure=open" in refused.stderr and "headrace keys add" in refused.stderr
    assert not (tmp_path / "run").exists()
    shell.environ["HEADRACE_API_KEY"] = "it is no setting"
    assert "keys_file" in shell("dump-config").stdout
    assert os.environ.get("HEADRACE_API_KEY") is None
