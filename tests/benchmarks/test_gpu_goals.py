"""Goals are judged against what was measured, and nothing passes for measured that was not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import command, decode
from benchmarks.gpu.card import Sizes, covered
from benchmarks.gpu.dry import dry_card
from benchmarks.gpu.goals import GOALS, judged

RATES = [
    {"what": "copy, read and written", "tb_per_s": 4.0},
    {"what": "read", "tb_per_s": 4.0},
    {"what": "matrix product", "tflop_per_s": 800.0},
]
GOOD: dict[str, list[dict[str, Any]]] = {
    "copy_rate": RATES,
    "orders": [{"id": "K0", "us": 100.0}, {"id": "K0", "us": 98.0}, {"id": "K0", "us": 140.0}],
    "decode": [
        {"id": "K1", "what": "batch", "tb_per_s": 3.8},
        {"id": "K1", "what": "torch, contiguous", "tb_per_s": 1.0},
        {"id": "K2", "what": "one", "us": 7.9, "bytes": 4_000_000},
        {"id": "K3", "what": "skewed", "us": 109.0, "bytes": 400_000_000},
    ],
    "eight_bits": [{"what": "int8", "times_16_bit_speed": 1.7, "bytes": 100, "bytes_of_16_bit": 190}],
    "shared": [{"what": "64", "times_plain_speed": 12.0, "plain_us": 120.0, "bytes": 20_000_000}],
    "copies": [
        {"what": "torch, contiguous", "of_copy": 1.0},
        {"what": "pack, digests", "of_copy": 0.9, "grid": "a worker's", "programs": 64},
        {"what": "pack", "of_copy": 0.5, "grid": "a worker's", "programs": 64},
        {"what": "pack, digests", "of_copy": 0.5, "grid": "the card's", "programs": 528},
    ],
    "beside": [
        {"id": "K6", "what": "beside 200 GB/s", "times_alone": 1.04, "gb_per_s": 200.0},
        {"id": "K6", "what": "beside 400 GB/s", "times_alone": 1.2, "gb_per_s": 400.0},
    ],
    "prefill": [
        {"what": "a", "tokens": 4096, "context": 4096, "tflop_per_s": 460.0},
        {"what": "b", "tokens": 2048, "context": 4096, "tflop_per_s": 300.0},
        {"what": "torch, contiguous", "tokens": 4096, "context": 4096, "tflop_per_s": 300.0},
        {"what": "torch, cuDNN", "refused": "no"},
    ],
    "blocks": [
        {"id": "K8", "what": "blocks of 64, shuffled", "of_contiguous": 1.04},
        {"id": "K8", "what": "blocks of 1, shuffled", "of_contiguous": 1.9},
    ],
    "transport": [
        {"transport": "cuda_ipc", "meet_s": 1.0},
        {"transport": "cuda_ipc", "blocks": 8, "bytes": 1, "gib_per_s": 100.0},
        {"transport": "cuda_ipc", "blocks": 64, "bytes": 8, "gib_per_s": 1500.0},
        {"transport": "nccl, two_hosts", "blocks": 64, "bytes": 8, "gib_per_s": 1.0},
    ],
    "engine": [
        {"what": "batch 32, recorded", "ms": 20.0, "bound_ms": 10.0, "idle": 0.5},
        {"what": "batch 64, not recorded", "ms": 20.0, "bound_ms": 10.0, "idle": 0.5},
        {"what": "batch 64, recorded", "ms": 11.0, "bound_ms": 10.0, "idle": 0.01},
    ],
    "sampling": [
        {"id": "E2", "what": "top-p", "us": 400.0, "bytes": 4_000_000},
        {"id": "E2", "what": "top-k and top-p", "us": 140.0, "bytes": 40_000_000},
    ],
}


def test_a_run_that_reaches_all_of_them() -> None:
    """Guards lines that are not what a goal is about: other sizes, other people's kernels, other transports."""
    lines = judged(GOOD)
    assert [line["id"] for line in lines] == [goal.name for goal in GOALS]
    assert all(line["met"] == 1 for line in lines), lines
    bounds = {line["id"]: line["bound"] for line in lines}
    assert bounds["K1"] == 1.0 and bounds["K2"] == 1.0 and bounds["K4"] == 1.9 and bounds["K7"] == 800.0
    assert bounds["K5"] == 24.0 and bounds["K6 beside"] == 1.05 and bounds["E2"] == 0.01


