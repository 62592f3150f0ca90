"""Parallel samples on the demo model in 32-bit: as single requests, bit for bit, and as transformers draws them.

transformers generates all samples (`num_return_sequences`), with its own cache and logits; only the draws are ours,
injected in the place of its random choice, since no two libraries share a random stream. Its logits differ in the last
bits, so a draw may fall on the other side of a border between two tokens: such a near tie is printed, and transformers
goes on with our token. More than two fail.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from engine.config import EngineConfig
from engine.device import open_device
from engine.sampling import sample
from engine.step import Row
from engine.text.bundle import TextModel
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated, ColocatedAnswer
from kernels.sampling import penalize, philox_uniform, probabilities
from tests.parity.reference import demo_reference

pytestmark = pytest.mark.parity

SAMPLES, OUTPUT_TOKENS = 4, 24
NEAR_TIE, MAX_NEAR_TIES = 1e-4, 2
"""A part of the distribution, whose whole is 1; and for all prompts together."""
SAMPLINGS = {
    "seeded": SamplingParams(temperature=1.0),
    "cut off": SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    ),
}
TEXTS = ("Once upon a time", "The three most important rules of a kitchen are these: " * 4, "1")


@pytest.fixture(scope="module")
def model_dir(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    text = TextModel.load(model_dir)
    return [text.encode(words, add_special=True) for words in TEXTS]


def _records(number: int, prompt: list[int], sampling: SamplingParams) -> list[RequestRecord]:
    whole = RequestRecord(
        request=RequestId(f"{number}"),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=OUTPUT_TOKENS,
        seed=1234 + number,
        sampling=sampling,
        ignore_eos=True,
        group=f"{number}",
    )
    return [
        msgspec.structs.replace(whole, request=RequestId(f"{number}.{at}"), sample_index=at)
        for at in range(SAMPLES)
    ]


def _cluster(model_dir: Path) -> Colocated:
    config = EngineConfig(model_dir=str(model_dir), threads=1)
    return Colocated(open_device(config), open_device(config))


def _together(cluster: Colocated, records: list[RequestRecord]) -> list[ColocatedAnswer]:
    first = records[0].request
    return [cluster.submit(r, None if r.request == first else first) for r in records]


@pytest.fixture(scope="module", params=list(SAMPLINGS))
def drawn(
    request: pytest.FixtureRequest, model_dir: Path, prompts: list[list[int]]
) -> list[list[ColocatedAnswer]]:
    """Return the samples by prompt, each prompt's forked from one another, all prompts at once."""
    cluster = _cluster(model_dir)
    sampling = SAMPLINGS[request.param]
    asked = [_records(number, prompt, sampling) for number, prompt in enumerate(prompts)]
    answers = [_together(cluster, records) for records in asked]
    while cluster.turn():
        pass
    assert cluster.decode.prefills.forks.forked == len(prompts) * (SAMPLES - 1)
    cluster.close()
    return answers


def test_samples_are_single_requests_bit_for_bit(drawn: list[list[ColocatedAnswer]], model_dir: Path) -> None:
    """Guards the fork: shared blocks, a copied boundary and a prompt's last token computed again change no token."""
    cluster = _cluster(model_dir)
    for answers in drawn:
        assert len({tuple(answer.tokens) for answer in answers}) == SAMPLES, "samples are alike"
        for answer in answers:
            (alone,) = cluster.run([msgspec.structs.replace(answer.record, group="")])
            assert answer.tokens == alone.tokens
    assert not cluster.decode.prefills.forks.forked
    cluster.close()


class _OurDraws(LogitsProcessor):  # type: ignore[misc]
    """Leaves of each row's logits only the answer's token. `distances`: where our sampler draws another one from them,
    how far its uniform number lies outside of what the answer's token has of the distribution."""

    def __init__(self, answers: list[ColocatedAnswer]) -> None:
        self._answers = answers
        self.distances: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, float("-inf"))
        for at, (answer, seen) in enumerate(zip(self._answers, ids.tolist(), strict=True)):
            record = answer.record
            ours = answer.tokens[len(seen) - record.prompt_tokens]
            row = Row(record.request, record, seen, len(seen) - 1, len(seen), [], draw=True)
            (theirs,) = sample(scores[at : at + 1].float(), [row])
            if theirs != ours:
                self.distances.append(self._distance(record, seen, scores[at].float(), ours))
            only[at, ours] = 0.0
        return only

    @staticmethod
    def _distance(
        record: RequestRecord, seen: list[int], logits: torch.Tensor, token: int
    ) -> float:
        params, so_far = record.sampling, torch.tensor(seen)
        output, counts = so_far[record.prompt_tokens :].unique(return_counts=True)
        penalized = penalize(
            logits,
            so_far.unique(),
            output,
            counts,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
        probs = probabilities(
            penalized,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        ends = torch.cumsum(probs, 0) / probs.sum()
        uniform = philox_uniform(record.seed, record.sample_index, len(seen))
        low = float(ends[token - 1]) if token else 0.0
        return max(low - uniform, uniform - float(ends[token]))


def test_samples_are_what_transformers_generates(drawn: list[list[ColocatedAnswer]]) -> None:
    """Guards logits and positions of every sample against an implementation that shares neither code nor cache."""
    torch.set_num_threads(1)
    model = demo_reference().model
    distances: list[float] = []
    for answers in drawn:
        prompt = torch.tensor([answers[0].record.tokens])
        draws = _OurDraws(answers)
        got = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_return_sequences=SAMPLES,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([draws]),
        )
        assert [answer.tokens for answer in answers] == got[:, prompt.shape[1] :].tolist()
        distances += draws.distances
    print(f"\n{len(drawn) * SAMPLES * OUTPUT_TOKENS} tokens, near ties: {distances}")
    assert all(distance < NEAR_TIE for distance in distances)
    assert len(distances) <= MAX_NEAR_TIES
