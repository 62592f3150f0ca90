"""A worker's page of metrics over real sockets: who reads it, with keys, with certificates, or on loopback."""

import shutil
import ssl
import time
from pathlib import Path

import httpx
import pytest

import access.tls
from access.config import AccessConfig, AccessError, PemSettings
from access.internal import INTERNAL_NAME, _shake_hands
from access.keys import make_key
from access.page import guard_page
from access.tenants import CertificateName, CredentialTable, Tenant
from access.tls import ServerCertificates
from access.validity import validity_of
from telemetry.page_server import PageServer
from tests.access.certificates import Pair, make_authority, make_certificate
from tests.access.test_authenticator import write


def get(server: PageServer, scheme: str = "http", verify: ssl.SSLContext | bool = True, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(verify=verify) as client:
        return client.get(f"{scheme}://127.0.0.1:{server.port}/metrics", headers=headers).status_code


def test_a_page_on_loopback_is_open() -> None:
    assert guard_page(AccessConfig(), "127.0.0.1", "decode-0") is None
    with pytest.raises(AccessError, match="decode-0 would listen on 10"):
        guard_page(AccessConfig(), "10.0.0.1", "decode-0")


def test_a_page_with_keys_is_for_monitors(tmp_path: Path) -> None:
    monitor, one = make_key("", "monitor", "")
    acme, other = make_key("acme", "tenant", "")
    write(tmp_path / "keys.json", CredentialTable(tenants={"acme": Tenant()}, keys=[one, other]))
    guard = guard_page(AccessConfig(keys_file=str(tmp_path / "keys.json")), "127.0.0.1", "decode-0")
    server = PageServer(lambda: b"page", "127.0.0.1", 0, guard)
    try:
        assert [get(server, key=key) for key in ("", acme, monitor, monitor + "x")] == [401, 403, 200, 401]
        answer = httpx.get(f"http://127.0.0.1:{server.port}/metrics")
        assert answer.headers["www-authenticate"] == "Bearer" and b"page" not in answer.content
    finally:
        server.close()


def test_a_page_with_mutual_tls_is_for_monitors_certificates(tmp_path: Path) -> None:
    ca = make_authority(tmp_path)
    pair = make_certificate(tmp_path, ca, "headrace", san="IP:127.0.0.1")
    clients = {name: make_certificate(tmp_path, ca, name) for name in ("prom", "acme")}
    clients["stranger"] = make_certificate(tmp_path, make_authority(tmp_path, "other"), "stranger")
    names = [CertificateName(name="prom", role="monitor"), CertificateName(name="acme", tenant="acme")]
    write(tmp_path / "keys.json", CredentialTable(tenants={"acme": Tenant()}, certificates=names))
    files = {"cert_file": pair.cert, "key_file": pair.key, "client_ca_file": ca.cert}
    guard = guard_page(AccessConfig(keys_file=str(tmp_path / "keys.json"), **files), "127.0.0.1", "decode-0")
    server = PageServer(lambda: b"page", "127.0.0.1", 0, guard)

    def context(name: str) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=ca.cert)
        if name:
            made.load_cert_chain(clients[name].cert, clients[name].key)
        return made

    try:
        assert [get(server, "https", context(name)) for name in ("prom", "acme")] == [200, 403]
        for name in ("", "stranger"):
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
                get(server, "https", context(name))
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            get(server)
    finally:
        server.close()


def test_a_page_has_the_certificates_that_its_files_hold_now(tmp_path: Path) -> None:
    """Guards against a worker whose page is lost on the day its certificate runs out, and against an authority of
    monitors that is not let go."""

    def reader(ca: str, shown: Pair) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=ca)
        made.load_cert_chain(shown.cert, shown.key)
        return made

    old, kept = make_authority(tmp_path), tmp_path / "kept.pem"
    shutil.copyfile(old.cert, kept)
    pair = make_certificate(tmp_path, old, "headrace", san="IP:127.0.0.1")
    before = reader(str(kept), make_certificate(tmp_path, old, "prom", file="before"))
    write(tmp_path / "keys.json", CredentialTable(certificates=[CertificateName(name="prom", role="monitor")]))
    files = {"cert_file": pair.cert, "key_file": pair.key, "client_ca_file": old.cert}
    guard = guard_page(AccessConfig(keys_file=str(tmp_path / "keys.json"), **files), "127.0.0.1", "decode-0")
    server = PageServer(lambda: b"page", "127.0.0.1", 0, guard)
    refused = (httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)
    try:
        assert get(server, "https", before) == 200
        # Half of it: the new key with the old certificate serves nobody, so the old pair stays.
        key = Path(pair.key).read_bytes()
        Path(pair.key).write_bytes(Path(make_certificate(tmp_path, old, "next").key).read_bytes())
        assert get(server, "https", before) == 200
        Path(pair.key).write_bytes(key)
        # All of it, with another authority for both sides.
        new = make_authority(tmp_path)
        assert Path(new.cert).read_bytes() != kept.read_bytes() and new.cert == old.cert
        make_certificate(tmp_path, new, "headrace", san="IP:127.0.0.1")
        assert get(server, "https", reader(new.cert, make_certificate(tmp_path, new, "prom"))) == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(server, "https", before)
        of_old = ssl.create_default_context(cafile=new.cert)
        of_old.load_cert_chain(tmp_path / "before.pem", tmp_path / "before.key")
        with pytest.raises(refused):
            get(server, "https", of_old)
    finally:
        server.close()


