"""Drafts over real kernels: the very tokens, log probabilities and KV that one token at a time gives."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.draft_model import ModelDrafter
from engine.drafts import DraftWanted
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.plan import row_of
from engine.runner import ModelRunner
from engine.step import Row, StepPlan, accepted, run_of
from engine.storage.paged import PagedKV
from engine.types import BlockId, DrawnToken, RequestId, RequestRecord, SamplingParams, id_of
from kernels.native import native
from tests.engine.model.test_families import BASE, save_hf

SIZE = 4
MOST = 3
STOPS = frozenset({7})
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0),
)

OPTIONS: list[dict[str, object]] = [
    {"logprobs": 2},
    {"min_tokens": 20},
    {"logit_bias": ((9, 3.0), (200, -2.0)), "logprobs": 0},
    {"allowed_token_ids": tuple(range(8, 60))},
]


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Llama, TorchAttention]:
    """A model, and the attention of PyTorch's kernels or of ours."""
    found = native() if request.param == "native" else None
    if request.param == "native" and found is None:
        pytest.skip("the native kernels were not built")
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(3)
    shape = {**BASE, "num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
    save_hf(LlamaForCausalLM(LlamaConfig(**shape)), folder)
    prepared: Path = prepare(str(folder), tmp_path_factory.mktemp("cache"))
    model = load_model(prepared, panels=found is not None)
    heads = model.config.heads
    return model, TorchAttention(heads) if found is None else NativeAttention(heads, found)


class _Sequence:
    """One request by itself, over blocks in an order of their own."""

    def __init__(self, number: int, sampling: SamplingParams, answer: list[int] | None, **more: object) -> None:
        chosen = random.Random(number)
        prompt = [chosen.randrange(8, 300) for _ in range(3 + 2 * number)]
        self.record = RequestRecord(
            request=RequestId(str(number)), tokens=prompt, prompt_tokens=len(prompt), max_tokens=40, seed=11 + number,
            sampling=sampling, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        self.tokens = list(prompt)
        self.told: list[DrawnToken] = []
        self.known = 0
        self.drafted = self.drawn_drafts = 0
        self.blocks = [BlockId(number * 16 + at) for at in range(16)]
        chosen.shuffle(self.blocks)
        self._answer = answer
        self._random = chosen

    @property
    def room(self) -> int:
        """How many drafts its next row may have."""
        done = len(self.tokens) - self.record.prompt_tokens
        return min(MOST, 39 - done) if done else 0

    def guesses(self) -> list[int]:
        """Return what comes next, with an error now and then."""
        done = len(self.tokens) - self.record.prompt_tokens
        drafts = self._answer[done : done + self.room] if self._answer is not None else []
        if drafts and self._random.random() < 0.4:
            drafts[self._random.randrange(len(drafts))] = self._random.randrange(8, 300)
        return drafts

    def row(self, drafts: list[int]) -> Row:
        row = row_of(self.record, self.tokens, self.known, len(self.tokens), self.blocks, STOPS)
        self.drafted += len(drafts)
        end, tokens = row.end + len(drafts), [*self.tokens, *drafts]
        return Row(row.request, row.record, tokens, row.start, end, row.blocks, True, row.banned, drafts=len(drafts))

    def take(self, row: Row, drawn: object) -> None:
        run = run_of(drawn)  # type: ignore[arg-type]
        count = accepted(row, run)
        assert len(run) == count + 1
        self.drawn_drafts += count
        self.known = row.end - row.drafts + count
        self.told += run
        self.tokens += map(id_of, run)


def _answers(
    kernels: tuple[Llama, TorchAttention], sequences: list[_Sequence], drafter: ModelDrafter | None = None
) -> tuple[list[list[DrawnToken]], list[torch.Tensor]]:
    """Return the answers of 40 tokens, and the KV of all tokens but the last. `drafter`: in place of their guesses."""
    model, attention = kernels
    runner = ModelRunner(model, PagedKV(model.config.kv_layout(SIZE), 16 * len(sequences)), attention)
    while live := [one for one in sequences if len(one.told) < 40]:
        if drafter is None:
            rows = [one.row(one.guesses()) for one in live]
        else:
            told = drafter.propose([DraftWanted(one.record, one.tokens, one.room) for one in live])
            rows = [one.row(drafts) for one, drafts in zip(live, told.drafts, strict=True)]
        for one, row, drawn in zip(live, rows, runner.run(StepPlan(tuple(rows))), strict=True):
            one.take(row, drawn)
    kv = [runner.kv.tensor[one.blocks].movedim(4, 1).flatten(0, 1)[: len(one.tokens) - 1] for one in sequences]
    return [one.told for one in sequences], kv


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_log_probabilities_and_kv(
    kernels: tuple[Llama, TorchAttention], sampling: SamplingParams
) -> None:
    """Guards a draw with another position's number, penalties that do not see the drafts before, `min_tokens` counted
    from the row's beginning, and rows whose bits depend on how many there are."""
    plain = [_Sequence(n, sampling, None, **options) for n, options in enumerate(OPTIONS)]
    told, kv = _answers(kernels, plain)
    drafted = [
        _Sequence(n, sampling, [*map(id_of, answer)], **options)
        for n, (answer, options) in enumerate(zip(told, OPTIONS, strict=True))
    ]
    again, kv_again = _answers(kernels, drafted)
    assert again == told
    assert all(map(torch.equal, kv, kv_again))
    assert all(one.drawn_drafts > 10 for one in drafted)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("blocks", [14, 64])
def test_a_draft_model_over_real_kernels(
    kernels: tuple[Llama, TorchAttention], blocks: int, sampling: SamplingParams
) -> None:
    """The model is its own draft model, greedily: it is wrong where another token is drawn or penalised, and right in
    every place where none is. Guards KV of the draft model that lies where another sequence's does, and two runners
    over one set of weights that disturb each other."""
    model, attention = kernels
    plain = [_Sequence(n, sampling, None, **options) for n, options in enumerate(OPTIONS)]
    told, kv = _answers(kernels, plain)
    found = native() if isinstance(attention, NativeAttention) else None
    own = TorchAttention(model.config.heads) if found is None else NativeAttention(model.config.heads, found)
    runner = ModelRunner(model, PagedKV(model.config.kv_layout(SIZE), blocks), own)
    drafter = ModelDrafter(runner, blocks, model.config.vocab, model.config.context_tokens, lambda: 0.0)
    drafted = [_Sequence(n, sampling, None, **options) for n, options in enumerate(OPTIONS)]
    again, kv_again = _answers(kernels, drafted, drafter)
    assert again == told
    assert all(map(torch.equal, kv, kv_again))
    drafter.check()
    if blocks == 64:
        assert all(one.drafted > 20 for one in drafted)
        if sampling == SamplingParams(temperature=0.0):
            free = drafted[0]
            assert free.drawn_drafts == free.drafted, "nothing is asked of this one but its log probabilities"
    else:
        assert any(one.drafted for one in drafted)
