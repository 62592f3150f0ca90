"""A cluster of real processes for a benchmark of its insides, and one request at a time through it."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.counting import FACTORIES, FOLDER, CopyCounts, read_counts
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.spec import LaunchError
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig, TierConfig
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

RESTARTS = 10_000
REPLACED_S = 60.0


class TimedAnswer(msgspec.Struct):
    """One request by its client's clock: when each token came (seconds after it was sent), and its account."""

    tokens: list[int]
    arrivals_s: list[float]
    finished: Finished

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def transfer_config(transport: str, digests: bool) -> TransferConfig:
    return TransferConfig(transport=transport, digests="all" if digests else "off")


class Bed:
    """A cluster of `prefill` and `decode` workers that count, with one thread each, watched and repaired by the
    supervisor."""

    def __init__(
        self,
        model_dir: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        transfer: TransferConfig,
        engine: EngineConfig,
        factories: Mapping[str, str] = FACTORIES,
        policy: str = "least-cost",
        tiers: TierConfig | None = None,
    ) -> None:
        self._counts = TemporaryDirectory(prefix="worker-counts-")
        os.environ[FOLDER] = self._counts.name
        self.config = config = ClusterConfig(
            launcher="process",
            prefill_workers=prefill,
            decode_workers=decode,
            stop_grace_s=1.0,
            log_level="error",
            restart=RestartConfig(limit=RESTARTS, first_pause_s=0.05, longest_pause_s=0.2),
            router=RouterConfig(grpc_port=0, http_port=-1, unplaceable_s=60.0, policy=policy),
            prefill=PrefillConfig(transfer=transfer, engine=engine, tiers=tiers or TierConfig()),
            decode=DecodeConfig(transfer=transfer, engine=engine, tiers=tiers or TierConfig()),
        )
        self.cluster = Cluster(config, make_launcher("process"), factories, model_dir=str(model_dir))
        self._stop = threading.Event()
        self._gave_up = ""
        try:
            addresses = self.cluster.start()
        except BaseException:
            self.cluster.stop()
            self._counts.cleanup()
            raise
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.client = Client(addresses.grpc)

    def __enter__(self) -> "Bed":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join(30)
        self.client.close()
        self.cluster.stop()
        self._counts.cleanup()

    def _watch(self) -> None:
        try:
            self.cluster.watch(self._stop)
        except LaunchError as error:
            self._gave_up = str(error)

    def pids(self, role: str) -> dict[str, int]:
        return {
            name: up.pid for name, up in self.cluster.workers.items() if name.startswith(role)
        }

    def counts(self, role: str) -> dict[str, CopyCounts]:
        return {name: read_counts(Path(self._counts.name), name) for name in self.pids(role)}

    def replaced(self, name: str, old_pid: int) -> None:
        """Wait until another process has the name. Raises LaunchError if none does."""
        deadline_s = time.monotonic() + REPLACED_S
        while self.cluster.workers[name].pid == old_pid:
            if self._gave_up or time.monotonic() > deadline_s:
                raise LaunchError(f"{name} was not replaced: {self._gave_up}")
            time.sleep(0.05)

    def ask(self, prompt: list[int], output_tokens: int, tenant: str, watch: "Watch | None" = None) -> TimedAnswer:
        """Ask greedily and to the full length. `tenant` keeps its prefix out of others' reach, so that nothing is
        cached; `watch` is told of each token. Raises ApiError."""
        call = GenerateCall(
            prompt=prompt,
            max_tokens=output_tokens,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.0),
            tenant=tenant,
        )
        tokens: list[int] = []
        arrivals_s: list[float] = []
        finished: Finished | None = None
        began_s = time.perf_counter()
        for event in self.client.generate(call):
            if isinstance(event, Delta):
                tokens += event.token_ids
                arrivals_s += [time.perf_counter() - began_s] * len(event.token_ids)
                if watch is not None:
                    watch.came(len(tokens))
            elif isinstance(event, Finished):
                finished = event
        if finished is None or len(tokens) != output_tokens:
            raise LaunchError(f"{len(tokens)} of {output_tokens} tokens came")
        return TimedAnswer(tokens, arrivals_s, finished)


class Watch:
    """Runs an action once, when a request has so many tokens."""

    def __init__(self, at: int, act: "threading.Event") -> None:
        self._at, self._act = at, act

    def came(self, count: int) -> None:
        if count >= self._at:
            self._act.set()


def random_prompt(tokens: int, vocab: int, seed: object) -> list[int]:
    random = Random(str(seed))
    return [random.randrange(vocab // 50, vocab) for _ in range(tokens)]
