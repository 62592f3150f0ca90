"""The manifests of `deploy/k8s`: Kubernetes' own schemas for what is Kubernetes' own, and every field that we use typed
for KubeRay's and the Prometheus operator's kinds, whose schemas no package carries."""

import re
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml

from cluster.config import check_listening
from cluster.processes.placement import gpus
from router.http.gate import OPEN_PATHS
from router.roster import Roster
from tests.deploy.test_ray_files import DEPLOY, check_gpu_defaults, check_ray_start, resolved

KUBERNETES = "1.33"
BUILT_IN = {"ConfigMap", "Deployment", "Service", "PersistentVolumeClaim", "NetworkPolicy", "PodDisruptionBudget"}
FOLDER = DEPLOY / "k8s"


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class Metadata(Strict):
    name: str


class HeadGroup(Strict):
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Strict):
    group_name: str
    labels: dict[str, str]
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class RayClusterSpec(Strict):
    ray_version: str
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(Strict):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class Relabeling(Strict):
    source_labels: list[str] = []
    target_label: str = ""
    regex: str = ""
    replacement: str = ""
    action: Literal["replace", "drop"] = "replace"


class SecretKey(Strict):
    name: str
    key: str


class Authorization(Strict):
    type: Literal["Bearer"]
    credentials: SecretKey


class Authority(Strict):
    secret: SecretKey


class Tls(Strict):
    server_name: str
    ca: Authority


class Endpoint(Strict):
    port: str
    path: str
    scheme: Literal["https"]
    authorization: Authorization
    tls_config: Tls
    interval: str
    honor_labels: bool
    relabelings: list[Relabeling]


class Selector(Strict):
    match_labels: dict[str, str]


class PodMonitorSpec(Strict):
    selector: Selector
    pod_metrics_endpoints: list[Endpoint]


class PodMonitor(Strict):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class Discovery(Strict):
    url: str
    refresh_interval: str
    authorization: Authorization
    tls_config: Tls


class ScrapeConfigSpec(Strict):
    scrape_interval: str
    honor_labels: bool
    scheme: Literal["HTTPS"]
    authorization: Authorization
    tls_config: Tls
    http_sd_configs: list[Discovery] = msgspec.field(name="httpSDConfigs")
    relabelings: list[Relabeling]


class ScrapeConfig(Strict):
    api_version: Literal["monitoring.coreos.com/v1alpha1"]
    kind: Literal["ScrapeConfig"]
    metadata: Metadata
    spec: ScrapeConfigSpec


KINDS = {"RayCluster": RayCluster, "PodMonitor": PodMonitor, "ScrapeConfig": ScrapeConfig}


