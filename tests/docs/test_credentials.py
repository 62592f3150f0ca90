"""The commands of docs/credentials.md that make keys and certificates, run as they stand there."""

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from access.authenticator import Authenticator
from access.config import AccessConfig
from access.tls import ServerCertificates
from tests.docs.test_commands import BIN, ROOT, blocks

PAGE = "docs/credentials.md"


def run_blocks(folder: Path) -> str:
    """Run the page's blocks that are marked so; return what they printed."""
    environ = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    said = ""
    for block in blocks((ROOT / PAGE).read_text()):
        if block.mark.startswith("run by"):
            script = f"set -e\n{block.text}"
            done = subprocess.run(["bash", "-c", script], cwd=folder, env=environ, capture_output=True, timeout=120)
            assert done.returncode == 0, done.stderr.decode()
            said += done.stdout.decode()
    return said


def test_what_the_page_makes_is_what_the_cluster_takes(tmp_path: Path) -> None:
    """Guards a newcomer with a keys file or a certificate that is refused, or a key that opens nothing."""
    said = run_blocks(tmp_path)
    acme = said.splitlines()[0]
    config = AccessConfig(
        keys_file=str(tmp_path / "keys.json"),
        cert_file=str(tmp_path / "server.pem"),
        key_file=str(tmp_path / "server.key"),
        client_ca_file=str(tmp_path / "ca.pem"),
    )
    found = Authenticator(AccessConfig(keys_file=config.keys_file))
    assert found.caller(f"Bearer {acme}", None).tenant == "acme"
    assert found.tenant("acme").concurrency == 8 and found.tenant("acme").weight == 2
    assert found.caller(f"Bearer {(tmp_path / 'monitor.key').read_text().strip()}", None).role == "monitor"
    assert "tenant acme: weight 2" in said and said.count(acme) == 1
    assert ServerCertificates(config.front_files).needs_client
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    assert len(client.get_ca_certs()) == 1


def test_the_page_names_each_setting() -> None:
    text = (ROOT / PAGE).read_text()
    assert all(f"`{name}`" in text for name in AccessConfig.__struct_fields__)


@pytest.mark.parametrize("variable", ["HEADRACE_API_KEY", "HEADRACE_CA", "HEADRACE_CERT", "HEADRACE_KEY"])
def test_the_page_names_each_variable(variable: str) -> None:
    assert variable in (ROOT / PAGE).read_text()
