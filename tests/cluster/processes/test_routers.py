"""Several routers of one cluster: who is told what while one of them is away, and the ports that they share."""

import socket

import pytest

from cluster.config import ClusterConfig
from cluster.processes.events import Announce, Discard, Launch, ProcessEnded, TimePassed, Up
from cluster.processes.fronts import shared_fronts
from cluster.processes.prepare import specs
from cluster.processes.slots import SlotState
from cluster.processes.spec import ChildReady, Kind, LaunchError
from cluster.processes.supervisor import Supervisor
from router.config import RouterConfig
from tests.cluster.processes.test_supervisor import POLICY, START_TIMEOUT_S, up


def router(name: str, own: int) -> ChildReady:
    return ChildReady(name=name, pid=1, address="h:50051", http="h:8000", own=f"h:{own}")


def supervisor() -> Supervisor:
    children: dict[str, tuple[Kind, ChildReady]] = {
        "decode-0": ("decode", up("decode-0", 2)),
        "router-0": ("router", router("router-0", 10)),
        "router-1": ("router", router("router-1", 11)),
    }
    return Supervisor(POLICY, START_TIMEOUT_S, children)


def test_while_one_is_away_the_other_is_told_all() -> None:
    """Guards a router that hears of no worker any more because another one has died; the dead one stays listed, so that
    whoever scrapes it sees that it is down."""
    one = supervisor()
    assert one.routers() == ["router-0", "router-1"]
    discard, announce = one.handle(ProcessEnded("router-0", "killed by SIGKILL"), 1.0)
    assert discard == Discard("router-0") and one.routers() == ["router-1"]
    assert isinstance(announce, Announce) and [p.name for p in announce.decode] == ["decode-0"]
    assert [(p.name, p.address) for p in announce.routers] == [("router-0", "h:10"), ("router-1", "h:11")]
    assert one.handle(TimePassed(), 2.0) == [Launch("router-0")]
    (announce,) = one.handle(Up(router("router-0", 12)), 3.0)
    assert isinstance(announce, Announce) and announce.routers[0].address == "h:12"
    assert one.routers() == ["router-0", "router-1"]


def test_one_that_dies_too_often_stays_down_while_another_serves() -> None:
    """Guards a cluster that is ended by one of its routers."""
    one, now = supervisor(), 0.0
    for _ in range(POLICY.limit + 1):
        now += 4.0
        told = one.handle(ProcessEnded("router-0", "x"), now)
        assert told[0] == Discard("router-0")
        one.handle(TimePassed(), now + 3.5)
        one.handle(Up(router("router-0", 10)), now + 3.6)
        one.check()
    assert one.state("router-0") is SlotState.FAILED and one.is_steady


def test_ports_are_held_for_several_and_are_nobody_elses() -> None:
    """Guards against two clusters of one user behind one port, each of which would get some of the other's clients."""
    config = ClusterConfig(routers=2, router=RouterConfig(grpc_port=0, http_port=0))
    held, found = shared_fronts(config)
    try:
        assert [one.getsockname()[1] for one in held] == [found.router.grpc_port, found.router.http_port]
        with socket.socket() as sibling:
            sibling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sibling.bind(("127.0.0.1", found.router.http_port))
            sibling.listen()
            taken = RouterConfig(grpc_port=0, http_port=found.router.http_port)
            with pytest.raises(LaunchError, match="for HTTP"):
                shared_fronts(ClusterConfig(routers=2, router=taken))
    finally:
        for one in held:
            one.close()
    assert shared_fronts(ClusterConfig()) == ([], ClusterConfig())


def test_each_has_its_own_name_port_log_and_lots() -> None:
    config = ClusterConfig(routers=2, router=RouterConfig(decision_log="log", seed=5))
    found = [spec for spec in specs(config, "m") if spec.kind == "router"]
    assert [spec.name for spec in found] == ["router-0", "router-1"]
    assert [(spec.config["name"], spec.config["own_port"], spec.config["seed"]) for spec in found] == [
        ("router-0", 0, 5),
        ("router-1", 0, 6),
    ]
    assert [spec.config["decision_log"] for spec in found] == ["log.router-0", "log.router-1"]
    (alone,) = [spec for spec in specs(ClusterConfig(), "m") if spec.kind == "router"]
    assert (alone.name, alone.config["name"], alone.config["own_port"]) == ("router", "router", -1)
