"""The `headrace` command: what a person types. The verbs are in `cluster/cli/verbs_*.py`.

Exit statuses: 0 done, 1 it could not be done (one line on standard error says why), 2 the command
or the configuration is wrong, 128 + signal when interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from cluster.cli import verbs_access, verbs_ask, verbs_inspect, verbs_operate, verbs_report, verbs_run
from cluster.config import ConfigError
from cluster.processes.signals import Interrupted, interruptible
from cluster.processes.spec import LaunchError
from engine.model.config import ModelError
from router.front.api import NOBODY, ApiError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with interruptible():
            return _verb(arguments)()
    except ConfigError as error:
        return _fail(error, 2)
    except (LaunchError, ModelError, OSError) as error:
        return _fail(error, 1)
    except ApiError as error:
        field = f" ({error.field})" if error.field else ""
        hint = " (start a cluster with: headrace up)" if error.message.startswith(NOBODY) else ""
        return _fail(f"{error.code}{field}: {error.message}{hint}", 1)
    except Interrupted as interrupted:
        return interrupted.status


def _verb(arguments: list[str]) -> Callable[[], int]:
    if arguments[:1] == ["bench"]:
        # Its flags are its own.
        from cluster.bench.command import main as bench

        return partial(bench, arguments[1:])
    parsed = _parser().parse_args(arguments)
    parsed.given = arguments
    return partial(parsed.verb, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Serves a large language model from a prefill pool and a decode pool.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for module in (verbs_run, verbs_ask, verbs_operate, verbs_inspect, verbs_report, verbs_access):
        module.add(verbs)
    return parser


def _fail(reason: object, status: int) -> int:
    print(f"headrace: {' '.join(str(reason).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
