"""A GPU's pool is what a trial leaves free at its peak: the rule, and the engine's own trial on a recorded card."""


import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.backends.gpu.graphs import Recording
from engine.backends.gpu.memory import CudaMemory, Peak, auto_pool_bytes, measure_peak
from engine.backends.gpu.runner import TRIAL_BLOCKS, TritonOpener
from engine.backends.workspace import LiveBytes
from engine.config import EngineConfig, StepLimits
from engine.device import open_device
from engine.model.llama import Llama, load_model
from engine.runner import ModelRunner
from engine.step import StepPlan
from engine.types import BlockId
from kernels.compilations import OWN
from tests.engine.backends.gpu.test_step import SMALL, prepared
from tests.engine.model.test_families import BASE
from tests.kernels.cases import DEVICE
from tests.kernels.specializations import launched

CARD = 1 << 26
LIMITS = StepLimits(chunk_tokens=40, batch=2)


class Ledger:
    """A card as its allocator sees it: what is `taken`, and the most that was `reserved`, of which part was given
    back already."""

    def __init__(self) -> None:
        self.total_bytes = 1000
        self.taken = self.reserved = self.most = 0
        self.released = 0

    def take(self, nbytes: int) -> None:
        self.taken += nbytes
        self.reserved += nbytes
        self.most = max(self.most, self.reserved)

    def free_bytes(self) -> int:
        return self.total_bytes - self.taken

    def reserved_bytes(self) -> tuple[int, int]:
        return self.reserved, self.most

    def release(self) -> None:
        self.released += 1
        self.most = self.reserved


def test_a_peak_is_the_most_that_was_taken_and_not_what_is_left_of_it() -> None:
    """Guards against memory that the allocator gave back during the trial, which serving will take again; against
    code and recordings, which no allocator counts; and against the trial's own pool."""
    card = Ledger()
    card.take(100)  # weights

    def trial() -> object:
        card.take(20)  # its pool
        card.taken += 50  # compiled code
        card.take(300)
        card.take(-130)
        return object()

    peak = measure_peak(card, trial, pool_bytes=20)
    assert peak == Peak(own_bytes=350, free_bytes=1000 - 100 - 350, total_bytes=1000)
    assert card.released == 2


def test_a_trial_is_let_go_before_the_pool_is_taken() -> None:
    """Guards against two pools at once, and recordings of the wrong one."""
    card, alive = Ledger(), [0]

    class Kept:
        def __init__(self) -> None:
            alive[0] += 1

        def __del__(self) -> None:
            alive[0] -= 1

    seen: list[int] = []
    card.release = lambda: seen.append(alive[0])  # type: ignore[method-assign]
    measure_peak(card, Kept, pool_bytes=0)
    assert seen == [0, 0]


@pytest.mark.parametrize(
    ("share", "free", "pool"),
    [
        (1.0, 600, 550),  # what is free, but for what is kept
        (0.5, 600, 1000 // 2 - 100 - 200 - 50),  # no more than the share
        (0.5, 120, 70),  # the other worker has taken more than its own
        (0.2, 600, -150),  # a share in which it does not fit
    ],
)
def test_a_pool_is_what_is_free_and_within_the_workers_share(share: float, free: int, pool: int) -> None:
    """Guards two workers of one card that start at once: each finds the other's memory free."""
    peak = Peak(own_bytes=200, free_bytes=free, total_bytes=1000)
    assert auto_pool_bytes(peak, share, weights_bytes=100, kept_bytes=50) == pool


class CountedCard:
    """A card of which live tensors take memory, and nothing else does; a limit makes it run out as torch does."""

    total_bytes = CARD

    def __init__(self, counter: LiveBytes) -> None:
        self._counter = counter
        self._first = counter.live

    def free_bytes(self) -> int:
        return self.total_bytes - (self._counter.live - self._first)

    def reserved_bytes(self) -> tuple[int, int]:
        return self._counter.live, self._counter.peak

    def release(self) -> None:
        self._counter.peak = self._counter.live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    return prepared(LlamaForCausalLM(LlamaConfig(**{**BASE, **SMALL})), tmp_path_factory)


class HoldingRecorder:
    """Carries work out once; a recording is so many bytes for as long as it is there, and replays nothing."""

    NBYTES = 30_000

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Callable[[], torch.Tensor]) -> Recording:
        result, held = work(), torch.empty(self.NBYTES, dtype=torch.uint8)
        self.recorded += 1
        return Recording(partial(_keep, held), result)


