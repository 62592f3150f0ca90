"""The verb that says who may come in: keys."""

import argparse
import os
from pathlib import Path
from typing import Any

from cluster.config import ConfigError
from cluster.resolve import add_flags, resolve

LIMITS = (
    ("--weight", float, "its share of the line while several tenants wait (1)"),
    ("--tokens-per-s", float, "tokens of prompts and answers per second; 0: no limit"),
    ("--burst-tokens", int, "tokens at once after a pause; 0: those of ten seconds"),
    ("--concurrency", int, "samples that run or wait at once; 0: no limit"),
    ("--cache-share", float, "the part of each worker's cache that is its own; 0: it lives on what others leave"),
    ("--shared-cache", str, "the cache that it shares with all tenants whose records name the same; '' for none"),
)


def add(verbs: Any) -> None:
    keys = verbs.add_parser("keys", help="who may come in: API keys, certificates, tenants and their limits")
    actions = keys.add_subparsers(required=True, metavar="ACTION")

    new = actions.add_parser("add", help="make an API key and show it once; or let a certificate in")
    new.add_argument("tenant", nargs="?", default="", help="whose it is; with --monitor nobody's")
    new.add_argument("--monitor", action="store_true", help="it reads /metrics and /sd, and nothing else")
    new.add_argument("--certificate", default="", metavar="NAME", help="a name in a client's certificate, not a key")
    new.add_argument("--max-priority", type=int, default=0, metavar="N", help="the highest priority it may ask for (0)")
    _limits(new)
    _common(new, _add)

    limit = actions.add_parser("limit", help="change what a tenant may use")
    limit.add_argument("tenant")
    _limits(limit)
    _common(limit, _limit)

    _common(actions.add_parser("list", help="who may come in; no key is shown"), _list)

    remove = actions.add_parser("remove", help="take a key, a certificate or a whole tenant away")
    remove.add_argument("name", help="the key's id, the certificate's name, or the tenant")
    _common(remove, _remove)


def _limits(parser: argparse.ArgumentParser) -> None:
    for flag, kind, text in LIMITS:
        parser.add_argument(flag, type=kind, default=None, metavar="N", help=text)


def _common(parser: argparse.ArgumentParser, verb: Any) -> None:
    parser.add_argument("--file", type=Path, default=None, help="the file (default: the configured access.keys_file)")
    add_flags(parser, only=("name",))
    parser.set_defaults(verb=verb)


def _file(arguments: argparse.Namespace) -> Path:
    """Raises ConfigError where no file is named."""
    named = arguments.file or resolve(arguments, os.environ).config.access.keys_file
    if not named:
        raise ConfigError("which file of keys? Give --file, or set access.keys_file")
    return Path(named).expanduser().absolute()


def _given(arguments: argparse.Namespace) -> dict[str, float | int | str]:
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _ in LIMITS]
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _add(arguments: argparse.Namespace) -> int:
    from cluster.cli.keys import add_credential

    limits = _given(arguments)
    if bool(arguments.tenant) == arguments.monitor:
        raise ConfigError("a key is that of a tenant, or of a --monitor")
    if arguments.monitor and (limits or arguments.max_priority):
        raise ConfigError("a monitor has no limits")
    most = arguments.max_priority
    return add_credential(_file(arguments), arguments.tenant, arguments.certificate, limits, most)


def _limit(arguments: argparse.Namespace) -> int:
    from cluster.cli.keys import limit_tenant

    return limit_tenant(_file(arguments), arguments.tenant, _given(arguments))


def _list(arguments: argparse.Namespace) -> int:
    from cluster.cli.keys import list_credentials

    return list_credentials(_file(arguments))


def _remove(arguments: argparse.Namespace) -> int:
    from cluster.cli.keys import remove_credential

    return remove_credential(_file(arguments), arguments.name)
