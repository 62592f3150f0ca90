"""Masks of constraints, on the CPU and as a GPU draws (`engine/backends/gpu/sampling.py`, its kernel interpreted): the
same tokens, never a forbidden one."""

import random

import pytest
import torch

from engine.backends.gpu.sampling import Drawing, draw_tokens
from engine.sampling import sample
from engine.step import Row
from engine.types import RequestId, RequestRecord, SamplingParams
from kernels.configs import KernelConfig

VOCAB = 101
WORDS = 4
CONFIG = KernelConfig(tile=64, warps=4, stages=1, rows=2)
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.5, top_p=0.95)
PENALIZED = SamplingParams(temperature=0.9, repetition_penalty=1.8, presence_penalty=1.0, frequency_penalty=0.5)


def mask_of(allowed: set[int]) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4 * WORDS, "little")


def row_with(sampling: SamplingParams, allowed: set[int], banned: tuple[int, ...] = (), seed: int = 5) -> Row:
    record = RequestRecord(
        request=RequestId(f"r{seed}"), tokens=[1, 2, 3], prompt_tokens=2, max_tokens=4, seed=seed, sampling=sampling
    )
    mask = mask_of(allowed) if allowed else b""
    return Row(record.request, record, [1, 2, 3], 2, 3, [], draw=True, banned=banned, allowed=mask)


def both(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    """Return what is drawn, on which both agree; logits are left as they were."""
    before = logits.clone()
    drawn = sample(logits, rows)
    drawing = Drawing.of(len(rows), VOCAB, logits.device, CONFIG, CONFIG)
    assert draw_tokens(logits, rows, drawing).tolist() == drawn
    assert torch.equal(logits, before)
    return drawn  # type: ignore[return-value]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"])
def test_what_is_forbidden_is_never_drawn(sampling: SamplingParams) -> None:
    """Guards each bit's place: the first token, the last, and those at the ends of words."""
    chosen = random.Random(3)
    generator = torch.Generator().manual_seed(4)
    edges = [0, 31, 32, 63, 64, VOCAB - 1]
    for seed in range(30):
        allowed = [{chosen.randrange(VOCAB) for _ in range(4)}, {edges[seed % len(edges)]}, set()]
        rows = [row_with(sampling, one, seed=seed) for one in allowed]
        drawn = both(4 * torch.randn(4, VOCAB, generator=generator), rows)
        assert drawn[0] in allowed[0] and {drawn[1]} == allowed[1]


def test_rows_without_a_mask_draw_as_they_would_alone() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = [row_with(DRAWN, set(), seed=seed) for seed in (1, 2)]
    alone = both(logits[[0, 2]], free)
    assert both(logits, [free[0], row_with(DRAWN, {7}), free[1]]) == [alone[0], 7, alone[1]]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_constraint_comes_before_bans(sampling: SamplingParams) -> None:
    """Guards a draw among nothing, which takes token 0, or the last, whatever the grammar says."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [row_with(sampling, {40, 50}, banned=(40,)), row_with(sampling, {40, 50}, banned=(40, 50, 60))]
    drawn = both(logits, rows)
    assert drawn[0] == 50 and drawn[1] in (40, 50)
