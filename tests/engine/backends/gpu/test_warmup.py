"""Nothing is compiled while a GPU worker serves: Triton's own keys of a long, varied session are those of the start."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.backends.gpu.runner import TritonOpener
from engine.backends.gpu.warmup import STEPS
from engine.config import StepLimits
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from tests.engine.backends.gpu.recording import FakeRecorder
from tests.engine.backends.gpu.test_step import SMALL, prepared
from tests.engine.model.hf_quantized import SIZES, save_quantized
from tests.engine.model.test_families import BASE, reference
from tests.engine.model.test_hf_quantized import FORMATS
from tests.kernels.cases import DEVICE
from tests.kernels.specializations import Key, launched

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of Triton's interpreter")

BLOCK, BLOCKS = 16, 40
SHARED_TOKENS = 256
OF_CODES = {"some_tokens", "more_tokens"}
"""Steps of the warm-up that only quantized weights need."""
ROLES = {
    "prefill": StepLimits(chunk_tokens=24, prompts=5),
    "decode": StepLimits(chunk_tokens=24, batch=3),
}
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(temperature=1.1, top_p=0.5, frequency_penalty=0.2),
)


@pytest.fixture(scope="module", params=["llama float32", "llama int8", "qwen3 float32"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A prepared model, and how its KV is kept."""
    family, kv_dtype = request.param.split()
    sizes = {**BASE, **SMALL, "max_position_embeddings": 512, "num_hidden_layers": 2}
    torch.manual_seed(3)
    model = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**{**sizes, "head_dim": 16}))
    )
    return prepared(model, tmp_path_factory), kv_dtype


@dataclass
class Started:
    """A worker's runner, and the keys of its start: of what was recorded, and of each step of the warm-up."""

    runner: ModelRunner
    recorder: FakeRecorder
    recorded: set[Key]
    warmed: dict[str, set[Key]]

    @property
    def all(self) -> set[Key]:
        return self.recorded.union(*self.warmed.values())


def start(side: tuple[Path, str], limits: StepLimits, monkeypatch: pytest.MonkeyPatch) -> Started:
    folder, kv_dtype = side
    model = load_model(folder, device=DEVICE, coded=True)
    shape = model.config
    layout = shape.kv_layout(BLOCK, kv_dtype)
    recorder, warmed = FakeRecorder(), dict[str, set[Key]]()

    def one_by_one(runner: ModelRunner, reach: object) -> None:
        from engine.backends.gpu.warmup import warm_up

        for step in STEPS:
            with launched() as keys:
                warm_up(runner, reach, [step])  # type: ignore[arg-type]
            warmed[step.__name__] = keys

    monkeypatch.setattr("engine.backends.gpu.runner.warm_up", one_by_one)
    with launched() as recorded:
        opened = TritonOpener(model, layout, limits, lambda: recorder).open(BLOCKS)
    return Started(opened.runner, recorder, recorded, warmed)


def session(role: str, steps: int = 120) -> list[StepPlan]:
    """What the role's scheduler may ask for, in any order: seeded. Lone rows and rows that share a prefix, chunks of
    odd lengths with and without something before them, rows that draw, that draw nothing, that want candidates."""
    chance, limits = Random(f"session of {role}"), ROLES[role]
    plans = []
    for number in range(steps):
        rows = [one_token(chance, number) for _ in range(chance.randint(0, limits.batch))]
        tokens = limits.chunk_tokens if chance.random() < 0.6 or not rows else 0
        for _ in range(chance.randint(1, limits.prompts) if tokens else 0):
            count = chance.choice([1, chance.randint(1, max(1, tokens))])
            if count <= tokens:
                rows.append(chunk(chance, count) if count > 1 else one_token(chance, number))
                tokens -= count
        pairs = [(n, BLOCKS - 1 - n) for n in range(chance.choice([0, 0, 1, 2, 5]))]
        plans.append(StepPlan(tuple(rows), tuple((BlockId(a), BlockId(b)) for a, b in pairs)))
    return plans


