"""The native mixture of experts against its specification, and against itself in other company."""

import pytest
import torch
from torch import Tensor

from kernels import reference_experts as reference
from kernels.experts import ClampedGate, ExpertWeights, RoutedRows, Routing
from kernels.native import Native, native
from kernels.panels import Kind, PanelStack, pack_codes, pack_stack, stacked, unpack
from tests.kernels.native.test_native import weight_of

KINDS: list[Kind] = ["f32", "bf16", "q8", "q4"]
NATIVE = native()
pytestmark = pytest.mark.skipif(
    NATIVE is None, reason="the native kernels were not built here: they need a C++ compiler at installation"
)
CLAMP = ClampedGate(1.702, 7.0)
ROUTINGS = [Routing(3, over, normalise) for over in (False, True) for normalise in (False, True)]


@pytest.fixture
def kernels() -> Native:
    assert NATIVE is not None
    return NATIVE


def stack_of(kind: Kind, count: int, rows: int, columns: int) -> PanelStack:
    """Other weights for each expert, all of one kind."""
    generator = torch.Generator().manual_seed(rows)
    if kind in ("f32", "bf16"):
        weights = torch.randn(count, rows, columns, generator=generator)
        return pack_stack(weights if kind == "f32" else weights.bfloat16().float())
    scales = torch.rand(count, rows, columns // 32, generator=generator).half().float() / 16
    codes = torch.randint(0, 16, (count, rows, columns), generator=generator, dtype=torch.uint8)
    pairs = zip(codes, scales, strict=True)
    if kind == "q8":
        return stacked([pack_codes(one.to(torch.int8) - 8, scale, None, "q8") for one, scale in pairs])
    return stacked([pack_codes(one, scale, -4 * scale, "q4") for one, scale in pairs])


def plain(stack: PanelStack) -> Tensor:
    return torch.stack([unpack(stack[expert]) for expert in range(stack.count)])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("experts", [3, 8, 17, 128])
def test_routing(kernels: Native, routing: Routing, experts: int) -> None:
    logits = torch.randn(20, experts, generator=torch.Generator().manual_seed(experts)) * 4
    got, want = kernels.route(logits, routing), reference.route(logits, routing)
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights.double(), want.weights, atol=1e-7, rtol=2e-6)
    for row in (0, 7, 19):
        alone = kernels.route(logits[row : row + 1], routing)
        assert torch.equal(alone.weights[0], got.weights[row])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_of_equal_logits_the_first_are_taken(kernels: Native, routing: Routing) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5, [float("-inf")] * 3 + [0.0, 0.0]])
    assert kernels.route(logits, routing).experts.tolist() == [[1, 3, 0], [0, 1, 2], [3, 4, 0]]


def test_logits_that_are_no_numbers_give_no_weights(kernels: Native) -> None:
    """Guards a spoiled row that would be answered by whichever expert comes first."""
    for routing in ROUTINGS:
        found = kernels.route(torch.full((1, 5), float("nan")), routing)
        assert sorted(found.experts[0].tolist()) == [0, 1, 2]
        assert found.weights.isnan().all()
    with pytest.raises(ValueError, match="6 of 5"):
        kernels.route(torch.zeros(1, 5), Routing(6, True, False))


def weights_of(kind: Kind, experts: int, hidden: int, width: int, clamped: bool) -> ExpertWeights:
    gate_up, down = stack_of(kind, experts, 2 * width, hidden), stack_of(kind, experts, hidden, width)
    if not clamped:
        return ExpertWeights(gate_up, down)
    generator = torch.Generator().manual_seed(1)
    biases = [torch.randn(experts, rows, generator=generator) for rows in (2 * width, hidden)]
    return ExpertWeights(gate_up, down, *biases, CLAMP)


def choice_of(rows: int, experts: int, chosen: int, pattern: str) -> RoutedRows:
    generator = torch.Generator().manual_seed(rows)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(rows)])
    if pattern == "all to one":
        order = torch.arange(experts).expand(rows, -1)
    elif pattern == "one with none":
        order = torch.where(order == experts - 1, -1, order).sort(-1, descending=True).values
    weights = torch.rand(rows, chosen, generator=generator)
    return RoutedRows(order[:, :chosen].contiguous(), weights)