def test_a_file_that_cannot_be_read_for_a_moment_is_read_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a certificate that runs out, though the new one has long been there: the process had no descriptor
    left just when the file changed."""
    ca = make_authority(tmp_path)
    pair = make_certificate(tmp_path, ca, "headrace", san="IP:127.0.0.1")
    later = make_certificate(tmp_path, ca, "later", san="IP:127.0.0.1")
    certificates = ServerCertificates(AccessConfig(cert_file=pair.cert, key_file=pair.key).front_files)
    before = certificates.pem()
    for new, old in ((later.cert, pair.cert), (later.key, pair.key)):
        shutil.copyfile(new, old)

    def unreadable(setting: str, file: str) -> bytes:
        raise AccessError(f"{setting}: no descriptor") from OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(access.tls, "_read", unreadable)
        assert certificates.pem() == before
    assert certificates.pem() != before


@pytest.mark.parametrize("is_first", [True, False], ids=["before the first handshake", "after one that gRPC saw"])
def test_half_a_renewal_leaves_the_next_handshake_a_certificate(tmp_path: Path, is_first: bool) -> None:
    """Guards a port without TLS: what its certificates were was known, and no context had been made of them."""
    ca = make_authority(tmp_path)
    pair = make_certificate(tmp_path, ca, "headrace", san=f"DNS:{INTERNAL_NAME}")
    certificates = ServerCertificates(AccessConfig(cert_file=pair.cert, key_file=pair.key).front_files)
    server, client = certificates.context(lets_in=True), ssl.create_default_context(cafile=ca.cert)
    if not is_first:
        _shake_hands(server, client)
        make_certificate(tmp_path, ca, "headrace", san=f"DNS:{INTERNAL_NAME}")
        certificates.pem()
    shutil.copyfile(make_certificate(tmp_path, ca, "next").key, pair.key)
    _shake_hands(server, client)


def test_a_certificate_that_is_not_good_replaces_none_that_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a renewal that went wrong: an expired certificate was taken, and every new connection failed."""
    ca = make_authority(tmp_path)
    pair = make_certificate(tmp_path, ca, "headrace", file="used", days=2)
    now_s = time.time()
    certificates = ServerCertificates(PemSettings(pair.cert, pair.key, ""), clock=lambda: now_s)
    first = certificates.pem()
    _replace(pair, make_certificate(tmp_path, ca, "headrace", file="expired", days=-1))
    now_s = time.time()
    assert [certificates.pem() is first for _ in range(3)] == [True] * 3
    (said,) = caplog.messages
    assert "expired on" in said and said.endswith("the certificates before it stay in force")
    time.sleep(1.0)  # certificates begin when they are made, in whole seconds
    _replace(pair, make_certificate(tmp_path, ca, "headrace", file="long", days=9))
    now_s = validity_of(Path(pair.cert).read_bytes()).begins_s - 0.5
    assert certificates.pem() is first and "not valid before" in caplog.messages[-1]
    assert certificates.pem() is first and len(caplog.messages) == 2
    now_s += 0.5
    assert certificates.pem() is not first, "its time has come, and the files are as they were"
    _replace(pair, make_certificate(tmp_path, ca, "headrace", file="longer", days=8))
    now_s += 8.5 * 86_400.0
    assert certificates.pem().chain != Path(pair.cert).read_bytes(), "it has ended, and the other has not"
    now_s += 1.0 * 86_400.0
    assert certificates.pem().chain == Path(pair.cert).read_bytes(), "now neither is better"
    assert [certificates.pem() is first for _ in range(2)] == [False] * 2
    ends = [message.rpartition("; ")[2] for message in caplog.messages[2:] if "; " in message]
    assert ends == ["the certificates before it stay in force", "clients refuse it"]


def test_a_file_that_is_gone_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the log: every handshake and every scrape looks."""
    pair = make_certificate(tmp_path, make_authority(tmp_path), "headrace")
    certificates = ServerCertificates(PemSettings(pair.cert, pair.key, ""))
    before = Path(pair.key).read_bytes()
    for _ in range(2):
        Path(pair.key).unlink()
        assert len({certificates.pem().chain for _ in range(3)}) == 1
        Path(pair.key).write_bytes(before)
        certificates.pem()
    assert [message.partition(" ")[0] for message in caplog.messages] == ["access.key_file:", "the"] * 2


def _replace(pair: Pair, by: Pair) -> None:
    shutil.copy(by.cert, pair.cert)
    shutil.copy(by.key, pair.key)
