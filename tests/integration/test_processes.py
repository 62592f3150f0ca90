"""Router, prefill and decode worker as real processes with the demo model, over shared memory and over tcp."""

import os
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.processes.launch import Addresses, Cluster, make_launcher, specs
from cluster.processes.process_launcher import ProcessLauncher
from cluster.processes.spec import Sealed
from decode_worker.role import open_decode_worker
from engine.config import EngineConfig
from engine.device import open_device
from engine.kv.manager import KVCacheManager
from engine.messages import PeerAddress
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, Delta, Finished, GenerateCall
from router.grpc.client import Client
from router.server import RouterServer
from tests.integration.data_sockets import cut
from tests.integration.probe import Probe
from tests.secrets_of_tests import SECRETS
from transfer.config import TransferConfig
from worker.config import DecodeConfig, PrefillConfig

GREEDY = SamplingParams(temperature=0.0)
FREED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def model_dir(demo_model: Path) -> Path:
    return demo_model


class Running:
    """A cluster of three processes, a client, and a probe on either worker. Over tcp, without preemption."""

    def __init__(self, model_dir: Path, transport: str, prefill_block_size: int = 16) -> None:
        transfer = TransferConfig(transport=transport)
        self.transport = transport
        config = ClusterConfig(
            launcher="process",
            router=RouterConfig(grpc_port=0, http_port=-1),
            prefill=PrefillConfig(
                transfer=transfer, engine=EngineConfig(block_size=prefill_block_size)
            ),
            decode=DecodeConfig(
                transfer=transfer, preemption="off" if transport == "tcp" else "recompute"
            ),
        )
        self.cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        self.addresses: Addresses = self.cluster.start()
        self.client = Client(self.addresses.grpc)
        self.pids = {worker.name: worker.pid for worker in self.addresses.workers}
        where = {worker.name: worker.address for worker in self.addresses.workers}
        self.prefill = Probe("prefill", where["prefill-0"], self.cluster.keys.valid())
        self.decode = Probe("decode", where["decode-0"], self.cluster.keys.valid())

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.client.close()
        self.cluster.stop()

    def ask(
        self, prompt: list[int] | str | list[ChatMessage], **more: object
    ) -> tuple[list[int], Finished]:
        call = GenerateCall(prompt=prompt, **{"sampling": GREEDY, "max_tokens": 8, **more})  # type: ignore[arg-type]
        tokens: list[int] = []
        finished = None
        for event in self.client.generate(call):
            if isinstance(event, Delta):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None
        return tokens, finished

    def wait_quiet(self, timeout_s: float = FREED_WITHIN_S) -> None:
        self.prefill.wait_quiet(timeout_s)
        self.decode.wait_quiet(timeout_s)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def running(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Running]:
    found = Running(model_dir, request.param)
    yield found
    found.close()


def _tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(count)]


def test_blocks_really_migrate_between_the_two(running: Running) -> None:
    tokens, finished = running.ask(_tokens(100, 1), ignore_eos=True)
    assert len(tokens) == 8 and finished.reason is FinishReason.LENGTH
    stats = finished.stats
    assert stats.migrated_blocks == 7 and stats.migrated_bytes == 7 * 720 * 1024
    assert stats.transport in ("shm", "tcp") and stats.migration_s > 0
    assert (stats.prefill_worker, stats.decode_worker) == ("prefill-0", "decode-0")
    assert running.pids["prefill-0"] != running.pids["decode-0"] != os.getpid()
    covered = sum(seconds for name, seconds in stats.stages.items() if name != "unattributed")
    assert len(stats.stages) == 10
    assert abs(finished.e2e_s - covered) <= max(0.02 * finished.e2e_s, 0.005)
    running.wait_quiet()


def test_a_cut_data_connection_is_made_anew(running: Running) -> None:
    """Guards against a pair that computes every prompt twice for good, once its data connection broke under a living
    control stream. The request that meets the broken connection is answered all the same."""
    if running.transport != "tcp":
        pytest.skip("nothing to cut")
    whole, _ = running.ask(_tokens(100, 31), ignore_eos=True)
    (port,) = [
        int(worker.address.rpartition(":")[2])
        for worker in running.addresses.workers
        if worker.name == "prefill-0"
    ]
    assert cut(running.pids["decode-0"], running.pids["prefill-0"], port) == 1, "nothing was cut"
    meets, _ = running.ask(_tokens(100, 32), ignore_eos=True)
    assert len(meets) == 8
    _, after = running.ask(_tokens(100, 33), ignore_eos=True)
    assert after.stats.migrated_blocks == 7, "the prompt did not come over the pair"
    assert cut(running.pids["decode-0"], running.pids["prefill-0"], port) == 1, "not tcp"
    again, _ = running.ask(_tokens(100, 31), ignore_eos=True)
    assert again == whole
    running.wait_quiet()


