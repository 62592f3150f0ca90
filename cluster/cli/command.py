"""Reads what a person types after `headrace`. The verbs are in `cluster/cli/verbs_*.py`.

Exit statuses: 0 done, 1 it could not be done (one line on standard error says why), 2 the command
or the configuration is wrong, 128 + signal when interrupted.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from cluster.cli import verbs_access, verbs_ask, verbs_inspect, verbs_operate, verbs_report, verbs_run
from cluster.cli.parser import CommandParser, almost
from cluster.config import ConfigError
from cluster.processes.signals import Interrupted, interruptible
from cluster.processes.spec import LaunchError
from cluster.rundir import command_line
from engine.model.config import ModelError
from router.front.api import NOBODY, ApiError

ELSEWHERE = {"serve": "up", "start": "up", "run": "up", "stop": "down", "kill": "down", "ps": "status"}
"""What verbs of other servers are called here."""


def run(arguments: list[str]) -> int:
    """Run one verb and return the exit status. Raises BrokenPipeError where nobody reads the output any more."""
    try:
        with interruptible():
            return _verb(arguments)()
    except BrokenPipeError:
        raise
    except ConfigError as error:
        return _fail(error, 2)
    except (LaunchError, ModelError, OSError) as error:
        return _fail(error, 1)
    except ApiError as error:
        field = f" ({error.field})" if error.field and not error.message.startswith(error.field) else ""
        hint = ""
        if error.message.startswith(NOBODY):
            hint = f" (start a cluster with: {command_line('up', _named(arguments))})"
        return _fail(f"{error.code}{field}: {error.message}{hint}", 1)
    except Interrupted as interrupted:
        return interrupted.status


def _verb(arguments: list[str]) -> Callable[[], int]:
    """Return what a command line asks for. Raises ConfigError for a verb or an option that there is not and for words
    that are no UTF-8, and SystemExit as argparse does."""
    for word in arguments:
        # Bytes that Python could not decode come as halves of surrogate pairs, which can be neither sent nor printed.
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(f"{word!r} is not valid UTF-8")
    parser, verbs = _parsers()
    if not arguments:
        parser.print_help(sys.stderr)
        return lambda: 2
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    verb = arguments[0]
    if verb.startswith("-") and verb not in ("-h", "--help", "--version"):
        raise ConfigError(f"{verb!r} comes before the verb: options come after it (`headrace help` lists the verbs)")
    if not verb.startswith("-") and verb not in verbs:
        meant = f"; did you mean {ELSEWHERE[verb]!r}?" if verb in ELSEWHERE else almost(verb, verbs)
        raise ConfigError(f"there is no verb {verb!r}{meant} (`headrace help` lists them)")
    if verb == "bench":
        # Its flags are its own.
        from cluster.bench.command import main as bench

        return partial(bench, arguments[1:])
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown(verb, unknown[0], verbs[verb].options()))
    parsed.given = arguments
    return partial(parsed.verb, parsed)


def _parsers() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of the whole line, and those of the verbs by their names."""
    parser = CommandParser(
        prog="headrace",
        description="Serves a large language model from a prefill pool and a decode pool.",
        epilog="`headrace help VERB` says what a verb takes.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {_version()}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in (verbs_run, verbs_ask, verbs_operate, verbs_inspect, verbs_report, verbs_access):
        module.add(verbs)
    verbs.add_parser("help", help="what a verb takes: help VERB")
    return parser, dict(verbs.choices)


def _unknown(verb: str, word: str, options: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{verb}: {word!r} is one word too many (`headrace help {verb}` says what it takes)"
    name = word.partition("=")[0]
    return f"{verb}: there is no option {name!r}{almost(name, options)} (`headrace help {verb}` lists them)"


def _named(arguments: Sequence[str]) -> str:
    """Return the name of the cluster that a command line is about; empty where it names none."""
    reader = CommandParser(add_help=False)
    reader.add_argument("--name", default=os.environ.get("HEADRACE_NAME", ""))
    name: str = reader.parse_known_args(arguments)[0].name
    return name


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout that was never installed


def _fail(reason: object, status: int) -> int:
    print(f"headrace: {' '.join(str(reason).split())}", file=sys.stderr)
    return status

