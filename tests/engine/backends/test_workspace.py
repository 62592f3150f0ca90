"""The workspace: an estimate over tensors without memory against a measured step."""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.backends.workspace import LiveBytes, estimate_workspace, measure_workspace
from engine.config import EngineConfig, StepLimits
from engine.device import open_device
from engine.model.config import ModelConfig
from engine.model.prepared.cache import prepare
from tests.engine.model.test_families import reference, save_hf

LIMITS = [
    StepLimits(chunk_tokens=64),
    StepLimits(chunk_tokens=16, batch=32),
    StepLimits(chunk_tokens=500, batch=3),
    StepLimits(chunk_tokens=16, context_tokens=40),
]
SHORT = ("float16", "bfloat16")
CASES = {"gqa": {"num_key_value_heads": 2}, "mha": {"attention_bias": True, "mlp_bias": True}}


@pytest.fixture(scope="module", params=list(CASES))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    return save_hf(reference(num_hidden_layers=4, **CASES[request.param]), folder)


def prepared(source: str, dtype: str) -> Path:
    return prepare(source, Path(source).parent / "cache", dtype)


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [*(("float32", limits) for limits in LIMITS), *((dtype, LIMITS[1]) for dtype in SHORT)],
    ids=str,
)
def test_the_estimate_is_what_a_step_takes(source: str, dtype: str, limits: StepLimits) -> None:
    """Guards against an estimate of another forward pass than the engine's."""
    folder = prepared(source, dtype)
    measured = measure_workspace(folder, 16, limits)
    estimated = estimate_workspace(ModelConfig.load(folder), dtype, 16, limits)
    assert estimated == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "float16"])
def test_the_estimate_knows_how_kv_is_kept(source: str, kv_dtype: str) -> None:
    folder = prepared(source, "float32")
    measured = measure_workspace(folder, 16, LIMITS[2], kv_dtype)
    shape = ModelConfig.load(folder)
    estimated = estimate_workspace(shape, "float32", 16, LIMITS[2], kv_dtype=kv_dtype)
    assert estimated == pytest.approx(measured, rel=0.01)


def test_contexts_are_not_gathered_all_at_once(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a workspace that grows with the sum of contexts, which the second figure has."""
    folder, peaks = prepared(source, "float32"), []
    shape = ModelConfig.load(folder)
    for most in (1 << 20, 1 << 40):
        monkeypatch.setattr("kernels.paged_attention.GATHER_BYTES", most)
        peaks.append(measure_workspace(folder, 16, StepLimits(chunk_tokens=4, batch=200)))
    gathered = 201 * shape.context_tokens * 2 * shape.kv_heads * shape.head_dim * 4
    assert peaks[1] - peaks[0] > 0.9 * gathered - (1 << 20) > 0


def test_a_larger_step_takes_more(source: str) -> None:
    """Guards against a count that sees nothing: twice the batch must show, and so must twice the context."""
    folder = prepared(source, "float32")
    sizes = [
        measure_workspace(
            folder, 16, StepLimits(chunk_tokens=4, batch=batch, context_tokens=context)
        )
        for batch, context in ((8, 128), (16, 128), (16, 256))
    ]
    assert sizes[1] > 1.7 * sizes[0] and sizes[2] > 1.5 * sizes[1]


def test_two_layers_stand_for_all(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the shortcut: something kept from layer to layer would make a deep model need more."""
    folder = prepared(source, "float32")
    shallow = measure_workspace(folder, 16, LIMITS[1])
    monkeypatch.setattr("engine.backends.workspace.LAYERS", 4)
    assert measure_workspace(folder, 16, LIMITS[1]) == pytest.approx(shallow, rel=0.01)


def test_kernels_that_read_in_place_need_no_copy_of_the_context(source: str) -> None:
    shape = ModelConfig.load(prepared(source, "float32"))
    copied, in_place = (
        estimate_workspace(shape, "float32", 16, StepLimits(chunk_tokens=4, batch=64), placed)
        for placed in (False, True)
    )
    gathered = 64 * shape.context_tokens * 2 * shape.kv_heads * shape.head_dim * 4
    assert copied - in_place > 0.9 * gathered


def test_a_model_larger_than_any_memory_is_estimated() -> None:
    """Guards against an estimate that allocates: these weights alone are terabytes."""
    shape = ModelConfig(
        family="llama", layers=126, hidden=65536, heads=512, kv_heads=8, head_dim=128,
        intermediate=1 << 20, vocab=1 << 20, context_tokens=4096, norm_eps=1e-5,
    )  # fmt: skip
    limits = StepLimits(chunk_tokens=256, batch=8)
    size = estimate_workspace(shape, "bfloat16", 64, limits, in_place=True)
    assert 2 * 256 * 2 * (1 << 20) < size < 1 << 33


def test_bytes_are_forgotten_when_their_tensor_is() -> None:
    with LiveBytes() as counter:
        kept = torch.zeros(1000)
        view = kept[10:].view(-1, 10)
        assert counter.live == 4000, "a view is no memory of its own"
        torch.zeros(5000)
        assert (counter.live, counter.peak) == (4000, 24000)
        del kept, view
        assert counter.live == 0


def test_a_pool_is_sized_from_what_is_left(source: str) -> None:
    """Guards against a pool that takes the memory in which its own steps must run."""
    folder = prepared(source, "float32")
    config = EngineConfig(
        model_dir=str(folder), pool_bytes="auto", memory_bytes=64 << 20, reserve_bytes=16 << 20
    )
    device = open_device(config, LIMITS[1])
    memory = device.memory
    device.kv.close()
    assert memory.workspace_bytes == measure_workspace(folder, 16, LIMITS[1]) > 0
    left = (48 << 20) - memory.weights_bytes - memory.workspace_bytes
    assert left - device.layout.block_bytes < memory.kv_bytes <= left
    assert memory.kv_bytes == device.blocks * device.layout.block_bytes


def test_too_little_memory_says_so(source: str) -> None:
    folder = prepared(source, "float32")
    config = EngineConfig(model_dir=str(folder), pool_bytes="auto", memory_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"pool_bytes auto: -\d+ bytes hold no block of \d+"):
        open_device(config, LIMITS[0])
    with pytest.raises(ValueError, match="step limits"):
        open_device(config)


def test_a_given_pool_is_not_profiled_unless_asked(source: str) -> None:
    """Guards the time a worker takes to come back: profiling is for those who need it."""
    config = EngineConfig(model_dir=str(prepared(source, "float32")), pool_bytes=8 << 20)
    for profile in (False, True):
        wanted = msgspec.structs.replace(config, profile_workspace=profile)
        device = open_device(wanted, LIMITS[0])
        device.kv.close()
        assert (device.memory.workspace_bytes > 0) is profile
        assert 0 < device.memory.kv_bytes <= 8 << 20
