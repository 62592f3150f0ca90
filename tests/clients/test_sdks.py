"""Clients that others wrote, as their users use them, against a real cluster with the demo model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import PROGRAMS, environment, run
from tests.integration.chat_picture import serving_page

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def address(demo_model: Path) -> Iterator[str]:
    with serving_page(demo_model) as one:
        yield one


def test_openai(address: str, tmp_path: Path) -> None:
    """Typed answers, whole and streamed, usage, samples, logprobs, structured output, and errors by their class."""
    python = environment("openai") / "python"
    saw: dict[str, Any] = json.loads(run([str(python), str(PROGRAMS / "openai_sdk.py"), address], tmp_path))
    assert saw["model"] == saw["retrieved"]
    assert saw["whole"] == saw["streamed"] == saw["likely_text"] != "" and saw["typed"]
    assert saw["finish"] == "length" and saw["usage"]["completion_tokens"] == 12
    assert saw["streamed_usage"]["prompt_tokens"] == saw["usage"]["prompt_tokens"]
    assert saw["cached"] > 0, "the same prompt came before"
    assert {"chunk", "content.delta", "content.done"} <= set(saw["kinds"])
    assert "four" in saw["text"] and saw["samples"] == 2
    length, most, has_two = saw["logprobs"]
    assert length == 12 and most <= 0 and has_two
    assert set(saw["parsed"]) == {"color", "is_high"}
    assert saw["errors"] == [
        [400, "temperature", "invalid_argument"],
        [400, "max_tokenz", "invalid_argument"],
        [400, "store", "invalid_argument"],
        [404, "model", "model_not_found"],
    ]


def test_llm(address: str, tmp_path: Path) -> None:
    """The command `llm`, with a stanza for a server of this kind: streamed, whole, with usage, and a second turn."""
    program = environment("llm") / "llm"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: SmolLM2-135M-Instruct\n  api_base: {address}v1\n"
    )
    told = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    ask = [str(program), "-m", "local", "-o", "max_tokens", "12", "-o", "temperature", "0"]
    streamed = run([*ask, "Why is the sky blue?"], tmp_path, **told).strip()
    whole = run([*ask, "--no-stream", "Why is the sky blue?"], tmp_path, **told).strip()
    assert streamed == whole != ""
    again = run([*ask, "--continue", "Say it again."], tmp_path, **told).strip()
    assert again
    logged = json.loads(run([str(program), "logs", "--json", "-n", "1"], tmp_path, **told))
    assert logged[0]["input_tokens"] > 40 and logged[0]["output_tokens"] == 12
