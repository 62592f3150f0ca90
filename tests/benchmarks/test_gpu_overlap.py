"""A step beside copies: paced and timed on a device of virtual time, since there is no other here."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import overlap
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.overlap import CudaOverlap, held_to

STEP_S, PIECE_S = 8e-3, 1e-4
HZ = 1.5e9
SLOWER_BESIDE = 2.0
"""Times that a copy takes longer than alone while the device computes."""


class VirtualStream:
    def __init__(self, device: object = None) -> None:
        self.free_s = 0.0

    def wait_event(self, event: "VirtualEvent") -> None:
        self.free_s = max(self.free_s, event.at_s)


class VirtualEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self, stream: VirtualStream | None = None) -> None:
        self.at_s = (stream or VIRTUAL.now).free_s

    def elapsed_time(self, other: "VirtualEvent") -> float:
        return (other.at_s - self.at_s) * 1e3


class VirtualGraph:
    def __init__(self) -> None:
        self.works: list[tuple[str, float]] = []

    def replay(self) -> None:
        for kind, seconds in self.works:
            VIRTUAL.run(kind, seconds)


class Virtual:
    """As much of `torch.cuda` as pacing needs, in virtual time. Each stream has a clock of its own; on a stream beside
    the main one copies are slow."""

    Event, Stream, CUDAGraph = VirtualEvent, VirtualStream, VirtualGraph

    def __init__(self) -> None:
        self.main = self.now = VirtualStream()
        self.recording: VirtualGraph | None = None

    def run(self, kind: str, seconds: float) -> None:
        if self.recording is not None:
            self.recording.works.append((kind, seconds))
            return
        slow = SLOWER_BESIDE if kind == "copy" and self.now is not self.main else 1.0
        self.now.free_s += seconds * slow

    def current_stream(self, device: object) -> VirtualStream:
        return self.main

    def synchronize(self) -> None:
        pass

    def _sleep(self, cycles: int) -> None:
        self.run("pause", cycles / HZ)

    @contextlib.contextmanager
    def stream(self, stream: VirtualStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextlib.contextmanager
    def graph(self, graph: VirtualGraph) -> Iterator[None]:
        self.recording = graph
        yield
        self.recording = None


VIRTUAL = Virtual()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], CudaOverlap]:
    monkeypatch.setitem(globals(), "VIRTUAL", Virtual())
    monkeypatch.setattr(overlap, "torch", SimpleNamespace(cuda=VIRTUAL))

    def make() -> CudaOverlap:
        def step() -> None:
            VIRTUAL.run("step", STEP_S)

        def copy() -> None:
            VIRTUAL.run("copy", PIECE_S)

        return CudaOverlap(torch.device("cpu"), step, [copy] * 4)

    return make


def test_copies_are_held_to_a_rate_while_steps_run(opened: Callable[[], CudaOverlap]) -> None:
    """Guards a rate that is right only where nothing runs beside it: there copies take longer, so they pause less."""
    found = held_to(opened(), 1e-3, 3)
    assert found.period_s == pytest.approx(1e-3, rel=overlap.CLOSE)
    assert found.alone_s == pytest.approx(STEP_S) == found.beside_s


def test_copies_that_cannot_keep_up_are_not_paused(opened: Callable[[], CudaOverlap]) -> None:
    """Guards a goal that is judged at a rate which was never reached: the line says what was."""
    assert held_to(opened(), PIECE_S, 3).period_s == pytest.approx(PIECE_S * SLOWER_BESIDE, rel=0.01)


def test_steps_that_outlast_the_copies_are_measured_again(
    opened: Callable[[], CudaOverlap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a step that is timed beside copies which are over."""
    made = opened()
    made._alone_s /= 100
    seen: list[bool] = []
    together = made._together

    def watched(*arguments: object) -> object:
        found = together(*arguments)  # type: ignore[arg-type]
        seen.append(found is not None)
        return found

    monkeypatch.setattr(made, "_together", watched)
    made.beside(1e-3)
    assert seen[0] is False and seen[-1] is True


def test_a_dry_run_tells_every_rate() -> None:
    lines = list(overlap.beside(dry_card()))
    assert [line["what"] for line in lines] == ["beside 200 GB/s", "beside 400 GB/s"]
    assert all(float(line["times_alone"]) > 1 < float(line["step_bytes"]) for line in lines)


def test_the_bytes_of_a_step_are_those_of_its_memory() -> None:
    """Guards the share of the bandwidth that a step reaches: the pool's keys and values and the weights, once each."""
    card = dry_card()
    card = replace(card, sizes=replace(card.sizes, layers=4))
    made: list[torch.Tensor] = []
    real = card.random

    class Counting(type(card)):  # type: ignore[misc]
        def random(self, *shape: int) -> torch.Tensor:
            made.append(real(*shape))
            return made[-1]

    counting = Counting(card.device, card.timer, card.dtype, card.arch, card.sms, card.sizes)
    _, nbytes = overlap.decode_step(counting)
    pool, _queries, *weights = made
    used = pool.nbytes * card.sizes.tokens(overlap.CONTEXT) // overlap.BLOCK
    assert nbytes == used + sum(weight.nbytes for weight in weights)
