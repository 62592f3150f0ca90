"""`headrace chat`: a conversation that streams, on a terminal or through a pipe (one line is one turn)."""

import argparse
import signal
import sys

from access.client import ClientCredentials
from cluster.cli.ask import ClientAnswer, ask, drawn_by, figures_line
from cluster.config import ConfigError
from router.front.api import ApiError, ChatMessage, GenerateCall
from router.grpc.client import Client

HELP = """\
/help           this
/reset          forget the conversation
/system TEXT    begin anew with this system message
/stats          show or hide figures after each answer
/exit           end (so does Ctrl-D); Ctrl-C ends the answer under way"""


class Chat:
    """One conversation. Mutable state: the messages so far, and whether figures are shown."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._drawn_by = drawn_by(arguments)
        self._stats: bool = arguments.stats
        self._system: str = arguments.system
        self.messages: list[ChatMessage] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [ChatMessage("system", self._system)] if self._system else []

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False ends the conversation."""
        word, _, rest = line.partition(" ")
        match word:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.reset()
            case "/system":
                self._system = rest.strip()
                self.reset()
            case "/stats":
                self._stats = not self._stats
            case "/help":
                print(HELP)
            case _:
                print(f"{word} is no command; /help lists them", file=sys.stderr)
        return True

    def turn(self, text: str) -> None:
        """Say `text` and print the answer as it comes. A turn that fails, or is interrupted, is not remembered. Raises
        ApiError and KeyboardInterrupt."""
        messages = [*self.messages, ChatMessage("user", text)]
        call = GenerateCall(
            prompt=messages,
            **self._drawn_by,
        )
        try:
            answer: ClientAnswer = ask(
                self._client, call, lambda piece: print(piece, end="", flush=True)
            )
        finally:
            print(flush=True)
        self.messages = [*messages, ChatMessage("assistant", answer.text)]
        if self._stats:
            print(figures_line(answer.finished), file=sys.stderr)


def run_chat(arguments: argparse.Namespace, credentials: ClientCredentials) -> int:
    """Converse until the end of the input. Piped, the first failure is raised as ApiError; a person may try again."""
    is_person = sys.stdin.isatty()
    if is_person:
        import readline  # noqa: F401  (lines can be edited and recalled once it is imported)
    # The first Ctrl-C is for the answer, not for the program.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Client(arguments.server, credentials) as client:
        if is_person:
            print(f"Talking with {', '.join(client.models())} at {arguments.server}. /help lists commands.")
        chat = Chat(client, arguments)
        while (line := _line(is_person)) is not None:
            if not line:
                continue
            if line.startswith("/"):
                if not chat.command(line):
                    break
                continue
            try:
                chat.turn(line)
            except KeyboardInterrupt:
                print("(interrupted)", file=sys.stderr)
            except ApiError as error:
                if not is_person:
                    raise
                print(f"{error.code}: {error.message}", file=sys.stderr)
    return 0


def _line(is_person: bool) -> str | None:
    """Return the next line without its end; None when there is none, or Ctrl-C is pressed where nothing runs."""
    try:
        return input("> " if is_person else "").strip()
    except UnicodeDecodeError as error:
        raise ConfigError("standard input is not valid UTF-8") from error
    except EOFError:
        if is_person:
            print()
        return None
    except KeyboardInterrupt:
        print()
        return None
