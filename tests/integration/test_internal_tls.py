"""A cluster of processes whose streams have TLS: it serves, takes a renewed certificate, and refuses to start with what
would be half of it."""

import shutil
import socket
import ssl
from pathlib import Path

import pytest

from access.config import AccessConfig
from access.internal import INTERNAL_NAME, internal_certificates
from cluster.processes.leftovers import descendants, running
from tests.access.certificates import make_authority, make_certificate
from tests.integration.test_verbs import Shell

pytestmark = pytest.mark.slow


def _listening(pids: list[int]) -> set[int]:
    """Return the TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def _shown(port: int, config: AccessConfig) -> str | None:
    """Return the certificate that who listens there shows, if it is one of INTERNAL_NAME and of our authority."""
    context = ssl.create_default_context(cafile=config.internal_ca_file)
    context.load_cert_chain(config.internal_cert_file, config.internal_key_file)
    context.set_alpn_protocols(["h2"])
    try:
        plain = socket.create_connection(("127.0.0.1", port), 5.0)
        with plain, context.wrap_socket(plain, server_hostname=INTERNAL_NAME) as secure:
            return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
    except OSError:
        return None


def test_a_cluster_with_tls_between_its_processes(tmp_path: Path, demo_cache: Path) -> None:
    """Guards the whole way of the settings, from the launcher to both ends of every stream."""
    authority = make_authority(tmp_path)
    san = f"DNS:{INTERNAL_NAME}"
    used = make_certificate(tmp_path, authority, INTERNAL_NAME, san=san)
    config = AccessConfig(
        internal_cert_file=used.cert, internal_key_file=used.key, internal_ca_file=authority.cert
    )
    assert internal_certificates(config) is not None
    shell = Shell(tmp_path, demo_cache)
    shell.environ |= {
        "HEADRACE_ACCESS__INTERNAL_CERT_FILE": used.cert,
        "HEADRACE_ACCESS__INTERNAL_KEY_FILE": used.key,
        "HEADRACE_ACCESS__INTERNAL_CA_FILE": authority.cert,
    }
    asked = ("generate", "--max-tokens", "4", "Hello")
    try:
        assert "access.internal_clear_kv=true" in shell("up", "--detach", fails=2).stderr
        shell.environ |= {f"HEADRACE_{pool}__TRANSFER__TRANSPORT": "shm" for pool in ("PREFILL", "DECODE")}
        shell("up", "--detach")
        below = descendants(shell.status()["router"]["pid"] and shell.supervisor)
        assert shell(*asked).stdout.strip()
        ports = _listening(list(below))
        workers = [port for port in ports if _shown(port, config) == Path(used.cert).read_text()]
        assert len(workers) == 2
        renewed = make_certificate(tmp_path, authority, INTERNAL_NAME, file="renewed", san=san)
        shutil.copy(renewed.cert, used.cert)
        shutil.copy(renewed.key, used.key)
        assert {_shown(port, config) for port in workers} == {Path(renewed.cert).read_text()}
        assert shell(*asked).stdout.strip()
        shell("down")
        assert not running(below)
    finally:
        shell.clean_up()
