"""Streams between processes with TLS: who is let in, who is refused and why, and certificates that are renewed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from access.config import PemSettings
from access.internal import INTERNAL_NAME
from access.tls import ServerCertificates
from tests.access.certificates import Pair, make_authority, make_certificate
from tests.secrets_of_tests import SECRETS
from tests.worker.test_rpc import HERE, SOON_S, STREAM, THERE, Client, Echo, dial
from worker.rpc import RpcLoop, ServedStream

SAN = f"DNS:{INTERNAL_NAME}"


class Certificates:
    """Every kind of certificate that a process may come with. Of those that it would refuse itself, as of one that has
    expired while it ran, nobody asks it here."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = make_authority(folder), make_authority(folder, "other")
        self.good = make_certificate(folder, self.authority, INTERNAL_NAME, file="good", san=SAN)
        self.alien = make_certificate(folder, self.other, INTERNAL_NAME, file="alien", san=SAN)
        self.expired = make_certificate(folder, self.authority, INTERNAL_NAME, file="expired", san=SAN, days=-1)
        self.client = make_certificate(folder, self.authority, "acme", san="DNS:acme")

    def of(self, kind: str) -> ServerCertificates | None:
        if kind == "plain":
            return None
        pair: Pair = getattr(self, kind)
        return files(pair, self.other if kind == "alien" else self.authority)


def files(pair: Pair, authority: Pair) -> ServerCertificates:
    return ServerCertificates(PemSettings(pair.cert, pair.key, authority.cert))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def serving(shown: ServerCertificates | None) -> Iterator[str]:
    loop = RpcLoop("server", THERE, SECRETS, shown)
    try:
        yield f"127.0.0.1:{loop.start('127.0.0.1', 0, {STREAM: ServedStream(frozenset({'router'}), Echo)})}"
    finally:
        loop.stop()


@contextmanager
def dialing(shown: ServerCertificates | None) -> Iterator[RpcLoop]:
    loop = RpcLoop("client", HERE, SECRETS, shown)
    loop.start("127.0.0.1", 0, {})
    try:
        yield loop
    finally:
        loop.stop()


def meet(loop: RpcLoop, address: str) -> Client:
    """Dial, and wait for an echo or the end."""
    client = dial(loop, address)
    client.send(b"frame")
    for _ in range(int(SOON_S / 0.01)):
        if client.echoed.wait(0.01) or client.ended.is_set():
            break
    return client


def test_two_with_certificates_speak(certificates: Certificates) -> None:
    with serving(certificates.of("good")) as address, dialing(certificates.of("good")) as loop:
        client = meet(loop, address)
        assert client.heard == [b"frame"] and client.peer == THERE, client.why


@pytest.mark.parametrize(
    ("dialer", "why"),
    [
        ("plain", "it may ask for TLS"),
        ("alien", "unable to get local issuer certificate"),
        ("expired", "it may have refused the certificate of this process"),
        ("client", f"not one of the name '{INTERNAL_NAME}'"),
    ],
)
def test_who_does_not_belong_opens_no_stream(certificates: Certificates, dialer: str, why: str) -> None:
    """Guards prompts, tokens and orders, with the cluster's secret in the wrong hands too: it is known here."""
    with serving(certificates.of("good")) as address, dialing(certificates.of(dialer)) as loop:
        client = meet(loop, address)
        assert client.ended.is_set() and client.peer is None and not client.heard
        assert why in client.why


def test_one_of_another_authority_is_refused_by_the_listener_itself(certificates: Certificates) -> None:
    """The dialer believes the listener's authority here: it is the listener that refuses."""
    shown = files(certificates.alien, certificates.authority)
    with serving(certificates.of("good")) as address, dialing(shown) as loop:
        client = meet(loop, address)
        assert client.peer is None and "it may have refused the certificate" in client.why


@pytest.mark.parametrize(
    ("listener", "why"),
    [
        ("plain", "it speaks without TLS"),
        ("alien", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("client", "Hostname Verification Check failed"),
    ],
)
def test_nobody_speaks_to_a_listener_that_does_not_belong(certificates: Certificates, listener: str, why: str) -> None:
    with serving(certificates.of(listener)) as address, dialing(certificates.of("good")) as loop:
        client = meet(loop, address)
        assert client.ended.is_set() and client.peer is None and why in client.why


def test_renewed_certificates_count_at_the_next_connection(certificates: Certificates, tmp_path: Path) -> None:
    """Guards a restart at every renewal: one authority is replaced by another while both ends run, and a stream that
    is open stays so."""
    used = Pair(str(tmp_path / "used.pem"), str(tmp_path / "used.key"))
    authority = Pair(str(tmp_path / "used-ca.pem"), "")
    _copy(certificates.good, used)
    shutil.copy(certificates.authority.cert, authority.cert)
    with serving(files(used, authority)) as address, dialing(files(used, authority)) as loop:
        first = meet(loop, address)
        assert first.peer == THERE
        with dialing(certificates.of("alien")) as before:
            assert meet(before, address).peer is None
        _copy(certificates.alien, used)
        shutil.copy(certificates.other.cert, authority.cert)
        assert meet(loop, address).peer == THERE
        with dialing(certificates.of("alien")) as after, dialing(certificates.of("good")) as late:
            assert meet(after, address).peer == THERE, "the listener shows the new one"
            assert meet(late, address).peer is None, "and believes the new authority alone"
        first.echoed.clear()
        first.send(b"still open")
        assert first.echoed.wait(SOON_S) and first.heard[-1] == b"still open"


def _copy(source: Pair, target: Pair) -> None:
    shutil.copy(source.cert, target.cert)
    shutil.copy(source.key, target.key)
