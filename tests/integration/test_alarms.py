"""Every alert fires in a real Prometheus, on a live cluster, by the very fault that it names.

One cluster, and an act after the other, each with faults that do not hide each other's alerts and a Prometheus of its
own, so that nothing of an earlier act is in its windows. The expressions are those that are shipped; only `for`, how
long they must hold, is divided by HURRY. `tests/telemetry/test_alerts.py` has the other half: when an alert must be
silent, and when it ends.
"""

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from access.config import AccessConfig
from access.internal import INTERNAL_NAME
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig, TierConfig
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import ApiError, GenerateCall
from router.grpc.client import Client
from router.status.overview import Overview
from telemetry.dashboards import rules
from telemetry.dashboards.alerts import ALERTS
from tests.access.certificates import Pair, make_authority, make_certificate
from tests.chaos.faults import frozen, kill, stutter
from tests.integration import sabotage
from tests.integration.prometheus import BINARY, PROMTOOL, Prometheus
from tests.integration.sabotage import given, lasting
from tests.integration.scene import BLOCK_BYTES, config
from tests.integration.traffic import Calls, prompt
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

pytestmark = [
    pytest.mark.observe,
    pytest.mark.skipif(not (BINARY and PROMTOOL), reason="prometheus and promtool are not installed"),
]

HURRY = 60.0
"""How many times shorter alerts must hold than in production."""
DECODE_BLOCKS, PREFILL_BLOCKS = 64, 192
"""A prefill pool that holds whatever waits for the decode pool: else it is the one that is short."""
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
FIRED_S = 90.0
FOR_EVER_S = 3600.0
GREEDY = SamplingParams(temperature=0.0)

ACTS = {
    "deaths": (
        "HeadraceProcessDown",
        "HeadracePoolEmpty",
        "HeadraceWorkerRestarts",
        "HeadraceKvLedgerBroken",
        "HeadraceAuditFailed",
        "HeadracePoisonousRequest",
    ),
    "prefill": ("HeadraceFirstTokenLate", "HeadraceAddPrefill"),
    "decode": ("HeadraceTokensSlow", "HeadraceAddDecode", "HeadraceRequestsWait", "HeadraceKvNearlyFull"),
    "one by one": (
        "HeadraceRequestsFail",
        "HeadraceRequestsRefused",
        "HeadraceCacheBeliefsWrong",
        "HeadraceDigestMismatch",
        "HeadraceMigrationsFail",
        "HeadraceFilesRunOut",
        "HeadraceRouterSlow",
        "HeadraceCertificateEnds",
    ),
    "quarantine": ("HeadraceBlocksQuarantined",),
}


