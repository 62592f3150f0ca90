"""Workers that are asked to leave: their requests go on elsewhere, to the token, and nobody is lost."""

import itertools
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.secret import write
from decode_worker.role import open_decode_worker
from engine.config import EngineConfig
from engine.device import open_device
from engine.messages import PeerAddress
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from prefill_worker.role import open_prefill_worker
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from router.server import RouterServer
from tests.chaos.ground import MODES, Ask, Ground, tokens
from tests.secrets_of_tests import SECRETS
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig
from worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0)
END_S = 300.0


@pytest.fixture(scope="module")
def model_dir(demo_model: Path) -> Path:
    return demo_model


class Pair:
    """One prefill worker, two decode workers and a router in this process, so that pools and counters can be read."""

    def __init__(self, model_dir: Path, transport: str) -> None:
        engine = EngineConfig(model_dir=str(model_dir), threads=1, pool_bytes=64 * 720 * 1024)
        transfer = TransferConfig(transport=transport)
        self.prefill = open_prefill_worker(
            "prefill-0", PrefillConfig(engine=engine, transfer=transfer), "127.0.0.1", 0, SECRETS
        )
        decode = DecodeConfig(engine=engine, transfer=transfer)
        self.decodes = {
            name: open_decode_worker(name, decode, "127.0.0.1", 0, SECRETS) for name in ("decode-0", "decode-1")
        }
        self.router = RouterServer(RouterConfig(grpc_port=0, http_port=-1), str(model_dir), SECRETS)
        first = self.prefill.start()
        rest = [worker.start() for worker in self.decodes.values()]
        self.client = Client(self.router.start().grpc)
        self.router.set_workers(
            [PeerAddress(first.name, first.address)], [PeerAddress(i.name, i.address) for i in rest]
        )
        deadline_s = time.monotonic() + 20
        while not self._is_known() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _is_known(self) -> bool:
        """Say whether the router has reached everybody."""
        return bool(self.prefill.parts.routers) and all(w.parts.routers for w in self.decodes.values())

    def home(self) -> Worker[Any]:
        """The decode worker in whose batch a request runs."""
        (home,) = [w for w in self.decodes.values() if w.scheduler.running_requests]
        return home

    def close(self) -> None:
        self.client.close()
        self.router.stop(1.0)
        for worker in (self.prefill, *self.decodes.values()):
            worker.stop(1.0)


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Pair]:
    found = Pair(model_dir, request.param)
    yield found
    found.close()


