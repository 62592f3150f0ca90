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
    with serving_page(demo_model, str(PROGRAMS / "tools.jinja")) as one:
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


def test_openai_tools(address: str, tmp_path: Path) -> None:
    """Calls of tools that a real model makes: demanded, by itself, streamed, with a second turn, in both shapes."""
    python = environment("openai") / "python"
    saw: dict[str, Any] = json.loads(run([str(python), str(PROGRAMS / "openai_tools.py"), address], tmp_path))
    assert saw["required"] == ["tool_calls", None, 1] and saw["required_typed"] in ("Weather", "Sky")
    name, arguments, kind = saw["named"]
    assert (name, kind, set(arguments)) == ("Weather", "function", {"city", "unit"})
    assert saw["streamed"] and saw["pieces"][0] > 3 and saw["pieces"][1]
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(saw["kinds"])
    assert saw["streamed_end"] == ["tool_calls", True]
    assert saw["counts"][0] > 3 and saw["counts"][1:] == [True, True]
    assert saw["second"] == ["assistant", True]
    assert saw["auto"] == ["tool_calls", "Weather", None] and 3 <= len(saw["auto_city"]) <= 8
    assert saw["none"] == ["length", None]
    kind, name, written, status = saw["item"]
    assert (kind, name, status, written) == ("function_call", "Weather", "completed", arguments)
    assert saw["item_streamed"] and saw["item_kinds"] == ["response.created", "response.completed", 1]
    assert saw["answered"][1:] == [True, True] and saw["typed"] == ["color", "is_high"]
    assert saw["refused"] == ["store", "invalid_argument"] and saw["effort"] == "reasoning.effort"


def test_anthropic(address: str, tmp_path: Path) -> None:
    """Messages, whole and as typed events, tools and their results, counting, and errors by their class."""
    python = environment("anthropic") / "python"
    program = [str(python), str(PROGRAMS / "anthropic_sdk.py"), address, "SmolLM2-135M-Instruct"]
    saw: dict[str, Any] = json.loads(run(program, tmp_path))
    assert saw["whole"] == ["assistant", "max_tokens", 12, ["text"]]
    assert saw["streamed"] and saw["usage"] == [12, True] and saw["input"] == saw["counted"]
    assert saw["stopped"] == ["stop_sequence", "."]
    assert saw["call"] == ["tool_use", "weather", ["city", "unit"], "tool_use"] and saw["any"] == "tool_use"
    assert saw["call_streamed"]
    assert {"message_start", "content_block_delta", "input_json", "message_delta", "message_stop"} <= set(saw["kinds"])
    assert saw["second"][0] == "text" and saw["parsed"] == ["color", "is_high"]
    assert saw["errors"] == [
        [400, "error", "invalid_request_error"],
        [404, "error", "not_found_error"],
        [413, "error", "request_too_large"],
        [400, "error", "invalid_request_error"],
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
