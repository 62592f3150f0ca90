"""Structured output of real workers and the demo model, over both fronts; a worker that is lost; hostile schemas beside
a neighbour."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.cli import __main__ as cli
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.types import Constraint, ConstraintKind, SamplingParams
from router.config import RouterConfig
from router.front.api import ApiError, ChatMessage, Delta, Finished, GenerateCall
from router.grpc.client import Client

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a pet as JSON."}]


class Served:
    def __init__(self, model_dir: Path) -> None:
        router = RouterConfig(grpc_port=0, http_port=0)
        config = ClusterConfig(launcher="process", prefill_workers=1, decode_workers=2, router=router)
        self.cluster = Cluster(config, make_launcher("process"), model_dir=str(model_dir))
        addresses = self.cluster.start()
        self.http = httpx.Client(base_url=f"http://{addresses.http}", timeout=120)
        self.grpc = addresses.grpc
        self.client = Client(addresses.grpc)
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self.cluster.watch, args=(self._stop,), daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(30)
        self.http.close()
        self.client.close()
        self.cluster.stop()

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": ASK, "max_tokens": 100, "temperature": 0.0} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def pids(self) -> dict[str, int]:
        return {name: up.pid for name, up in self.cluster.workers.items()}

    def text(self, **fields: Any) -> tuple[str, str]:
        reply = self.chat(**fields)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]


@pytest.fixture(scope="module")
def served(demo_model: Path) -> Iterator[Served]:
    one = Served(demo_model)
    yield one
    one.close()


FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [{"response_format": FORMAT}, {"guided_json": PET}, {"structured_outputs": {"json": PET}}],
    ids=lambda fields: str(fields)[:30],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_kept(served: Served, fields: dict[str, Any], temperature: float) -> None:
    text, reason = served.text(**fields, temperature=temperature, seed=3)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), PET)


def test_other_constraints_are_kept(served: Served) -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", served.text(guided_regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")[0])
    assert served.text(guided_choice=["crimson", "azure"])[0] in ("crimson", "azure")
    ebnf = 'root ::= word (" " word)* "."\nword ::= [a-z]{1,5}'
    text, reason = served.text(structured_outputs={"grammar": ebnf}, max_tokens=60, temperature=1.0, seed=5)
    assert reason == "length" or re.fullmatch(r"[a-z]{1,5}( [a-z]{1,5})*\.", text)
    text, reason = served.text(response_format={"type": "json_object"}, max_tokens=200, temperature=1.0, seed=8)
    assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))


@pytest.mark.parametrize("grammar", ['start: "crimson" | "azure"', 'root ::= "crimson" | "azure"'])
def test_a_grammar_is_given_to_generate(served: Served, grammar: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the text of a grammar taken for a file's name, and a flag that does not reach the workers."""
    assert cli.main(["generate", "--server", served.grpc, "--grammar", grammar, "Name a colour."]) == 0
    assert capsys.readouterr().out.strip() in ("crimson", "azure")
    assert cli.main(["generate", "--server", served.grpc, "--grammar", "start: nothing", "x"]) == 1
    assert "is not a grammar that can be kept to" in capsys.readouterr().err


