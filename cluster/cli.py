"""The `headrace` command: what a person types.

Exit statuses: 0 done, 1 it could not be done (one line on standard error says why), 2 the command
or the configuration is wrong, 128 + signal when interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cluster.config import ConfigError
from cluster.plan_flags import add_plan_flags, read_flags
from cluster.resolve import Resolved, add_flags, resolve
from cluster.signals import Interrupted, interruptible, on_hangup
from cluster.spec import LaunchError
from engine.model.config import ModelError
from router.api import ApiError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        # Its flags are its own.
        from benchmarks.load import main as bench

        return int(bench(arguments[1:]) or 0)
    parsed = _parser().parse_args(arguments)
    verb: Callable[[argparse.Namespace], int] = parsed.verb
    try:
        with interruptible():
            return verb(parsed)
    except ConfigError as error:
        return _fail(error, 2)
    except (LaunchError, ModelError, OSError) as error:
        return _fail(error, 1)
    except ApiError as error:
        field = f" ({error.field})" if error.field else ""
        return _fail(f"{error.code}{field}: {error.message}", 1)
    except Interrupted as interrupted:
        return interrupted.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Serves a large language model from a prefill pool and a decode pool.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    up = verbs.add_parser("up", help="start a cluster and serve until Ctrl-C")
    add_flags(up)
    up.set_defaults(verb=_up)

    generate = verbs.add_parser("generate", help="ask a running cluster; the answer streams")
    generate.add_argument("prompt", help="what to ask; - reads standard input")
    generate.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    generate.add_argument("--system", default="", metavar="TEXT", help="a system message")
    generate.add_argument("--raw", action="store_true", help="continue the text, without a chat")
    generate.add_argument("--max-tokens", type=int, default=None, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T")
    generate.add_argument("--seed", type=int, default=None, metavar="N")
    generate.add_argument("--stats", action="store_true", help="figures on standard error")
    generate.set_defaults(verb=_generate)

    verbs.add_parser("bench", help="load a running cluster and measure it", add_help=False)

    demo = verbs.add_parser("demo", help="start a cluster, ask it four questions, show the figures")
    add_flags(demo)
    demo.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="figures as JSON")
    demo.set_defaults(verb=_demo)

    worker = verbs.add_parser("worker", help="one worker alone, in the foreground")
    worker.add_argument("role", choices=("prefill", "decode"))
    worker.add_argument("--name", default="", help="its stable name (default: its role and -0)")
    worker.add_argument("--port", type=int, default=0, help="gRPC port (default: a free one)")
    add_flags(worker)
    worker.set_defaults(verb=_worker)

    plan = verbs.add_parser("plan", help="capacity on paper: what a model's KV takes, what fits")
    add_plan_flags(plan)
    plan.set_defaults(verb=_plan)

    dump = verbs.add_parser("dump-config", help="every setting with its value and origin")
    add_flags(dump)
    dump.add_argument("--json", action="store_true", help="as JSON")
    dump.set_defaults(verb=_dump_config)
    return parser


def _resolve(arguments: argparse.Namespace) -> Resolved:
    return resolve(arguments, os.environ)


def _up(arguments: argparse.Namespace) -> int:
    from cluster.launch import Cluster, make_launcher

    config = _resolve(arguments).config
    with Cluster(config, make_launcher(config.launcher, config.ray)) as cluster:
        addresses = cluster.start()
        workers = ", ".join(worker.name for worker in addresses.workers)
        print(f"headrace is ready: {workers}")
        print(f"  gRPC  {addresses.grpc}")
        if addresses.http:
            print(f"  HTTP  {_url(addresses.http)}")
        print("\nTry, in another terminal:")
        print(f"  {_command()} generate --server {addresses.grpc} 'Why is the sky blue?'")
        if addresses.http:
            body = json.dumps(
                {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}
            )
            print(
                f"  curl -N {_url(addresses.http)}/v1/chat/completions "
                f"-H 'content-type: application/json' -d '{body}'"
            )
        print("\nCtrl-C stops everything. SIGHUP replaces every worker in turn, and drops no request.", flush=True)
        try:
            with on_hangup(cluster.roll):
                cluster.watch()
        except Interrupted:
            print("stopping", flush=True)
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from cluster.ask import stream_answer

    return stream_answer(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from cluster.demo import run_demo

    return run_demo(_resolve(arguments), arguments.json_file)


def _worker(arguments: argparse.Namespace) -> int:
    from cluster.solo import run_worker

    name = arguments.name or f"{arguments.role}-0"
    return run_worker(_resolve(arguments).config, arguments.role, name, arguments.port)


def _plan(arguments: argparse.Namespace) -> int:
    from cluster.plan import make_plan
    from cluster.plan_report import check_text, plan_text

    config = _resolve(arguments).config
    plan = make_plan(read_flags(arguments), config)
    if not arguments.check:
        print(msgspec.json.encode(plan).decode() if arguments.json else plan_text(plan))
        return 1 if any(pool.missing_bytes for pool in plan.pools) else 0
    from cluster.plan_check import check_plan

    compared = check_plan(plan, config)
    print(msgspec.json.encode(compared).decode() if arguments.json else check_text(compared))
    return 0 if all(one.fits for one in compared) else 1


def _dump_config(arguments: argparse.Namespace) -> int:
    settings = _resolve(arguments).settings
    shown = {item.key: json.dumps(_public(item.key, item.value)) for item in settings}
    if arguments.json:
        rows = {
            item.key: {"value": _public(item.key, item.value), "origin": item.origin}
            for item in settings
        }
        print(json.dumps(rows, indent=2))
        return 0
    keys = max(len(key) for key in shown)
    values = max(len(value) for value in shown.values())
    for item in settings:
        print(f"{item.key:{keys}}  {shown[item.key]:{values}}  # {item.origin}")
    return 0


def _public(key: str, value: object) -> object:
    """Secrets are shown as set or not, never as what they are."""
    return "(set)" if key.endswith("_key") and value else value


def _url(address: str) -> str:
    return address if address.startswith("http") else f"http://{address}"


def _command() -> str:
    """How this command was called, so that the printed line works from the same folder."""
    called = Path(sys.argv[0])
    if called.name != "headrace":
        return "headrace"
    directory = os.environ.get("PATH", "").split(os.pathsep)
    if str(called.parent.absolute()) in directory:
        return "headrace"
    try:
        return str(called.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(called)


def _fail(reason: object, status: int) -> int:
    print(f"headrace: {' '.join(str(reason).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
