"""Who is listed for Prometheus, and in which state: a lost worker stays, one that left goes. Who computes otherwise."""

import asyncio
import logging
import threading
from collections.abc import Sequence

import msgspec
import pytest

from engine.messages import PeerAddress
from router.app import RouterApp
from router.config import RouterConfig
from router.hub import Hub
from router.roster import ScrapeTarget
from router.status.observer import NullObserver
from telemetry.router_metrics import RouterMetrics, WorkerView
from tests.router.bench import Bench
from tests.router.fake_cluster import ByteText, load, worker_info
from tests.secrets_of_tests import SECRETS
from tests.telemetry.pages import Samples, samples

ROUTER = ScrapeTarget(["r:80"], {"instance": "router", "worker": "router", "pool": "router"})


class Watched:
    """A hub without workers; `now` of its bench is the clock."""

    def __init__(self) -> None:
        self.bench = Bench(decodes=0, prefills=0, worker_silent_s=10.0)
        self.metrics = RouterMetrics("m")
        self.hub = Hub(self.bench.router, lambda: self.bench.now, self.metrics)

    def join(self, name: str, life: int = 1) -> None:
        info = worker_info(name, "prefill" if name.startswith("p") else "decode", life)
        info = msgspec.structs.replace(info, metrics_address=f"{name}:{9000 + life}")
        self.hub.joined(PeerAddress(name, f"{name}:1"), info)

    def page(self) -> Samples:
        self.metrics.cluster(*self.hub.observe())
        return samples(self.metrics.render())

    def value(self, family: str, **labels: str) -> float | None:
        page = self.page()
        return page.get((f"headrace_{family}", tuple(sorted(labels.items()))))

    def state(self, name: str) -> str:
        page = self.page()
        (found,) = [
            dict(labels)["state"]
            for (family, labels), value in page.items()
            if family == "headrace_worker_state" and value and dict(labels)["peer"] == name
        ]
        return found

    def addresses(self) -> list[str]:
        return [target.targets[0] for target in self.hub.roster.targets("r:80")]


def test_a_supervisor_is_listed_where_there_is_one() -> None:
    """Guards the alerts about deaths: their page is found like any other."""
    own = ScrapeTarget(["10.0.0.7:9"], {"instance": "supervisor", "worker": "supervisor", "pool": "supervisor"})
    assert Watched().hub.roster.targets("r:80", "10.0.0.7:9") == [ROUTER, own]


def test_a_router_is_ready_without_the_prefill_pool_that_was_taken_away() -> None:
    """Guards one pool that two were made of: a prefill worker that died before is not waited for, nor missed by an
    alert, once its pool is to have nobody."""
    watched = Watched()
    hub = watched.hub
    watched.join("d0")
    assert hub.ready() and watched.value("pool_ready_workers", role="prefill") is None, "there never was one"
    watched.join("p0")
    assert hub.ready()
    hub.lost("p0")
    hub.lost("p0", for_good=True)
    hub.expect_only("prefill", {"p0"})
    assert not hub.ready() and watched.value("pool_ready_workers", role="prefill") == 0, "it will be started again"
    hub.expect_only("prefill", set())
    assert hub.ready() and watched.value("pool_ready_workers", role="prefill") is None


def test_a_lost_worker_stays_listed_until_it_is_back() -> None:
    """Guards against `up == 0` that nobody can see, because who is down is not scraped any more."""
    watched = Watched()
    watched.hub.expect("d0", "decode")
    assert watched.state("d0") == "starting" and watched.hub.roster.targets("r:80") == [ROUTER]
    watched.join("d0")
    listed = ScrapeTarget(["d0:9001"], {"instance": "d0", "worker": "d0", "pool": "decode"})
    assert watched.state("d0") == "ready" and watched.hub.roster.targets("r:80") == [ROUTER, listed]
    watched.hub.lost("d0")
    assert watched.state("d0") == "lost" and watched.hub.roster.targets("r:80") == [ROUTER, listed]
    watched.hub.lost("d0", for_good=True)  # the supervisor does not name it while it is down
    assert watched.state("d0") == "lost" and watched.hub.roster.targets("r:80") == [ROUTER, listed]
    lost = {"peer": "d0", "role": "decode", "how": "lost"}
    assert watched.value("worker_losses_total", **lost) == 1
    watched.hub.expect("d0", "decode")
    watched.join("d0", life=2)
    assert watched.state("d0") == "ready" and watched.addresses() == ["r:80", "d0:9002"]
    assert watched.value("worker_lives_total", peer="d0", role="decode") == 2


