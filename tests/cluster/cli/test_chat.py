"""The conversation of `headrace chat`: what is remembered, what is not, and how it behaves in a pipe."""

import argparse
import io
from collections.abc import Callable, Generator

import pytest

from access.client import ClientCredentials
from cluster.cli import chat
from cluster.cli.ask import stream_answer
from cluster.cli.chat import Chat, run_chat
from cluster.config import ConfigError
from engine.messages import RequestStats
from engine.types import FinishReason
from router.front.api import (
    ApiError,
    ChatMessage,
    Delta,
    Finished,
    GenerateCall,
    GenerateEvent,
    SamplingOverrides,
    Started,
)


class Parrot:
    """Says what it has heard; fails, or is interrupted in the middle of a word, where a message asks for it."""

    def __init__(self, address: str = "") -> None:
        self.calls: list[GenerateCall] = []
        self.closed = 0

    def generate(self, call: GenerateCall) -> Generator[GenerateEvent, None, None]:
        self.calls.append(call)
        messages = call.prompt
        assert isinstance(messages, list) and isinstance(messages[-1], ChatMessage)
        said = messages[-1].content
        try:
            yield Started("r", "m", 3)
            if said == "fail":
                raise ApiError("UNAVAILABLE", "no worker")
            yield Delta(f"you said {said[:2]}", (1,))
            if said == "interrupt":
                raise KeyboardInterrupt
            yield Delta(said[2:], (2,))
            yield Finished(
                reason=FinishReason.STOP,
                prompt_tokens=3,
                output_tokens=2,
                cached_tokens=1,
                stats=RequestStats(),
                ttft_s=0.1,
                itl_mean_s=0.01,
                itl_p99_s=0.01,
                e2e_s=0.2,
            )
        finally:
            self.closed += 1

    def __enter__(self) -> "Parrot":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def arguments(**more: object) -> argparse.Namespace:
    given = {"server": "x", "system": "", "max_tokens": 9, "min_tokens": 0, "seed": None, "stats": False}
    given |= {"stop": [], "ignore_eos": False, "logit_bias": [], "json_schema": None, "regex": None, "choice": []}
    given |= {"grammar": None}
    return argparse.Namespace(**{**dict.fromkeys(SamplingOverrides.__struct_fields__), **given, **more})


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Parrot:
    one = Parrot()
    monkeypatch.setattr(chat, "Client", lambda address, credentials: one)
    return one


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def contents(call: GenerateCall) -> list[tuple[str, str]]:
    assert isinstance(call.prompt, list)
    return [(m.role, m.content) for m in call.prompt if isinstance(m, ChatMessage)]


def test_a_pipe_holds_a_conversation(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a second turn that does not know of the first, and prompts or greetings in a script's output."""
    piped(monkeypatch, "hello\n\nagain\n/reset\nnew\n/exit\nnever said\n")
    assert run_chat(arguments(system="be kind"), ClientCredentials()) == 0
    assert capsys.readouterr().out == "you said hello\nyou said again\nyou said new\n"
    first, second, third = (contents(call) for call in parrot.calls)
    assert first == [("system", "be kind"), ("user", "hello")]
    assert second == [*first, ("assistant", "you said hello"), ("user", "again")]
    assert third == [("system", "be kind"), ("user", "new")]
    assert parrot.closed == 3


def test_a_script_hears_of_failure(parrot: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, "fail\nnever said\n")
    with pytest.raises(ApiError):
        run_chat(arguments(), ClientCredentials())
    assert len(parrot.calls) == 1


@pytest.mark.parametrize("verb", [run_chat, stream_answer])
def test_input_in_another_encoding_is_one_line(
    verb: Callable[..., int], parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `iconv -t latin1 letter | headrace generate -`, which ended in a traceback."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("né\n".encode("latin-1")), "utf-8"))
    with pytest.raises(ConfigError, match="standard input is not valid UTF-8"):
        verb(arguments(prompt="-"), ClientCredentials())
    assert not parrot.calls


def test_a_person_may_try_again(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a conversation that ends with its first error, or remembers a turn that had no answer."""
    lines = iter(["fail", "interrupt", "/system be brief", "/what", "/help", "/stats", "hello"])

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def typed(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration as error:
            raise EOFError from error

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(Parrot, "models", lambda self: {"m": 1}, raising=False)
    assert run_chat(arguments(), ClientCredentials()) == 0
    captured = capsys.readouterr()
    assert "UNAVAILABLE: no worker" in captured.err and "(interrupted)" in captured.err
    assert "/what is no command" in captured.err and "/reset" in captured.out
    assert contents(parrot.calls[-1]) == [("system", "be brief"), ("user", "hello")]
    assert "first token 100 ms" in captured.err
    assert parrot.closed == 3, "an interrupted answer still runs on the server"


def test_a_turn_without_an_answer_is_not_remembered(parrot: Parrot) -> None:
    one = Chat(parrot, arguments())  # type: ignore[arg-type]
    one.turn("hello")
    with pytest.raises(KeyboardInterrupt):
        one.turn("interrupt")
    assert [m.content for m in one.messages] == ["hello", "you said hello"]
