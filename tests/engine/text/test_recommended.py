"""The sampling that a model's files recommend."""

import logging

import pytest

from engine.text.files import TextFiles
from engine.text.recommended import CARDS, from_card, from_generation_config, from_gguf
from engine.types import SamplingParams


def test_a_generation_config_is_read() -> None:
    """As Qwen3 publishes it: what is no matter of sampling is left alone."""
    raw = {"bos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 20}
    assert from_generation_config(raw) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert from_generation_config({"eos_token_id": [1, 2], "transformers_version": "4.51.0"}) is None
    assert from_generation_config({"do_sample": False, "temperature": 0.6}) == SamplingParams(temperature=0.0)


def test_a_gguf_files_metadata_are_read() -> None:
    held = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40, "general.sampling.penalty_repeat": 1.05}
    assert from_gguf(held.get) == SamplingParams(temperature=0.7, top_k=40, repetition_penalty=1.05)
    assert from_gguf({}.get) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 5.0), ("temperature", "hot"), ("top_p", 0.0), ("top_k", -1), ("top_k", True), ("min_p", [0.1])],
)
def test_an_unsound_recommendation_is_left_out(name: str, value: object, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a model that cannot be served because of a number beside its weights, which every request would
    be refused for."""
    with caplog.at_level(logging.WARNING):
        found = from_generation_config({name: value, "repetition_penalty": 1.1})
    assert found == SamplingParams(repetition_penalty=1.1)
    assert name in caplog.text


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("SmolLM2-135M-Instruct", 0.2),
        ("SmolLM2-135M", 1.0),
        ("Qwen3-0.6B", 0.6),
        ("Qwen3-0.6B-Base", 1.0),
        ("Llama-3.2-1B-Instruct", 0.6),
        ("Meta-Llama-3-8B-Instruct", 0.6),
    ],
)
def test_the_table_knows_chat_models_by_their_names(name: str, temperature: float) -> None:
    """A base model is not in it: only chat models are published with settings."""
    assert from_card(name).temperature == temperature
    assert len(CARDS) == 3


def test_the_demo_model_answers_by_its_card(demo_model: object) -> None:
    """The file says nothing, the table does; every front begins from this (`router/front/intake.py`)."""
    assert TextFiles.load(demo_model).settings.sampling == SamplingParams(temperature=0.2, top_p=0.9)  # type: ignore[arg-type]
