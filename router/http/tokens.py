"""`/tokenize` and `/detokenize`, in the shapes of vLLM's server: ids of a text or a chat, and the text of ids.

A body of `/tokenize` is one of the generating routes with two fields more, so that it counts what they would read.
Long text is tokenized where theirs is (`router/front/tokenizing.py`), within the same budget.
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.front.access import as_tenant, tenant_for
from router.front.api import ApiError, GenerateCall, TokenizedText, invalid
from router.front.frontend import Frontend
from router.http.adapters.messages_request import parse_count
from router.http.answers import error_response, json_response, while_connected
from router.http.bodies import Bodies, BodyRefusal
from router.http.fields import FieldsReader, decoded
from router.http.formats import in_words_of
from router.http.gate import caller_of
from router.http.openai import CHAT, COMPLETION, Int, Parsed, parse_chat, parse_completion


class TokenizeOptions(msgspec.Struct, kw_only=True):
    """The fields beside those of the generating routes."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[Int]
    model: str | None = None
    tenant: str | None = None


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
OPTIONS = FieldsReader(TokenizeOptions, {})
IDS = FieldsReader(DetokenizeRequest, {})
_known = {name for reader in (OPTIONS, CHAT, COMPLETION) for name in reader.whole.__struct_fields__}
NAMES = FieldsReader(msgspec.defstruct("TokenizeNames", [(name, object, None) for name in sorted(_known)]), {})
"""Reads the names of fields alone."""


def parse_tokenize(body: bytes) -> tuple[Parsed, TokenizeOptions]:
    """Read a `/tokenize` body: `messages`, or a `prompt` that is text. Raises `ApiError` INVALID_ARGUMENT."""
    try:
        fields = decoded(_fields, body)
    except msgspec.ValidationError as error:
        raise invalid("", "the body must be a JSON object, with prompt or messages in it") from error
    NAMES.read(msgspec.json.encode(dict.fromkeys(fields)))
    fields = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    names = TokenizeOptions.__struct_fields__
    options = OPTIONS.read(msgspec.json.encode({name: fields.pop(name) for name in names if name in fields}))
    rest = msgspec.json.encode(fields)
    if "messages" in fields:
        return parse_chat(rest), options
    if "prompt" not in fields:
        raise invalid("prompt", "is required, or messages")
    parsed = parse_completion(rest)
    if not isinstance(parsed.call.prompt, str):
        raise invalid("prompt", "must be text: these are token ids already")
    if len(parsed.prompts) > 1:
        raise invalid("prompt", "must be one text")
    return parsed, options


class TokenRoutes:
    """The endpoints. Bodies count against the same budget as those of the generating routes."""

    def __init__(self, frontend: Frontend, bodies: Bodies) -> None:
        self._frontend = frontend
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        return await self._answered(request, self._tokenize)

    async def count(self, request: Request) -> Response:
        """Anthropic's route: how many tokens a message's prompt has."""
        return await self._answered(request, self._count, "messages")

    async def _count(self, request: Request, body: bytes) -> object:
        call = as_tenant(await self._bodies.large.parse(parse_count, body), caller_of(request))
        return {"input_tokens": len((await self._tokens_of(call, "messages")).ids)}

    async def detokenize(self, request: Request) -> Response:
        return await self._answered(request, self._detokenize)

    async def _answered(
        self, request: Request, reply: Callable[[Request, bytes], Awaitable[object]], api: str = ""
    ) -> Response:
        try:
            body = await self._bodies.read(request)
            made = await while_connected(reply(request, body), request.receive)
            return Response(status_code=499) if made is None else json_response(made)
        except BodyRefusal as refusal:
            return refusal.response(request.url.path)
        except ClientDisconnect:
            return Response(status_code=499)
        except ApiError as error:
            return error_response(error, api=api)

    async def _tokenize(self, request: Request, body: bytes) -> object:
        parsed, options = await self._bodies.large.parse(parse_tokenize, body)
        call = as_tenant(parsed.call, caller_of(request))
        strings = bool(options.return_token_strs)
        found = await self._tokens_of(call, add_special=options.add_special_tokens, strings=strings)
        context_tokens = self._frontend.model.context_tokens
        return TokenizeReply(len(found.ids), context_tokens, found.ids, found.strings if strings else None)

    async def _tokens_of(
        self, call: GenerateCall, api: str = "", *, add_special: bool | None = None, strings: bool = False
    ) -> TokenizedText:
        try:
            return await self._frontend.tokenize(call, add_special=add_special, strings=strings)
        except ApiError as error:
            raise in_words_of(api, error) from error

    async def _detokenize(self, request: Request, body: bytes) -> object:
        asked = await self._bodies.large.parse(IDS.read, body)
        tenant = tenant_for(caller_of(request), asked.tenant or "")
        return {"prompt": await self._frontend.detokenize(asked.tokens, asked.model, tenant, "tokens")}
