"""Verbs that ask a model: generate, chat, bench."""

import argparse
import os
from typing import Any

from cluster.cli.answer_flags import add_answer_flags
from cluster.cli.credentials import add_client_flags, client_credentials
from cluster.cli.numbers import seed, token_count, whole
from cluster.resolve import add_flags

_SAMPLING = {
    "temperature": "0: always the likeliest token",
    "top_k": "draw from so many likeliest tokens; 0: from all",
    "top_p": "draw from the likeliest tokens that together have this probability",
    "min_p": "leave out tokens of less than this part of the likeliest one's probability",
    "repetition_penalty": "above 1: tokens that prompt or answer have become less likely",
    "presence_penalty": "above 0: tokens that the answer has become less likely",
    "frequency_penalty": "above 0: the more often, the less likely",
}
"""The sampling values of a call (`router.front.api.SamplingOverrides`), and what each does."""


def add(verbs: Any) -> None:
    generate = verbs.add_parser("generate", help="ask a running cluster; the answer streams")
    generate.add_argument("prompt", help="what to ask; - reads standard input")
    _add_flags(generate)
    add_answer_flags(generate, has_samples=True)
    generate.add_argument("--raw", action="store_true", help="continue the text, without a chat")
    generate.set_defaults(verb=_generate)

    chat = verbs.add_parser("chat", help="talk with a running cluster; /help lists commands")
    _add_flags(chat)
    add_answer_flags(chat, has_samples=False)
    chat.set_defaults(verb=_chat)

    verbs.add_parser("bench", help="load a running cluster and measure it", add_help=False)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    server = "where it serves gRPC (default: the cluster of that name on this host, or the configured address)"
    parser.add_argument("--server", default="", metavar="HOST:PORT", help=server)
    add_flags(parser, only=("name",))
    add_client_flags(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=token_count, default=None, metavar="N")
    sampling = parser.add_argument_group("sampling", "what is left out is as the model's publisher recommends")
    for name, text in _SAMPLING.items():
        read = int if name == "top_k" else float
        flag = f"--{name.replace('_', '-')}"
        sampling.add_argument(flag, dest=name, type=read, default=None, metavar="X", help=text)
    sampling.add_argument("--min-tokens", type=whole(0, 2**31 - 1), default=0, metavar="N")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before it; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever the model says")
    sampling.add_argument("--seed", type=seed, default=None, metavar="N", help="repeats an answer")
    parser.add_argument("--stats", action="store_true", help="figures on standard error")


def _generate(arguments: argparse.Namespace) -> int:
    from cluster.cli.ask import stream_answer
    from cluster.cli.find import served_at

    arguments.server = arguments.server or served_at(arguments, "grpc")
    return stream_answer(arguments, client_credentials(arguments, os.environ))


def _chat(arguments: argparse.Namespace) -> int:
    from cluster.cli.chat import run_chat
    from cluster.cli.find import served_at

    arguments.server = arguments.server or served_at(arguments, "grpc")
    return run_chat(arguments, client_credentials(arguments, os.environ))
