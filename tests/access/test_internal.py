"""What router and workers show each other: what cannot be used is refused, with its reason, before it counts."""

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from access.config import AccessConfig, AccessError, check_settings, check_transport
from access.internal import INTERNAL_NAME, internal_certificates
from tests.access.certificates import Pair, make_authority, make_certificate

SAN = f"DNS:{INTERNAL_NAME}"


def internal(pair: Pair, authority: Pair) -> AccessConfig:
    return AccessConfig(internal_cert_file=pair.cert, internal_key_file=pair.key, internal_ca_file=authority.cert)


def test_three_files_go_together() -> None:
    assert internal_certificates(AccessConfig()) is None
    with pytest.raises(AccessError, match="go together"):
        check_settings(AccessConfig(internal_cert_file="a", internal_key_file="b"))


def test_a_certificate_that_peers_would_refuse_is_refused_at_start(tmp_path: Path) -> None:
    """Guards against a cluster that starts, and of which no two processes can speak."""
    authority, other = make_authority(tmp_path), make_authority(tmp_path, "other")
    good = make_certificate(tmp_path, authority, INTERNAL_NAME, file="good", san=SAN)
    assert internal_certificates(internal(good, authority)) is not None
    expired = make_certificate(tmp_path, authority, INTERNAL_NAME, file="expired", san=SAN, days=-1)
    named = make_certificate(tmp_path, authority, "acme", san="DNS:acme")
    for pair, ca, why in (
        (expired, authority, "certificate has expired"),
        (good, other, "unable to get local issuer certificate"),
        (named, authority, f"not valid for '{INTERNAL_NAME}'"),
        (Pair(good.cert, expired.key), authority, "access.internal_key_file: .*MISMATCH"),
        (Pair(str(tmp_path / "none.pem"), good.key), authority, "access.internal_cert_file: .*none.pem: No such file"),
    ):
        with pytest.raises(AccessError, match=why):
            internal_certificates(internal(pair, ca))


def test_a_chain_that_only_openssl_reads_is_refused_at_start(tmp_path: Path) -> None:
    """Guards against a cluster that starts, and whose processes never dial: each dial failed, where nobody looked."""
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, authority, INTERNAL_NAME, file="used", san=SAN)
    chain = Path(pair.cert)
    subprocess.run(["openssl", "x509", "-in", chain, "-trustout", "-out", chain], check=True)
    assert "BEGIN TRUSTED CERTIFICATE" in chain.read_text()
    with pytest.raises(AccessError, match=r"access.internal_cert_file: .*BEGIN CERTIFICATE"):
        internal_certificates(internal(pair, authority))


def test_renewed_files_count_and_bad_ones_replace_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, authority, INTERNAL_NAME, file="used", san=SAN)
    found = internal_certificates(internal(pair, authority))
    assert found is not None
    first = found.pem()
    expired = make_certificate(tmp_path, authority, INTERNAL_NAME, file="expired", san=SAN, days=-1)
    renewed = make_certificate(tmp_path, authority, INTERNAL_NAME, file="renewed", san=SAN)
    with caplog.at_level(logging.ERROR, "access.tls"):
        _put(expired, pair)
        assert [found.pem() is first for _ in range(3)] == [True] * 3
    assert len(caplog.records) == 1, "what is wrong with the same files is said once, not at every handshake"
    assert "certificate has expired; the certificates before it stay in force" in caplog.text
    _put(renewed, pair)
    assert found.pem().chain == Path(renewed.cert).read_bytes()


def _put(source: Pair, target: Pair) -> None:
    shutil.copy(source.cert, target.cert)
    shutil.copy(source.key, target.key)


@pytest.mark.parametrize("transport", ["auto", "tcp", "nccl"])
def test_kv_does_not_travel_in_the_clear_unasked(transport: str) -> None:
    tls = AccessConfig(internal_cert_file="a", internal_key_file="b", internal_ca_file="c")
    why = rf'decode\.transfer\.transport="{transport}".*access\.internal_clear_kv=true'
    with pytest.raises(AccessError, match=why):
        check_transport(tls, transport, "decode.transfer.transport")
    asked = AccessConfig(internal_cert_file="a", internal_key_file="b", internal_ca_file="c", internal_clear_kv=True)
    check_transport(asked, transport, "decode.transfer.transport")
    check_transport(tls, "shm", "decode.transfer.transport")
    check_transport(AccessConfig(), transport, "decode.transfer.transport")