def test_the_second_time_the_prompt_is_cached_on_both_sides(running: Running) -> None:
    prompt = _tokens(64, 2)
    first, cold = running.ask(prompt)
    second, warm = running.ask(prompt)
    assert first == second
    assert cold.cached_tokens == 0 and warm.cached_tokens == 63
    assert warm.stats.decode_cached_tokens == 48 and warm.stats.migrated_blocks == 1


def test_prefill_blocks_of_another_size_make_the_same_tokens(
    running: Running, model_dir: Path
) -> None:
    """Guards conversion between real processes: rows of 32-token blocks are repacked into blocks of 16."""
    converting = Running(model_dir, running.transport, prefill_block_size=32)
    try:
        for seed, count in ((21, 40), (22, 90)):
            prompt = _tokens(count, seed)
            wanted, _ = running.ask(prompt, ignore_eos=True)
            got, finished = converting.ask(prompt, ignore_eos=True)
            assert got == wanted, f"{count} tokens"
            assert finished.stats.migrated_blocks == -(-count // 16)
            assert finished.stats.transport == running.transport
            assert finished.stats.prefill_worker == "prefill-0"
            # Its next turn: what is cached here is whole blocks of 16, which may end in the middle of one of 32.
            longer = [*prompt, *wanted, *_tokens(30, seed + 100)]
            wanted, equal = running.ask(longer, ignore_eos=True)
            got, finished = converting.ask(longer, ignore_eos=True)
            assert got == wanted, f"{count} tokens, the second turn"
            cached = (equal.stats.decode_cached_tokens, equal.stats.prefill_cached_tokens)
            assert cached == (
                finished.stats.decode_cached_tokens,
                finished.stats.prefill_cached_tokens,
            )
        converting.wait_quiet()
        assert _metric(converting.decode, 'handoff_digests_total{what="verified"') > 0
        assert _metric(converting.decode, 'handoff_digests_total{what="mismatched"') == 0
        assert _metric(converting.prefill, 'handoff_digests_total{what="made"') > 0
    finally:
        converting.close()


def _metric(worker: Probe, start: str) -> float:
    """The value of a worker's sample whose name and label are in `start`."""
    name, _, label = start.partition("{")
    assert worker.info is not None
    with urllib.request.urlopen(f"http://{worker.info.metrics_address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [x for x in lines if x.startswith(f"headrace_{name}{{") and label in x]
    return float(line.rpartition(" ")[2])


def test_turn_two_finds_the_very_tokens_of_turn_one(running: Running) -> None:
    """Guards re-tokenization: the answer's ids come back as they were emitted, so the decode worker's blocks of prompt
    and answer are found. (The prefill worker never had the answer's: it computes them once.)"""
    chat = [ChatMessage("user", "Name three rivers in Europe, with commas.")]
    tokens, first = running.ask(chat, max_tokens=40)
    with Client(running.addresses.grpc) as client:
        call = GenerateCall(prompt=chat, sampling=GREEDY, max_tokens=40)
        text = "".join(event.text for event in client.generate(call) if isinstance(event, Delta))
    chat += [ChatMessage("assistant", text), ChatMessage("user", "And in Asia?")]
    _, second = running.ask(chat)
    known = first.prompt_tokens + len(tokens) - 1
    assert second.stats.decode_cached_tokens == known // 16 * 16
    assert second.cached_tokens >= first.prompt_tokens


def test_a_seed_repeats_and_none_differs(running: Running) -> None:
    warm = SamplingParams(temperature=1.0)
    prompt = _tokens(20, 3)

    def ask(seed: int | None) -> list[int]:
        return running.ask(prompt, sampling=warm, seed=seed, max_tokens=12, ignore_eos=True)[0]

    assert ask(11) == ask(11)
    assert ask(11) != ask(12)
    assert ask(None) != ask(None)


def test_the_answers_of_a_beam_search_come_best_first(running: Running) -> None:
    """Guards the way of a search through real processes: a search of width 1 is greedy, one of width 3 finds better."""
    prompt = _tokens(20, 4)
    greedy, _ = running.ask(prompt, ignore_eos=True)
    alone, one = running.ask(prompt, beam_width=1, ignore_eos=True)
    assert alone == greedy and one.beam_score is not None
    call = GenerateCall(prompt=prompt, n=3, beam_width=3, max_tokens=8, ignore_eos=True)
    events = list(running.client.generate(call))
    ends = [event for event in events if isinstance(event, Finished)]
    scores = [end.beam_score for end in sorted(ends, key=lambda end: end.sample)]
    assert None not in scores and scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len(scores) == 3 and scores[0] >= one.beam_score  # type: ignore[operator]
    texts = {e.sample: e.token_ids for e in events if isinstance(e, Delta)}
    assert len(set(texts.values())) == 3
    running.wait_quiet()


def test_more_than_fit_are_queued_not_failed(running: Running) -> None:
    """Guards the line for room: the router keeps what no worker has promised room for, and offers it again after a no.
    Without preemption there is room to grow for two at a time; with it for all, since nobody is promised what it may
    never need."""
    cities = ("France", "Italy", "Spain", "Japan", "Peru", "Egypt", "Norway", "India")

    def ask(country: str) -> Finished:
        chat = [ChatMessage("user", f"What is the capital of {country}? One short sentence.")]
        return running.ask(chat, max_tokens=4000)[1]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, cities))
    assert all(finished.reason is FinishReason.STOP for finished in answers)
    waits = sorted(f.stats.stages["route"] + f.stats.stages["reserve"] for f in answers)
    shortest = min(f.stats.stages["decode_run"] for f in answers)
    # Two at a time, the last waits for three answers.
    if running.transport == "tcp":
        assert waits[-1] > 2 * shortest, "nobody had to wait for room"
    else:
        assert waits[-1] < 2 * shortest, "somebody waited"
    running.wait_quiet()


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
@pytest.mark.parametrize("after", ["prefill has begun", "tokens come"])
def test_a_client_that_leaves_frees_both_workers(running: Running, how: str, after: str) -> None:
    client = Client(running.addresses.grpc)
    decoding = after == "tokens come"
    prompt = _tokens(40 if decoding else 1500, 20)
    events = client.generate(
        GenerateCall(prompt=prompt, sampling=GREEDY, max_tokens=400, ignore_eos=True)
    )
    for event in events:
        if isinstance(event, Delta) == decoding:
            break
    running.decode.wait_busy(20.0)
    if how == "cancel":
        events.close()  # type: ignore[attr-defined]
    client.close()
    running.wait_quiet()


def test_a_deadline_ends_it_everywhere(running: Running) -> None:
    started = time.monotonic()
    with pytest.raises(ApiError) as caught:
        running.ask(_tokens(1500, 30), timeout_s=0.5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - started < 1.5
    running.wait_quiet()


def test_bad_input_is_named_and_harms_nobody(running: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(running.ask, _tokens(60, 40), max_tokens=24, ignore_eos=True)
        for change, code, field in (
            ({"prompt": []}, "INVALID_ARGUMENT", "prompt"),
            ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
            ({"prompt": [1, 49152]}, "INVALID_ARGUMENT", "token_ids"),
            ({"prompt": _tokens(8193, 1)}, "OUT_OF_RANGE", ""),
            ({"sampling": SamplingParams(temperature=float("nan"))}, "INVALID_ARGUMENT", "temperature"),
            ({"sampling": SamplingParams(temperature=-1.0)}, "INVALID_ARGUMENT", "temperature"),
            ({"sampling": SamplingParams(top_p=1.5)}, "INVALID_ARGUMENT", "top_p"),
            ({"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens"),
            ({"max_tokens": 2_000_000_000}, "OUT_OF_RANGE", "max_tokens"),
            ({"model": "gpt-9"}, "NOT_FOUND", "model"),
            ({"stop": tuple(str(n) for n in range(10_000))}, "INVALID_ARGUMENT", "stop"),
        ):
            with pytest.raises(ApiError) as caught:
                running.ask(**{"prompt": [1, 2], **change})  # type: ignore[arg-type]
            assert caught.value.code == code, change
            assert field in caught.value.message, (field, caught.value.message)
        channel = grpc.insecure_channel(running.addresses.grpc)
        method = channel.unary_stream("/headrace.v1.Headrace/Generate")
        for raw, status in (
            (b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT),
            (b"\xff" * 40, grpc.StatusCode.INVALID_ARGUMENT),
            (b"\x00" * (5 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(method(raw))
            assert refused.value.code() is status
        channel.close()
        assert len(good.result(30)[0]) == 24
    running.wait_quiet()
    for name, pid in running.pids.items():
        assert Path(f"/proc/{pid}").exists(), f"{name} is gone"


def test_a_killed_prefill_worker_changes_no_token(model_dir: Path) -> None:
    """Guards recovery: what was under way on it is computed by the decode worker, which keeps what has landed."""
    running = Running(model_dir, "auto")
    prompt = _tokens(900, 50)
    try:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(running.ask, prompt, ignore_eos=True)
            running.prefill.wait_busy(20.0)
            time.sleep(0.5)
            pid = running.pids["prefill-0"]
            os.kill(pid, signal.SIGKILL)
            tokens, finished = job.result(timeout=60)
        running.decode.wait_quiet(2.0)
    finally:
        running.close()
    assert finished.stats.prefill_worker == "decode-0", "it was over before the worker was killed"
    device = open_device(EngineConfig(model_dir=str(model_dir), threads=1))
    colocated = Colocated(device, open_device(EngineConfig(model_dir=str(model_dir), threads=1)))
    (want,) = colocated.run([_record("want", prompt, max_tokens=8)])
    colocated.close()
    assert tokens == want.tokens


def _record(name: str, prompt: list[int], max_tokens: int) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=0,
        sampling=GREEDY,
        ignore_eos=True,
    )


def test_migrated_kv_is_byte_equal_to_the_colocated_engines(model_dir: Path) -> None:
    """Prefill worker in a process of its own, decode worker here, so that its pool can be read."""
    config = ClusterConfig(launcher="process")
    launcher = ProcessLauncher()
    spec = msgspec.structs.replace(specs(config, str(model_dir))[0], secrets=Sealed.of(SECRETS.valid()))
    child = launcher.launch(spec)
    engine = EngineConfig(model_dir=str(model_dir), threads=1)
    decode = open_decode_worker("decode-0", DecodeConfig(engine=engine), "127.0.0.1", 0, SECRETS)
    router = RouterServer(RouterConfig(grpc_port=0, http_port=-1), str(model_dir), SECRETS)
    try:
        info = decode.start()
        address = router.start().grpc
        up = None
        while up is None:
            up = child.started_within(1.0)
        router.set_workers([PeerAddress(up.name, up.address)], [PeerAddress(info.name, info.address)])
        ours_device = open_device(engine)
        colocated = Colocated(open_device(engine), ours_device)
        with Client(address) as client:
            deadline_s = time.monotonic() + 10
            while not router.ready() and time.monotonic() < deadline_s:
                time.sleep(0.05)
            for number, length in enumerate((5, 16, 130, 333)):
                prompt = _tokens(length, 60 + number)
                call = GenerateCall(prompt=prompt, sampling=GREEDY, max_tokens=1, ignore_eos=True)
                list(client.generate(call))
                colocated.run([_record(str(number), prompt, max_tokens=1)])
                ours = _rows(colocated.decode.kv, ours_device.kv, prompt)
                # The first token is the last: the answer may be here before the blocks that it came from.
                deadline_s = time.monotonic() + 10
                while _cached_tokens(decode.parts.kv, prompt) < length and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                theirs = _rows(decode.parts.kv, decode.parts.device.kv, prompt)
                assert len(ours) == len(theirs) == -(-length // 16)
                assert ours == theirs
        colocated.close()
    finally:
        router.stop(1.0)
        decode.stop(1.0)
        child.stop(1.0)
        launcher.close()


def _cached_tokens(manager: KVCacheManager, prompt: list[int]) -> int:
    match = manager.cache.match(b"", prompt, len(prompt))
    return len(match.nodes) * manager.block_size + match.partial_tokens


def _rows(manager, kv, prompt: list[int]) -> list[bytes]:  # type: ignore[no-untyped-def]
    """The valid bytes of a cached prompt's blocks, in order."""
    match = manager.cache.match(b"", prompt, len(prompt))
    nodes = [*match.nodes, match.partial] if match.partial_tokens else match.nodes
    rest = len(prompt) % 16 or 16
    lengths = [16] * (len(nodes) - 1) + [rest]
    return [
        kv.tensor[node.block, :, :, :, :valid].contiguous().numpy().tobytes()
        for node, valid in zip(nodes, lengths, strict=True)
    ]
