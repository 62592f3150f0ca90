"""`headrace worker`: one worker in the foreground of this process, without launcher or router."""

import os

import msgspec

from cluster.config import ClusterConfig
from cluster.processes.launch import prepare_draft, prepare_model, specs
from cluster.processes.signals import Interrupted
from cluster.processes.spec import LaunchError, environment_of
from cluster.secret import opened


def run_worker(config: ClusterConfig, role: str, name: str, port: int) -> int:
    """Serve until interrupted, then leave: what runs is finished, or moved, for up to `stop_grace_s`.

    Raises LaunchError when the worker cannot start or its engine dies."""
    if not config.secret_file:
        raise LaunchError(
            "a worker that is started alone needs the secret of its cluster: name the same --set secret_file=FILE for "
            "all of it (the first one makes it)"
        )
    secrets = opened(config.secret_file)
    model_dir = prepare_model(config)
    draft_dir = prepare_draft(config, model_dir) if role == "decode" else ""
    spec = next(spec for spec in specs(config, model_dir, draft_dir=draft_dir) if spec.kind == role)
    spec = msgspec.structs.replace(spec, name=name, port=port)
    # Before torch is imported, which `hosting` leaves to the moment it builds the worker.
    os.environ.update(environment_of(spec, os.environ))
    from cluster.processes.hosting import Hosted, one_line

    try:
        hosted = Hosted(spec, secrets)
        try:
            up = hosted.start()
            print(f"{name} is ready: gRPC {up.address}\nCtrl-C stops it.", flush=True)
            try:
                hosted.wait()
            except Interrupted:
                print("leaving", flush=True)
                hosted.leave(config.stop_grace_s)
                hosted.wait()
        finally:
            hosted.stop(config.stop_grace_s)
    except Interrupted:
        print("stopping", flush=True)
    except Exception as error:
        raise LaunchError(f"{name}: {one_line(error)}") from error
    return 0
