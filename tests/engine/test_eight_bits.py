"""8-bit KV: what it takes, what it costs in quality, and that it moves whole, scales included."""

from pathlib import Path

import msgspec
import pytest
import torch

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.device import open_device
from engine.kv.layout import KVLayout
from engine.messages import Hello, WorkerInfo
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.storage.paged import PagedKV
from engine.text.bundle import TextModel
from engine.types import BlockId, Incarnation, RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from fakes.model import fake_next
from kernels.native import native
from tests.engine.model.test_families import reference, save_hf
from tests.integration.fake_device import VOCAB, fake_device
from transfer.handoff.negotiation import NegotiationError, negotiate

TEXT = Path(__file__).parent.parent.parent / "LICENSE"


def logits_of(model: Llama, attention: TorchAttention, ids: list[int], kv_dtype: str) -> torch.Tensor:
    """float32 `[tokens, vocab]`, in chunks, so that what was kept is read again."""
    shape = model.config
    layout = shape.kv_layout(16, kv_dtype)
    kv = PagedKV(layout, layout.blocks_for(len(ids)))
    blocks = [BlockId(block) for block in reversed(range(kv.blocks))]
    found = []
    with torch.inference_mode():
        for start in range(0, len(ids), 64):
            piece = trial_row(ids[: start + 64], start, blocks)
            batch = ForwardBatch.build([piece], 16, row_multiple=attention.row_multiple)
            attention.begin(batch, kv)
            hidden = model.hidden(batch, kv, attention)[: batch.rows]
            found.append(model.logits(hidden))
    kv.close()
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_quality_on_the_demo_model(demo_model: Path, kernels: str) -> None:
    """Guards scales that belong to another row, and rounding that is worse than 8 bits need be: against 16-bit KV, the
    text is as probable to within a hundredth of a nat per token, and nearly every best token stays the best."""
    model, text = load_model(demo_model, panels=kernels == "native"), TextModel.load(demo_model)
    attention = TorchAttention(model.config.heads, dtype=torch.float32)
    if kernels == "native":
        found_here = native()
        if found_here is None:
            pytest.skip("the native kernels were not built here: they need a C++ compiler at installation")
        attention = NativeAttention(model.config.heads, found_here)
    ids = text.encode(TEXT.read_text(encoding="utf-8"), add_special=False)[:384]
    target = torch.tensor(ids[1:])

    def loss(logits: torch.Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits[:-1], target))

    half = logits_of(model, attention, ids, "float16")
    found = {kind: logits_of(model, attention, ids, kind) for kind in ("int8", "fp8")}
    losses = {kind: loss(logits) - loss(half) for kind, logits in found.items()}
    same = {
        kind: float((logits.argmax(-1) == half.argmax(-1)).float().mean())
        for kind, logits in found.items()
    }
    print(f"loss {loss(half):.4f} nats; more with {losses}; same best token {same}")
    assert loss(half) < 5.0, "the model does not know this kind of text: nothing is compared"
    assert max(map(abs, losses.values())) < 0.02
    assert same["int8"] > 0.96 and same["fp8"] > 0.92
    assert not torch.equal(found["int8"], half)


def test_a_pool_of_as_many_bytes_holds_nearly_twice_as_many_blocks(tmp_path: Path) -> None:
    folder = prepare(save_hf(reference(head_dim=64), tmp_path / "m"), tmp_path / "c", "float16")
    blocks = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        config = EngineConfig(
            model_dir=str(folder), dtype="float16", kv_dtype=kv_dtype, pool_bytes=4 << 20, deterministic="off"
        )
        device = open_device(config)
        blocks[kv_dtype] = device.blocks
        assert device.fingerprint.endswith("float16" if kv_dtype == "auto" else kv_dtype)
        device.kv.close()
    assert blocks["int8"] == blocks["fp8"] == int((4 << 20) / (16 * 2 * 2 * 8 * 68))
    assert blocks["int8"] == pytest.approx(blocks["auto"] * 128 / 68, abs=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "torch", "device": "cuda"}, "do not run on cuda"),
        ({"attention": "triton", "deterministic": "on"}, "deterministic"),
    ],
)
def test_kernels_that_cannot_do_it_are_refused(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    """Guards a worker that starts on other kernels than were asked for."""
    folder = prepare(save_hf(reference(), tmp_path / "m"), tmp_path / "c")
    config = msgspec.convert({"model_dir": str(folder), "pool_bytes": 1 << 20, **settings}, EngineConfig)
    with pytest.raises(ValueError, match=message):
        open_device(config)


@pytest.mark.parametrize("prefill_block", [4, 6])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_handoff_moves_the_scales_too(dtype: str, prefill_block: int) -> None:
    """Guards scales that stay behind when blocks move or are repacked: the fake model's tokens depend on every byte of
    rows and scales."""
    layout = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4, dtype=dtype)
    sender = msgspec.structs.replace(layout, block_size=prefill_block)
    tokens = [(7 * n + 1) % 256 for n in range(29)]
    record = RequestRecord(
        request=RequestId("r"),
        tokens=list(tokens),
        prompt_tokens=29,
        max_tokens=5,
        seed=1,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.0),
    )
    cluster = Colocated(fake_device(sender, 40), fake_device(layout, 40), check=True)
    (answer,) = cluster.run([record])
    for _ in range(5):
        tokens.append(fake_next(tokens, layout, VOCAB))
    assert answer.tokens == tokens[29:]
    assert answer.ended is not None and answer.ended.stats.migrated_bytes > 0
    cluster.close()


def hello(**more: object) -> Hello:
    layout = KVLayout(**{"kv_heads": 2, "layers": 2, "block_size": 16, "head_dim": 8, **more})  # type: ignore[arg-type]
    info = WorkerInfo(
        name="w", role="prefill", incarnation=Incarnation(1), address="somewhere:1", model="m", fingerprint="m",
        block_size=16, blocks=8, context_tokens=64, pid=1, host="h",
    )  # fmt: skip
    return Hello(info=info, layout=layout.describe(), endpoints=[])


def test_layouts_that_differ_in_how_kv_is_kept_are_refused() -> None:
    """Guards blocks of one size read as those of another type; int8 and fp8 blocks have as many bytes."""
    one, other = hello(dtype="int8"), hello(dtype="fp8")
    assert negotiate(one, one).layout.dtype == "int8"
    with pytest.raises(NegotiationError, match="dtype is fp8, this worker's is int8"):
        negotiate(one, other)


def test_digests_must_be_of_one_kind() -> None:
    """Guards a digest that is made by one algorithm and checked by another: every handoff would fail."""
    xxh3, wp64 = hello(), msgspec.structs.replace(hello(), digest="wp64")
    assert negotiate(wp64, wp64).digest == "wp64"
    with pytest.raises(NegotiationError, match="digest is wp64, this worker's is xxh3-64"):
        negotiate(xxh3, wp64)
    odd = msgspec.structs.replace(hello(head_dim=3), digest="wp64")
    with pytest.raises(NegotiationError, match="no wp64 digest"):
        negotiate(odd, odd)
