"""The engine's step on the GPU kernels against the same step on the CPU's: in the interpreter where there is no GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.backends.attention import TorchAttention
from engine.backends.gpu.attention import TritonAttention
from engine.backends.gpu.pool import DeviceKV
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.runner import ModelRunner
from engine.step import Drawn, Row, StepPlan
from engine.storage.paged import TORCH_DTYPES, KVTensors, PagedKV
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from kernels.configs import ConfigKey, default_config
from tests.engine.model.test_families import BASE, save_hf
from tests.kernels.cases import DEVICE
from transfer.digest import block_digest, combine
from transfer.handoff.negotiation import WP64

BLOCK = 16
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    return prepared(LlamaForCausalLM(LlamaConfig(**{**BASE, **SMALL})), tmp_path_factory)


def prepared(model: Any, made: pytest.TempPathFactory) -> Path:
    source = made.mktemp("hf")
    with torch.no_grad():
        for weight in model.float().parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.2)
    save_hf(model, source)
    return prepare(str(source), made.mktemp("cache"))


class Side:
    """A runner of one kind, and the logits of its latest step."""

    def __init__(self, folder: Path, kernels: str, kv_dtype: str = "float32", share_tokens: int = 256) -> None:
        self.model = load_model(folder, device="cpu" if kernels == "torch" else DEVICE)
        shape = self.model.config
        layout = shape.kv_layout(BLOCK, kv_dtype)
        self.kv: KVTensors
        self.attention: TorchAttention | TritonAttention
        if kernels == "torch":
            self.kv = PagedKV(layout, 40)
            self.attention = TorchAttention(shape.heads, dtype=TORCH_DTYPES[shape.dtype])
        else:
            self.kv = DeviceKV(layout, 40, DEVICE)
            self.attention = TritonAttention(
                shape, layout, DEVICE, max_batch=4, programs=3, share_tokens=share_tokens
            )
        self.kv.memory.fill_(0x7F)  # a NaN, whatever the type, or the scale of one
        self.runner = ModelRunner(self.model, self.kv, self.attention)
        self.logits = torch.empty(0)
        forward = self.model.forward

        def seen(*args: object) -> torch.Tensor:
            self.logits = forward(*args)  # type: ignore[arg-type]
            return self.logits

        self.model.forward = seen  # type: ignore[method-assign]

    def run(self, *rows: Row, copies: tuple[tuple[BlockId, BlockId], ...] = ()) -> Sequence[Drawn]:
        return self.runner.run(StepPlan(rows, copies))


def row(
    name: int, tokens: list[int], start: int, blocks: list[int], params: SamplingParams = GREEDY, draw: bool = True
) -> Row:
    record = RequestRecord(
        request=RequestId(str(name)),
        tokens=tokens,
        prompt_tokens=max(1, len(tokens) - 2),
        max_tokens=8,
        seed=2**64 - 7 * name - 1,
        sampling=params,
    )
    return Row(record.request, record, tokens, start, len(tokens), [BlockId(b) for b in blocks], draw)


def prompt(seed: int, count: int) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


FIRST, SECOND, THIRD = [31, 2, 17, 5, 23], [8, 30, 1, 12, 19], [0, 39, 7, 3, 11]


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float32", 2e-4), ("int8", 5e-2), ("fp8", 2e-1)])
def test_mixed_steps_give_the_cpus_logits_and_tokens(folder: Path, kv_dtype: str, tolerance: float) -> None:
    """Guards the whole step: rows in another order, padding that is written, a table of the wrong sequence, a scale of
    the wrong row. Decode rows stand behind chunks in the plan, one of them draws nothing."""
    cpu, gpu = Side(folder, "torch", kv_dtype), Side(folder, "triton", kv_dtype)
    a, b, c = prompt(1, 21), prompt(2, 40), prompt(3, 17)
    steps = [
        [row(1, a, 0, FIRST), row(2, b[:19], 0, SECOND, draw=False)],
        [row(2, b, 19, SECOND, DRAWN), row(1, [*a, 7], 21, FIRST, DRAWN), row(3, c, 0, THIRD)],
        [row(1, [*a, 7, 9], 22, FIRST), row(2, [*b, 5], 40, SECOND, DRAWN), row(3, [*c, 1], 17, THIRD)],
    ]
    for plan in steps:
        wanted, got = cpu.run(*plan), gpu.run(*plan)
        drawing = sum(r.draw for r in plan)
        torch.testing.assert_close(gpu.logits[:drawing].cpu(), cpu.logits[:drawing], atol=tolerance, rtol=0)
        if kv_dtype == "float32":
            assert got == wanted
    assert cpu.logits.std() > 20 * 2e-4, "a flat reference would prove nothing"
    if kv_dtype != "float32":
        assert (cpu.logits - exact_logits(folder, steps)).abs().max() > 0, "nothing was quantized"


def test_qwen3_equals_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Guards query-key norm in the kernel's launch: another model's weights, eps, or none. Logits, then 20 tokens."""
    torch.manual_seed(4)
    config = Qwen3Config(**{**BASE, **SMALL, "head_dim": 16, "rms_norm_eps": 1e-2})
    model = Qwen3ForCausalLM(config).eval()
    gpu = Side(prepared(model, tmp_path_factory), "triton")
    tokens = prompt(6, 21)
    wanted = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    gpu.run(row(1, tokens[:9], 0, FIRST, draw=False))
    start = 9
    for logits in wanted.logits:
        (token,) = gpu.run(row(1, tokens, start, FIRST))
        torch.testing.assert_close(gpu.logits[:1].cpu(), logits, atol=1e-4, rtol=0)
        start, tokens = len(tokens), [*tokens, int(token)]  # type: ignore[arg-type]
    assert tokens == wanted.sequences[0].tolist()


