"""Programs of several generations: what each asks, and what comes of it. Against a real model they run in
tests/examples/test_examples.py."""

import asyncio
from typing import Any

import pytest

from protos import headrace_pb2 as pb
from router.client.errors import ApiError
from router.client.program import PROMPT_OPTIONS, AsyncProgram, SyncProgram, ajoin, best_choice, join, scored_steps
from router.client.requests import GeneratedText, Prompt


def generated(text: str, logprob: float = 0.0, cached: int = 0) -> GeneratedText:
    return GeneratedText(
        text=text,
        token_ids=(1,),
        finish_reason="stop",
        prompt_tokens=1,
        output_tokens=1,
        cached_tokens=cached,
        request_id="r",
        prefill_worker="p",
        decode_worker="d",
        ttft_s=0.0,
        e2e_s=0.0,
        stages_s={},
        logprobs=(logprob,),
        finished=pb.Finished(),
    )


class Scripted:
    """A client whose model writes its question's length, and likes low bytes; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, dict[str, Any]]] = []
        self.tokenized: list[tuple[Prompt, dict[str, Any]]] = []

    def generate(self, prompt: Any, **options: Any) -> GeneratedText:
        self.asked.append((prompt, options))
        if "allowed_token_ids" in options:
            (token,) = options["allowed_token_ids"]
            return generated("", -token / 100, 3)
        return generated(f"<{len(prompt)}>", 0.0, 2)

    def tokenize(self, prompt: Any, **options: Any) -> list[int]:
        self.tokenized.append((prompt, options))
        return list(prompt.encode()) if isinstance(prompt, str) else [7] * len(prompt)


class AsyncScripted(Scripted):
    async def generate(self, prompt: Any, **options: Any) -> GeneratedText:  # type: ignore[override]
        return super().generate(prompt, **options)

    async def tokenize(self, prompt: Any, **options: Any) -> list[int]:  # type: ignore[override]
        return super().tokenize(prompt, **options)


def test_a_chat_grows_by_its_roles() -> None:
    client = Scripted()
    program = SyncProgram(client, max_tokens=9)  # type: ignore[arg-type]
    program.system("s").user("u")
    assert program.gen("one", temperature=0) == "<2>" == program["one"]
    program.user("v")
    program.gen("two")
    roles = [(message["role"], message["content"]) for message in client.asked[-1][0]]  # type: ignore[index,call-overload]
    assert roles == [("system", "s"), ("user", "u"), ("assistant", "<2>"), ("user", "v")]
    assert [options for _, options in client.asked] == [{"max_tokens": 9, "temperature": 0}, {"max_tokens": 9}]
    assert "two" in program and "three" not in program and program.cached_tokens == 4
    with pytest.raises(ValueError, match="roles"):
        program.text("x")


def test_a_text_goes_on_with_what_was_written() -> None:
    """Guards injection: names of control tokens in a program's own text stay text."""
    client = Scripted()
    program = SyncProgram(client)  # type: ignore[arg-type]
    program.text("ab").gen("one")
    program.text("c").gen("two")
    assert [prompt for prompt, _ in client.asked] == ["ab", "ab<2>c"]
    assert all(options == {"parse_control_tokens": False} for _, options in client.asked)
    with pytest.raises(ValueError, match="roles"):
        program.user("x")


def test_every_step_of_every_choice_is_scored_once() -> None:
    """Guards `select`: shared beginnings of choices are one step, and each step's prompt is all that goes before."""
    choices = {"ab": [1, 2], "ac": [1, 3], "d": [4]}
    steps = scored_steps([9], choices)
    assert steps == [((9,), 1), ((9, 1), 2), ((9, 1), 3), ((9,), 4)]
    found = dict(zip(steps, map(generated, "abcd", (-0.1, -2.0, -1.0, -0.9)), strict=True))
    by_token = best_choice([9], choices, found, True)
    assert by_token.choice == "ac" and by_token.scores == pytest.approx({"ab": -1.05, "ac": -0.55, "d": -0.9})
    summed = best_choice([9], choices, found, False)
    assert summed.choice == "d" and summed.scores == pytest.approx({"ab": -2.1, "ac": -1.1, "d": -0.9})
    with pytest.raises(ApiError, match="no tokens"):
        scored_steps([9], {"": []})


def test_the_likeliest_is_written() -> None:
    client = Scripted()
    program = SyncProgram(client, max_tokens=5, temperature=0, cache_salt="s")  # type: ignore[arg-type]
    program.text("q")
    assert program.select("letter", ["z", "a", "m"]) == "a" == program["letter"]
    assert program.prompt == "qa" and program.selections["letter"].cached_tokens == 9
    assert {tuple(prompt) for prompt, _ in client.asked} == {(ord("q"),)}
    for _, options in client.asked:
        token = options.pop("allowed_token_ids")
        assert token[0] in b"zam"
        assert options == {"max_tokens": 1, "logprobs": 0, "resumable": False, "cache_salt": "s"}

    async def go() -> None:
        other = AsyncProgram(AsyncScripted())  # type: ignore[arg-type]
        other.user("q")
        assert await other.select("letter", ["z", "a"]) == "a"
        assert other.prompt[-1] == {"role": "assistant", "content": "a"}

    asyncio.run(go())


