"""Workers and router as actors on a Ray cluster that others run (`ray up`, KubeRay): placed by node labels.

It takes away what it started and nothing else. A worker listens on the address that Ray knows its node by, and has the
model prepared on its own host. A keeper on every node in use ends processes there, since a pid means nothing here.
"""

import logging
import socket
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.processes.keeper import KILLED_S, Keeper
from cluster.processes.placement import NODE_ID_LABEL, ClusterNode, RayConfig, gpus, selector
from cluster.processes.ray_child import ANSWER_TIMEOUT_S, RayChild, cause_of
from cluster.processes.ray_launcher import imported_ray, init
from cluster.processes.signals import check
from cluster.processes.spec import ChildSpec, LaunchError
from engine.config import EngineConfig

NAMESPACE = "headrace"
"""Ray's namespace of our actors: whoever knows it finds them by name."""
END_TIMEOUT_S = 5.0
FAULTS = {
    "killed": "did not end by itself, and was killed",
    "runs": "does not end, although it was killed",
    "silent": "may still run: its host does not answer",
}
"""What a message says of a process that did not end as it was asked to, by how it ended."""
KNOCK_TIMEOUT_S = 5.0
LEFT_S = 45.0
"""How long Ray may take to notice that the host of an earlier supervisor is lost, and to end what belonged to it."""
LOOK_S = 0.5

log = logging.getLogger(__name__)


class KeptProcess:
    """A process of any node, through that node's keeper."""

    def __init__(self, launcher: "RayClusterLauncher") -> None:
        self._launcher = launcher
        self._keeper: Any = None
        self.pid = 0
        self.node = ""

    def found(self, actor: Any, pid: int) -> None:
        self.node = self._launcher.answer(actor.node.remote())
        keeper = self._launcher.keeper(self.node)
        # Before the process can end: a keeper that looked later might take a stranger for it.
        try:
            self._launcher.answer(keeper.watch.remote(pid))
        except LaunchError:
            self._launcher.forget_keeper(self.node)
            raise
        self._keeper, self.pid = keeper, pid

    def kill(self) -> None:
        if self._keeper is not None:
            self._keeper.kill.remote(self.pid)

    def ending(self) -> Any:
        """Ask how the process ended; returns Ray's reference to the answer, None if it was never found."""
        if self._keeper is None:
            return None
        return self._keeper.end.remote(self.pid, END_TIMEOUT_S)


def _knock(address: str) -> None:
    """Connect to the address and hang up: Ray itself would wait for minutes. Raises OSError, or ValueError, where
    nobody can be there."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()


def _first(text: str) -> str:
    """Return the text's first sentence: the next ones name flags of Ray's own."""
    return text.partition(". ")[0]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A child with its process, the node that it was pinned to, if any, and the GPUs that it has asked for."""

    child: RayChild
    process: KeptProcess
    pinned: str
    gpus: float

    @property
    def node(self) -> str:
        """The node's id; empty while Ray looks for one."""
        return self.process.node or self.pinned