def test_a_slower_card_is_judged_by_its_own_rates() -> None:
    """Guards a goal that only one card can reach: at three quarters of the bandwidth all takes a third longer."""
    slower = {part: [dict(line) for line in found] for part, found in GOOD.items()}
    for line in slower["copy_rate"]:
        if "tb_per_s" in line:
            line["tb_per_s"] *= 0.75
    slower["decode"][0]["tb_per_s"] *= 0.75
    slower["decode"][3]["us"] /= 0.75
    slower["transport"][2]["gib_per_s"] *= 0.75
    assert all(line["met"] == 1 for line in judged(slower))


@pytest.mark.parametrize(
    ("part", "at", "key", "value", "goal"),
    [
        ("orders", 1, "us", 90.0, "K0"),
        ("decode", 0, "tb_per_s", 3.7, "K1"),
        ("decode", 2, "us", 8.1, "K2"),
        ("decode", 3, "us", 111.0, "K3"),
        ("eight_bits", 0, "times_16_bit_speed", 1.5, "K4"),
        ("shared", 0, "times_plain_speed", 9.0, "K5"),
        ("copies", 1, "of_copy", 0.8, "K6"),
        ("beside", 0, "times_alone", 1.06, "K6 beside"),
        ("prefill", 0, "tflop_per_s", 440.0, "K7"),
        ("blocks", 0, "of_contiguous", 1.06, "K8"),
        ("transport", 2, "gib_per_s", 1400.0, "T1"),
        ("engine", 2, "ms", 12.0, "E1"),
        ("engine", 2, "idle", 0.03, "E1 idle"),
        ("sampling", 1, "us", 160.0, "E2"),
    ],
)
def test_one_that_is_missed_is_said_to_be(part: str, at: int, key: str, value: float, goal: str) -> None:
    worse = {**GOOD, part: [dict(line) for line in GOOD[part]]}
    worse[part][at][key] = value
    assert [line["id"] for line in judged(worse) if line["met"] != 1] == [goal]


@pytest.mark.parametrize("part", [goal.part for goal in GOALS] + ["copy_rate"])
def test_what_was_not_measured_is_neither_met_nor_missed(part: str) -> None:
    lines = judged({name: found for name, found in GOOD.items() if name != part})
    open_ = {line["id"] for line in lines if line["met"] == "not measured"}
    about = {goal.name for goal in GOALS if part in (goal.part, "copy_rate")}
    assert open_ == about and len({line["id"] for line in lines}) == len(GOALS)


def test_orders_of_a_small_pool_are_refused_on_a_card() -> None:
    """Guards a decision about the layout that rests on a pool which the translation cache holds."""
    card = dry_card()
    small = replace(card, device=torch.device("cuda", 0))
    (line,) = decode.orders(small)
    assert "32" in str(line["refused"]) and "us" not in line
    (goal, *_) = judged({"copy_rate": RATES, "orders": [line]})
    assert goal["id"] == "K0" and goal["met"] == "not measured"


def test_they_fit_a_card_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards K0, which a card of that size was refused. An H100 of 80 GB has 79.6 GiB, a context takes some."""
    here = replace(dry_card(), device=torch.device("cuda", 0), sizes=Sizes())
    monkeypatch.setattr(command, "open_card", lambda sizes: here)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (78 << 30, 80 << 30))
    assert command.whole_card().sizes.pool_bytes >= decode.LEAST_POOL_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (38 << 30, 40 << 30))
    assert 0 < command.whole_card().sizes.pool_bytes < decode.LEAST_POOL_BYTES


def test_what_runs_beside_something_else_counts_once() -> None:
    """Guards the idle time of a step: a dependent launch begins while the one before it runs."""
    assert covered([(5.0, 9.0), (0.0, 4.0), (1.0, 2.0), (6.0, 11.0)]) == 10.0
    assert covered([]) == 0.0
