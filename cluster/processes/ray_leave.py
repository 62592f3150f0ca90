"""`python -m cluster.processes.ray_leave`: makes every worker leave the Ray node that this runs on, as a preStop hook
asks.

Ray is told first that the node is being emptied, so that nothing new is placed there. Then each worker of ours is asked
to leave: a prefill worker finishes what it has begun, a decode worker's requests move to another one. The supervisor
starts their replacements on another node of the pool, or waits until there is one.
"""

import argparse
import logging
import sys
import time
from typing import Any

from cluster.processes.ray_child import ANSWER_TIMEOUT_S, cause_of
from cluster.processes.ray_cluster import NAMESPACE
from cluster.processes.ray_launcher import imported_ray, init
from cluster.processes.spec import LaunchError

log = logging.getLogger(__name__)


def leave_node(grace_s: float) -> list[str]:
    """Empty the node that this machine is; returns the names of the workers that left. Raises LaunchError as `empty`
    does, and if this machine is no node of a Ray cluster."""
    ray = imported_ray()
    try:
        init(ray, address="auto", namespace=NAMESPACE)
    except Exception as error:
        raise LaunchError(f"this is no node of a Ray cluster: {cause_of(error)}") from error
    try:
        return empty(ray, ray.get_runtime_context().get_node_id(), grace_s)
    finally:
        ray.shutdown()


def empty(ray: Any, node: str, grace_s: float) -> list[str]:
    """Block until all our workers have left a node; returns their names. Raises LaunchError if one has not in
    `grace_s`."""
    try:
        close(ray, node, grace_s)
        workers = workers_on(ray, node)
        for worker in workers.values():
            ray.get(worker.leave.remote(grace_s), timeout=ANSWER_TIMEOUT_S)
        ends = {worker.wait.remote(): name for name, worker in workers.items()}
        there = ray.wait(list(ends), num_returns=len(ends), timeout=grace_s)[1] if ends else []
    except ray.exceptions.RayError as error:
        raise LaunchError(cause_of(error)) from error
    if there:
        names = ", ".join(ends[end] for end in there)
        raise LaunchError(f"still here after {grace_s:.0f} s: {names}")
    return sorted(workers)


def close(ray: Any, node: str, grace_s: float) -> None:
    """Ray places nothing new on the node from now on."""
    from ray.core.generated import autoscaler_pb2

    enums: Any = autoscaler_pb2
    # Of the reasons there are, the one that Ray also obeys on a node that is in use.
    reason = enums.DRAIN_NODE_REASON_PREEMPTION
    deadline_ms = int((time.time() + grace_s) * 1000)
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    gcs.drain_node(node, reason, "its workers are to leave", deadline_ms)


def workers_on(ray: Any, node: str) -> dict[str, Any]:
    """Return our workers on the node, by name."""
    found = {}
    for name in ray.util.list_named_actors():
        if not name.startswith(("prefill-", "decode-")):
            continue
        try:
            worker = ray.get_actor(name)
            if ray.get(worker.node.remote(), timeout=ANSWER_TIMEOUT_S) == node:
                found[name] = worker
        except (ValueError, ray.exceptions.RayError) as error:
            # Not up yet, on a node that does not answer, or gone meanwhile: not ours to wait for.
            log.info("%s: %s", name, cause_of(error))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.processes.ray_leave", description=__doc__)
    parser.add_argument("--grace", type=float, default=60.0, metavar="SECONDS")
    try:
        left = leave_node(parser.parse_args().grace)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    print("left:", ", ".join(left) or "nothing was here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
