"""The goal of each stage, K0 to K8, T1, E1 and E2, beside what bounds it on this card, and whether it was reached.

Bounds are not looked up but measured in the same run: what the card reads and copies, and how fast it multiplies
matrices (the part `copy_rate`). What bandwidth bounds is judged as a share of those, so a goal asks as much of one card
as of another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.card import Line

ENGINE_STEP = "batch 64, recorded"
Results = Mapping[str, Sequence[Mapping[str, Any]]]
Found = tuple[str, float, float]
"""The case; what was measured, and what it could be at best."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The card's rates, as measured."""

    read_tb_per_s: float
    copy_tb_per_s: float
    """Terabytes per second of a copy, read and written bytes both counted."""
    matmul_tflop_per_s: float

    def read_us(self, nbytes: float) -> float:
        return nbytes / self.read_tb_per_s / 1e6


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal. `needed` is the least, or with `at_most` the most, that `found` may say of the lines of `part`."""

    name: str
    part: str
    asks: str
    needed: float
    found: Callable[[Rates, Sequence[Mapping[str, Any]]], Iterator[Found]]
    at_most: bool = False

    def met(self, measured: float) -> bool:
        return measured <= self.needed if self.at_most else measured >= self.needed


def _orders(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    times = [line["us"] for line in lines if "us" in line]
    if times:
        yield "the layout's order", times[0] / min(times), 1.0


def _batch(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "K1", "batch"):
        yield line["what"], line["tb_per_s"] / rates.read_tb_per_s, 1.0


def _one(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "K2", "one"):
        yield line["what"], line["us"], rates.read_us(line["bytes"])


def _skewed(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "K3", "skewed"):
        yield line["what"], line["us"] / rates.read_us(line["bytes"]), 1.0


def _eight_bits(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        yield line["what"], line["times_16_bit_speed"], line["bytes_of_16_bit"] / line["bytes"]


def _shared(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        yield line["what"], line["times_plain_speed"], line["plain_us"] / rates.read_us(line["bytes"])


def _copies(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        if line.get("grid") == "a worker's" and line["what"].endswith("digests"):
            yield line["what"], line["of_copy"], 1.0


def _beside(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "K6", "beside 200 GB/s"):
        yield line["what"], line["times_alone"], 1 + line["gb_per_s"] / 1e3 / rates.copy_tb_per_s


def _prefill(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        if "torch" not in line["what"] and line["tokens"] == line["context"]:
            yield line["what"], line["tflop_per_s"], rates.matmul_tflop_per_s


def _blocks(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "K8", "blocks of 64, shuffled"):
        yield line["what"], line["of_contiguous"], 1.0


def _transport(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    moved = [line for line in lines if line.get("transport") == "cuda_ipc" and "blocks" in line]
    if moved:
        line = max(moved, key=lambda one: int(one["bytes"]))
        rate = line["gib_per_s"] * 2**30 / 1e12
        yield f"cuda_ipc, {line['blocks']} blocks", rate / (rates.copy_tb_per_s / 2), 1.0


def _step(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        if line["what"] == ENGINE_STEP:
            yield line["what"], line["ms"] / line["bound_ms"], 1.0


def _idle(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in lines:
        if line["what"] == ENGINE_STEP and "idle" in line:
            yield line["what"], line["idle"], 0.0


def _sampling(rates: Rates, lines: Sequence[Mapping[str, Any]]) -> Iterator[Found]:
    for line in _of(lines, "E2", "top-k and top-p"):
        yield line["what"], line["us"] / 1e3, rates.read_us(line["bytes"]) / 1e3


def _of(lines: Sequence[Mapping[str, Any]], name: str, what: str) -> Iterator[Mapping[str, Any]]:
    return (line for line in lines if line["id"] == name and line["what"] == what)


GOALS = (
    Goal("K0", "orders", "times the fastest order, at most", 1.05, _orders, at_most=True),
    Goal("K1", "decode", "of the rate of reading", 0.93, _batch),
    Goal("K2", "decode", "us, at most", 8.0, _one, at_most=True),
    Goal("K3", "decode", "times the time of reading it, at most", 1.1, _skewed, at_most=True),
    Goal("K4", "eight_bits", "times the speed of 16 bits", 1.6, _eight_bits),
    Goal("K5", "shared", "times the speed of reading it for everybody", 10.0, _shared),
    Goal("K6", "copies", "of a copy's speed, alone, on a worker's grid", 0.85, _copies),
    Goal("K6 beside", "beside", "times a step's time alone, at most", 1.05, _beside, at_most=True),
    Goal("K7", "prefill", "TFLOP/s", 450.0, _prefill),
    Goal("K8", "blocks", "times the time over blocks in order, at most", 1.05, _blocks, at_most=True),
    Goal("T1", "transport", "of the rate of a copy on the card", 0.8, _transport),
    Goal("E1", "engine", "times the time of reading weights and KV, at most", 1.15, _step, at_most=True),
    Goal("E1 idle", "engine", "of a step without a kernel, at most", 0.02, _idle, at_most=True),
    Goal("E2", "sampling", "ms, at most", 0.15, _sampling, at_most=True),
)


def judged(results: Results) -> list[Line]:
    """Return a line for each goal and case: what was asked, measured, and possible. Without figures, or without the
    rates that they are held against, it says so."""
    rates = _rates(results)
    lines: list[Line] = []
    for goal in GOALS:
        asked: Line = {"id": goal.name, "asks": goal.asks, "goal": goal.needed}
        found = list(goal.found(rates, results.get(goal.part, ()))) if rates is not None else []
        lines += [
            {**asked, "case": case, "measured": measured, "bound": bound, "met": int(goal.met(measured))}
            for case, measured, bound in found
        ] or [{**asked, "met": "not measured"}]
    return lines


def _rates(results: Results) -> Rates | None:
    found = {line["what"]: line for line in results.get("copy_rate", ())}
    try:
        return Rates(
            found["read"]["tb_per_s"],
            found["copy, read and written"]["tb_per_s"],
            found["matrix product"]["tflop_per_s"],
        )
    except KeyError:
        return None