def test_a_request_moves_with_its_kv(
    pair: Pair, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a move that computes the prompt again, loses or repeats a token, or keeps blocks at the source."""
    prompt = tokens(100, 5)
    call = GenerateCall(prompt=prompt, sampling=GREEDY, max_tokens=60, ignore_eos=True)
    got: list[int] = []
    at_s: list[float] = []
    finished = home = None
    for event in pair.client.generate(call):
        if isinstance(event, Delta):
            got += event.token_ids
            at_s.append(time.monotonic())
            if home is None and len(got) >= 20:
                home = pair.home()
                home.leave(30.0)
        elif isinstance(event, Finished):
            finished = event
    assert home is not None and finished is not None
    home.wait()
    target = next(w for w in pair.decodes.values() if w is not home)
    stats = finished.stats
    moved = -(-(len(prompt) + 20) // 16)
    assert stats.decode_worker == target.name and stats.prefill_worker == home.name
    assert 7 + moved <= stats.migrated_blocks <= 7 + moved + 3, "prompt once, then prompt and answer"
    assert finished.cached_tokens == 0 and stats.prompt_tokens == 100
    text = target.parts.metrics.render().decode()
    (computed,) = [s for s in text.splitlines() if 'source="computed"' in s and "_total{" in s]
    assert computed.split()[-1] == "0.0", computed
    assert home.parts.kv.pool.counts()["active"] == 0 and home.scheduler.is_idle
    covered = sum(seconds for name, seconds in stats.stages.items() if name != "unattributed")
    assert abs(finished.e2e_s - covered) <= max(0.02 * finished.e2e_s, 0.05), stats.stages
    engine = EngineConfig(model_dir=str(model_dir), threads=1)
    ours = open_device(engine)
    colocated = Colocated(open_device(engine), ours)
    record = RequestRecord(
        request=RequestId("want"),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=60,
        seed=0,
        sampling=GREEDY,
        ignore_eos=True,
    )
    (want,) = colocated.run([record])
    assert got == want.tokens
    whole = prompt + got[:-1]
    theirs = _rows(target.parts.kv, target.parts.device.kv, whole)
    assert theirs == _rows(colocated.decode.kv, ours.kv, whole)
    colocated.close()
    gaps = [b - a for a, b in itertools.pairwise(at_s)]
    with capsys.disabled():
        usual, longest = statistics.median(gaps), max(gaps)
        print(f"\nmove: the longest gap is {longest * 1e3:.0f} ms, the usual one {usual * 1e3:.0f} ms")


def _rows(manager, kv, sequence: list[int]) -> list[bytes]:  # type: ignore[no-untyped-def]
    """The valid bytes of a cached sequence's blocks, in order."""
    match = manager.cache.match(b"", sequence, len(sequence))
    nodes = [*match.nodes, match.partial] if match.partial_tokens else match.nodes
    assert (len(match.nodes) * 16 + match.partial_tokens) == len(sequence)
    lengths = [16] * (len(nodes) - 1) + [len(sequence) % 16 or 16]
    return [
        kv.tensor[node.block, :, :, :, :valid].contiguous().numpy().tobytes()
        for node, valid in zip(nodes, lengths, strict=True)
    ]


@pytest.mark.slow
def test_sigterm_lets_a_lone_worker_finish(model_dir: Path, tmp_path: Path) -> None:
    """Guards against a worker under Kubernetes that drops its requests when its pod is asked to end."""
    engine = EngineConfig(model_dir=str(model_dir), threads=1)
    prefill = open_prefill_worker("prefill-0", PrefillConfig(engine=engine), "127.0.0.1", 0, SECRETS)
    router = RouterServer(RouterConfig(grpc_port=0, http_port=-1), str(model_dir), SECRETS)
    secret = tmp_path / "secret"
    write(secret, SECRETS.valid())
    settings = [f"cache_dir={model_dir.parent}", "stop_grace_s=120", "decode.engine.threads=1", f"secret_file={secret}"]
    command = [sys.executable, "-m", "cluster.cli", "worker", "decode"]
    for setting in settings:
        command += ["--set", setting]
    lone = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert lone.stdout is not None
        ready = lone.stdout.readline()
        address = ready.rpartition(" ")[2].strip()
        first = prefill.start()
        with Client(router.start().grpc) as client:
            router.set_workers(
                [PeerAddress(first.name, first.address)], [PeerAddress("decode-0", address)]
            )
            while not router.ready():
                time.sleep(0.02)
            call = GenerateCall(
                prompt=tokens(40, 6), sampling=GREEDY, max_tokens=30, ignore_eos=True
            )
            ask = Ask(client, call)
            ask.wait_tokens(5)
            lone.send_signal(signal.SIGTERM)
            ask.join(END_S)
            assert ask.finished is not None and len(ask.tokens) == 30, ask.error
            ended_s = time.monotonic()
            assert lone.wait(20) == 0
            assert time.monotonic() - ended_s < 10, "it waits out its grace with nothing in hand"
    finally:
        lone.kill()
        lone.communicate()
        router.stop(1.0)
        prefill.stop(1.0)


class Load:
    """Clients that ask again and again until they are told to stop; every answer is compared as it ends."""

    def __init__(self, ground: Ground, clients: int) -> None:
        self.ended: list[Ask] = []
        self.wrong: list[str] = []
        self._ground = ground
        self._stop = threading.Event()
        self._prompts = [tokens(40 + 30 * n, 30 + n) for n in range(4)]
        self._want = {
            (n, mode): self._done(n, mode, "reference") for n in range(4) for mode in MODES
        }
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(END_S)

    def _done(self, number: int, mode: str, tenant: str) -> list[int]:
        ask = self._ground.ask(self._prompts[number], mode, 24, tenant)
        ask.join(END_S)
        if ask.error is not None:
            self.wrong.append(f"{tenant}: {ask.error}")
        else:
            self.ended.append(ask)
        return ask.tokens

    def _run(self, client: int) -> None:
        for turn in itertools.count(client):
            key = (turn % 4, list(MODES)[client % 2])
            got = self._done(*key, f"client-{client}-{turn}")
            if got != self._want[key]:
                self.wrong.append(f"client {client}: {got}, not {self._want[key]}")
            if self._stop.is_set():
                return

    def moved(self) -> int:
        """Answers for which more blocks were moved than their prompt has."""
        return sum(
            ask.finished is not None
            and ask.finished.stats.migrated_blocks > -(-ask.finished.prompt_tokens // 16)
            for ask in self.ended
        )


@pytest.mark.slow
def test_a_rolling_restart_under_load_drops_no_request(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a restart that any client notices: an error, a wrong token, a worker that is still the old one."""
    ground = Ground(model_dir, blocks=160)
    try:
        pids = {name: ground.pid(name) for name in ground.names}
        with Load(ground, clients=8) as load:
            before = len(load.ended)
            began_s = time.monotonic()
            ground.cluster.roll(timeout_s=END_S)
            took_s = time.monotonic() - began_s
            during = len(load.ended) - before
        assert load.wrong == []
        assert all(ground.pid(name) != pid for name, pid in pids.items()), pids
        assert during >= 8, "there was no load"
        with capsys.disabled():
            print(f"\nroll: 4 workers in {took_s:.1f} s, {during} answers meanwhile, {load.moved()} moved")
        assert load.moved() >= 1, "nothing was moved"
        ground.settle(5.0)
    finally:
        ground.close()


@pytest.mark.slow
def test_a_worker_that_is_drained_is_not_replaced(model_dir: Path) -> None:
    """Guards against a drained worker that comes back, and one that takes its requests with it."""
    ground = Ground(model_dir, blocks=96, prefill=1)
    try:
        want = ground.ask(tokens(60, 9), "seeded", 300, "reference")
        want.join(END_S)
        ask = ground.ask(tokens(60, 9), "seeded", 300, "moves")
        ask.wait_tokens(5)
        name = ground.busy("decode")
        pid = ground.pid(name)
        ground.cluster.drain(name, timeout_s=END_S)
        assert name not in ground.cluster.workers and not Path(f"/proc/{pid}").exists()
        ask.join(END_S)
        assert ask.tokens == want.tokens and ask.finished is not None
        assert ask.finished.stats.decode_worker != name
    finally:
        ground.close()
