"""Clients that others wrote, as their users use them, against a real cluster with the demo model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.text.bundle import TextModel
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


@pytest.fixture(scope="module")
def thinking(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model thinks: the demo's, with names of its unused control tokens changed."""
    folder = tmp_path_factory.mktemp("thinking")
    for file in demo_model.iterdir():
        (folder / file.name).symlink_to(file)
    text = (demo_model / "tokenizer.json").read_text()
    for unused, name in (("<repo_name>", "<think>"), ("<file_sep>", "</think>")):
        assert unused in text
        text = text.replace(unused, name)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(text)
    with serving_page(folder, str(PROGRAMS / "thinking.jinja")) as one:
        yield one


def test_a_budget_of_thinking_is_kept(thinking: str) -> None:
    """The block is closed by force, in Anthropic's shape, and the answer follows; usage counts what was thought."""
    body = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 40, "temperature": 0}
    for budget in (6, 11):
        asked = body | {"thinking": {"type": "enabled", "budget_tokens": budget}}
        told = httpx.post(f"{thinking}v1/messages", json=asked, timeout=60).json()
        assert [one["type"] for one in told["content"]] == ["thinking", "text"], told
        thought = told["content"][0]["thinking"]
        counted = httpx.post(f"{thinking}tokenize", json={"prompt": thought}, timeout=60).json()["count"]
        assert budget - 2 <= counted <= budget, "the model thinks for as long as it may; a control token is not shown"
        assert told["content"][1]["text"] and told["usage"]["output_tokens"] > budget + 2
    chat = httpx.post(f"{thinking}v1/chat/completions", json=body | {"ignore_eos": True}, timeout=60).json()
    assert chat["choices"][0]["message"]["reasoning_content"] and chat["choices"][0]["message"]["content"] == ""
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 40, "without a budget it goes on"
    bounded = body | {"thinking_token_budget": 6}
    chat = httpx.post(f"{thinking}v1/chat/completions", json=bounded, timeout=60).json()
    assert chat["choices"][0]["message"]["reasoning_content"] and chat["choices"][0]["message"]["content"]
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7, "the token that closes it counts"
    quiet = body | {"thinking": {"type": "disabled"}}
    told = httpx.post(f"{thinking}v1/messages", json=quiet, timeout=60).json()
    assert "thinking" not in [one["type"] for one in told["content"]]


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


@pytest.fixture
def tokenizer(demo_model: Path, tmp_path: Path) -> Path:
    """A folder with the tokenizer, as those clients want it that count tokens by themselves."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, text in TextModel.load(demo_model).tokenizer_files().items():
        (folder / name).write_text(text)
    return folder


def test_aiperf(address: str, tokenizer: Path, tmp_path: Path) -> None:
    """A load client that counts tokens by itself: every answer has its length, and every count is the server's too."""
    requests, tokens = 6, 12
    command = [
        *(str(environment("aiperf") / "aiperf"), "profile", "--url", address.rstrip("/")),
        *("--tokenizer", str(tokenizer)),
        *("--model", "SmolLM2-135M-Instruct", "--endpoint-type", "completions", "--streaming", "--ui-type", "none"),
        *("--request-count", str(requests), "--concurrency", "2", "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", "40", "--output-tokens-mean", str(tokens)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{tokens}"),
    ]
    run(command, tmp_path)
    (report,) = tmp_path.glob("artifacts/*/profile_export_aiperf.json")
    saw: dict[str, Any] = json.loads(report.read_text())
    assert saw["request_count"]["avg"] == requests and not saw["error_summary"] and not saw["was_cancelled"]
    assert saw["total_osl"]["avg"] == saw["total_usage_completion_tokens"]["avg"] == requests * tokens
    assert saw["total_isl"]["avg"] == saw["total_usage_prompt_tokens"]["avg"]
    assert saw["usage_discrepancy_count"]["avg"] == saw["osl_mismatch_count"]["avg"] == 0
    assert 0 < saw["time_to_first_token"]["avg"] < saw["request_latency"]["avg"]
    assert saw["inter_token_latency"]["avg"] > 0, "tokens came one by one"


TASK = """task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval(address: str, tokenizer: Path, tmp_path: Path) -> None:
    """A harness that scores choices by the prompt's log probabilities (`echo`): it finds what the answers are, and the
    numbers that it sums are the model's own."""
    questions = PROGRAMS / "capitals.jsonl"
    (tmp_path / "capitals.yaml").write_text(TASK.format(questions=questions))
    options = {
        "model": "SmolLM2-135M-Instruct",
        "base_url": f"{address}v1/completions",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "max_length": "2048",
    }
    command = [
        *(str(environment("lm_eval") / "lm_eval"), "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
        *("--tasks", "capitals", "--include_path", str(tmp_path), "--output_path", "out", "--log_samples"),
    ]
    run(command, tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    (result,) = tmp_path.glob("out/*/results_*.json")
    (samples,) = tmp_path.glob("out/*/samples_capitals_*.jsonl")
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    assert len(told) == len(asked)
    assert json.loads(result.read_text())["results"]["capitals"]["acc,none"] == 1.0
    for sample in told:
        found = [float(one[0][0]) for one in sample["resps"]]
        known = [scored(address, sample["doc"]["question"], one) for one in sample["doc"]["choices"]]
        assert found == pytest.approx(known, abs=1e-3)


def scored(address: str, question: str, choice: str) -> float:
    """The log probability of ` choice` behind a question, as one request asks for it."""
    body = {"prompt": f"{question} {choice}", "max_tokens": 1, "prompt_logprobs": 0}
    told = httpx.post(f"{address}v1/completions", json=body, timeout=60).json()["choices"][0]["prompt_logprobs"]
    begun = httpx.post(f"{address}tokenize", json={"prompt": question}, timeout=60).json()["count"]
    return sum(one["logprob"] for entry in told[begun:] for one in entry.values())