CASES = [
    ("random", 64, 32, 8, 2),
    ("random", 96, 160, 5, 5),
    ("all to one", 64, 96, 4, 1),
    ("one with none", 96, 64, 6, 3),
]


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pattern", "hidden", "width", "experts", "chosen"), CASES)
def test_mixtures(
    kernels: Native, pattern: str, hidden: int, width: int, experts: int, chosen: int, kind: Kind, clamped: bool
) -> None:
    """Rows by expert and back, experts with many rows, few and none, every kind of weight; a row alone has the bits
    that it has in company."""
    weights = weights_of(kind, experts, hidden, width, clamped)
    assert isinstance(weights.gate_up, PanelStack) and isinstance(weights.down, PanelStack)
    assert weights.gate_up.kind == kind
    wide = plain(weights.gate_up), plain(weights.down)
    for rows in (1, 13):
        x, choice = torch.randn(rows, hidden), choice_of(rows, experts, chosen, pattern)
        if pattern == "one with none" and chosen < experts:
            assert experts - 1 not in choice.experts
        got = kernels.mix(x, choice, weights)
        want = reference.mix(x, choice, *wide, *weights[2:])
        torch.testing.assert_close(got.double(), want, atol=2e-6 * float(want.abs().max()), rtol=1e-5)
        for row in range(rows):
            one = slice(row, row + 1)
            alone = kernels.mix(x[one], RoutedRows(choice.experts[one], choice.weights[one]), weights)
            assert torch.equal(alone[0], got[row])


def test_a_mixture_of_nothing(kernels: Native) -> None:
    weights = weights_of("f32", 4, 32, 32, False)
    choice = RoutedRows(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert kernels.mix(torch.empty(0, 32), choice, weights).shape == (0, 32)


def test_the_sum_is_taken_slot_by_slot(kernels: Native) -> None:
    """Guards the order of the sum: 1e8 - 1e8 + 1 is 1, and 1 + 1e8 - 1e8 is 0 in 32 bits."""
    down = torch.zeros(3, 1, 32)
    down[:, 0, 0] = torch.tensor([1e8, -1e8, 1.0])
    gate_up = torch.zeros(3, 64, 32)
    gate_up[:, 0, 0], gate_up[:, 32, 0] = 40.0, 1.0
    weights = ExpertWeights(pack_stack(gate_up), pack_stack(down))
    x = torch.zeros(2, 32)
    x[:, 0] = 1.0
    choice = RoutedRows(torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.ones(2, 3))
    assert kernels.mix(x, choice, weights).tolist() == [[40.0], [0.0]]


def test_spoiled_rows_stay_their_own(kernels: Native) -> None:
    weights = weights_of("f32", 4, 64, 32, True)
    x, choice = torch.randn(6, 64), choice_of(6, 4, 2, "random")
    clean = kernels.mix(x, choice, weights)
    x[2, 5] = float("nan")
    got = kernels.mix(x, choice, weights)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])


def test_threads_make_no_difference(kernels: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of("q4", 6, 64, 160, True)
    x, choice = torch.randn(70, 64), choice_of(70, 6, 3, "random")
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(kernels, "threads", lambda threads=threads: threads)
        found.append(kernels.mix(x, choice, weights))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("width", [16, 45])
def test_the_clamped_gate(kernels: Native, width: int) -> None:
    gate_up = torch.randn(5, 2 * width) * 9
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 3] = -300.0, 300.0, float("nan")
    got, want = kernels.clamped_gate(gate_up, *CLAMP), reference.gate(gate_up, CLAMP)
    torch.testing.assert_close(got.double(), want, atol=1e-30, rtol=3e-6, equal_nan=True)
    assert got.isnan().nonzero().tolist() == [[2, 3]]


def test_what_does_not_fit_is_refused(kernels: Native) -> None:
    weights = weights_of("f32", 4, 64, 32, False)
    choice = choice_of(1, 4, 2, "random")
    with pytest.raises(ValueError, match="64 columns"):
        kernels.mix(torch.randn(1, 32), choice, weights)
    with pytest.raises(ValueError, match="panels"):
        kernels.mix(torch.randn(1, 64), choice, ExpertWeights(torch.randn(4, 64, 64), torch.randn(4, 64, 32)))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.mix(torch.randn(1, 64), RoutedRows(choice.experts.int(), choice.weights), weights)
    with pytest.raises(ValueError, match="2 shapes"):
        stacked([weight_of("q8", 32, 32), weight_of("q8", 32, 64)])
