"""Sums over ranks in one kernel: between processes that share memory of this host, in Triton's interpreter."""

import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import engine.ranks.one_shot
from engine.model.split import Share
from engine.ranks.one_shot import OneShotSums, open_one_shot
from engine.ranks.sums import RankError
from kernels.rank_sum import PART_BYTES, buffer_bytes, flag_bytes, programs_of, rank_sum
from tests.engine.ranks.one_shot_rank import MOST_BYTES, PLANTS, SHAPES, Setup


def pairs(ranks: int) -> dict[tuple[int, int], socket.socket]:
    """Return `rank`'s end of its socket to `other`, for all."""
    found = {}
    for low in range(ranks):
        for high in range(low + 1, ranks):
            found[low, high], found[high, low] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return found


def run(folder: Path, ranks: int, steps: int, **options: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run ranks as processes until all have ended, or one of them has failed."""
    ends = pairs(ranks)
    processes = []
    for rank in range(ranks):
        links = {other: ends[rank, other].fileno() for other in range(ranks) if other != rank}
        setup = msgspec.json.encode(Setup(rank, ranks, links, steps, **options)).decode()
        command = [sys.executable, "-m", "tests.engine.ranks.one_shot_rank", setup]
        with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, pass_fds=tuple(links.values())))
    for end in ends.values():
        end.close()
    try:
        deadline_s = time.monotonic() + 240
        while any(one.poll() is None for one in processes) and not any(one.poll() for one in processes):
            assert time.monotonic() < deadline_s, "ranks wait for each other for ever"
            time.sleep(0.05)
    finally:
        for one in processes:
            if one.poll() is None:
                one.send_signal(signal.SIGKILL)
    ended = []
    for rank, one in enumerate(processes):
        code = one.wait()
        out, err = ((folder / f"{rank}.{what}").read_text() for what in ("out", "err"))
        ended.append(subprocess.CompletedProcess(one.args, code, out, err))
    return ended


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_have_the_same_bits_on_every_rank(ranks: int, tmp_path: Path) -> None:
    """Guards the order of ranks, sizes that do not divide, and slots that are overwritten while another rank still
    reads them: ranks are late at random, also amid the kernel. Of every type, the bits are those of parts added in
    order."""
    done = run(tmp_path, ranks, steps=3 * len(SHAPES) + 12, seed=ranks)
    assert [one.returncode for one in done] == [0] * ranks, done[0].stderr + done[-1].stderr
    assert len({one.stdout for one in done}) == 1 and done[0].stdout


@pytest.mark.parametrize(
    "plant", ["one slot", *(pytest.param(one, marks=pytest.mark.slow) for one in PLANTS if one != "one slot")]
)
def test_a_wrong_kernel_is_noticed(plant: str, tmp_path: Path) -> None:
    """Guards the test above: with one slot, with another order, or without a wait, some sum is wrong."""
    done = run(tmp_path, 3, steps=120, seed=3, plant=plant)
    assert any("AssertionError: rank" in one.stderr for one in done), [one.stderr[-300:] for one in done]


def test_recorded_sums_count_on_with_each_replay(tmp_path: Path) -> None:
    """Guards a step that is frozen in a recording: a replay would find the flags of the first one set."""
    done = run(tmp_path, 2, steps=3, seed=5, recorded=True)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    assert len({one.stdout for one in done}) == 1


def alone(limit: int | None = None, monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[OneShotSums, list[Tensor]]:
    """Return rank 0 of two, of which the other never comes, and both memories."""
    if limit is not None and monkeypatch is not None:
        monkeypatch.setattr(engine.ranks.one_shot, "POLLS", limit)
    memory = [torch.zeros(buffer_bytes(2, MOST_BYTES), dtype=torch.uint8) for _ in range(2)]
    return OneShotSums(0, memory, MOST_BYTES, torch.device("cpu")), memory


def flags(memory: Tensor) -> Tensor:
    return memory[: 8 * 2 * programs_of(MOST_BYTES)].view(torch.int64)


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("most_bytes", [1, 4096, 12 << 10, 256 << 10])
def test_slots_begin_at_whole_lines(ranks: int, most_bytes: int) -> None:
    """Guards an odd number of flags, behind which vectors of 16 bytes would not be aligned: a device ends of that, and
    an interpreter does not notice."""
    programs = programs_of(most_bytes)
    assert flag_bytes(ranks, programs) % 128 == 0 and flag_bytes(ranks, programs) >= 8 * ranks * programs
    slots_bytes = buffer_bytes(ranks, most_bytes) - flag_bytes(ranks, programs)
    assert slots_bytes == 2 * programs * PART_BYTES >= 2 * most_bytes


def test_a_rank_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a device that spins for ever, an answer made of what lay in a slot, and a rank that goes on telling others
    of parts that are none: they would go on with them."""
    sums, (_, other) = alone(50, monkeypatch)
    x = torch.ones(1025)
    sums.sum(x)
    assert x.isnan().all() and sorted(flags(other).tolist())[-2:] == [1, 1]
    with pytest.raises(RankError, match="does not answer") as found:
        sums.check()
    assert found.value.rank == 1
    monkeypatch.setattr(engine.ranks.one_shot, "POLLS", 1 << 30)
    flags(sums._buffers[0]).fill_(9)  # as though the other had come after all
    slots = sums._buffers[0][flag_bytes(2, programs_of(MOST_BYTES)) :].clone()
    x = torch.full((1025,), 2.0)
    sums.sum(x)
    assert x.isnan().all(), "it takes part again"
    assert torch.equal(sums._buffers[0][-len(slots) :], slots), "it writes where another may still read"
    assert sorted(flags(other).tolist())[-2:] == [1, 1], "it tells of another part"


def test_the_host_ends_a_wait() -> None:
    """Guards the watch over ranks, which cannot end a kernel but by asking it."""
    sums, _ = alone()
    timer = threading.Timer(0.3, sums.abort)
    began_s, x = time.monotonic(), torch.ones(5)
    timer.start()
    sums.sum(x)
    assert 0.2 < time.monotonic() - began_s < 20.0 and x.isnan().all()
    with pytest.raises(RankError):
        sums.check()


def test_what_does_not_fit_is_refused() -> None:
    sums, _ = alone()
    for x in (torch.ones(MOST_BYTES // 4 + 1), torch.ones(4, 4).T, torch.ones(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="for sums of up to 16384 bytes"):
            sums.sum(x)
    sums.sum(torch.ones(0))  # asks nobody
    assert not sums._steps.any()
    with pytest.raises(TypeError, match="interpreter"):
        rank_sum(
            torch.ones(3, dtype=torch.bfloat16),
            *(sums._addresses, sums._steps, sums._notes),
            0,
            engine.ranks.one_shot.config_for(engine.ranks.one_shot.ConfigKey("rank_sum", 0, 0, 0, "bfloat16", 90)),
        )


class Told:
    """Devices of which some cannot share, or map, memory."""

    def __init__(self, rank: int, shares: bool, maps: bool) -> None:
        self._rank, self._shares, self._maps = rank, shares, maps

    def shared(self, nbytes: int, ranks: int) -> tuple[Tensor, bytes]:
        if not self._shares:
            raise ValueError("GPU 1 has no atomics over its link with GPU 0")
        return torch.zeros(nbytes, dtype=torch.uint8), b"memory"

    def map(self, name: bytes, blocks: int, block_bytes: int) -> Tensor:
        if not self._maps:
            raise ValueError("cannot map the peer's pool: invalid argument")
        return torch.zeros(blocks, block_bytes, dtype=torch.uint8)


def opened(shares: bool, maps: bool, most_bytes: int = MOST_BYTES) -> list[tuple[OneShotSums | None, str]]:
    """Open three ranks, of which rank 1 cannot do everything."""
    ends = pairs(3)

    def one(rank: int) -> tuple[OneShotSums | None, str]:
        links = {other: ends[rank, other] for other in range(3) if other != rank}
        devices: Any = Told(rank, rank != 1 or shares, rank != 1 or maps)
        return open_one_shot(Share(rank, 3), most_bytes, devices, torch.device("cpu"), links)

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(one, range(3)))
    for end in ends.values():
        end.close()
    return found


def test_all_ranks_add_up_in_one_kernel_or_none_does(caplog: pytest.LogCaptureFixture) -> None:
    """Guards ranks that wait for each other in two ways, and a fall back that nobody is told of."""
    assert all(sums is not None and by == "up to 16 KiB in one kernel, else by NCCL" for sums, by in opened(True, True))
    for shares, maps, why in (
        (False, True, "GPU 1 has no atomics over its link with GPU 0"),
        (True, False, "cannot map the peer's pool: invalid argument"),
    ):
        caplog.clear()
        assert opened(shares, maps) == [(None, f"by NCCL alone: rank 1: {why}")] * 3
        assert f"by NCCL alone: rank 1: {why}" in caplog.text
    for most_bytes in (0, -5000):
        why = f"by NCCL alone: rank 0: engine.one_shot_bytes is {most_bytes}"
        assert opened(True, True, most_bytes) == [(None, why)] * 3


def test_a_rank_that_ends_while_they_agree_is_named() -> None:
    ends = pairs(2)
    ends[1, 0].close()
    devices: Any = Told(0, True, True)
    with pytest.raises(RankError, match="has ended") as found:
        open_one_shot(Share(0, 2), MOST_BYTES, devices, torch.device("cpu"), {1: ends[0, 1]})
    assert found.value.rank == 1
    ends[0, 1].close()
