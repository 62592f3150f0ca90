"""A real cluster under load, watched by Prometheus as our files say, of which a prefill and a decode worker are killed.

warm --load--> busy --a crowd exhausts the decode pools--> calm --a prefill and a decode worker are killed--> down
     --the supervisor starts others--> whole
"""

import json
import re
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig
from router.config import RouterConfig
from telemetry.dashboards import rules
from tests.chaos.faults import kill
from tests.integration.prometheus import Prometheus
from tests.integration.traffic import Calls, Crowd, Traffic
from worker.config import DecodeConfig, PrefillConfig

ROOT = Path(__file__).parents[2]
BLOCK_BYTES = 720 * 1024
BLOCKS = 64
"""Blocks of each worker: few enough that caches evict."""
CROWD = 20
"""Clients whose requests are taken with room for 4 blocks and grow to 9: half of them fit a worker at first, not in
the end."""
ITL_TARGET_MS = 100.0
DOWN_S = 8.0
"""How long a killed worker stays away."""
HURRY = 10.0
"""How many times sooner alerts fire than in production."""
PATIENCE_S = 90.0
SEEN_S = 2.5
"""Two scrapes, and some."""
VICTIMS = ("prefill-1", "decode-1")
INTERRUPTED = (
    'sum(increase(headrace_kv_migrations_total{outcome=~"retry|failed"}[2m])) > 0',
    'increase(headrace_prompt_tokens_total{source="recomputed_after_failure"}[2m]) > 0',
)
"""What the death of each interrupts, if it was busy."""


def config(sd: str) -> str:
    """The configuration that we ship, with the address that it asks its user to change, and in a hurry."""
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    assert text.count("http://127.0.0.1:8000/sd") == 1
    return text.replace("http://127.0.0.1:8000/sd", sd).replace(": 5s", ": 1s")


