"""The flags and variables by which the verbs that ask a cluster show their credentials."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from access.client import ClientCredentials, credentials_from
from access.config import AccessError
from cluster.config import ConfigError

FLAGS = (
    ("--api-key", "api_key", "KEY", "an API key, or @FILE that holds one (default: $HEADRACE_API_KEY)"),
    ("--ca", "ca_file", "FILE", "use TLS; FILE has the authority of the server, `system`: those of this machine"),
    ("--cert", "cert_file", "FILE", "the client's certificate, in PEM"),
    ("--key", "key_file", "FILE", "its private key"),
    ("--server-name", "server_name", "NAME", "the name in the server's certificate, if it is reached by another"),
)


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("credentials", "each may be a variable: HEADRACE_API_KEY, HEADRACE_CA, …")
    for flag, field, metavar, text in FLAGS:
        group.add_argument(flag, dest=f"client:{field}", metavar=metavar, default=None, help=text)


def client_credentials(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ClientCredentials:
    """Return what flags say, and variables where there is no flag. Raises ConfigError."""
    given = {field: getattr(arguments, f"client:{field}") for _, field, _, _ in FLAGS}
    key = given["api_key"]
    try:
        if key is not None and key.startswith("@"):
            given["api_key"] = Path(key[1:]).expanduser().read_text(encoding="utf-8").strip()
        return credentials_from(environ, given)
    except (AccessError, UnicodeDecodeError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"--api-key: {error.filename}: {error.strerror}") from error
