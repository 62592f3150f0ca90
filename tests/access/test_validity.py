"""The dates of certificates, beside what `openssl` says of the same files."""

import random
import ssl
import subprocess
from pathlib import Path

import pytest

from access.validity import Validity, validity_of
from tests.access.certificates import make_authority, make_certificate

DAY_S = 86_400.0


def openssl_dates(file: str) -> tuple[float, float]:
    words = ["openssl", "x509", "-in", file, "-noout", "-startdate", "-enddate"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split("\n")
    begins, ends = (ssl.cert_time_to_seconds(line.partition("=")[2]) for line in told[:2])
    return begins, ends


@pytest.mark.parametrize("days", [-1, 2, 400, 20_000])
def test_dates_are_those_that_openssl_tells(days: int, tmp_path: Path) -> None:
    """20,000 days reach behind 2049, where the time is written with four digits of the year."""
    pair = make_certificate(tmp_path, make_authority(tmp_path), "headrace", days=days)
    assert validity_of(Path(pair.cert).read_bytes()) == Validity(*openssl_dates(pair.cert))


def test_a_chain_is_as_good_as_its_first(tmp_path: Path) -> None:
    """Public chains carry what an authority was signed with in former times, and may have ended."""
    authority = make_authority(tmp_path)
    pair, ended = (make_certificate(tmp_path, authority, name, days=days) for name, days in (("a", 900), ("b", -1)))
    chain = b"bag attributes\n" + Path(pair.cert).read_bytes() + Path(ended.cert).read_bytes()
    assert validity_of(chain) == Validity(*openssl_dates(pair.cert))


def test_whatever_a_file_holds_is_a_value_error_at_worst(tmp_path: Path) -> None:
    """Guards a process that reads a file while it is written."""
    found = ssl.PEM_cert_to_DER_cert(Path(make_authority(tmp_path).cert).read_text())
    lots = random.Random(1)
    broken = [found[:size] for size in range(0, len(found), 3)]
    for _ in range(2000):
        changed = bytearray(found)
        changed[lots.randrange(180)] = lots.randrange(256)
        broken.append(bytes(changed))
    refused = 0
    for der in broken:
        try:
            validity_of(ssl.DER_cert_to_PEM_cert(der).encode())
        except ValueError:
            refused += 1
    assert refused > len(found) // 3
    with pytest.raises(ValueError, match="no certificate in PEM"):
        validity_of(b"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n")


def test_what_is_said_of_it() -> None:
    good = Validity(10 * DAY_S, 100 * DAY_S)
    assert good.warning(50 * DAY_S) == good.problem(90 * DAY_S) == ""
    assert good.warning(90 * DAY_S) == "expires on 1970-04-11 00:00 UTC, in 10.0 days"
    assert good.problem(9 * DAY_S) == good.warning(9 * DAY_S) == "not valid before 1970-01-11 00:00 UTC"
    assert good.problem(101 * DAY_S) == good.warning(101 * DAY_S) == "expired on 1970-04-11 00:00 UTC"