def one_token(chance: Random, number: int) -> Row:
    shares = SHARED_TOKENS // BLOCK
    if number % 2:
        end = chance.randint(SHARED_TOKENS + 1, SHARED_TOKENS + 40)
        return made(chance, 1, end, [*range(shares), *(chance.randrange(shares, BLOCKS) for _ in range(4))])
    end = chance.randint(1, 70)
    return made(chance, 1, end, chance.sample(range(BLOCKS), 5))


def chunk(chance: Random, count: int) -> Row:
    return made(chance, count, count + chance.choice([0, 16, chance.randint(0, 50)]), chance.sample(range(BLOCKS), 5))


def made(chance: Random, count: int, end: int, blocks: list[int]) -> Row:
    record = RequestRecord(
        request=RequestId(str(chance.random())),
        tokens=[chance.randrange(320) for _ in range(end)],
        prompt_tokens=max(1, end - 2),
        max_tokens=8,
        seed=chance.randrange(2**64),
        sampling=chance.choice(SAMPLINGS),
    )
    draw = chance.random() < 0.8
    return Row(
        request=record.request,
        record=record,
        tokens=record.tokens,
        start=end - count,
        end=end,
        blocks=[BlockId(block) for block in blocks],
        draw=draw,
        banned=(3, 5) if chance.random() < 0.2 else (),
        candidates=6 if draw and chance.random() < 0.1 else 0,
    )


def test_serving_compiles_nothing(side: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every launch of the engine against a compilation, or a recording, that requests wait for: a slice that
    begins at another address, a kernel for steps that nobody thought of. And each step of the warm-up is needed by one
    of the roles."""
    needed: set[str] = set()
    for role, limits in ROLES.items():
        started = start(side, limits, monkeypatch)
        recordings = started.recorder.recorded
        with launched() as served:
            for plan in session(role):
                started.runner.run(plan)
        assert served - started.all == set(), role
        twice = {name for name, _ in started.recorded - started.warmed["largest_step"]}
        assert twice <= {"decode_kernel"}, "compiled for recordings, and once more for other steps"
        assert started.recorder.recorded == recordings == (5 if limits.batch else 0)
        assert {name for name, _ in served} >= {
            "decode_kernel", "merge_kernel", "prefill_kernel", "rope_kv_write_kernel", "rms_norm_kernel",
            "silu_mul_kernel", "copy_blocks_kernel", "tops_kernel", "weigh_kernel", "gather_kernel", "choose_kernel",
        }  # fmt: skip
        # Quantized weights alone need these (below).
        warmed = {name: keys for name, keys in started.warmed.items() if name not in OF_CODES}
        for step in warmed:
            rest = [keys for name, keys in warmed.items() if name != step]
            if served - started.recorded.union(*rest):
                needed.add(step)
    assert needed == {step.__name__ for step in STEPS} - OF_CODES


@pytest.mark.parametrize("form", ["awq", "fp8-rows"])
def test_serving_quantized_weights_compiles_nothing(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards products with codes, whose tiles follow the number of rows: a chunk of each height is there at the start,
    on a worker that has recorded none of them."""
    source = save_quantized(reference(**SIZES), tmp_path / "model", FORMATS[form]())
    folder = prepare(source, tmp_path / "cache", "float16", mapped=False)
    limits = StepLimits(chunk_tokens=160, prompts=2)
    started = start((folder, "float16"), limits, monkeypatch)
    chance, kinds = Random(7), set[Key]()
    for tokens in (1, 2, 16, 17, 40, 64, 65, 96, 128, 129, 160):
        with launched() as served:
            started.runner.run(StepPlan((made(chance, tokens, tokens, chance.sample(range(BLOCKS), 10)),)))
        assert served - started.all == set(), tokens
        kinds |= {key for key in served if key[0] == "coded_linear_kernel"}
    assert len(kinds) >= 3
    needed = set()
    for step in OF_CODES:
        rest = [keys for name, keys in started.warmed.items() if name != step]
        if kinds - started.recorded.union(*rest):
            needed.add(step)
    assert needed == (OF_CODES if form == "fp8-rows" else {"some_tokens"})  # codes of 4 bits have no higher tiles
