"""The prefill kernel for sm_90: its own source over a model of the machine, against dense attention in 64 bits; and how
its wrapper and the engine choose it. What the compiler makes of it: `make contract`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.gpu.attention import TritonAttention
from engine.config import EngineConfig
from engine.model.config import ModelConfig
from kernels import prefill_hopper as hopper
from kernels import reference_attention as reference
from kernels.pool import KVPool
from kernels.prefill_attention import plan_prefill
from tests.kernels import hopper_model
from tests.kernels.cases import fill, poisoned_pool, tables_for
from tests.kernels.hopper_model import Boxes, Pointer


class _Launch:
    """Takes what the wrapper launches, and runs it over the model."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*given: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == hopper.WARPS
            taken = [Pointer(each.view(-1)) if isinstance(each, torch.Tensor) else each for each in given]
            hopper_model.run(self.kernel, hopper, grid, *taken, **constants)

        return launch


@pytest.fixture
def on_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "prefill_hopper_kernel", _Launch(hopper.prefill_hopper_kernel))
    monkeypatch.setattr(
        hopper, "TensorDescriptor", lambda base, shape, strides, box, layout: Boxes(base, box)
    )


def _attend(
    counts: list[int], contexts: list[int], *, heads: int, kv_heads: int, head_dim: int, block_size: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the kernel answers, and its log-sum-exp, beside what both should be."""
    generator = torch.Generator().manual_seed(sum(contexts))
    tables, blocks = tables_for(contexts, block_size, generator)
    pool = poisoned_pool(blocks, kv_heads, block_size, head_dim, torch.float16)
    fill(pool, tables, contexts, generator)
    rows = sum(counts)
    q = torch.randn(rows + 2, heads, head_dim, generator=generator).to(torch.float16)
    width = max(map(len, tables))
    table = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    tiles = torch.tensor(plan_prefill(counts, contexts, hopper.ROWS * kv_heads // heads), dtype=torch.int32)
    out, lse = torch.full_like(q, 7.0), torch.full((rows + 2, heads), 7.0)
    hopper.prefill_hopper(q, pool, 1, tiles, table, out=out, lse=lse, **options)
    assert (out[rows:] == 7.0).all()
    assert (lse[rows:] == 7.0).all()
    scoring = reference.Scoring(0, options.get("scale"), options.get("softcap", 0.0), options.get("sinks"))
    want, want_lse = reference.prefill(q[:rows], pool, 1, counts, contexts, tables, scoring)
    return out[:rows], lse[:rows], want, want_lse


@pytest.mark.usefixtures("on_model")
@pytest.mark.parametrize(
    ("counts", "contexts", "shape"),
    [
        ([1], [1], (4, 2, 64, 16)),
        ([70], [70], (4, 2, 64, 16)),
        ([33, 5, 1], [129, 128, 300], (4, 2, 64, 64)),
        ([40], [256], (8, 2, 64, 128)),
        ([64], [640], (6, 2, 64, 32)),
        ([20], [530], (2, 2, 128, 256)),
        ([9], [400], (32, 2, 64, 8)),
    ],
    ids=str,
)
def test_answers_as_the_reference(counts: list[int], contexts: list[int], shape: tuple[int, int, int, int]) -> None:
    """Contexts that end on a tile, on a block and between; everything behind them is NaN."""
    heads, kv_heads, head_dim, block_size = shape
    out, lse, want, want_lse = _attend(
        counts, contexts, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size
    )
    torch.testing.assert_close(out.double(), want.double(), atol=3e-3, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=3e-3, rtol=0)


@pytest.mark.usefixtures("on_model")
def test_scale_cap_and_sinks() -> None:
    sinks = torch.linspace(-1, 2, 4)
    out, lse, want, want_lse = _attend(
        [30], [200], heads=4, kv_heads=2, head_dim=64, block_size=16, scale=0.3, softcap=5.0, sinks=sinks
    )
    torch.testing.assert_close(out.double(), want.double(), atol=3e-3, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse.double(), atol=3e-3, rtol=0)


@pytest.mark.usefixtures("on_model")
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("wait", lambda barrier, parity: None),
        ("arrive", lambda barrier, count: None),
        ("arrive", lambda barrier, count: barrier.tell(count + 1, 0)),
    ],
    ids=["nobody waits", "nobody arrives", "two for one"],
)
def test_the_model_of_the_machine_notices(name: str, instead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the guard: the kernel comes to a halt, breaks a rule or answers wrong where its barriers do not hold."""
    monkeypatch.setattr(hopper_model, "WAIT_S", 1.0)
    machine = vars(hopper_model.HOPPER["mbarrier"])
    monkeypatch.setitem(hopper_model.HOPPER, "mbarrier", SimpleNamespace(**{**machine, name: instead}))
    try:
        out, _, want, _ = _attend([40], [700], heads=4, kv_heads=2, head_dim=64, block_size=16)
    except AssertionError:
        return
    assert not torch.allclose(out.double(), want.double(), atol=3e-3)


@pytest.mark.usefixtures("on_model")
def test_what_lies_behind_a_context_is_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cases above: they see it if the last tile of values is not set to zero behind the context."""
    monkeypatch.setitem(hopper_model.HOPPER, "_zero_behind", lambda tile, rows: None)
    out, _, _, _ = _attend([40], [70], heads=4, kv_heads=2, head_dim=64, block_size=16)
    assert out.isnan().any()


def test_what_it_cannot_do_is_refused_by_name() -> None:
    half = torch.float16
    assert hopper.unfit(half, half, 64, 16, 2) == ""
    assert "16-bit" in hopper.unfit(torch.int8, half, 64, 16, 2)
    assert "16-bit" in hopper.unfit(half, torch.float32, 64, 16, 2)
    assert "heads of 80" in hopper.unfit(half, half, 80, 16, 2)
    assert "window of 8" in hopper.unfit(half, half, 64, 16, 2, window=8)
    assert "blocks of 4" in hopper.unfit(half, half, 64, 4, 2)
    assert "512 queries" in hopper.unfit(half, half, 64, 16, 512)
    assert not hopper.runs_on(torch.device("cpu"))
    tiles, tables = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    pool = poisoned_pool(2, 2, 16, 64, half)
    with pytest.raises(ValueError, match="cannot do heads of 80"):
        hopper.prefill_hopper(
            torch.zeros(1, 4, 80, dtype=half), poisoned_pool(2, 2, 16, 80, half), 0, tiles, tables
        )
    with pytest.raises(ValueError, match="do not fit"):
        hopper.prefill_hopper(torch.zeros(1, 3, 64, dtype=half), pool, 0, tiles, tables)
    with pytest.raises(ValueError, match="int32"):
        hopper.prefill_hopper(torch.zeros(1, 4, 64, dtype=half), pool, 0, tiles.long(), tables)
    apart = KVPool(pool.payload.transpose(3, 4).contiguous().transpose(3, 4))
    with pytest.raises(ValueError, match="whole rows"):
        hopper.prefill_hopper(torch.zeros(1, 4, 64, dtype=half), apart, 0, tiles, tables)


def test_the_engine_refuses_it_where_it_does_not_run() -> None:
    config = EngineConfig(model_dir="none", prefill_kernel="hopper")
    with pytest.raises(ValueError, match=r"engine\.prefill_kernel: hopper runs on GPUs"):
        _ = config.kernels
    shape = ModelConfig(
        family="llama", layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=8, vocab=8,
        context_tokens=64, norm_eps=1e-5, dtype="float16",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"engine\.prefill_kernel: hopper cannot do cpu"):
        TritonAttention(shape, shape.kv_layout(16), "cpu", prefill_kernel="hopper")