def test_samples_and_streams_keep_it_too(served: Served) -> None:
    reply = served.chat(response_format=FORMAT, n=3, temperature=1.0, seed=9).json()
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), PET)
    fields = {"response_format": FORMAT, "stream": True, "temperature": 1.0, "seed": 9}
    lines = [line[6:] for line in served.chat(**fields).text.split("\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if json.loads(line)["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == texts[0], "sample 0 is the same whatever n is"


def test_min_tokens_and_bans_do_not_break_it(served: Served) -> None:
    assert served.text(guided_choice=["ok"], min_tokens=30) == ("ok", "stop")


HOSTILE: dict[str, dict[str, Any]] = {
    "remainders": {"guided_json": {"type": "integer", "multipleOf": 99_999_989}},
    "deep": {"guided_json": '{"not":' * 5000 + "true" + "}" * 5000},
    "deep expression": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "counts": {"guided_regex": "((a{1000}){1000}){1000}"},
    "large": {"guided_json": {"enum": [f"{number} of many words" for number in range(20_000)]}},
    "itself": {"guided_json": {"$ref": "#"}},
    "remote": {"guided_json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "multiplied": {"guided_json": {"allOf": [{"oneOf": [
        {"type": "object", "properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(8)]} for i in range(12)]}},
    "broken": {"guided_grammar": "start: nothing"},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_the_caller_s_fault(served: Served, name: str) -> None:
    began_s = time.monotonic()
    error = served.chat(**HOSTILE[name])
    assert error.status_code == 400, error.text
    assert error.json()["error"]["param"] == next(iter(HOSTILE[name]))
    assert time.monotonic() - began_s < 20.0


def test_a_neighbour_is_not_stalled_while_hostile_ones_are_tried(served: Served) -> None:
    """Guards a trial, or a compilation, on a thread that others need. The gap allowed is far above a step's, and far
    below what a trial that stopped the router or an engine would make of it."""
    gaps: list[float] = []

    def neighbour() -> None:
        call = GenerateCall(
            prompt="Once upon a time", max_tokens=150, ignore_eos=True, sampling=SamplingParams(temperature=0.0)
        )
        latest = None
        for event in served.client.generate(call):
            if isinstance(event, Delta):
                now = time.monotonic()
                if latest is not None:
                    gaps.append(now - latest)
                latest = now

    pids = served.pids()
    running = threading.Thread(target=neighbour)
    running.start()
    number = 0
    with ThreadPoolExecutor(2) as asked:
        while running.is_alive():
            # A new one each time: what was refused once is remembered.
            bombs = [{"type": "integer", "multipleOf": 99_999_000 + number + one} for one in range(2)]
            replies = list(asked.map(lambda schema: served.chat(guided_json=schema), bombs))
            assert [reply.status_code for reply in replies] == [400, 400]
            number += 2
    running.join()
    # One event may bring several tokens.
    assert number and len(gaps) > 40
    assert max(gaps) < 1.0, f"{number} trials, the longest gaps were {sorted(gaps)[-3:]}"
    assert served.pids() == pids, "no process has died of it"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "beam_width": 2}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": ""}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_go_together_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served.chat(**fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def _call(seed: int) -> GenerateCall:
    return GenerateCall(
        prompt=[ChatMessage("user", "Describe a pet as JSON.")],
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(PET)),
        max_tokens=100,
        seed=seed,
        sampling=SamplingParams(temperature=1.0),
    )


def test_a_lost_decode_worker_breaks_no_answer(served: Served) -> None:
    """Guards a grammar that begins anew on another worker, behind half an answer."""
    calls = [_call(seed) for seed in range(6)]
    wanted = []
    for call in calls:
        events = list(served.client.generate(call))
        wanted.append([t for e in events if isinstance(e, Delta) for t in e.token_ids])
    killed: list[int] = []

    def run(call: GenerateCall) -> tuple[list[int], Finished]:
        tokens: list[int] = []
        for event in served.client.generate(call):
            if isinstance(event, Delta):
                tokens += event.token_ids
                if len(tokens) > 8 and not killed:
                    pid = served.pids()["decode-0"]
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
            elif isinstance(event, Finished):
                finished = event
        return tokens, finished

    with ThreadPoolExecutor(6) as asked:
        got = list(asked.map(run, calls))
    assert killed and [tokens for tokens, _ in got] == wanted
    for tokens, finished in got:
        assert finished.reason == "stop" and tokens


def test_grpc_names_the_field(served: Served) -> None:
    call = GenerateCall(prompt="x", constraint=Constraint(ConstraintKind.REGEX, "["), max_tokens=4)
    with pytest.raises(ApiError) as caught:
        list(served.client.generate(call))
    assert (caught.value.code, caught.value.field) == ("INVALID_ARGUMENT", "regex")