class RayClusterLauncher:
    """Starts actors on a Ray cluster that others run. Mutable state: the keepers by node, and every child with its
    process, owned by the thread that launches."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._ray: Any = None
        self._here = ""
        self._keepers: dict[str, Any] = {}
        self._children: list[_Placed] = []

    def open(self) -> None:
        ray = imported_ray()
        try:
            _knock(self._config.address)
            init(ray, address=self._config.address, namespace=NAMESPACE)
        except Exception as error:
            raise LaunchError(
                f"no Ray cluster at {self._config.address} (ray.address): {_first(cause_of(error))}"
            ) from error
        self._ray = ray
        self._here = ray.get_runtime_context().get_node_id()
        self._wait_alone()

    def launch(self, spec: ChildSpec) -> RayChild:
        nodes = self._nodes(spec)
        engine = msgspec.convert(spec.config.get("engine", {}), EngineConfig)
        try:
            wanted = gpus(spec.kind, engine, self._config)
            labels = selector(spec.kind, self._config, nodes, self._ours(spec), self._here, wanted)
        except ValueError as error:
            raise LaunchError(f"{spec.name}: {error}") from error
        if NODE_ID_LABEL in labels:
            self.keeper(labels[NODE_ID_LABEL])  # it starts while the worker does
        else:
            log.warning("%s waits for a node with the label %s", spec.name, labels)
        process = KeptProcess(self)
        # The node's own address: only the actor knows it.
        spec = msgspec.structs.replace(spec, host="")
        try:
            child = RayChild(self._ray, spec, process, label_selector=labels, num_gpus=wanted)
        except ValueError as error:  # the name still belongs to the actor that it replaces
            raise LaunchError(cause_of(error)) from error
        self._children = [*self._others(spec), _Placed(child, process, labels.get(NODE_ID_LABEL, ""), wanted)]
        return child

    def close(self) -> None:
        """Check that every process, which has been asked to stop, ended on its own host. Raises LaunchError with each
        that did not, or of which nobody can tell."""
        if self._ray is None:
            return
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        ends = [(one.child, one.process, one.process.ending()) for one in self._children]
        faults = [
            f"{child.spec.name} (process {process.pid} on {hosts.get(process.node, process.node)}) "
            f"{FAULTS[how]}"
            for child, process, end in ends
            if end is not None and (how := self._how(child.spec.name, end)) != "ended"
        ]
        for keeper in self._keepers.values():
            self._ray.kill(keeper)
        self._ray.shutdown()
        self._ray, self._keepers, self._children = None, {}, []
        if faults:
            raise LaunchError("; ".join(faults))

    def answer(self, reference: Any) -> Any:
        """Return what a call answers. Raises LaunchError where nobody does."""
        try:
            return self._ray.get(reference, timeout=ANSWER_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            raise LaunchError(cause_of(error)) from error

    def keeper(self, node: str) -> Any:
        """Return the keeper of a node, started when it is first needed."""
        if node not in self._keepers:
            self._keepers[node] = (
                self._ray.remote(Keeper)
                .options(
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=8,
                    label_selector={NODE_ID_LABEL: node},
                )
                .remote()
            )
        return self._keepers[node]

    def forget_keeper(self, node: str) -> None:
        """Drop a keeper that does not answer: the next process there gets another one."""
        self._keepers.pop(node, None)

    def _wait_alone(self) -> None:
        """Wait until the processes of an earlier supervisor, which end with it, are gone. Raises LaunchError if they
        stay."""
        deadline_s = time.monotonic() + LEFT_S
        told = False
        while names := sorted(self._ray.util.list_named_actors()):
            there = f"this Ray already runs {', '.join(names)}"
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"{there}: `headrace down`, on the host of their `headrace up`, ends them"
                )
            if not told:
                log.warning("%s: waiting up to %.0f s for them to end", there, LEFT_S)
                told = True
            check()
            time.sleep(LOOK_S)

    def _how(self, name: str, end: Any) -> str:
        """Return how a process ended, as its keeper says; `silent` where nobody does."""
        try:
            return str(self._ray.get(end, timeout=END_TIMEOUT_S + KILLED_S + ANSWER_TIMEOUT_S))
        except self._ray.exceptions.RayError as error:
            log.warning("%s: its host does not answer: %s", name, cause_of(error))
            return "silent"

    def _nodes(self, spec: ChildSpec) -> list[ClusterNode]:
        """Return the live nodes, as they are without the process that `spec` replaces."""
        leaving, asked = self._leaving_nodes(), defaultdict[str, float](float)
        for one in self._others(spec):
            asked[one.node] += one.gpus
        return [
            ClusterNode(
                node["NodeID"],
                node["Labels"],
                node["NodeID"] in leaving,
                float(node["Resources"].get("GPU", 0.0)),
                asked[node["NodeID"]],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _leaving_nodes(self) -> set[str]:
        from ray.autoscaler.v2.sdk import get_cluster_resource_state
        from ray.core.generated import autoscaler_pb2

        enums: Any = autoscaler_pb2
        gcs = self._ray._raylet.GcsClient(self._ray.get_runtime_context().gcs_address)
        state = get_cluster_resource_state(gcs)
        return {one.node_id.hex() for one in state.node_states if one.status == enums.DRAINING}

    def _ours(self, spec: ChildSpec) -> Counter[str]:
        """Count our processes of this kind by node, without the one to be replaced."""
        return Counter(one.node for one in self._others(spec) if one.child.spec.kind == spec.kind)

    def _others(self, spec: ChildSpec) -> list[_Placed]:
        return [one for one in self._children if one.child.spec.name != spec.name]
