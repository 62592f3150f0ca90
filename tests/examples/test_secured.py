"""Every program of examples/, and every verb that asks, beside a cluster that wants a key, TLS and a certificate."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from access.client import VARIABLES, credentials_from
from cluster.processes.leftovers import descendants, running
from router.client.channel import ClientSecrets
from tests.access.certificates import make_authority, make_certificate, openssl
from tests.examples.test_examples import ROOT, SAYS
from tests.integration.test_verbs import Shell

HELLO = ("generate", "--max-tokens", "4", "Hello")
LOAD = ("bench", "--requests", "2", "--concurrency", "1", "--input-tokens", "8", "--output-tokens", "2", "--target")


class Site(NamedTuple):
    shell: Shell
    variables: dict[str, str]
    """What a client shows, by the variables that it reads."""


@pytest.fixture(scope="module")
def site(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("secured")
    shell = Shell(folder, demo_cache)
    ca = make_authority(folder)
    server, client = (make_certificate(folder, ca, name, san=f"DNS:{name}") for name in ("headrace", "gateway"))
    shell.environ |= {
        "HEADRACE_ACCESS__KEYS_FILE": str(folder / "keys.json"),
        "HEADRACE_ACCESS__CERT_FILE": server.cert,
        "HEADRACE_ACCESS__KEY_FILE": server.key,
        "HEADRACE_ACCESS__CLIENT_CA_FILE": ca.cert,
        "HEADRACE_ROUTER__HTTP_PORT": "0",
    }
    values = (shell("keys", "add", "acme").stdout.strip(), ca.cert, client.cert, client.key, "headrace")
    variables = dict(zip(VARIABLES, values, strict=True))
    try:
        shell("up", "--detach")
        shell.status()
        yield Site(shell, variables)
        below = descendants(shell.supervisor)
        shell("down")
        assert not running(below)
    finally:
        shell.clean_up()


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(SAYS))
def test_an_example_shows_what_the_variables_say(site: Site, program: str) -> None:
    """Guards programs to copy from, which would work on their author's machine alone."""
    done = _run(program, site, site.variables)
    assert done.returncode == 0, done.stderr
    assert SAYS[program](done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("missing", sorted(VARIABLES))
def test_nothing_of_it_is_for_show(site: Site, missing: str) -> None:
    """The test above would pass beside a cluster that asks for less."""
    less = {name: value for name, value in site.variables.items() if name != missing}
    if missing == "HEADRACE_CERT":
        del less["HEADRACE_KEY"]
    done = _run("count_tokens.py", site, less)
    assert done.returncode != 0 and "tokens" not in done.stdout, missing


@pytest.mark.slow
def test_the_verbs_that_ask_take_all_of_it_as_flags(site: Site, tmp_path: Path) -> None:
    """Guards flags that are taken, and never shown to the server."""
    shell, (key, ca, cert, private, name) = site.shell, site.variables.values()
    (tmp_path / "key").write_text(key + "\n")
    flags = ("--api-key", f"@{tmp_path / 'key'}", "--ca", ca, "--cert", cert, "--key", private, "--server-name", name)
    assert shell(*HELLO, *flags).stdout.strip()
    assert shell("chat", "--max-tokens", "4", *flags, said="Hello\n").stdout.strip()
    for target in ("grpc", "http"):
        assert shell(*LOAD, target, *flags).stdout.strip()
    for at in range(0, len(flags), 2):
        less = tuple(word for number, word in enumerate(flags) if number not in (at, at + 1))
        assert shell(*HELLO, *less, fails=None).returncode != 0, flags[at]


def test_both_clients_read_the_same_variables(tmp_path: Path) -> None:
    """Guards against a client that finds its key and not its authority, or another one than the command line does."""
    ca = make_authority(tmp_path)
    gateway = make_certificate(tmp_path, ca, "gateway")
    values = ("hr_a_b", ca.cert, gateway.cert, gateway.key, "headrace")
    environ = dict(zip(VARIABLES, values, strict=True))
    found, whole = ClientSecrets.of_variables(environ), credentials_from(environ)
    assert (found.roots, found.key, found.chain) == whole.pem()
    assert (found.api_key, found.server_name, found.has_tls) == (whole.api_key, whole.server_name, whole.has_tls)
    system = ClientSecrets.of_variables({"HEADRACE_CA": "system"})
    assert system.has_tls and system.roots is None
    assert ClientSecrets.of_variables({}) == ClientSecrets()
    for missing in ("HEADRACE_CA", "HEADRACE_CERT", "HEADRACE_KEY"):
        less = environ | {missing: ""}
        for read in (ClientSecrets.of_variables, credentials_from):
            with pytest.raises(ValueError, match=r"go together|needs TLS"):
                read(less)


def test_a_file_that_holds_something_else_is_named_by_both(tmp_path: Path) -> None:
    """Guards a client whose error was that of a handshake, as if the server were at fault."""
    ca = make_authority(tmp_path)
    one, other = (make_certificate(tmp_path, ca, name) for name in ("one", "other"))
    (tmp_path / "junk").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    junk = str(tmp_path / "junk")
    for authority, chain, key, named in (
        (junk, "", "", junk),
        (one.key, "", "", one.key),
        (ca.cert, junk, one.key, junk),
        (ca.cert, one.cert, junk, junk),
        (ca.cert, one.cert, other.key, other.key),
    ):
        environ = {"HEADRACE_CA": authority, "HEADRACE_CERT": chain, "HEADRACE_KEY": key}
        for read in (ClientSecrets.of_variables, lambda told: credentials_from(told).pem()):
            with pytest.raises(ValueError, match=re.escape(named)):
                read(environ)


def test_an_encrypted_key_is_told_by_both(tmp_path: Path) -> None:
    """Guards against a number of a line in OpenSSL, which says nothing of a password."""
    ca = make_authority(tmp_path)
    one = make_certificate(tmp_path, ca, "one")
    locked = str(tmp_path / "locked.key")
    openssl("pkcs8", "-topk8", "-in", one.key, "-passout", "pass:sesame", "-out", locked)
    environ = {"HEADRACE_CA": ca.cert, "HEADRACE_CERT": one.cert, "HEADRACE_KEY": locked}
    for read in (ClientSecrets.of_variables, lambda told: credentials_from(told).pem()):
        with pytest.raises(ValueError, match=re.escape(f"{locked}: the private key is encrypted")):
            read(environ)


def _run(program: str, site: Site, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), "--address", site.shell.server],
        env={**environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
