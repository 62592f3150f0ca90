"""Which node a process goes to."""

from cluster.processes.placement import NODE_ID_LABEL, ClusterNode, RayConfig, gpus, selector

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


def test_who_asks_for_a_gpu() -> None:
    """Guards against a router or a CPU worker that takes a GPU from others, and one named by its number taken twice."""
    assert gpus("prefill", "cuda", CONFIG) == gpus("decode", "cuda", CONFIG) == 1.0
    assert gpus("decode", "cuda", RayConfig(gpus_per_worker=0.5)) == 0.5
    assert gpus("router", "", CONFIG) == gpus("decode", "cpu", CONFIG) == 0.0
    assert gpus("decode", "cuda:1", CONFIG) == 0.0
