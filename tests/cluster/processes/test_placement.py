"""Which node a process goes to."""

import pytest

from cluster.processes.placement import NODE_ID_LABEL, ClusterNode, RayConfig, gpus, selector
from engine.config import EngineConfig

CONFIG = RayConfig(address="auto")
NODES = [
    ClusterNode("a", {"pool": "prefill"}),
    ClusterNode("b", {"pool": "decode"}),
    ClusterNode("c", {"pool": "decode"}),
    ClusterNode("head"),
]


def test_the_label_decides_and_the_emptiest_node_wins() -> None:
    """Guards against a pool on the wrong hosts, and against all workers of a pool on one of its hosts."""

    def at(kind: str, ours: dict[str, int]) -> str:
        return selector(kind, CONFIG, NODES, ours, "head")[NODE_ID_LABEL]  # type: ignore[arg-type]

    assert at("prefill", {"a": 7}) == "a"
    assert at("decode", {}) == "b"
    assert at("decode", {"b": 1}) == "c"
    assert at("decode", {"b": 1, "c": 1}) == "b"
    assert at("router", {}) == "head"


def test_without_a_node_ray_waits_for_one() -> None:
    """Guards against a pin to a node that Ray is emptying, and against giving up while a host is on its way."""
    leaving = [ClusterNode("a", {"pool": "prefill"}, is_leaving=True), ClusterNode("b", {"pool": "decode"})]
    assert selector("prefill", CONFIG, leaving, {}, "b") == {"pool": "prefill"}
    assert selector("prefill", CONFIG, [], {}, "b") == {"pool": "prefill"}


def test_another_label_or_none() -> None:
    nodes = [ClusterNode("a", {"role": "decode"}), ClusterNode("b", {"pool": "decode"})]
    named = RayConfig(address="auto", pool_label="role")
    assert selector("decode", named, nodes, {}, "x") == {"role": "decode", NODE_ID_LABEL: "a"}
    anywhere = RayConfig(address="auto", pool_label="")
    assert selector("decode", anywhere, nodes, {"a": 1}, "x") == {NODE_ID_LABEL: "b"}


def on(device: str, ranks: int = 1) -> EngineConfig:
    return EngineConfig(device=device, tensor_parallel=ranks)


def test_who_asks_for_a_gpu() -> None:
    """Guards against a router or a CPU worker that takes a GPU from others, one named by its number taken twice, and
    ranks that find fewer than they are."""
    assert gpus("prefill", on("cuda"), CONFIG) == gpus("decode", on("cuda"), CONFIG) == 1.0
    assert gpus("decode", on("cuda"), RayConfig(gpus_per_worker=0.5)) == 0.5
    assert gpus("router", on("cuda"), CONFIG) == gpus("decode", on("cpu", 2), CONFIG) == 0.0
    assert gpus("decode", on("cuda:1"), CONFIG) == 0.0
    assert gpus("decode", on("cuda", 4), CONFIG) == 4.0
    assert gpus("decode", on("cuda", 4), RayConfig(gpus_per_worker=0.0)) == 0.0
    with pytest.raises(ValueError, match=r"gpus_per_worker: 0\.5, but each of 2 ranks"):
        gpus("decode", on("cuda", 2), RayConfig(gpus_per_worker=0.5))


def test_ranks_go_to_a_host_that_has_a_gpu_for_each() -> None:
    """Guards a worker pinned to a host that is too small while another would do, and one that waits for ever."""
    nodes = [ClusterNode("a", gpus=2.0), ClusterNode("b", gpus=4.0), ClusterNode("c", gpus=4.0)]
    anywhere = RayConfig(address="auto", pool_label="")
    assert selector("decode", anywhere, nodes, {"b": 1}, "x", 4.0) == {NODE_ID_LABEL: "c"}
    assert selector("decode", anywhere, nodes, {}, "x", 2.0) == {NODE_ID_LABEL: "a"}
    with pytest.raises(ValueError, match="need 8 GPUs of one host, and no node has more than 4"):
        selector("decode", anywhere, nodes, {}, "x", 8.0)
    assert selector("decode", anywhere, [], {}, "x", 8.0) == {}, "a host may be on its way"


def test_a_node_that_our_workers_fill_is_not_waited_for() -> None:
    """Guards a decode worker pinned to the host whose GPUs a prefill worker has, while another is free."""
    first, second = ClusterNode("a", gpus=4.0, asked_gpus=4.0), ClusterNode("b", gpus=4.0)
    anywhere = RayConfig(address="auto", pool_label="")
    assert selector("decode", anywhere, [first, second], {}, "x", 4.0) == {NODE_ID_LABEL: "b"}
    assert selector("decode", anywhere, [first], {}, "x", 1.0) == {}, "Ray waits for any node with room"
    assert selector("decode", anywhere, [first], {}, "x") == {NODE_ID_LABEL: "a"}
