"""The GPU's mixture of experts against its specification, and against itself in other company."""

import pytest
import torch

from kernels import grouped_experts as grouped
from kernels import reference_experts as reference
from kernels.configs import KernelConfig
from kernels.experts import ClampedGate, ExpertWeights, RoutedRows, Routing
from kernels.grouped_experts import ExpertConfigs, plan, tiles_for
from kernels.launch import interpreted
from tests.kernels.cases import DEVICE
from tests.kernels.specializations import launched

SMALL = KernelConfig(tile=32, warps=4, stages=1, rows=16)
CONFIGS = ExpertConfigs(SMALL, SMALL, SMALL, SMALL, SMALL)
CLAMP = ClampedGate(1.702, 7.0)
ROUTINGS = [Routing(3, over, normalise) for over in (False, True) for normalise in (False, True)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("experts", [3, 17])
def test_routing(routing: Routing, experts: int) -> None:
    """Guards the order of the chosen, what the weights are shares of, and numbers of experts that fill no power of
    two; of equal logits the first count."""
    logits = torch.randn(5, experts, generator=torch.Generator().manual_seed(experts)) * 3
    logits[1, 1] = logits[1, 2] = logits[1].max()
    logits[2], logits[3, :-1] = 0.0, float("-inf")
    got, want = grouped.route(logits.to(DEVICE), routing, SMALL), reference.route(logits, routing)
    assert torch.equal(got.experts.cpu().long(), want.experts)
    torch.testing.assert_close(got.weights.cpu().double(), want.weights, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    """Guards addresses made of an expert's number: past the last there is somebody else's memory."""
    found = grouped.route(torch.full((1, 5), float("nan"), device=DEVICE), Routing(3, False, True), SMALL)
    assert found.experts.tolist() == [[0, 1, 2]] and found.weights.isnan().all()
    with pytest.raises(ValueError, match="6 experts cannot"):
        grouped.route(torch.zeros(1, 5, device=DEVICE), Routing(6, False, True), SMALL)


@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "least"), [(1, 8, 2, 0), (40, 3, 1, 0), (70, 5, 2, 3), (9, 130, 4, 0)]
)
def test_the_plan_has_every_pair_once(rows: int, experts: int, chosen: int, least: int) -> None:
    """Guards pairs that are dropped or doubled where a tile, a scan or a step ends, and experts without any."""
    order = [torch.randperm(experts - least, generator=torch.Generator().manual_seed(row)) for row in range(rows)]
    numbers = torch.stack(order)[:, :chosen].contiguous() + least
    tile = 16
    made = plan(numbers.to(DEVICE, torch.int32), experts, tile, SMALL)
    assert len(made.experts) == tiles_for(rows * chosen, experts, tile)
    flat, found = numbers.flatten(), []
    tiles = made.pairs[:-1].view(-1, tile).tolist()
    for expert, pairs in zip(made.experts.tolist(), tiles, strict=True):
        if expert < 0:
            continue
        there = [pair for pair in pairs if pair >= 0]
        assert there and pairs[len(there) :] == [-1] * (tile - len(there))
        assert all(flat[pair] == expert for pair in there)
        found += there
    assert found == flat.argsort(stable=True).tolist()
    used = sum(expert >= 0 for expert in made.experts.tolist())
    assert used == sum(-(-count // tile) for count in flat.bincount().tolist())


def test_no_step_needs_more_tiles_than_are_kept_for_it() -> None:
    """Guards the count of tiles against the worst spread of so many pairs over experts."""
    for pairs in range(1, 80):
        for experts in (1, 2, 7, 64):
            alone = min(experts, pairs) - 1  # experts of one pair each; the last has all others
            spread = alone + -(-(pairs - alone) // 16)
            assert spread <= tiles_for(pairs, experts, 16) <= pairs
    assert tiles_for(0, 8, 16) == 0


def case_of(
    rows: int, hidden: int, width: int, experts: int, chosen: int, biased: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, RoutedRows, ExpertWeights]:
    generator = torch.Generator().manual_seed(rows + hidden)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(rows)])
    weights = torch.rand(rows, chosen, generator=generator)
    biases = (noise(experts, 2 * width), noise(experts, hidden), CLAMP) if biased else ()
    return (
        noise(rows, hidden),
        RoutedRows(order[:, :chosen].int().contiguous().to(DEVICE), weights.to(DEVICE)),
        ExpertWeights(noise(experts, 2 * width, hidden) / 8, noise(experts, hidden, width) / 8, *biases),
    )


@pytest.mark.parametrize(
    ("rows", "hidden", "width", "experts", "chosen", "biased", "dtype"),
    [
        (1, 32, 16, 4, 2, False, torch.float32),
        (5, 45, 35, 3, 3, True, torch.float32),
        (41, 72, 40, 2, 1, False, torch.float16),
        (7, 33, 64, 9, 2, True, torch.float16),
    ],
)
def test_mixtures(
    rows: int, hidden: int, width: int, experts: int, chosen: int, biased: bool, dtype: torch.dtype
) -> None:
    """Guards ragged tiles in each direction, experts that nobody chose and that all did, biases, both gates; and rows
    that look at one another."""
    x, choice, weights = case_of(rows, hidden, width, experts, chosen, biased, dtype)
    got = grouped.mix(x, choice, weights, CONFIGS)
    want = reference.mix(x.cpu(), RoutedRows(*(part.cpu() for part in choice)), *(
        part.cpu() if isinstance(part, torch.Tensor) else part for part in weights
    ))
    tolerance = (2e-5 if dtype == torch.float32 else 4e-3) * float(want.abs().max())
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=0)
    for row in {0, rows - 1}:
        one = slice(row, row + 1)
        alone = grouped.mix(x[one], RoutedRows(choice.experts[one], choice.weights[one]), weights, CONFIGS)
        if interpreted():  # where a product's bits are those of the CPU's library
            torch.testing.assert_close(alone[0], got[row], atol=tolerance / 4, rtol=0)
        else:
            assert torch.equal(alone[0], got[row])


