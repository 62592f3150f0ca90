"""A real cluster that is made to be broken: its processes, a client, a probe on every worker."""

import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.spec import FACTORIES, LaunchError
from cluster.processes.supervisor import RestartConfig
from engine.config import EngineConfig
from engine.messages import Load
from engine.types import Incarnation, SamplingParams
from router.config import RouterConfig
from router.core.escalation import Verdict
from router.front.api import ApiError, Delta, Finished, GenerateCall
from router.grpc.client import Client
from tests.chaos import faults
from tests.chaos.proxy import ProxiedLauncher, Proxy
from tests.integration.probe import Probe, is_quiet
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0)
MODES = {"greedy": (GREEDY, 0), "seeded": (SEEDED, 77)}
BLOCK_BYTES = 720 * 1024
HEAL_S = 60.0
INTRODUCTION_BYTES = 400
"""A worker's first frame to its router (who it is, how it fares) is longer."""


def tokens(count: int, seed: int) -> list[int]:
    """A prompt of random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


class Ask:
    """One request in a thread of its own. `tokens` and `text` grow as they come; then `finished` or `error` is set."""

    def __init__(self, client: Client, call: GenerateCall, resume: bool = False) -> None:
        self.call = call
        self.tokens: list[int] = []
        self.text = ""
        self.finished: Finished | None = None
        self.error: ApiError | None = None
        self.ended_s = 0.0
        self._client = client
        self._resume = resume
        self._news = threading.Condition()
        self._left = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.began_s = time.monotonic()
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        events = self._client.generate(self.call, self._resume)
        try:
            for event in events:
                with self._news:
                    if isinstance(event, Delta):
                        self.tokens += event.token_ids
                        self.text += event.text
                    elif isinstance(event, Finished):
                        self.finished = event
                    self._news.notify_all()
                if self._left:
                    return
        except ApiError as error:
            self.error = error
        finally:
            events.close()  # type: ignore[attr-defined]
            self.ended_s = time.monotonic()
            with self._news:
                self._news.notify_all()

    def leave(self) -> None:
        """Leave as a client that goes away: the request is cancelled at its next event."""
        self._left = True

    def wait_tokens(self, count: int, timeout_s: float = 30.0) -> None:
        """Wait until `count` tokens have come. Fails if the request ends before."""
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while len(self.tokens) < count:
                assert not (self.error or self.finished), f"over after {len(self.tokens)}: {self.error}"
                assert self._news.wait(deadline_s - time.monotonic()), f"{len(self.tokens)} tokens"

    def join(self, timeout_s: float) -> None:
        """Wait until the request has ended. Fails on silence: neither an end nor an error within the time."""
        self._thread.join(timeout_s)
        assert self.over, f"silence: no end after {timeout_s} s, {len(self.tokens)} tokens came"


class Ground:
    """`prefill` and `decode` workers with pools of `blocks` blocks behind proxies, watched and repaired by the
    supervisor. `factories` replace the workers' classes."""

    def __init__(
        self,
        model_dir: Path,
        *,
        launcher: str | ProxiedLauncher = "process",
        transport: str = "auto",
        prefill: int = 2,
        decode: int = 2,
        blocks: int = 96,
        factories: dict[str, str] | None = None,
        restarts: int = 100,
        escalate_s: float = 5.0,
        hung_s: float = 30.0,
        router_hung_s: float = 30.0,
        stuck_s: float = 10.0,
        stall_s: float = 10.0,
        deterministic: Literal["auto", "on", "off"] = "auto",
        attention: Literal["auto", "torch"] = "auto",
        ranks: int = 1,
        rank_wait_s: float = 30.0,
        rank_pools: Literal["auto", "shared", "own"] = "auto",
    ) -> None:
        transfer = TransferConfig(
            transport=transport, escalate_s=escalate_s, stuck_s=stuck_s, stall_s=stall_s
        )
        self.hung_s = hung_s
        # Threads that idle workers would lend make a prompt too short for a fault to strike in the middle of it.
        engine = EngineConfig(
            pool_bytes=blocks * BLOCK_BYTES,
            deterministic=deterministic,
            attention=attention,
            lend_cores=False,
            tensor_parallel=ranks,
            rank_wait_s=rank_wait_s,
            rank_pools=rank_pools,
        )
        config = ClusterConfig(
            launcher="ray" if launcher == "ray" else "process",
            prefill_workers=prefill,
            decode_workers=decode,
            stop_grace_s=1.0,
            log_level="error",
            restart=RestartConfig(
                limit=restarts,
                first_pause_s=0.05,
                longest_pause_s=0.2,
                router_hung_s=router_hung_s,
            ),
            router=RouterConfig(
                grpc_port=0,
                http_port=-1,
                unplaceable_s=30.0,
                escalate_s=escalate_s,
                worker_hung_s=hung_s,
            ),
            prefill=PrefillConfig(transfer=transfer, engine=engine, chunk_tokens=16),
            decode=DecodeConfig(transfer=transfer, engine=engine),
        )
        if isinstance(launcher, str):
            launcher = ProxiedLauncher(make_launcher(launcher))
        self._launcher = launcher
        self.cluster = Cluster(
            config, self._launcher, {**FACTORIES, **(factories or {})}, model_dir=str(model_dir)
        )
        self._probes: dict[tuple[str, int], Probe] = {}
        self._stop = threading.Event()
        self.gave_up = ""
        try:
            addresses = self.cluster.start()
        except BaseException:
            self.cluster.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self.client = Client(addresses.grpc)
        self.names = tuple(up.name for up in addresses.workers)

    def _watch(self) -> None:
        try:
            self.cluster.watch(self._stop)
        except LaunchError as error:
            self.gave_up = str(error)

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(30)
        for probe in self._probes.values():
            probe.close()
        self.client.close()
        self.cluster.stop()

    # who is there

    def of(self, role: str) -> list[str]:
        return [name for name in self.names if name.startswith(role)]

    def pid(self, name: str) -> int:
        return self.cluster.router.pid if name == "router" else self.cluster.workers[name].pid

    def rank_pid(self, name: str, rank: int) -> int:
        return self.cluster.workers[name].ranks[rank].pid

    def proxy(self, name: str) -> Proxy:
        return self._launcher.proxies[name]

    def probe(self, name: str) -> Probe:
        """Return a probe of the worker's latest process; opened when first asked for."""
        up = self._launcher.direct[name]
        key = (name, up.pid)
        if key not in self._probes:
            for old in [k for k in self._probes if k[0] == name]:
                self._probes.pop(old).close()
            self._probes[key] = Probe(name.partition("-")[0], up.address, self.cluster.keys.valid())
        return self._probes[key]

    def load(self, name: str) -> Load | None:
        """Return the latest report of a worker that lives and is connected to the router; None where it is not."""
        known = faults.process_state(self.pid(name)) not in ("", "Z")
        known &= self.proxy(name).bytes_out > INTRODUCTION_BYTES
        return self.probe(name).load if known else None

    def busy(self, role: str, timeout_s: float = 10.0) -> str:
        """Return the first worker of a role that holds a block or a request."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for name in self.of(role):
                load = self.load(name)
                if load is not None and not is_quiet(load):
                    return name
            time.sleep(0.002)
        raise AssertionError(f"no {role} worker became busy")

    def replaced(self, name: str, old_pid: int, timeout_s: float = HEAL_S) -> None:
        """Wait until another process answers to this name, be it a worker's or `router`."""
        deadline_s = time.monotonic() + timeout_s
        while self.pid(name) == old_pid:
            assert time.monotonic() < deadline_s, f"{name} was not replaced: {self.gave_up}"
            time.sleep(0.02)

    def settle(self, quiet_s: float) -> None:
        """Wait until every worker answers and holds nothing: free + cached == total. Fails, with the ledger, past
        `quiet_s` after all answer."""
        deadline_s = time.monotonic() + HEAL_S
        for name in self.names:
            while self.load(name) is None:
                assert time.monotonic() < deadline_s, f"{name} does not answer: {self.gave_up}"
                time.sleep(0.02)
        until_s = time.monotonic() + quiet_s
        for name in self.names:
            try:
                self.probe(name).wait_quiet(max(0.3, until_s - time.monotonic()))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    def replace(self, names: list[str]) -> None:
        """Kill these workers and wait for others in their place."""
        pids = {name: self.pid(name) for name in names}
        for pid in pids.values():
            with suppress(faults.NoEffectError):
                faults.kill(pid)
        for name, pid in pids.items():
            self.replaced(name, pid)

    def accuse(self, name: str, incarnation: Incarnation) -> None:
        """Make the router's answer name this life as one that it has given up."""
        self._launcher.accused = [Verdict(name, incarnation, "a test says so")]

    def renew(self) -> list[str]:
        """Replace every worker that still holds blocks, so that what comes next starts from a whole cluster. Returns
        their names."""
        try:
            self.settle(0.3)
            return []
        except AssertionError:
            loads = {name: self.load(name) for name in self.names}
        broken = [name for name, load in loads.items() if load is None or not is_quiet(load)]
        self.replace(broken)
        return broken

    # requests

    def ask(
        self,
        prompt: list[int],
        mode: str,
        count: int,
        tenant: str,
        *,
        resume: bool = False,
        **more: object,
    ) -> Ask:
        """`tenant` keeps the prefixes of one request out of another's reach, so that its blocks must migrate.

        With `resume` the client comes back after a broken connection."""
        sampling, seed = MODES[mode]
        call = GenerateCall(
            prompt=prompt,
            sampling=sampling,
            seed=seed,
            max_tokens=count,
            ignore_eos=True,
            tenant=tenant,
            **more,  # type: ignore[arg-type]
        )
        return Ask(self.client, call, resume)
