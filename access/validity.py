"""Until when certificates are good: the dates in X.509 files (RFC 5280, section 4.1.2.5), which Python's `ssl` tells of
authorities alone."""

import binascii
import datetime
import re
from collections.abc import Iterator

import msgspec

WARN_S = 14 * 86_400.0
"""A certificate with less time left is spoken of."""

_BLOCK = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
_SEQUENCE, _INTEGER, _VERSION, _UTC_TIME = 0x30, 0x02, 0xA0, 0x17


class Validity(msgspec.Struct, frozen=True):
    """When a certificate is good, in seconds since 1970."""

    begins_s: float
    ends_s: float

    def problem(self, now_s: float) -> str:
        """Say why it is not good at `now_s`; empty where it is."""
        if now_s < self.begins_s:
            return f"not valid before {_day(self.begins_s)}"
        return f"expired on {_day(self.ends_s)}" if now_s > self.ends_s else ""

    def warning(self, now_s: float) -> str:
        """Say that it is not good, or not for long; empty where neither is so."""
        if problem := self.problem(now_s):
            return problem
        left_s = self.ends_s - now_s
        return f"expires on {_day(self.ends_s)}, in {left_s / 86_400:.1f} days" if left_s < WARN_S else ""


def validity_of(chain: bytes) -> Validity:
    """Return when the first certificate of a PEM file is good, which is the server's own. Those behind it may have
    ended: clients find another way to an authority that they trust. Raises ValueError for what is no certificate."""
    found = _BLOCK.search(chain)
    if found is None:
        raise ValueError("no certificate in PEM")
    return _dates(binascii.a2b_base64(found[1]))


def _dates(der: bytes) -> Validity:
    """A certificate is a sequence that begins with what is signed: a sequence of version, which may be left out, serial
    number, signature, issuer, validity and more. Raises ValueError."""
    (_, certificate), *_ = _parts(der)
    (_, signed), *_ = _parts(certificate)
    parts = [part for part in _parts(signed) if part[0] != _VERSION]
    if [kind for kind, _ in parts[:4]] != [_INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE]:
        raise ValueError("no certificate in DER")
    begins, ends = [_time(kind, text.decode("ascii")) for kind, text in _parts(parts[3][1])]
    return Validity(begins, ends)


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents that stand one behind the other. Raises ValueError where one ends early."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1] if at + 1 < len(der) else 0x80, at + 2
        if size & 0x80:
            more = size & 0x7F
            size, at = int.from_bytes(der[at : at + more]), at + more
            if not more:
                raise ValueError("no length in DER")
        if at + size > len(der):
            raise ValueError("the certificate is cut off")
        yield tag, der[at : at + size]
        at += size


def _time(kind: int, text: str) -> float:
    """Two digits of a year are those of 1950 to 2049."""
    if kind == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _day(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