class Scene:
    """Played once, by `play`. `began_s`, `fault_s` and `ended_s` are times since 1970."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        engine = EngineConfig(pool_bytes=BLOCKS * BLOCK_BYTES)
        self.cluster = Cluster(
            ClusterConfig(
                launcher="process",
                prefill_workers=2,
                decode_workers=2,
                stop_grace_s=1.0,
                log_level="error",
                restart=RestartConfig(first_pause_s=DOWN_S),
                router=RouterConfig(
                    grpc_port=0,
                    http_port=0,
                    # Two busy cores and five processes: with the usual targets, goodput would be zero.
                    slo_ttft_s=5.0,
                    slo_itl_s=0.5,
                    shadow_policies=("random",),
                    decision_log=str(folder / "decisions"),
                ),
                prefill=PrefillConfig(engine=engine, chunk_tokens=32),
                # Near what a step takes here: some wait for rows, and some tokens are too late.
                decode=DecodeConfig(engine=engine, growth_tokens=16, itl_target_ms=ITL_TARGET_MS),
            ),
            make_launcher("process"),
            model_dir=str(model_dir),
        )
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self.cluster.watch, args=(self._stop,), daemon=True)
        self.prometheus: Prometheus | None = None
        try:
            addresses = self.cluster.start()
            self._grpc, self.http = addresses.grpc, addresses.http
            self._watcher.start()
            (folder / "rules").mkdir()
            (folder / "rules" / "headrace.yml").write_text(rules.render(HURRY))
            self.prometheus = Prometheus(folder, config(f"http://{self.http}/sd"))
        except BaseException:
            self.close()
            raise
        self.listed_while_down: set[str] = set()
        self.deaths: Counter[str] = Counter()
        """How often each victim was killed."""
        self.began_s = self.fault_s = self.ended_s = 0.0

    def play(self, busy_s: float = 8.0, clients: int = 6) -> None:
        """Fails if Prometheus does not see what happens."""
        assert self.prometheus is not None
        self.prometheus.until("count(up == 1) == 6", 20.0)
        self.began_s = time.time()
        traffic = Traffic(self._grpc, clients, seed=1)
        time.sleep(busy_s)
        traffic.until_mixed(PATIENCE_S)
        self._exhaust()
        pids = {name: self.cluster.workers[name].pid for name in VICTIMS}
        for name in VICTIMS:
            self._kill(name)
            self.fault_s = self.fault_s or time.time()
            # What one death did to the other victim is scraped before that one dies too.
            time.sleep(SEEN_S)
        self.prometheus.until(
            'count(ALERTS{alertname="HeadraceProcessDown",alertstate="firing"}) == 2', 20.0
        )
        self.listed_while_down = set(self.discovered())
        self.prometheus.until("count(up == 1) == 6", 40.0)
        for name in VICTIMS:
            assert self.cluster.workers[name].pid != pids[name]
        for name, seen in zip(VICTIMS, INTERRUPTED, strict=True):
            self._interrupt(name, seen)
        # What Prometheus has seen once may be too little for a rate.
        traffic.until_mixed(PATIENCE_S)
        traffic.end(PATIENCE_S)
        self.traffic = traffic.ended
        time.sleep(SEEN_S)
        self.prometheus.until(
            'absent(ALERTS{alertname="HeadraceProcessDown",alertstate="firing"})', 20.0
        )
        self.ended_s = time.time()

    def play_kills(self, busy_s: float, clients: int) -> Counter[str]:
        """Kill two workers under steady load, and nothing else; returns how requests ended, by what went wrong."""
        assert self.prometheus is not None
        self.prometheus.until("count(up == 1) == 6", 20.0)
        # Some prompts share a head, as chats share a system prompt; the others keep every worker busy.
        shared, unique = Calls(self._grpc, 1, 120, 32, shared=True), Calls(self._grpc, clients - 1, 120, 32)
        with shared, unique:
            self.prometheus.until("sum(headrace_requests_total) > 10", PATIENCE_S)
            self.began_s = time.time()
            time.sleep(busy_s)
            self.fault_s = time.time()
            for name in VICTIMS:
                self._kill(name)
            self.prometheus.until("count(up == 0) == 2", 20.0)
            self.prometheus.until("count(up == 1) == 6", 40.0)
            time.sleep(busy_s)
            self.ended_s = time.time()
        return shared.errors + unique.errors

    def _kill(self, name: str) -> None:
        """Kill the worker of this name, once it is busy."""
        self._until_busy(name)
        kill(self.cluster.workers[name].pid)
        self.deaths[name] += 1

    def _interrupt(self, name: str, seen: str) -> None:
        """Kill the worker of this name until what it interrupts is `seen`, unless the deaths so far made that happen.
        It takes a request under way at that very moment: prompts and answers take less than a second here. Fails after
        three more deaths."""
        assert self.prometheus is not None
        for _ in range(3):
            if self.prometheus.get("/api/v1/query", query=seen)["result"]:
                return
            self._kill(name)
            time.sleep(SEEN_S)
            self.prometheus.until("count(up == 1) == 6", 40.0)
        self.prometheus.until(seen, SEEN_S)

    def _exhaust(self) -> None:
        """Wait until requests have given their blocks to others, and have come back."""
        assert self.prometheus is not None
        crowd = Crowd(self._grpc, CROWD, seed=100)
        try:
            self.prometheus.until("sum(headrace_preemption_seconds_count) > 0", PATIENCE_S)
            for way in ("out", "in"):
                swapped = f'sum(headrace_swap_bytes_total{{way="{way}"}}) > 0'
                self.prometheus.until(swapped, PATIENCE_S)
        finally:
            crowd.end(PATIENCE_S)
        time.sleep(SEEN_S)

    def _until_busy(self, name: str) -> None:
        """Wait until a worker is busy: one that dies idle disturbs nobody, nor does a decode worker that has said
        nothing yet."""
        running = re.compile(rb"^headrace_running_requests\{.*\} (?!0\.0)", re.MULTILINE)
        address, deadline_s = self.discovered()[name], time.monotonic() + PATIENCE_S
        wanted = 3 if name.startswith("decode") else 1
        seen = 0
        while seen < wanted:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                seen = seen + 1 if running.search(answer.read()) else 0
            if 0 < seen < wanted:
                time.sleep(0.15)
            assert time.monotonic() < deadline_s, f"{name} got no request"

    def discovered(self) -> dict[str, str]:
        """Addresses by worker, as the router lists them."""
        with urllib.request.urlopen(f"http://{self.http}/sd", timeout=5) as answer:
            return {one["labels"]["worker"]: one["targets"][0] for one in json.load(answer)}

    def close(self) -> None:
        if self.prometheus is not None:
            self.prometheus.close()
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join(30)
        self.cluster.stop()