class Stage:
    """The cluster, and the folder of its workers' orders."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        small, large = (EngineConfig(pool_bytes=blocks * BLOCK_BYTES) for blocks in (DECODE_BLOCKS, PREFILL_BLOCKS))
        tiers = TierConfig(host_bytes=0)
        transfer = TransferConfig(escalate_s=FOR_EVER_S)
        self.folder = folder
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._authority = make_authority(folder)
        self._used = self._certificate("used", days=90)
        os.environ[sabotage.FOLDER] = str(self.orders)
        self.cluster = Cluster(
            ClusterConfig(
                launcher="process",
                prefill_workers=2,
                decode_workers=2,
                stop_grace_s=1.0,
                access=AccessConfig(
                    internal_cert_file=self._used.cert,
                    internal_key_file=self._used.key,
                    internal_ca_file=self._authority.cert,
                    internal_clear_kv=True,
                ),
                log_level="error",
                restart=RestartConfig(limit=100, first_pause_s=2.0, longest_pause_s=2.0),
                # Nobody is given up: what a frozen peer reads stays in quarantine, which is what an alert is for.
                router=RouterConfig(
                    grpc_port=0,
                    http_port=0,
                    slo_ttft_s=4.0,
                    slo_itl_s=0.5,
                    worker_hung_s=FOR_EVER_S,
                    escalate_s=FOR_EVER_S,
                    unplaceable_s=60.0,
                ),
                prefill=PrefillConfig(engine=large, tiers=tiers, transfer=transfer, chunk_tokens=64),
                decode=DecodeConfig(engine=small, tiers=tiers, transfer=transfer, growth_tokens=16),
            ),
            make_launcher("process"),
            sabotage.FACTORIES,
            model_dir=str(model_dir),
        )
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self.cluster.watch, args=(self._stop,), daemon=True)
        self._acts = 0
        try:
            addresses = self.cluster.start()
            self.grpc, self.http = addresses.grpc, addresses.http
            self._watcher.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(30)
        self.cluster.stop()
        del os.environ[sabotage.FOLDER]

    def put_certificate(self, days: int) -> None:
        """Put another one in the place of what the cluster's processes show each other."""
        made = self._certificate("other", days)
        shutil.copy(made.cert, self._used.cert)
        shutil.copy(made.key, self._used.key)

    def _certificate(self, file: str, days: int) -> Pair:
        return make_certificate(
            self.folder, self._authority, INTERNAL_NAME, file=file, san=f"DNS:{INTERNAL_NAME}", days=days
        )

    def pid(self, name: str) -> int:
        return self.cluster.processes()[name].pid

    @contextmanager
    def watched(self, has_begun: bool = False) -> Iterator[Prometheus]:
        """Run a Prometheus; it has scraped everybody when the body begins, unless the fault has begun already."""
        self._acts += 1
        folder = self.folder / f"act-{self._acts}"
        (folder / "rules").mkdir(parents=True)
        (folder / "rules" / "headrace.yml").write_text(rules.render(HURRY))
        prometheus = Prometheus(folder, config(f"http://{self.http}/sd"))
        try:
            if not has_begun:
                prometheus.until("count(up == 1) == 6", FIRED_S)
                # An increase is only seen where there was a sample before it.
                prometheus.until("count(count_over_time(up[1m]) >= 2) == 6", FIRED_S)
            yield prometheus
        finally:
            prometheus.close()

    def whole(self) -> None:
        """Wait until everybody is up, and a request is answered."""
        self.until(lambda: all(slot.state == "up" for slot in self.cluster.slots()), FIRED_S)
        client = Client(self.grpc)
        try:
            list(client.generate(GenerateCall(prompt=prompt(20, 1), sampling=GREEDY, max_tokens=2, ignore_eos=True)))
        finally:
            client.close()

    def until(self, condition: Callable[[], object], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.fixture(scope="module")
def stage(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    played = Stage(tmp_path_factory.mktemp("alarms"), demo_model)
    try:
        yield played
    finally:
        played.close()


def fires(prometheus: Prometheus, *alerts: str, **labels: str) -> None:
    """Wait until each of these alerts fires, with these labels."""
    matchers = "".join(f',{key}="{value}"' for key, value in labels.items())
    for alert in alerts:
        prometheus.until(f'ALERTS{{alertname="{alert}",alertstate="firing"{matchers}}}', FIRED_S)


def silent(prometheus: Prometheus, *alerts: str) -> None:
    """Fail if one of them fires already: what follows would prove nothing."""
    for alert in alerts:
        assert not prometheus.get("/api/v1/query", query=f'ALERTS{{alertname="{alert}",alertstate="firing"}}')["result"]


def test_every_alert_has_its_act() -> None:
    """Guards against an alert that is added without a proof that its fault makes it fire."""
    acts = [alert for alerts in ACTS.values() for alert in alerts]
    assert sorted(acts) == sorted(alert.name for alert in ALERTS)


def test_workers_that_die(stage: Stage) -> None:
    """By a kill, of their own books, and of a request."""
    with stage.watched() as prometheus:
        silent(prometheus, *ACTS["deaths"])
        for name in DECODES:
            kill(stage.pid(name))
        fires(prometheus, "HeadraceProcessDown", worker="decode-0")
        fires(prometheus, "HeadracePoolEmpty", role="decode")
        prometheus.until('headrace_process_deaths_total{role="decode",cause="signal"} == 2', FIRED_S)
        stage.whole()
        _break_books(stage, prometheus)
        stage.whole()
        _poison(stage, sabotage.POISON)
        fires(prometheus, "HeadracePoisonousRequest")
        stage.whole()
        _poison(stage, sabotage.POISON_AT_ONCE)
        fires(prometheus, "HeadraceWorkerRestarts", peer="decode-0")


def _break_books(stage: Stage, prometheus: Prometheus) -> None:
    """Leak a block, give one two owners, and make other books wrong: under load, for an idle worker is a rare one."""
    ledger, audit = "HeadraceKvLedgerBroken", "HeadraceAuditFailed"
    with Calls(stage.grpc, 4, 60, 24):
        given(stage.orders, "prefill-0", "leak")
        fires(prometheus, ledger, audit, role="prefill")
        given(stage.orders, "decode-0", "books")
        fires(prometheus, audit, role="decode")
        sound = f'ALERTS{{alertname="{ledger}",role="decode"}}'
        assert not prometheus.get("/api/v1/query", query=sound)["result"], "its blocks add up"
        given(stage.orders, "decode-1", "share")
        fires(prometheus, ledger, role="decode")


def _poison(stage: Stage, token: int) -> None:
    """Ask what kills its workers: it is refused with their names and ends, and takes three at most."""
    before = sum(slot.deaths for slot in stage.cluster.slots())
    call = GenerateCall(prompt=[*prompt(30, 2), token], sampling=GREEDY, max_tokens=200, ignore_eos=True)
    client = Client(stage.grpc)
    try:
        with pytest.raises(ApiError, match=r"refused as poisonous: \d workers .*decode-\d \(.*decode-\d \("):
            list(client.generate(call))
    finally:
        client.close()
    stage.until(lambda: sum(slot.deaths for slot in stage.cluster.slots()) - before >= 2, FIRED_S)
    assert sum(slot.deaths for slot in stage.cluster.slots()) - before <= 3


def test_a_prefill_pool_that_is_too_slow(stage: Stage) -> None:
    stage.whole()
    with (
        lasting(stage.orders, PREFILLS, "slow", "3.0"),
        # Many tokens: the gap behind the first holds the migration, and would make decoding look slow by itself.
        Calls(stage.grpc, 4, 250, 16) as calls,
        stage.watched(has_begun=True) as prometheus,
    ):
        fires(prometheus, *ACTS["prefill"])
    assert calls.answered


def test_a_decode_pool_that_is_too_slow_and_too_small(stage: Stage) -> None:
    """Requests of 31 blocks: two fill a worker, the others wait at the router. Many tokens: a worker is full for as
    long as two requests decode together, and must be for 5 s."""
    stage.whole()
    with (
        lasting(stage.orders, DECODES, "slow", "3.0"),
        Calls(stage.grpc, 8, 480, 14) as calls,
        stage.watched(has_begun=True) as prometheus,
    ):
        fires(prometheus, *ACTS["decode"])
    assert calls.answered


def test_clients_caches_bytes_files_and_a_router_without_a_core(stage: Stage) -> None:
    """Prefill workers whose caches are gone, deadlines that nobody could meet, nonsense; blocks that arrive spoiled; a
    limit of files that is too low; a router that is stopped again and again."""
    stage.whole()
    with stage.watched() as prometheus:
        silent(prometheus, *ACTS["one by one"])
        with (
            lasting(stage.orders, PREFILLS + DECODES, "forget"),
            Calls(stage.grpc, 1, 160, 2, shared=True),
            Calls(stage.grpc, 6, 60, 600, timeout_s=2.0) as late,
            Calls(stage.grpc, 1, 5, -1) as nonsense,
        ):
            fires(prometheus, "HeadraceRequestsFail", "HeadraceRequestsRefused", "HeadraceCacheBeliefsWrong")
            (stage.orders / "spoil").write_text("1000000")
            fires(prometheus, "HeadraceDigestMismatch", "HeadraceMigrationsFail")
            assert (stage.orders / "spoiled").exists()
            (stage.orders / "spoil").unlink()
        assert late.errors["DEADLINE_EXCEEDED"] and nonsense.errors["INVALID_ARGUMENT"]
        _take_files(stage.pid("decode-0"), lambda: fires(prometheus, "HeadraceFilesRunOut", worker="decode-0"))
        stutter(stage.pid("router"), 15, stopped_s=0.3, running_s=0.2)
        fires(prometheus, "HeadraceRouterSlow")
        stage.put_certificate(days=3)
        for worker in ("router", "decode-0"):
            fires(prometheus, "HeadraceCertificateEnds", worker=worker, certificate="internal")


def _take_files(pid: int, meanwhile: Callable[[], None]) -> None:
    """Let the process open hardly more files than it has open."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + opened // 10 + 2, limits[1]))
    try:
        meanwhile()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_blocks_that_a_frozen_peer_may_still_read(stage: Stage) -> None:
    """Decode workers stop while prompts are on their way to them, and nobody ends them."""
    stage.whole()
    with lasting(stage.orders, PREFILLS, "slow", "0.7"), Calls(stage.grpc, 4, 400, 2):
        stage.until(lambda: _reserved(stage), FIRED_S)
        with frozen(*(stage.pid(name) for name in DECODES)), stage.watched(has_begun=True) as prometheus:
            fires(prometheus, "HeadraceBlocksQuarantined")


def _reserved(stage: Stage) -> bool:
    """Say whether blocks are on their way to both decode workers."""
    found = msgspec.json.decode(stage.cluster.ask("router", "overview"), type=Overview)
    loads = [worker.load for worker in found.workers if worker.role == "decode"]
    return sum(load is not None and load.reserved_blocks > 0 for load in loads) == 2
