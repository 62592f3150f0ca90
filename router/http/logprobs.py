"""Log probabilities as the two OpenAI routes write them. Pure.

A token is written as the text that it stands for by itself; a control token, which answers skip, by its name. What is
no whole character reads as U+FFFD in a chat, whose `bytes` say what it is, and as `bytes:\\xe2\\x80` in a completion,
where a token has nothing else to be told by. `text_offset` counts characters of the text, of which each belongs to
the token that begins it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.types import TokenLogprobs

TokenBytes = Callable[[int], tuple[bytes, bool]]
"""The bytes of a token, and whether answers show them (`router.front.output.ServedModel`)."""


def chat_logprobs(given: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """The field `logprobs` of a chat's choice."""
    content = []
    for one in given:
        top = [_entry(token, logprob, token_bytes) for token, logprob in one.top]
        content.append(_entry(one.token, one.logprob, token_bytes) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    given: Sequence[TokenLogprobs | int], offset: int, token_bytes: TokenBytes, *, has_top: bool
) -> dict[str, Any]:
    """The field `logprobs` of a completion's choice, whose text has `offset` characters before the first of these
    tokens. The first token of a prompt, of which nothing is known, is given as its id."""
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in given:
        token = one if isinstance(one, int) else one.token
        names.append(_name(token, token_bytes))
        offsets.append(offset)
        offset += characters(token, token_bytes)
        if isinstance(one, int):
            values.append(None)
            tops.append(None)
            continue
        values.append(one.logprob)
        # The token itself is always among them, as callers look it up there.
        top = {_name(other, token_bytes): logprob for other, logprob in one.top}
        tops.append(top | {names[-1]: one.logprob})
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops if has_top else None,
        "text_offset": offsets,
    }


def prompt_logprobs(given: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """The field `prompt_logprobs`: by token id, for each token of the prompt; nothing is known of the first."""
    told: list[dict[str, Any] | None] = [None]
    for one in given:
        values = {**dict(one.top), one.token: one.logprob}
        told.append({str(token): _decoded(token, logprob, token_bytes) for token, logprob in values.items()})
    return told


def _decoded(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    return {"logprob": logprob, "decoded_token": token_bytes(token)[0].decode(errors="replace")}


def characters(token: int, token_bytes: TokenBytes) -> int:
    """How many characters of the text a token begins."""
    data, is_shown = token_bytes(token)
    return sum(byte & 0xC0 != 0x80 for byte in data) if is_shown else 0


def _entry(token: int, logprob: float, token_bytes: TokenBytes) -> dict[str, Any]:
    data, _ = token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _name(token: int, token_bytes: TokenBytes) -> str:
    data, _ = token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