def test_all_rows_to_one_expert_and_the_others_unread() -> None:
    """Guards tiles past the last, whose expert is none: other experts' weights are not numbers here."""
    x, choice, weights = case_of(20, 32, 16, 4, 1, False, torch.float32)
    choice = RoutedRows(torch.full_like(choice.experts, 2), choice.weights)
    for stack in (weights.gate_up, weights.down):
        assert isinstance(stack, torch.Tensor)
        stack[[0, 1, 3]] = float("nan")
    got = grouped.mix(x, choice, weights, CONFIGS)
    want = reference.mix(x.cpu(), RoutedRows(*(p.cpu() for p in choice)), weights.gate_up.cpu(), weights.down.cpu())
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-4, rtol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are seen in the interpreter")
def test_what_is_launched_depends_on_shapes_alone() -> None:
    """Guards recorded steps: another choice of experts must be the same launches over the same memory."""
    x, choice, weights = case_of(6, 32, 16, 4, 2, False, torch.float32)
    with launched() as first:
        grouped.mix(x, choice, weights, CONFIGS)
    with launched() as second:
        grouped.mix(x, RoutedRows(torch.zeros_like(choice.experts), choice.weights), weights, CONFIGS)
    assert first == second and len(first) == 5


def test_no_rows() -> None:
    x, choice, weights = case_of(1, 32, 16, 4, 2, False, torch.float32)
    assert grouped.mix(x[:0], RoutedRows(choice.experts[:0], choice.weights[:0]), weights, CONFIGS).shape == (0, 32)


def test_what_does_not_fit_is_refused() -> None:
    x, choice, weights = case_of(2, 32, 16, 4, 2, False, torch.float32)
    with pytest.raises(ValueError, match="no experts"):
        grouped.mix(x[:, :16].contiguous(), choice, weights, CONFIGS)
    with pytest.raises(ValueError, match="one plan"):
        grouped.mix(x, choice, weights, CONFIGS._replace(down=KernelConfig(32, 4, 1, 32)))
