"""Makes the certificates of a test with the `openssl` command: an authority, and what it signs."""

import subprocess
from pathlib import Path

import msgspec


class Pair(msgspec.Struct, frozen=True):
    """Paths of a certificate and of its private key, in PEM."""

    cert: str
    key: str


def openssl(*arguments: str) -> None:
    """Run the command. Raises CalledProcessError, whose `stderr` says why."""
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True, timeout=60.0)


def make_authority(folder: Path, name: str = "ca") -> Pair:
    """Make a certificate that signs others."""
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign", "-out", pair.cert, "-keyout", pair.key),
    )
    return pair


def make_certificate(folder: Path, authority: Pair, name: str, *, file: str = "", san: str = "", days: int = 2) -> Pair:
    """Make a certificate of `name`, signed by `authority`, which servers and clients may show. `san` are its subject
    alternative names in openssl's notation; empty leaves only the common name. The files are called `file`, or `name`.
    With `days` below 0 it has expired."""
    stem = file or name
    pair, request, extra = (
        Pair(str(folder / f"{stem}.pem"), str(folder / f"{stem}.key")),
        str(folder / f"{stem}.csr"),
        folder / f"{stem}.ext",
    )
    extra.write_text(f"subjectAltName={san}\n" if san else "basicConstraints=CA:FALSE\n")
    openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-out", request, "-keyout", pair.key),
    )
    openssl(
        *("x509", "-req", "-in", request, "-CA", authority.cert, "-CAkey", authority.key, "-CAcreateserial"),
        *("-days", str(days), "-extfile", str(extra), "-out", pair.cert),
    )
    return pair
