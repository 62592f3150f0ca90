"""Ranks as processes: what they compute, that they wait asleep, and what the end or the error of one costs."""

import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import EngineDevice, open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from engine.ranks.device_orders import DeviceOrder
from engine.ranks.group import RankGroup
from engine.ranks.orders import ANNOUNCEMENT, RankOrder, digest_of
from engine.ranks.sums import RankError, memory_file, set_wait
from engine.step import StepPlan
from engine.types import BlockId
from tests.engine.model.checkpoints import build, save_hf

BLOCKS = [BlockId(block) for block in (3, 1, 6, 0)]
CONFIG = EngineConfig(pool_bytes=8 * 16 * 2 * 4 * 2 * 16 * 4, deterministic="off", rank_wait_s=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six heads and six KV heads: two and three ranks."""
    folder = tmp_path_factory.mktemp("tiny")
    model = build("qwen2", num_attention_heads=6, num_key_value_heads=6, hidden_size=96)
    return prepare(save_hf(model, folder / "model"), folder / "cache")


def opened(folder: Path, **options: object) -> EngineDevice:
    config = msgspec.structs.replace(CONFIG, model_dir=str(folder), **options)
    layout = ModelConfig.load(folder).kv_layout(16, config.kv_dtype_of("float32"))
    return open_device(msgspec.structs.replace(config, pool_bytes=8 * layout.block_bytes))


def group_of(device: EngineDevice) -> RankGroup:
    assert device.ranks is not None
    return device.ranks


def close(device: EngineDevice) -> None:
    if device.ranks is not None:
        device.ranks.close()
    if device.matchers is not None:
        device.matchers.close()
    device.kv.close()


@pytest.fixture
def three(tiny: Path) -> Iterator[EngineDevice]:
    device = opened(tiny, tensor_parallel=3)
    pids = group_of(device).pids
    yield device
    close(device)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a rank has outlived its group"


def plan(tokens: list[int], start: int = 0, copies: tuple[tuple[BlockId, BlockId], ...] = ()) -> StepPlan:
    row = msgspec.structs.replace(trial_row(tokens, start, BLOCKS), draw=True)
    return StepPlan((row,), copies=copies)


def answer(device: EngineDevice) -> list[object]:
    """Draw ten tokens greedily, behind a prompt of two chunks and a block copied to and fro."""
    tokens = list(range(40, 61))
    device.runner.launch(StepPlan((trial_row(tokens[:9], 0, BLOCKS),))).wait()
    drawn = device.runner.launch(plan(tokens, 9)).wait()
    told: list[object] = [*drawn]
    for _ in range(9):
        tokens.append(int(str(told[-1])))
        copies = ((BLOCKS[0], BlockId(5)), (BlockId(5), BLOCKS[0]))
        told += device.runner.launch(plan(tokens, len(tokens) - 1, copies)).wait()
    return told


@pytest.mark.parametrize(("ranks", "kv_dtype"), [(2, "auto"), (3, "auto"), (2, "int8"), (3, "fp8")])
def test_processes_give_the_bits_of_one_in_the_same_slices(tiny: Path, ranks: int, kv_dtype: str) -> None:
    """Guards the way from a plan to other processes: tokens, positions, block numbers and copies; of 8-bit KV, where a
    rank's scales lie."""
    alone = opened(tiny, sum_slices=ranks, kv_dtype=kv_dtype)
    group = opened(tiny, tensor_parallel=ranks, kv_dtype=kv_dtype)
    try:
        assert answer(group) == answer(alone)
        for block in BLOCKS[:1]:
            assert bytes(group.kv.block(block)) == bytes(alone.kv.block(block))
        assert group.arithmetic == alone.arithmetic
        assert f"sums of {ranks} slices" in group.arithmetic
        assert group.fingerprint == alone.fingerprint
        assert group.layout == alone.layout
    finally:
        close(group)
        close(alone)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_waiting_ranks_take_no_processor_time(three: EngineDevice) -> None:
    """Guards against a wait between steps that spins."""
    group = group_of(three)
    answer(three)
    before = [cpu_s(pid) for pid in group.pids]
    time.sleep(1.0)
    assert [cpu_s(pid) for pid in group.pids] == pytest.approx(before, abs=0.03)


def failing(device: EngineDevice) -> RankError:
    with pytest.raises(RankError) as caught:
        answer(device)
    return caught.value


def test_a_killed_rank_ends_the_group(three: EngineDevice) -> None:
    """Guards against a group that goes on, or waits, without one of its ranks, and against blaming another one."""
    rank = 2
    group, told = group_of(three), list[RankError]()
    group.watch(told.append)
    answer(three)
    os.kill(group.pids[rank - 1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [error.rank for error in told] == [rank], "nobody was told while the group was idle"
    error = failing(three)
    assert error.rank == rank
    assert "SIGKILL" in str(error)


def test_who_looks_late_is_told_of_a_rank_that_has_ended(three: EngineDevice) -> None:
    """Guards against a worker that opens, and looks alive until somebody wants a token, without one of its ranks."""
    group, told = group_of(three), list[RankError]()
    os.kill(group.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{group.pids[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    group.watch(told.append)
    assert [error.rank for error in told] == [1]


def test_a_frozen_rank_ends_the_group(three: EngineDevice) -> None:
    """Guards against a wait without end or one that spins, and against blaming a rank that waits for the frozen one as
    well."""
    rank = 1
    group = group_of(three)
    answer(three)
    os.kill(group.pids[rank - 1], signal.SIGSTOP)
    began, spent = time.monotonic(), (time.thread_time(), cpu_s(group.pids[1]))
    error = failing(three)
    waited = time.monotonic() - began
    assert CONFIG.rank_wait_s <= waited < 5
    assert time.thread_time() - spent[0] < waited / 4, "rank 0 does not sleep"
    assert cpu_s(group.pids[1]) - spent[1] < waited / 4, "rank 2 does not sleep"
    assert error.rank == rank
    assert "does not answer" in str(error)


def announce(group: RankGroup, order: RankOrder | DeviceOrder, differs: str) -> None:
    """Tell rank 1 of an order with another number, or another digest, than it will find."""
    raw = msgspec.msgpack.encode(order)
    group._memory[: len(raw)] = raw
    group._number += 1
    number = group._number + (differs == "number")
    digest = digest_of(raw, group._number) ^ (differs == "digest")
    group._orders[1].send(ANNOUNCEMENT.pack(number, len(raw), digest))


@pytest.mark.parametrize("differs", ["number", "digest"])
def test_a_rank_that_reads_another_order_says_so(three: EngineDevice, differs: str) -> None:
    """Guards against ranks that go on with different steps, which is a wrong answer or a wait for ever: rank 1 is told
    of other bytes than it finds, or has missed an order."""
    answer(three)
    announce(group_of(three), RankOrder("logits"), differs)
    began_s = time.monotonic()
    error = failing(three)
    assert error.rank == 1
    assert "order" in str(error)
    assert time.monotonic() - began_s < CONFIG.rank_wait_s, "it was not noticed at once"


def test_ranks_at_different_sums_say_so(three: EngineDevice) -> None:
    """Guards against sums of different things: rank 0 skips one."""
    group_of(three).sums._count += 2
    error = failing(three)
    assert "sum" in str(error)


def test_a_rank_that_finds_rank_0_at_another_sum_is_the_one_that_is_named(three: EngineDevice) -> None:
    """Guards an error that blames rank 0, which decides where the others should be, or a rank that only noticed."""
    group = group_of(three)
    dict(group.sums._links)[2].send(struct.pack("<QQ", 99, 4))
    error = failing(three)
    assert error.rank == 2
    assert "says that rank 0 computes another step" in str(error)


def differing(**option: object) -> Callable[..., None]:
    """Return what opens a group whose other ranks have another option than rank 0."""
    original = RankGroup.__init__

    def opened(self: RankGroup, config: EngineConfig, *rest: Any) -> None:
        original(self, msgspec.structs.replace(config, **option), *rest)

    return opened


@pytest.mark.parametrize("pools", ["shared", "own"])
@pytest.mark.parametrize(
    ("option", "said"),
    [({"model": "other"}, "fingerprint"), ({"kv_dtype": "float16"}, "fingerprint"), ({"block_size": 8}, "blocks")],
)
def test_a_rank_that_opens_otherwise_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, object], said: str, pools: str
) -> None:
    if "model" in option:
        other = build("qwen2", num_attention_heads=6, num_key_value_heads=6, hidden_size=96, num_hidden_layers=1)
        option = {"model_dir": str(prepare(save_hf(other, tmp_path / "model"), tmp_path / "cache"))}
    monkeypatch.setattr(RankGroup, "__init__", differing(**option))
    with pytest.raises(RankError, match=said) as caught:
        opened(tiny, tensor_parallel=2, rank_pools=pools)
    assert caught.value.rank == 1


@pytest.mark.parametrize("size", [8, 1 << 13], ids=["without generations", "without its last blocks"])
def test_a_rank_whose_pool_is_smaller_than_it_says_is_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Guards generations and tiers of blocks that a rank does not have, an error that names nobody, and a file that
    stays open behind it."""
    hear = RankGroup._hear

    def shrunk(self: RankGroup, rank: int, kind: Any, files: list[int] | None = None) -> Any:
        said = hear(self, rank, kind, files)
        if files and rank == 2:
            smaller = memory_file("smaller", size)
            os.dup2(smaller, files[0])
            os.close(smaller)
        return said

    monkeypatch.setattr(RankGroup, "_hear", shrunk)
    with pytest.raises(RankError, match="another pool than it says") as caught:
        opened(tiny, tensor_parallel=3, rank_pools="own")
    assert caught.value.rank == 2
    open_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert size > 8 or not any("memfd:smaller" in name for name in open_files)  # a map keeps one of its own


def test_a_rank_that_is_not_understood_is_named(three: EngineDevice) -> None:
    """Guards an error that names nobody where a rank says what is no record."""
    group, order = group_of(three), RankOrder("logits")
    link = group._orders[2]
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    group._orders[2] = here
    there.send(b"\xc1")
    try:
        error = group.explained(RankError(2, "does not answer"))
        assert (error.rank, error.problem.partition(" (")[0]) == (2, "does not answer")
        there.send(b"\xc1")
        with pytest.raises(RankError, match="not understood") as caught:
            group.order(order)
        assert caught.value.rank == 2
    finally:
        group._orders[2] = link
        here.close()
        there.close()


def test_a_wait_as_short_as_can_be_is_one() -> None:
    """Guards a limit that is rounded to none, which a socket takes for no limit at all."""
    here, there = socket.socketpair()
    with here, there:
        set_wait(here, 1e-9)
        assert struct.unpack("@ll", here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) > (0, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 4}, "6 heads .* do not divide by 4"),
        ({"tensor_parallel": 2, "sum_slices": 2}, "sum_slices"),
        ({"tensor_parallel": 2, "attention": "triton"}, "not triton"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tiny: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        opened(tiny, **options)


def test_ranks_end_with_rank_0(tiny: Path, tmp_path: Path) -> None:
    """Guards against ranks that outlive a worker that was killed, a frozen one too."""
    import subprocess
    import sys

    program = (
        "import sys, time\n"
        "from tests.engine.ranks.test_processes import opened, group_of\n"
        "from pathlib import Path\n"
        "device = opened(Path(sys.argv[1]), tensor_parallel=3)\n"
        "print(*group_of(device).pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tiny)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)
        worker.kill()
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """False also for one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