def _keep(_: torch.Tensor) -> None:
    """A replay, which is of no interest here."""


class Opening:
    """An opener for a small model; `blocks` and `recorders` of every pool that was opened."""

    def __init__(self, folder: Path, limits: StepLimits = LIMITS) -> None:
        self.model: Llama = load_model(folder, device=DEVICE)
        shape = self.model.config
        self.layout = shape.kv_layout(16, "float32")
        self.recorders: list[HoldingRecorder] = []
        self.blocks: list[int] = []
        self.opener = TritonOpener(self.model, self.layout, limits, self._recorder)
        real = self.opener.open

        def opened(blocks: int) -> object:
            self.blocks.append(blocks)
            return real(blocks)

        self.opener.open = opened  # type: ignore[method-assign, assignment]

    def _recorder(self) -> HoldingRecorder:
        self.recorders.append(HoldingRecorder())
        return self.recorders[-1]


AUTO = EngineConfig(model_dir="x", pool_bytes="auto", reserve_bytes=1 << 20)

needs_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="counts tensors of the host")


@needs_interpreter
@torch.inference_mode()
def test_the_engine_sizes_its_pool_by_a_trial_and_records_again(folder: Path) -> None:
    """Guards against a pool that takes the memory in which its own steps must run, against recordings of the trial's
    pool, and against a largest step that was not among what was tried."""
    opening, counter = Opening(folder), LiveBytes()
    with counter, launched():
        card = CountedCard(counter)
        kv, runner, workspace_bytes = opening.opener.sized(AUTO, card, weights_bytes=0, kept_bytes=1 << 19)
        kept_bytes = (1 << 20) + (1 << 19)
        assert opening.blocks == [TRIAL_BLOCKS, kv.blocks]
        assert [recorder.recorded for recorder in opening.recorders] == [3, 3]
        room = CARD - workspace_bytes - kept_bytes
        assert room - opening.layout.block_bytes < kv.nbytes <= room
        card.release()
        rest = card.free_bytes()
        # A full batch beside a whole chunk, with every option of sampling.
        runner.run(_largest(opening))
        assert rest - (counter.peak - counter.live) >= kept_bytes - 1024
        assert workspace_bytes > 3 * HoldingRecorder.NBYTES


def _largest(opening: Opening) -> StepPlan:
    from engine.backends.gpu.warmup import Reach, largest_step

    return largest_step(Reach(LIMITS, 256, 16, 2))


@needs_interpreter
def test_a_pool_in_bytes_is_not_tried(folder: Path) -> None:
    opening = Opening(folder)
    config = msgspec.structs.replace(AUTO, pool_bytes=4 * opening.layout.block_bytes)
    with LiveBytes() as counter, launched():
        kv, _, workspace_bytes = opening.opener.sized(config, CountedCard(counter), 0)
    assert (opening.blocks, kv.blocks, workspace_bytes) == ([4], 4, 0)


@needs_interpreter
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool_bytes": CARD + (1 << 20)}, f"pool_bytes {CARD + (1 << 20)}: cuda:0 has {CARD} bytes free, beside 7 of"),
        ({"reserve_bytes": CARD}, r"pool_bytes auto: -\d+ bytes hold no block of"),
        ({"device_share": 0.01}, r"pool_bytes auto: -\d+ bytes hold no block of"),
    ],
)
def test_a_pool_that_does_not_fit_says_so(folder: Path, change: dict[str, object], words: str) -> None:
    config = msgspec.structs.replace(AUTO, device="cuda:0", **change)
    with LiveBytes() as counter, launched(), pytest.raises(ValueError, match=words):
        Opening(folder).opener.sized(config, CountedCard(counter), weights_bytes=7)