def test_a_beam_search_beside_a_drawn_row_gets_its_candidates(folder: Path) -> None:
    """Guards the candidates' order and scores, and the token of the row beside them."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    beam = msgspec.structs.replace(row(1, prompt(1, 21), 0, FIRST), candidates=6)
    plan = [beam, row(2, prompt(2, 19), 0, SECOND, DRAWN)]
    (wanted, token), (got, drawn) = cpu.run(*plan), gpu.run(*plan)
    assert isinstance(wanted, tuple) and len(wanted) == 6 and drawn == token
    assert [one for one, _ in got] == [one for one, _ in wanted]
    torch.testing.assert_close(
        torch.tensor([s for _, s in got]), torch.tensor([s for _, s in wanted]), atol=2e-4, rtol=0
    )


def exact_logits(folder: Path, steps: list[list[Row]]) -> torch.Tensor:
    side = Side(folder, "torch")
    for plan in steps:
        side.run(*plan)
    return side.logits


def test_rows_that_share_blocks_read_them_once(folder: Path) -> None:
    """Guards the cascade through the engine: two nested prefixes in the block tables, found and planned as such."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton", share_tokens=BLOCK)
    stem, branch = prompt(4, 48), prompt(5, 16)
    tails = [prompt(10 + n, 3 + n) for n in range(4)]
    tables = [[4, 9, 1, 20 + n] for n in range(2)] + [[4, 9, 1, 33, 24 + n] for n in range(2)]
    texts = [stem + tails[0], stem + tails[1], stem + branch + tails[2], stem + branch + tails[3]]
    for side in (cpu, gpu):
        side.run(row(0, stem, 0, [4, 9, 1], draw=False))
        side.run(row(0, stem + branch, 48, [4, 9, 1, 33], draw=False))
        for n, (text, table) in enumerate(zip(texts, tables, strict=True)):
            side.run(row(n, text, 48 if n < 2 else 64, table, draw=False))
    rows = [row(n, [*text, 3], len(text), table) for n, (text, table) in enumerate(zip(texts, tables, strict=True))]
    assert cpu.run(*rows) == gpu.run(*rows)
    torch.testing.assert_close(gpu.logits.cpu(), cpu.logits, atol=2e-4, rtol=0)
    assert isinstance(gpu.attention, TritonAttention)
    assert gpu.attention._latest is not None
    assert [(p.rows, p.tokens) for p in gpu.attention._latest[1]] == [((0, 1, 2, 3), 48), ((2, 3), 64)]


