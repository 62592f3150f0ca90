"""Beam search against transformers on a tiny random model, and against trying every sequence."""

from itertools import product
from math import log
from random import Random

import pytest
import torch

from engine.beam import BeamSearch
from engine.step import Candidates
from engine.types import BeamParams, EarlyStopping

VOCAB = 11
TRANSFORMERS = {
    EarlyStopping.FULL: True,
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.NEVER: "never",
}


@pytest.fixture(scope="module")
def tiny() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.7,
        pad_token_id=VOCAB - 1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("ends", [(), (3,), (3, 7)])
def test_answers_are_those_of_transformers(
    tiny: torch.nn.Module, early_stopping: EarlyStopping, length_penalty: float, ends: tuple[int, ...]
) -> None:
    """Guards every rule of the search: what is ranked, what may end, how it is scored, and when it is over."""
    stopped_early = 0
    for prompt in ([1, 2, 4], [9]):
        for width in (2, 4):
            ids = torch.tensor([prompt])
            theirs = tiny.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=9,
                length_penalty=length_penalty,
                early_stopping=TRANSFORMERS[early_stopping],
                eos_token_id=list(ends) or None,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
            params = BeamParams(
                width=width,
                answers=width,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
            search = BeamSearch(params, 9, frozenset(ends))
            with torch.inference_mode():
                while not search.is_over:
                    rows = torch.tensor([prompt + live.ids for live in search.live])
                    log_probs = tiny(rows).logits[:, -1].log_softmax(-1)
                    top = log_probs.topk(min(search.candidates, VOCAB))
                    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                    search.advance([tuple(zip(*pair, strict=True)) for pair in pairs])
            got = [answer.ids for answer in search.answers]
            for mine, line in zip(got, theirs.sequences.tolist(), strict=True):
                assert line[len(prompt) : len(prompt) + len(mine)] == mine
                assert set(line[len(prompt) + len(mine) :]) <= {VOCAB - 1}, "transformers goes on behind it"
            scores = [answer.score for answer in search.answers]
            assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
            stopped_early += any(len(ids) < 9 for ids in got)
    # Where long answers are not favoured, some end before their time.
    assert stopped_early if ends and length_penalty <= 0.0 else ends or not stopped_early


def _model(ids: list[int]) -> list[float]:
    weights = [Random(str((ids, token))).random() + 0.05 for token in range(3)]
    return [log(weight / sum(weights)) for weight in weights]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_search_as_wide_as_there_are_sequences_finds_the_best_of_all(length_penalty: float) -> None:
    """Guards the arithmetic, by brute force: every sequence of up to four tokens, of which token 0 ends one."""
    want: dict[tuple[int, ...], float] = {}
    for ids in product(range(3), repeat=4):
        cut = (*ids[: ids.index(0)], 0) if 0 in ids else ids
        log_prob = sum(_model(list(cut[:at]))[token] for at, token in enumerate(cut))
        want[cut] = log_prob / len(cut) ** length_penalty
    params = BeamParams(
        width=81, answers=5, length_penalty=length_penalty, early_stopping=EarlyStopping.NEVER
    )
    search = BeamSearch(params, 4, frozenset({0}))
    while not search.is_over:
        drawn: list[Candidates] = []
        for live in search.live:
            drawn.append(tuple(sorted(enumerate(_model(live.ids)), key=lambda pair: -pair[1])))
        search.advance(drawn)
    best = sorted(want.items(), key=lambda item: -item[1])[:5]
    assert [tuple(answer.ids) for answer in search.answers[:5]] == [ids for ids, _ in best]
    assert [answer.score for answer in search.answers[:5]] == pytest.approx([s for _, s in best])