@needs_interpreter
def test_a_step_without_room_beside_the_pool_is_a_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against torch's page about its allocator, from deep within a warm-up, where a setting is to be named."""

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand a page more")

    monkeypatch.setattr(ModelRunner, "launch", run_out)
    config = msgspec.structs.replace(AUTO, device="cuda:0", pool_bytes=1 << 20)
    words = "pool_bytes 1048576: the largest step has no room beside it on cuda:0: CUDA out of memory. Tried to"
    with LiveBytes() as counter, launched(), pytest.raises(ValueError, match=words):
        Opening(folder).opener.sized(config, CountedCard(counter), 0)


@needs_interpreter
def test_a_warm_up_is_carried_out(folder: Path) -> None:
    """Guards the warm-up's own rows, tables and positions against what no kernel could run: all of it in the
    interpreter, over a pool of two blocks."""
    opening = Opening(folder, StepLimits(chunk_tokens=20, batch=1))
    kv, _, _ = opening.opener.open(TRIAL_BLOCKS)
    assert kv.tensor.isfinite().all() and kv.tensor.any()
    assert torch.equal(kv.memory[BlockId(0)], kv.memory[BlockId(1)])


def is_held(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@needs_interpreter
def test_a_worker_on_a_gpu_opens_its_device_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards the way from a worker's config to the trial: limits, what transports will take, the count of
    compilations. The card is of this host's memory, and the model's tensors are too."""
    model = load_model(folder, device=DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-card"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = tmp_path / f"headrace-gpu-{os.getuid()}-a-card.lock"

    def load(*args: object, **options: object) -> Llama:
        assert is_held(lock), "a neighbour's weights would count as this worker's own"
        return model

    monkeypatch.setattr("engine.device.load_model", load)
    streams: list[object] = []

    def recorder(device: torch.device, stream: object) -> HoldingRecorder:
        streams.append(stream)
        assert is_held(lock)
        return HoldingRecorder()

    monkeypatch.setattr("engine.backends.gpu.graphs.CudaRecorder", recorder)
    config = msgspec.structs.replace(AUTO, model_dir=str(folder), device="cuda", reserve_bytes=1 << 20)
    sizes = []
    for transport_bytes in (0, 1 << 22):
        with LiveBytes() as counter, launched():
            card = CountedCard(counter)
            monkeypatch.setattr("engine.backends.gpu.memory.CudaMemory", lambda device, card=card: card)
            opened = open_device(config, LIMITS, transport_bytes=transport_bytes)
        sizes.append(opened.memory.kv_bytes)
        assert opened.kv.nbytes == opened.memory.kv_bytes and opened.memory.workspace_bytes > 0
        assert opened.compilations is OWN
    assert sizes[0] - sizes[1] == pytest.approx(1 << 22, abs=opened.layout.block_bytes)
    assert streams == ["a stream"] * 4, "a trial and the real one, twice"
    assert not is_held(lock)
    assert set(chosen) == {torch.device("cuda", 0)}, "torch takes no device without a number"


def test_the_cards_memory_is_read_off_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the trial's figures: of this device, with the allocator's peak since the last release."""
    device, done = torch.device("cuda", 1), list[str]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", {device: (60, 100)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {device: 9}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {device: 30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of: done.append(f"synchronize {of}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda of: done.append(f"reset {of}"))
    card = CudaMemory(device)
    assert (card.total_bytes, card.free_bytes(), card.reserved_bytes()) == (100, 60, (9, 30))
    card.release()
    assert done == ["synchronize cuda:1", "empty", "reset cuda:1"]
