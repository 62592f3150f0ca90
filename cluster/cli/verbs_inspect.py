"""Verbs that need no running cluster: dump-config, doctor, collect-env, plan, replay."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from cluster.config import ConfigError
from cluster.plan.flags import add_plan_flags, read_flags
from cluster.resolve import Resolved, add_flags, resolve, settled
from engine.model.config import ModelError


def add(verbs: Any) -> None:
    plan = verbs.add_parser("plan", help="capacity on paper: what a model's KV takes, what fits")
    add_plan_flags(plan)
    plan.set_defaults(verb=_plan)

    dump = verbs.add_parser("dump-config", help="every setting with its value and origin")
    add_flags(dump)
    dump.add_argument("--json", action="store_true", help="as JSON")
    dump.add_argument(
        "--running", action="store_true", help="of the cluster that runs, not of a new one"
    )
    dump.set_defaults(verb=_dump_config)

    doctor = verbs.add_parser("doctor", help="whether this host can run a cluster, and what to fix")
    add_flags(doctor)
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.add_argument("--deep", action="store_true", help="read all prepared models too, against their digests")
    doctor.set_defaults(verb=_doctor)

    collect = verbs.add_parser("collect-env", help="what a bug report needs to say of this host")
    add_flags(collect)
    collect.add_argument("--json", action="store_true", help="as JSON")
    collect.set_defaults(verb=_collect_env)

    replay = verbs.add_parser("replay", help="repeat the decisions of a router's log; what others would have chosen")
    replay.add_argument("log", metavar="LOG", type=Path, help="the file that `router.decision_log` names")
    replay.add_argument(
        "--policy", metavar="NAME", nargs="+", action="extend", default=[], help="policies to ask about the same views"
    )
    replay.add_argument("--json", action="store_true", help="as JSON")
    replay.set_defaults(verb=_replay)


def _plan(arguments: argparse.Namespace) -> int:
    from cluster.plan.plan import is_own, make_plan
    from cluster.plan.report import check_text, plan_text

    asked, config = read_flags(arguments), resolve(arguments, os.environ).config
    if not is_own(asked, config):
        config = resolve(arguments, os.environ, device="cuda").config
    plan = make_plan(asked, config)
    if not arguments.check:
        print(msgspec.json.encode(plan).decode() if arguments.json else plan_text(plan))
        return 1 if any(pool.missing_bytes for pool in plan.pools) else 0
    from cluster.plan.check import check_plan

    compared = check_plan(plan, config)
    print(msgspec.json.encode(compared).decode() if arguments.json else check_text(compared))
    return 0 if all(one.fits for one in compared) else 1


def _dump_config(arguments: argparse.Namespace) -> int:
    resolved = _settled(arguments)
    if arguments.running:
        from cluster.admin_client import AdminClient
        from cluster.rundir import RunDir

        with AdminClient(RunDir(resolved.config, os.environ)) as client:
            rows = client.config()
    else:
        rows = {s.key: {"value": s.public, "origin": s.origin} for s in resolved.settings}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    shown = {key: json.dumps(row["value"]) for key, row in rows.items()}
    keys = max(len(key) for key in shown)
    values = max(len(value) for value in shown.values())
    for key, row in rows.items():
        print(f"{key:{keys}}  {shown[key]:{values}}  # {row['origin']}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from cluster.doctor.host import examine, print_checks

    checks = examine(resolve(arguments, os.environ).config, os.environ, arguments.deep)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(checks)).decode())
    else:
        print_checks(checks)
    return 1 if any(check.level == "fail" for check in checks) else 0


def _collect_env(arguments: argparse.Namespace) -> int:
    from cluster.doctor.environment import collect, print_environment

    found = collect(_settled(arguments), os.environ)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_environment(found)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from cluster.cli.replay import ReplayError, replay, text
    from router.core.policies import POLICIES

    for name in arguments.policy:
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is none of {', '.join(POLICIES)}")
    try:
        report = replay(arguments.log, arguments.policy)
    except ReplayError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(report).decode() if arguments.json else text(arguments.log, report))
    return 0 if report.equal == report.decisions else 1


def _settled(arguments: argparse.Namespace) -> Resolved:
    """Resolve every setting; an `engine.dtype` stays "auto" where only the model's file says it and the file is not
    here."""
    resolved = resolve(arguments, os.environ)
    try:
        return settled(resolved)
    except ModelError as error:
        print(f"headrace: engine.dtype is not known here: {error}", file=sys.stderr)
        return resolved