def test_branches_share_their_beginning_and_nothing_else() -> None:
    """Guards a branch against what another one adds, and the cache: what is shared is read before they go on."""
    client = Scripted()
    program = SyncProgram(client, temperature=0)  # type: ignore[arg-type]
    program.text("abc").gen("one")
    branches = program.fork(3)
    assert client.asked[-1][0] == "abc<3>" and client.asked[-1][1]["max_tokens"] == 1
    for branch, letter in zip(branches, "xyy", strict=True):
        branch.text(letter)
    assert join(branches, lambda one: one.gen("two")) == ["<7>"] * 3
    assert [branch.prompt for branch in branches] == ["abc<3>x<7>", "abc<3>y<7>", "abc<3>y<7>"]
    assert program.prompt == "abc<3>" and "two" not in program and branches[0]["one"] == "<3>"
    assert join([], lambda one: 1) == []

    async def go() -> None:
        other = AsyncProgram(AsyncScripted())  # type: ignore[arg-type]
        two = await other.text("ab").fork(2)
        assert await ajoin(two, lambda one: one.gen("x")) == ["<2>"] * 2

    asyncio.run(go())


def test_a_fork_reads_with_the_programs_own_options() -> None:
    """Guards options that say how long or how often is generated: the request that only reads is of one token."""
    client = Scripted()
    program = SyncProgram(client, max_tokens=9, min_tokens=5, n=2, model="m")  # type: ignore[arg-type]
    program.text("ab").fork(2)
    other = AsyncScripted()
    asyncio.run(AsyncProgram(other, max_tokens=9, min_tokens=5, n=2, model="m").text("ab").fork(2))  # type: ignore[arg-type]
    for (_, options), in (client.asked, other.asked):
        kept = {name: value for name, value in options.items() if value is not None}
        assert kept == {"max_tokens": 1, "model": "m", "parse_control_tokens": False}


def test_nothing_to_choose_from_is_told() -> None:
    """Guards against a complaint of Python's about unpacking."""
    with pytest.raises(ApiError, match="choices: must not be empty"):
        SyncProgram(Scripted()).text("ab").select("x", [])  # type: ignore[arg-type]


def test_a_choice_goes_on_with_the_prompt_that_gen_would() -> None:
    """Guards scores of another prompt than the next `gen` reads: of a model that thinks, after what opens a thought."""
    shared = {"model": "m", "tenant": "t", "timeout_s": 5.0}
    chat = {"add_generation_prompt": False, "chat_template_kwargs": '{"thinks": false}', "tools": [{"name": "f"}]}
    options = {**shared, **chat, "max_tokens": 9, "temperature": 0, "session": "s", "truncate_prompt_tokens": None}
    client, other = Scripted(), AsyncScripted()
    SyncProgram(client, **options).user("q").select("letter", ["a"])  # type: ignore[arg-type]
    asyncio.run(AsyncProgram(other, **options).user("q").select("letter", ["a"]))  # type: ignore[arg-type]
    told: list[tuple[Prompt, dict[str, Any]]] = [
        ([{"role": "user", "content": "q"}], {**shared, **chat}),
        ("a", {**shared, "add_special_tokens": False, "parse_control_tokens": False}),
    ]
    assert client.tokenized == told == other.tokenized
    assert client.asked[0][1].items() >= shared.items()
    SyncProgram(client, parse_control_tokens=True).text("<end>").select("x", ["a"])  # type: ignore[arg-type]
    assert client.tokenized[-2] == ("<end>", {"parse_control_tokens": True})


def test_every_option_of_a_prompt_is_passed_on() -> None:
    """Guards a field that requests get later: both have it, and `select` drops it."""
    both = {*pb.TokenizeRequest.DESCRIPTOR.fields_by_name} & {*pb.GenerateRequest.DESCRIPTOR.fields_by_name}
    assert both - {"prompt", "chat"} == {*PROMPT_OPTIONS} - {"timeout_s"}


@pytest.mark.parametrize("kind", [SyncProgram, AsyncProgram])
def test_a_prompt_that_is_cut_is_not_selected_after(kind: type) -> None:
    """Guards scores of the whole prompt where `gen` reads its end alone: nothing is asked."""
    client = Scripted() if kind is SyncProgram else AsyncScripted()

    async def go() -> None:
        found = kind(client, truncate_prompt_tokens=5).text("ab").select("x", ["a"])
        if kind is AsyncProgram:
            await found

    with pytest.raises(ApiError, match="truncate_prompt_tokens: select") as raised:
        asyncio.run(go())
    assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", "truncate_prompt_tokens")
    assert client.tokenized == [] == client.asked
