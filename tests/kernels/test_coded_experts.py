"""The GPU's mixture of experts in codes: the specification of plain ones, of the values that the codes stand for."""

from dataclasses import replace

import pytest
import torch

from kernels import coded_experts, grouped_experts
from kernels import reference_experts as reference
from kernels.coded_weight import CodedStack
from kernels.configs import KernelConfig
from kernels.experts import ExpertWeights, RoutedRows
from kernels.experts import mix as plain_mix
from kernels.panels import Kind
from tests.kernels.cases import DEVICE
from tests.kernels.specializations import launched
from tests.kernels.test_coded_linear import KINDS, weight_of
from tests.kernels.test_grouped_experts import CONFIGS, case_of

SMALL = KernelConfig(tile=32, warps=4, stages=1, rows=16)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged tiles in every direction."""
    monkeypatch.setattr(grouped_experts, "launch_config", lambda *_: SMALL)


def stack_of(kind: Kind, experts: int, rows: int, columns: int) -> CodedStack:
    return CodedStack(experts, weight_of(kind, experts * rows, columns))


def coded_case(
    kinds: tuple[Kind, Kind], rows: int, hidden: int, width: int, experts: int, chosen: int, biased: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, RoutedRows, ExpertWeights]:  # fmt: skip
    x, choice, plain = case_of(rows, hidden, width, experts, chosen, biased, dtype)
    gate_up, down = stack_of(kinds[0], experts, 2 * width, hidden), stack_of(kinds[1], experts, hidden, width)
    return x / 8, choice, ExpertWeights(gate_up, down, *plain[2:])


def wanted(x: torch.Tensor, choice: RoutedRows, weights: ExpertWeights) -> torch.Tensor:
    stacks = (weights.gate_up, weights.down)
    wide = [item.widen(x.dtype) if isinstance(item, CodedStack) else item for item in stacks]
    rest = [part.cpu() if isinstance(part, torch.Tensor) else part for part in weights[2:]]
    chosen = RoutedRows(*(part.cpu() for part in choice))
    return reference.mix(x.cpu(), chosen, *(item.cpu() for item in wide), *rest)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "hidden", "width", "experts", "chosen", "biased", "dtype"),
    [
        (1, 32, 32, 4, 2, False, torch.float32),
        (5, 160, 96, 3, 3, True, torch.float32),
        (23, 96, 160, 9, 2, True, torch.float16),
    ],
)
def test_mixtures(
    kind: Kind, rows: int, hidden: int, width: int, experts: int, chosen: int, biased: bool, dtype: torch.dtype
) -> None:
    """Guards codes and factors of another expert, of up for gate, of another group; half bytes; steps that end within
    the columns; biases and both gates."""
    case = coded_case((kind, kind), rows, hidden, width, experts, chosen, biased, dtype)
    got, want = grouped_experts.mix(*case, CONFIGS), wanted(*case)
    tolerance = (3e-5 if dtype == torch.float32 else 6e-3) * float(want.abs().max())
    assert got.dtype == dtype and bool(torch.isfinite(got).all())
    torch.testing.assert_close(got.cpu().double(), want, atol=tolerance, rtol=0)


@pytest.mark.parametrize("plain", ["gate_up", "down"])
def test_one_product_of_codes_and_one_of_plain_weights(plain: str) -> None:
    """Guards a layer whose `down` has columns that fill no groups, and stays in the model's type: the table has other
    heights of tiles for plain weights than for codes."""
    x, choice, weights = coded_case(("q4", "q8"), 7, 64, 96, 4, 2, True, torch.float32)
    stack = getattr(weights, plain)
    mixed = weights._replace(**{plain: stack.widen(torch.float32)})
    want = wanted(x, choice, weights)
    higher = replace(SMALL, rows=32)
    for configs in (CONFIGS, CONFIGS._replace(gate_up=higher, down=higher)):
        got = grouped_experts.mix(x, choice, mixed, configs)
        torch.testing.assert_close(got.cpu().double(), want, atol=3e-5 * float(want.abs().max()), rtol=0)
    wide = [item.widen(x.dtype) for item in (weights.gate_up, weights.down) if isinstance(item, CodedStack)]
    both = ExpertWeights(wide[0], wide[1], *weights[2:])
    with pytest.raises(ValueError, match="tiles of"):
        grouped_experts.mix(x, choice, both, CONFIGS._replace(gate_up=higher))


def test_experts_that_nobody_chose_are_not_read() -> None:
    """Guards a step that would read all codes: those of others have factors that are no numbers."""
    x, choice, weights = coded_case(("q4", "f8"), 20, 64, 32, 4, 1, False, torch.float32)
    choice = RoutedRows(torch.full_like(choice.experts, 2), choice.weights)
    want = wanted(x, choice, weights)
    for stack in (weights.gate_up, weights.down):
        assert isinstance(stack, CodedStack)
        scales = stack.weight.scales.view(4, -1)
        scales[[0, 1, 3]] = float("nan")
    got = grouped_experts.mix(x, choice, weights, CONFIGS)
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_a_rows_sums_are_its_own() -> None:
    """Guards an order of sums that would follow who else chose an expert. The interpreter's library rounds by a row's
    place in its tile, and rows keep theirs here: the others change."""
    x, choice, weights = coded_case(("q4", "q4"), 12, 64, 96, 2, 1, False, torch.float32)
    choice = RoutedRows(torch.zeros_like(choice.experts), torch.ones_like(choice.weights))
    whole = grouped_experts.mix(x, choice, weights, CONFIGS)
    other = x.clone()
    other[5:] *= -1.0
    assert torch.equal(grouped_experts.mix(other, choice, weights, CONFIGS)[:5], whole[:5])
    first = RoutedRows(choice.experts[:5].contiguous(), choice.weights[:5].contiguous())
    assert torch.equal(grouped_experts.mix(x[:5].contiguous(), first, weights, CONFIGS), whole[:5])


@pytest.mark.skipif(DEVICE == "cuda", reason="launches are seen in the interpreter")
def test_what_is_launched_depends_on_shapes_alone() -> None:
    x, choice, weights = coded_case(("q4", "q4"), 6, 32, 32, 4, 2, False, torch.float32)
    with launched() as first:
        grouped_experts.mix(x, choice, weights, CONFIGS)
    with launched() as second:
        grouped_experts.mix(x, RoutedRows(torch.zeros_like(choice.experts), choice.weights), weights, CONFIGS)
    assert first == second and len(first) == 5
    assert grouped_experts.mix(x[:0], RoutedRows(choice.experts[:0], choice.weights[:0]), weights, CONFIGS).numel() == 0


def test_both_products_of_a_kind_share_a_plan() -> None:
    """Guards the table: a plan has tiles of one height, whatever codes its products have."""
    device = torch.device("cpu")
    heights = {coded_experts.launch_config(device, what, kind).rows for what in ("gate_up", "down") for kind in KINDS}
    assert len(heights) == 1


def test_what_does_not_fit_is_refused() -> None:
    x, choice, weights = coded_case(("q4", "q4"), 3, 64, 32, 2, 1, False, torch.float32)
    with pytest.raises(ValueError, match="are no experts for"):
        grouped_experts.mix(x[:, :32].contiguous(), choice, weights, CONFIGS)
    with pytest.raises(ValueError, match="are not those of 3 matrices"):
        CodedStack(3, weight_of("q4", 40, 32))
    with pytest.raises(TypeError, match="in codes a GPU's"):
        plain_mix(x, choice, weights)