def test_a_worker_that_left_is_taken_off() -> None:
    """Guards against an alert for ever about a worker that was drained."""
    watched = Watched()
    watched.hub.expect("d0", "decode")
    watched.join("d0")
    watched.hub.heard("d0", [load(leaving=True)])
    assert watched.state("d0") == "draining"
    watched.hub.lost("d0")
    assert watched.state("d0") == "lost"
    watched.hub.lost("d0", for_good=True)
    assert watched.addresses() == ["r:80"]
    assert watched.value("worker_state", peer="d0", role="decode", state="lost") is None
    assert watched.value("worker_losses_total", peer="d0", role="decode", how="left") == 1


def test_silence_counts_as_loss_and_ends_with_a_word() -> None:
    """Guards against a frozen worker that is shown as ready because its connection stands."""
    watched = Watched()
    watched.hub.expect("d0", "decode")
    watched.join("d0")
    watched.bench.now = 11.0
    assert watched.state("d0") == "lost"
    watched.hub.heard("d0", [load()])
    assert watched.state("d0") == "ready"


def test_a_worker_that_is_given_up_is_counted_once() -> None:
    """Guards against one death counted as two: given up, and then its stream breaks."""
    watched = Watched()
    watched.hub.expect("d0", "decode")
    watched.join("d0")
    watched.bench.now = 31.0
    # The router looks often; if it had not for long, it would take itself to have slept.
    watched.hub.tick()
    watched.hub.lost("d0")
    how = {
        how: watched.value("worker_losses_total", peer="d0", role="decode", how=how)
        for how in ("left", "lost", "given_up")
    }
    assert how == {"left": 0, "lost": 0, "given_up": 1}


def test_the_index_of_each_worker_is_shown() -> None:
    watched = Watched()
    watched.hub.expect("d0", "decode")
    watched.join("d0")
    watched.bench.router.index.insert("d0", [b"a", b"b"])
    assert watched.value("router_index_blocks", peer="d0") == 2


def test_workers_of_one_model_that_compute_otherwise_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Guards a promise that nobody keeps: a host without a compiler serves with other kernels, and an answer that is
    resumed there may go on otherwise."""
    watched = Watched()

    def join(name: str, arithmetic: str, fingerprint: str = "f") -> list[str]:
        caplog.clear()
        info = worker_info(name, "decode", fingerprint=fingerprint)
        info = msgspec.structs.replace(info, arithmetic=arithmetic)
        watched.hub.joined(PeerAddress(name, f"{name}:1"), info)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "router.hub"):
        assert join("d0", "native 1") == []
        assert join("d1", "native 1") == []
        assert join("d2", "torch", fingerprint="g") == [], "of another model"
        (told,) = join("d3", "torch")
        assert "d3 computes with torch, d0 with native 1" in told
        (told,) = join("d3", "torch")
        assert "d0" in told, "it does not compare itself"


def test_the_page_is_filled_in_by_the_thread_that_writes_it() -> None:
    """Guards the streams of a router of many workers, each of which has five gauges: at each scrape they were set on
    the event loop."""
    threads: list[str] = []

    class Watching(NullObserver):
        def cluster(self, waiting: int, running: int, workers: Sequence[WorkerView]) -> None:
            threads.append(threading.current_thread().name)
            self.seen = [worker.peer for worker in workers]

        def render(self) -> bytes:
            return ",".join(self.seen).encode()

    async def body() -> None:
        app = RouterApp(RouterConfig(grpc_port=0, http_port=-1), ByteText(), Watching(), SECRETS)
        for name in ("d0", "p0"):
            app.hub.expect(name, "decode" if name == "d0" else "prefill")
        assert await app.metrics_text() == b"d0,p0"
        app._pages.shutdown()
        app._frontend.close()

    asyncio.run(body())
    assert threads == ["metrics page_0"]
