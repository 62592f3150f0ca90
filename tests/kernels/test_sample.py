"""The sampling kernel against the CPU's functions: the same numbers, the same support, the same token."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import sampling as cpu
from kernels.configs import KernelConfig
from kernels.sample import SamplingRows, philox_uniform, sample
from kernels.sample_slices import SamplingScratch
from tests.kernels.cases import DEVICE

CONFIG = KernelConfig(tile=16, warps=4, stages=1, rows=4)


@triton.jit
def _uniform_kernel(seed, index, position, out, N: tl.constexpr):
    for at in range(N):
        drawn = philox_uniform(tl.load(seed + at), tl.load(index + at), tl.load(position + at))
        tl.store(out + at, drawn)


def test_random_numbers_are_the_cpu_s_to_the_bit() -> None:
    """Guards resumption across devices: seeds with the top bit set, indices and positions beyond 32 bits."""
    cases = [
        (0, 0, 0),
        (2**64 - 1, 3, 17),
        (0x8000000000000001, 2**33 + 5, 2**40 + 1),
        (12345, 1, 8000),
    ]
    seeds = [seed - 2**64 if seed >= 2**63 else seed for seed, _, _ in cases]
    columns = [
        torch.tensor(c, device=DEVICE)
        for c in (seeds, [i for _, i, _ in cases], [p for *_, p in cases])
    ]
    out = torch.empty(len(cases), dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(1,)](*columns, out, N=len(cases))
    assert out.tolist() == [cpu.philox_uniform(*case) for case in cases]


def _rows(count: int, **values: float) -> SamplingRows:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), values.get(name, default), dtype=dtype, device=DEVICE)

    return SamplingRows(
        temperature=column("temperature", 1.0, torch.float64),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float64),
        seed=torch.arange(count, device=DEVICE) * 7919,
        sample_index=column("sample_index", 0, torch.int64),
        position=torch.arange(count, device=DEVICE) + 40,
    )


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5, "temperature": 2.0},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_the_cpu_s_token(settings: dict[str, float], ties: bool) -> None:
    """Guards every filter, alone and together, with many equal logits, negative ones, both zeros and banned tokens."""
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(3, 71, generator=generator)
    logits[:, 3] = float("-inf")
    if ties:
        logits = (
            logits.round()
            * torch.tensor([1.0, -1.0])[torch.randint(2, (3, 71), generator=generator)]
        )
        logits[:, 3] = float("-inf")
        assert (logits == 0).sum() > 5 and torch.signbit(logits[logits == 0]).any()
    params = _rows(3, **settings)
    tokens = sample(logits.to(DEVICE), params, CONFIG).tolist()
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    want = [
        cpu.draw(
            cpu.probabilities(row, **filters),  # type: ignore[arg-type]
            cpu.philox_uniform(number * 7919, 0, number + 40),
        )
        for number, row in enumerate(logits)
    ]
    assert tokens == want


def test_greedy_rows_take_the_first_of_the_best() -> None:
    logits = torch.zeros(2, 70, device=DEVICE)
    logits[0, [40, 69]] = 2.0
    logits[1, 0] = -1.0
    assert sample(logits, _rows(2, temperature=0.0), CONFIG).tolist() == [40, 1]


def test_a_tie_at_the_edge_is_broken_in_vocabulary_order_across_tiles() -> None:
    """Guards the count of ties carried from tile to tile: of 20 equal tokens ten are kept, eight of a tile and two of
    the next."""
    logits = torch.zeros(24, 20, device=DEVICE)
    probs = cpu.probabilities(logits[0].cpu(), temperature=1.0, top_k=0, top_p=0.48, min_p=0.0)
    assert torch.nonzero(probs).flatten().tolist() == list(range(10))
    config = KernelConfig(tile=8, warps=4, stages=1, rows=2)
    drawn = sample(logits, _rows(24, top_p=0.48), config).tolist()
    numbers = [cpu.philox_uniform(row * 7919, 0, row + 40) for row in range(24)]
    assert drawn == [cpu.draw(probs, number) for number in numbers]
    assert max(drawn) >= 8 and len(set(drawn)) > 5, "the second tile was never needed"


def test_misfits_are_refused() -> None:
    with pytest.raises(ValueError, match="not one of each"):
        sample(torch.zeros(2, 8, device=DEVICE), _rows(3), CONFIG)
    with pytest.raises(ValueError, match="scratch"):
        sample(
            torch.zeros(2, 8, device=DEVICE),
            _rows(2),
            CONFIG,
            scratch=SamplingScratch.empty(1, 8, CONFIG, DEVICE),
        )


@pytest.mark.parametrize("slices", [1, 8])
@pytest.mark.parametrize(
    ("spread", "settings"),
    [
        (4.0, {"top_p": 0.95}),
        (4.0, {"temperature": 0.1, "top_k": 50, "top_p": 0.99}),
        (30.0, {"top_k": 40}),
        (30.0, {"top_p": 0.9999, "temperature": 2.0}),
        (0.001, {"top_p": 0.5}),
        (1.0, {"top_k": 600, "min_p": 0.1}),
        (4.0, {}),
    ],
    ids=str,
)
def test_draws_the_cpu_s_token_however_a_row_is_divided(
    spread: float, settings: dict[str, float], slices: int
) -> None:
    """Guards the sums over slices, the bins by which candidates are gathered (gaps beyond the last of them, all of a
    row in one), and the order in which candidates of several slices stand: rows of 700 logits in pieces of 64."""
    generator = torch.Generator().manual_seed(11)
    logits = spread * torch.randn(4, 700, generator=generator)
    config = KernelConfig(tile=64, warps=4, stages=1, rows=slices)
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    want = [
        cpu.draw(
            cpu.probabilities(row, **filters),  # type: ignore[arg-type]
            cpu.philox_uniform(number * 7919, 0, number + 40),
        )
        for number, row in enumerate(logits)
    ]
    assert sample(logits.to(DEVICE), _rows(4, **settings), config).tolist() == want


@pytest.mark.parametrize(
    ("settings", "most"), [({"top_p": 0.95}, 50), ({"top_k": 20, "top_p": 0.9}, 24), ({"top_p": 0.5}, 4)], ids=str
)
def test_what_is_searched_is_a_small_part_of_the_vocabulary(settings: dict[str, float], most: int) -> None:
    """Guards the bounds by which candidates are gathered: were they loose, tokens would be right and drawing slow,
    since one program searches the list several times over. Of 2,000 logits a sort keeps 38, 8 and 2 at most."""
    logits = 4 * torch.randn(2, 2000, generator=torch.Generator().manual_seed(3))
    config = KernelConfig(tile=256, warps=4, stages=1, rows=8)
    scratch = SamplingScratch.empty(2, 2000, config, DEVICE)
    sample(logits.to(DEVICE), _rows(2, **settings), config, scratch=scratch)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    for row, listed, ids in zip(logits, scratch.listed.tolist(), scratch.ids.tolist(), strict=True):
        kept = cpu.probabilities(row, **options).nonzero().flatten()  # type: ignore[arg-type]
        assert ids[:listed] == sorted(ids[:listed]) and set(kept.tolist()) <= set(ids[:listed])
        assert listed <= most
