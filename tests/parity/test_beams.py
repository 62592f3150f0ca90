"""Beam search on the demo model in 32-bit, token for token against transformers."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device import open_device
from engine.text.bundle import TextModel
from engine.types import BeamParams, EarlyStopping, RequestId, RequestRecord
from fakes.colocated import Colocated
from tests.parity.reference import demo_reference

pytestmark = pytest.mark.parity

OUTPUT_TOKENS = 16
TEXTS = ("Once upon a time", "The three most important rules of a kitchen are these: " * 2)
SEARCHES = (
    BeamParams(width=2, answers=2),
    BeamParams(width=4, answers=3, length_penalty=0.0, early_stopping=EarlyStopping.FULL),
    BeamParams(width=3, answers=3, length_penalty=1.5, early_stopping=EarlyStopping.NEVER),
)
TRANSFORMERS = {
    EarlyStopping.FULL: True,
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.NEVER: "never",
}


def test_answers_are_those_of_transformers(demo_model: Path) -> None:
    """Guards the whole way: prompts that migrate, hypotheses that fork, log probabilities, and the end. A full stop
    ends the text as well, so that answers end early."""
    text = TextModel.load(demo_model)
    ends = sorted({*text.stop_ids, *text.encode(".", add_special=False)})
    config = EngineConfig(model_dir=str(demo_model), threads=1)
    cluster = Colocated(open_device(config), open_device(config))
    asked = [
        RequestRecord(
            request=RequestId(f"{number}.{at}"),
            tokens=prompt,
            prompt_tokens=len(prompt),
            max_tokens=OUTPUT_TOKENS,
            seed=0,
            beams=params,
            stop_token_ids=tuple(ends),
        )
        for number, prompt in enumerate(text.encode(words, add_special=True) for words in TEXTS)
        for at, params in enumerate(SEARCHES)
    ]
    answers = cluster.run(asked)
    assert cluster.decode.batch.beams.forked > 0
    cluster.close()
    model = demo_reference().model
    early = 0
    for answer in answers:
        params, prompt = answer.record.beams, answer.record.tokens
        assert params is not None and answer.ended is not None
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.width,
            num_return_sequences=params.answers,
            max_new_tokens=OUTPUT_TOKENS,
            length_penalty=params.length_penalty,
            early_stopping=TRANSFORMERS[params.early_stopping],
            eos_token_id=ends,
            pad_token_id=ends[0],
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for beam, line in zip(answer.ended.beams, theirs.sequences.tolist(), strict=True):
            assert line[len(prompt) : len(prompt) + len(beam.ids)] == beam.ids
            early += len(beam.ids) < OUTPUT_TOKENS
        scores = [beam.score for beam in answer.ended.beams]
        assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-3)
    assert early, "no answer ended before its time"
