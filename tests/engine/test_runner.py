"""The runner over a small random model: mixed batches, and answers that do not depend on who else is in them."""


import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.backends.attention import TorchAttention
from engine.batch import ForwardBatch
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.runner import HostMark, ModelRunner
from engine.step import Row, StepPlan
from engine.storage.paged import KVTensors, PagedKV
from engine.types import RequestId, RequestRecord, SamplingParams
from tests.engine.model.test_families import BASE, save_hf

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    save_hf(LlamaForCausalLM(LlamaConfig(**{**BASE, "num_key_value_heads": 2})), folder)
    return load_model(prepare(str(folder), tmp_path_factory.mktemp("cache")))


def _runner(model: Llama) -> ModelRunner:
    config = model.config
    layout = config.kv_layout(4)
    return ModelRunner(model, PagedKV(layout, 64), TorchAttention(config.heads))


def _row(number: int, tokens: list[int], start: int, end: int, draw: bool) -> Row:
    record = RequestRecord(
        request=RequestId(str(number)),
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=8,
        seed=1,
        sampling=GREEDY,
    )
    blocks = list(range(number * 12, number * 12 + 12))
    return Row(record.request, record, tokens, start, end, blocks, draw)


def test_decode_and_prefill_rows_run_as_one_batch(model: Llama) -> None:
    """Guards mixed steps: one sequence decodes while another's chunk is computed, each as if it were alone."""
    first = [(7 * n + 3) % 300 for n in range(21)]
    second = [(11 * n + 5) % 300 for n in range(30)]
    alone, mixed = _runner(model), _runner(model)
    for runner in (alone, mixed):
        runner.run(StepPlan((_row(0, first, 0, 20, False),)))
        runner.run(StepPlan((_row(1, second, 0, 13, False),)))
    apart = alone.run(StepPlan((_row(0, first, 20, 21, True),)))
    apart += alone.run(StepPlan((_row(1, second, 13, 30, True),)))
    together = mixed.run(
        StepPlan((_row(0, first, 20, 21, True), _row(1, second, 13, 30, True)))
    )
    assert together == apart
    assert torch.equal(alone.kv.tensor, mixed.kv.tensor), "KV bits depend on the batch"


def test_chunk_boundaries_do_not_change_the_answer(model: Llama) -> None:
    tokens = [(13 * n + 1) % 300 for n in range(40)]
    drawn = set()
    for cuts in ([40], [16, 40], [1, 2, 3, 40], [37, 40]):
        runner = _runner(model)
        start = 0
        for cut in cuts:
            result = runner.run(StepPlan((_row(2, tokens, start, cut, cut == 40),)))
            start = cut
        drawn.add(result[0])
    assert len(drawn) == 1


def test_copies_are_made_before_the_rows_run(model: Llama) -> None:
    """Guards copy-on-write: the rows of a step may stand on a block that is copied in that very step."""
    tokens = [(5 * n + 2) % 300 for n in range(8)]
    runner = _runner(model)
    (want,) = runner.run(StepPlan((_row(0, tokens, 0, 8, True),)))
    other = _row(1, tokens, 7, 8, True)
    copies = ((0, other.blocks[0]), (1, other.blocks[1]))
    runner.kv.tensor[other.blocks[1], :, :, :, 3] = float("nan")
    assert runner.run(StepPlan((other,), copies)) == [want]


def test_a_step_runs_on_the_device_of_its_model(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `cuda:1`: Triton launches on the calling thread's current device, and the engine thread's is number 0."""
    entered: list[torch.device] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            entered.append(self._device)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    class Elsewhere(Llama):
        device = torch.device("cuda", 1)

        def __init__(self) -> None:
            pass

    class Attention(TorchAttention):
        def begin(self, batch: ForwardBatch, kv: KVTensors) -> None:
            seen.extend(entered)
            raise InterruptedError

    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: HostMark())
    monkeypatch.setattr(ForwardBatch, "build", lambda *_: None)
    kv = _runner(model).kv
    runner = ModelRunner(Elsewhere(), kv, Attention(model.config.heads))
    with pytest.raises(InterruptedError):
        runner.run(StepPlan((_row(0, [1, 2, 3], 0, 3, True),)))
    assert seen == [torch.device("cuda", 1)] and not entered
