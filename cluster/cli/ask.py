"""Asks a running server and shows the answer as it comes."""

import argparse
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from access.client import ClientCredentials
from cluster.cli.answer_flags import form_of
from cluster.config import ConfigError
from router.front.api import ApiError, ChatMessage, Delta, Finished, GenerateCall, SamplingOverrides, Started
from router.grpc.client import Client


class ClientAnswer(msgspec.Struct, frozen=True):
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finished: Finished


def ask(client: Client, call: GenerateCall, show: Callable[[str], object]) -> ClientAnswer:
    """Stream one answer: `show` gets every new piece of text. Raises ApiError."""
    pieces: list[str] = []
    token_ids: list[int] = []
    prompt_tokens = 0
    with closing(client.generate(call)) as events:
        for event in events:
            match event:
                case Started():
                    prompt_tokens = event.prompt_tokens
                case Delta():
                    pieces.append(event.text)
                    token_ids.extend(event.token_ids)
                    if event.text:
                        show(event.text)
                case Finished():
                    return ClientAnswer("".join(pieces), tuple(token_ids), prompt_tokens, event)
    raise ApiError("INTERNAL", "the stream ended without a result")


def drawn_by(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a call by which its answer is drawn and ended, and what it must be like, as the flags say.
    Raises ConfigError."""
    sampling = {name: getattr(arguments, name) for name in SamplingOverrides.__struct_fields__}
    return {
        "max_tokens": arguments.max_tokens,
        "min_tokens": arguments.min_tokens,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        "stop": tuple(arguments.stop),
        "sampling": SamplingOverrides(**sampling),
        **form_of(arguments),
    }


def stream_answer(arguments: argparse.Namespace, credentials: ClientCredentials) -> int:
    """Run `headrace generate`: the answer goes to standard output, figures (if asked for) to standard error."""
    text = _standard_input() if arguments.prompt == "-" else arguments.prompt
    chat = [ChatMessage("user", text)]
    if arguments.system:
        chat.insert(0, ChatMessage("system", arguments.system))
    call = GenerateCall(
        prompt=text if arguments.raw else chat,
        n=arguments.n,
        **drawn_by(arguments),
    )
    with Client(arguments.server, credentials) as client:
        if call.n > 1:
            return _show_samples(client, call, arguments.stats)
        answer = ask(client, call, lambda piece: print(piece, end="", flush=True))
    print()
    if arguments.stats:
        print(figures_line(answer.finished), file=sys.stderr)
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError("standard input is not valid UTF-8") from error


def _show_samples(client: Client, call: GenerateCall, has_stats: bool) -> int:
    """Print each answer below its number, in order, when all are there."""
    texts, ends = [""] * call.n, list[Finished]()
    with closing(client.generate(call)) as events:
        for event in events:
            match event:
                case Delta():
                    texts[event.sample] += event.text
                case Finished():
                    ends.append(event)
    for number, text in enumerate(texts, 1):
        print(f"--- {number}\n{text}")
    if has_stats:
        for end in ends:
            print(figures_line(end), file=sys.stderr)
    return 0


def figures_line(end: Finished) -> str:
    return (
        f"{end.prompt_tokens} prompt tokens ({end.cached_tokens} cached), "
        f"{end.output_tokens} output tokens, {end.reason.value}; "
        f"first token {end.ttft_s * 1e3:.0f} ms, then {end.itl_mean_s * 1e3:.1f} ms each"
    )