def test_the_next_steps_work_list_is_made_ahead(folder: Path) -> None:
    """Guards a plan used for another step than it was made for: a row that left, a row that came, a longer table."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    texts = {1: prompt(1, 15), 2: prompt(2, 30)}
    tables = {1: FIRST, 2: SECOND}
    assert isinstance(gpu.attention, TritonAttention)
    seen = []
    for side in (cpu, gpu):
        for n in (1, 2):
            side.run(row(n, texts[n], 0, tables[n], draw=False))
    for names in ([1, 2], [1, 2], [1, 2], [2], [2], [2, 1], [1, 2]):
        rows = []
        for n in names:
            texts[n] = [*texts[n], 3 + n]
            rows.append(row(n, texts[n], len(texts[n]) - 1, tables[n]))
        assert gpu.run(*rows) == cpu.run(*rows)
        torch.testing.assert_close(gpu.logits[: len(rows)].cpu(), cpu.logits[: len(rows)], atol=2e-4, rtol=0)
        seen.append((gpu.attention.planning.ahead, gpu.attention.planning.at_once))
    assert seen == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (3, 4)]


def test_a_step_that_outgrows_the_buffers_still_runs(folder: Path) -> None:
    """Guards the limit of `max_batch`, which is a size to be fast at and no promise of the scheduler's."""
    cpu, gpu = Side(folder, "torch"), Side(folder, "triton")
    rows = [row(n, prompt(n, 5), 0, [n]) for n in range(6)]
    assert cpu.run(*rows) == gpu.run(*rows)
    rows = [row(n, [*prompt(n, 5), n], 5, [n]) for n in range(6)]
    assert cpu.run(*rows) == gpu.run(*rows)


def test_copies_are_made_in_order(folder: Path) -> None:
    """Guards copy-on-write on a device: a block that was just copied to is copied on; the kernel alone may not."""
    side = Side(folder, "triton")
    side.kv.memory.copy_(torch.arange(40, dtype=torch.uint8).view(-1, 1))
    pairs = [(1, 2), (2, 3), (4, 2), (5, 4), (6, 6 + 1)]
    side.kv.copy([(BlockId(a), BlockId(b)) for a, b in pairs])
    found = side.kv.memory[:9, -1].tolist()
    assert found == [0, 1, 4, 1, 5, 5, 6, 6, 8]
    assert torch.equal(side.kv.memory, side.kv.memory[:, :1].expand_as(side.kv.memory))


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_a_device_digests_what_a_cpu_peer_does(folder: Path, kv_dtype: str) -> None:
    """Guards a handoff between a GPU and a CPU: the kernel's digests, combined, are those of the block's bytes."""
    kv = Side(folder, "triton", kv_dtype).kv
    assert isinstance(kv, DeviceKV)
    kv.memory.random_(generator=torch.Generator(DEVICE).manual_seed(5))
    blocks, tokens = [BlockId(3), BlockId(39)], [BLOCK, 5]
    for block, count, heads in zip(blocks, tokens, kv.head_digests(blocks, tokens), strict=True):
        view = memoryview(kv.memory[block].cpu().numpy())
        assert combine(heads, count, b"bound") == block_digest(view, kv.layout, count, b"bound", WP64)
    assert kv.head_digests(blocks, tokens, range(1, 2)) == [h[1:] for h in kv.head_digests(blocks, tokens)]
    with pytest.raises(TypeError, match="no bytes of it"):
        kv.block(blocks[0])


def test_programs_have_room_for_32_bit_queries_over_8_bit_kv(folder: Path) -> None:
    """Guards configurations that were made for queries of half the size, by the type of what is stored."""
    side = Side(folder, "triton", "int8")
    assert isinstance(side.attention, TritonAttention) and side.model.config.dtype == "float32"
    for kernel in ("decode", "decode_shared", "prefill"):
        key = ConfigKey(kernel, side.model.config.head_dim, 2, BLOCK, "float32", 90)
        assert side.attention._configs[kernel] == default_config(key) != default_config(replace(key, dtype="int8"))