def everything() -> list[dict[str, Any]]:
    files = sorted(FOLDER.rglob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def documents() -> dict[str, dict[str, Any]]:
    """A document of each kind; of most there is one."""
    found: dict[str, dict[str, Any]] = {}
    for document in everything():
        found.setdefault(document["kind"], document)
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The specification of each kind of pod, by its name."""
    spec = ray_cluster().spec
    groups = {group.group_name: group.template["spec"] for group in spec.worker_group_specs}
    return {"head": spec.head_group_spec.template["spec"], "front": front_pod(), **groups}


def ray_cluster() -> RayCluster:
    return msgspec.convert(documents()["RayCluster"], RayCluster)


def pod(template: dict[str, Any]) -> dict[str, Any]:
    """A pod made from a template, for the schema of pods."""
    name = {"metadata": {"name": "x", **template.get("metadata", {})}}
    return {"apiVersion": "v1", "kind": "Pod", **template, **name}


def check(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_every_document_fits_its_schema() -> None:
    found = documents()
    assert set(found) == BUILT_IN | set(KINDS)
    for document in everything():
        if document["kind"] in BUILT_IN:
            check(document)
    for kind, struct in KINDS.items():
        msgspec.convert(found[kind], struct)
    spec = ray_cluster().spec
    for group in (spec.head_group_spec, *spec.worker_group_specs):
        check(pod(group.template))


def test_a_slip_is_refused() -> None:
    """Guards against checks above that would let anything pass."""
    deployment = documents()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment)
    cluster = documents()["RayCluster"]
    cluster["spec"]["workerGroupSpecs"][0]["lables"] = {}
    with pytest.raises(msgspec.ValidationError, match="lables"):
        msgspec.convert(cluster, RayCluster)


def test_pools_by_label_and_workers_leave_before_their_pod() -> None:
    """Guards against a pool without nodes, against another Ray than is in the image, and against a pod that is killed
    while its requests still move."""
    spec = ray_cluster().spec
    assert {group.group_name: group.labels for group in spec.worker_group_specs} == {
        "prefill": {"pool": "prefill"},
        "decode": {"pool": "decode"},
    }
    pins = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={spec.ray_version}" in pins
    for group in spec.worker_group_specs:
        inside = group.template["spec"]
        (container,) = inside["containers"]
        *module, grace = container["lifecycle"]["preStop"]["exec"]["command"]
        assert module == ["python", "-m", "cluster.processes.ray_leave", "--grace"]
        assert float(grace) + 20 < inside["terminationGracePeriodSeconds"]


def test_commands_are_known_and_names_meet() -> None:
    """Guards against a flag that Ray does not know, and a service, port or label that nothing answers to."""
    found, spec = documents(), ray_cluster().spec
    for group in (spec.head_group_spec, *spec.worker_group_specs):
        flags = " ".join(f"--{name}={value}" for name, value in group.ray_start_params.items())
        check_ray_start(f"ray start {flags}")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (line,) = container["args"]
    head = f"{ray_cluster().metadata.name}-head-svc"
    assert check_ray_start(line)["address"] == f"{head}:6379"
    assert line.endswith("exec headrace up --config /etc/headrace/headrace.toml")
    service = found["Service"]["spec"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == labels == found["PodMonitor"]["spec"]["selector"]["matchLabels"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports == {"http", "grpc"}
    (discovery,) = found["ScrapeConfig"]["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"https://{found['Service']['metadata']['name']}.NAMESPACE.svc:8000/sd"


@pytest.mark.parametrize("count", [1, 2])
def test_every_router_is_scraped_once(count: int) -> None:
    """Guards the pages of several routers, which were all taken for the one that the PodMonitor scrapes."""
    own = "10.0.0.9:8000" if count == 1 else {f"router-{n}": f"10.0.0.9:{41001 + n}" for n in range(count)}
    listed = {target.labels["worker"]: target.labels for target in Roster().targets(own, "10.0.0.9:41009")}
    (rule,) = documents()["ScrapeConfig"]["spec"]["relabelings"]
    (label,) = rule["sourceLabels"]
    assert rule["action"] == "drop"
    dropped = {worker for worker, labels in listed.items() if re.fullmatch(rule["regex"], labels[label])}
    (endpoint,) = documents()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    by_pod = {one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "worker"}
    assert len(listed) == count + 1 and dropped == by_pod & set(listed) == ({"router"} if count == 1 else set())


def test_the_config_map_is_ours(tmp_path: Path) -> None:
    """Guards against a setting that `headrace up` does not know, and a router that only its own pod can reach."""
    file = tmp_path / "headrace.toml"
    file.write_text(documents()["ConfigMap"]["data"]["headrace.toml"])
    config = resolved(file)
    assert config.ray.address == "auto" and config.router.host == "0.0.0.0"
    check_listening(config)
    for pod_spec in (front_pod(), *(group.template["spec"] for group in ray_cluster().spec.worker_group_specs)):
        secrets = {v["name"]: v["secret"]["secretName"] for v in pod_spec["volumes"] if "secret" in v}
        mounts = {m["mountPath"]: secrets.get(m["name"]) for m in pod_spec["containers"][0]["volumeMounts"]}
        for file in (config.access.keys_file, config.access.cert_file, config.access.key_file):
            assert mounts[str(Path(file).parent)] == "headrace-access", "each host has the same files"
    check_gpu_defaults(config, device_share=1.0)


def front_pod() -> dict[str, Any]:
    return dict(documents()["Deployment"]["spec"]["template"]["spec"])


def test_probes_speak_tls_where_the_front_does() -> None:
    """Guards a pod that is never ready, or killed every minute, because its probes are refused."""
    (container,) = front_pod()["containers"]
    for probe in ("readinessProbe", "startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS


def gpus_by_group(spec: RayClusterSpec) -> dict[str, int]:
    """GPUs that a pod of each group is given."""
    return {
        group.group_name: sum(
            int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
            for container in group.template["spec"]["containers"]
        )
        for group in spec.worker_group_specs
    }


def test_workers_that_compute_on_a_gpu_are_given_one(tmp_path: Path) -> None:
    """Guards against a pod on a node without a GPU, or one that waits for ever for a GPU that no pod was given. Ray
    counts the limits of KubeRay's pods as its own."""
    spec = ray_cluster().spec
    file = tmp_path / "headrace.toml"
    file.write_text(documents()["ConfigMap"]["data"]["headrace.toml"])
    config = resolved(file)
    asked = {
        kind: gpus(kind, pool.engine, config.ray)
        for kind, pool in (("prefill", config.prefill), ("decode", config.decode))
    }
    assert gpus_by_group(spec) == asked == {"prefill": 1, "decode": 1}
    for group in spec.worker_group_specs:
        (toleration,) = group.template["spec"]["tolerations"]
        assert toleration["key"] == "nvidia.com/gpu"
    (head,) = spec.head_group_spec.template["spec"]["containers"]
    (front,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    images = {c["image"] for g in spec.worker_group_specs for c in g.template["spec"]["containers"]}
    assert images == {head["image"], front["image"]} and images.pop().endswith(":cuda12")


def test_what_is_applied_at_once_needs_no_other_operator() -> None:
    """Guards `kubectl apply --filename deploy/k8s` against kinds that only the Prometheus operator knows: it does not
    look into folders."""
    at_once = {doc["kind"] for file in FOLDER.glob("*.yaml") for doc in yaml.safe_load_all(file.read_text())}
    assert at_once == BUILT_IN | {"RayCluster"}
    apart = {document["kind"] for document in yaml.safe_load_all((FOLDER / "monitoring/monitoring.yaml").read_text())}
    assert apart == {"PodMonitor", "ScrapeConfig"}


def test_every_line_to_edit_is_marked() -> None:
    """Guards against an example's value that nobody is told of."""
    text = "\n".join(file.read_text() for file in sorted(FOLDER.rglob("*.yaml")))
    marked = [line for line in text.splitlines() if "EDIT" in line and not line.startswith("#")]
    examples = ("registry.example.com", "name: registry", "replicas: 1", "_workers = 1", 'model = "', "storage: ")
    for example in (*examples, "NAMESPACE"):
        lines = [line for line in text.splitlines() if example in line and "Deployment" not in line]
        unmarked = [line for line in lines if line not in marked]
        # The router's own replica is no choice: there is one.
        assert unmarked == (["  replicas: 1"] if example == "replicas: 1" else []), example
    for example in ("storageClassName", "accessModes", "kubernetes.io/metadata.name", "minAvailable"):
        assert [line for line in text.splitlines() if example in line and line not in marked] == [], example
    assert len(marked) == 20


def test_no_pod_has_rights_that_it_does_not_use() -> None:
    for name, spec in pods().items():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, f"{name}: the variables of a service `headrace` would be settings"
        user = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        assert spec["securityContext"] == user, "the user of the image"
        assert "USER 1000" in (DEPLOY / "docker/Dockerfile").read_text()
        for container in spec["containers"]:
            bounds = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == bounds


def test_pods_have_the_model_room_for_it_and_shared_memory(tmp_path: Path) -> None:
    """Guards against a worker that has no model, one that prepares it on the node's disk without end, and a /dev/shm of
    64 MiB."""
    claim = documents()["PersistentVolumeClaim"]["metadata"]["name"]
    file = tmp_path / "headrace.toml"
    file.write_text(documents()["ConfigMap"]["data"]["headrace.toml"])
    model = resolved(file).model
    for name, spec in pods().items():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} == set(volumes)
        assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
        if name == "head":
            continue
        assert volumes[mounts["/models"]["name"]]["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
        assert mounts["/models"]["readOnly"] and model.startswith("/models/")
        assert "sizeLimit" in volumes[mounts["/home/headrace/.cache/headrace"]["name"]]["emptyDir"]


def test_probes_outlast_a_start(tmp_path: Path) -> None:
    """Guards against a pod that is killed while it starts, and starts again, for ever."""
    file = tmp_path / "headrace.toml"
    file.write_text(documents()["ConfigMap"]["data"]["headrace.toml"])
    for name, spec in pods().items():
        probe = spec["containers"][0]["startupProbe"]
        patience_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert patience_s >= (1.2 * resolved(file).start_timeout_s if name == "front" else 300), name


def test_guards_are_of_pods_that_there_are() -> None:
    """Guards against a policy or a budget whose labels no pod has. KubeRay gives pods the names of their cluster and
    group."""
    cluster = ray_cluster()
    labels = [documents()["Deployment"]["spec"]["template"]["metadata"]["labels"]]
    for group in ("headgroup", *(one.group_name for one in cluster.spec.worker_group_specs)):
        labels.append({"ray.io/cluster": cluster.metadata.name, "ray.io/group": group})

    def chosen(selector: dict[str, str]) -> int:
        return sum(selector.items() <= one.items() for one in labels)

    policies = [one for one in everything() if one["kind"] == "NetworkPolicy"]
    assert [chosen(one["spec"]["podSelector"]["matchLabels"]) for one in policies] == [3, 1], "every pod has a policy"
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", []):
                if "namespaceSelector" not in peer:
                    assert chosen(peer["podSelector"]["matchLabels"])
    # Pages of metrics are at free ports, the supervisor's, on the router's pod, too.
    prometheus = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    for policy in policies:
        assert {"from": [prometheus]} in policy["spec"]["ingress"], policy["metadata"]["name"]
    open_ports = [rule["ports"] for rule in policies[1]["spec"]["ingress"] if "ports" in rule]
    assert open_ports == [[{"port": "http"}, {"port": "grpc"}]]
    budgets = [one["spec"] for one in everything() if one["kind"] == "PodDisruptionBudget"]
    assert [chosen(one["selector"]["matchLabels"]) for one in budgets] == [1, 1]
    # A RayCluster has no scale: under maxUnavailable nothing of it could ever be evicted.
    groups = {one.group_name: one.replicas for one in cluster.spec.worker_group_specs}
    for one in budgets:
        group = one["selector"]["matchLabels"]["ray.io/group"]
        assert "maxUnavailable" not in one and one["minAvailable"] == groups[group] - 1
