"""A vocabulary of bytes, for constraints on the answers of models that are none."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from llguidance import LLTokenizer

from engine.constraints.matchers import Matchers


class _ByteTokens:
    """What `LLTokenizer` asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, end: int) -> None:
        self.eos_token_id = end
        self.special_token_ids = [end]
        self.tokens = [bytes([byte]) for byte in range(end)] + [b"<end>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_vocabulary(end: int = 256) -> LLTokenizer:
    """Return one whose tokens are bytes, up to `end`, which ends an answer."""
    return LLTokenizer(_ByteTokens(end), eos_token=end)  # type: ignore[arg-type]


class AtOnce(Executor):
    """Runs what it is given in the caller's thread, before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def byte_matchers(end: int = 256, jumps: bool = True) -> Matchers:
    """Return matchers of such a vocabulary, without threads."""
    return Matchers(lambda: byte_vocabulary(end), end + 1, AtOnce(), AtOnce(), jumps)
