"""The intake: what a caller asks becomes the record that any worker may run, in one pass and once.

Four steps: check every field, tokenize, fill in the record, and add what a later router needs to go on with it. All bad
input stops here. The frontend submits the record to the router's core, through `router/hub.py`.
"""

import asyncio
import secrets
from hashlib import blake2b

import msgspec

from engine.types import FieldError, RequestId, RequestRecord, TooLongError
from router.config import RouterConfig
from router.front.api import ApiError, GenerateCall
from router.front.conversation import Conversations, TokenizedPrompt
from router.front.output import ServedModel
from router.front.resume import Context, pack
from router.front.validate import UnknownModelError, beam_params, check_call, prompt_field


class Arrival(msgspec.Struct, frozen=True):
    """A call that was taken in. `chat` holds (role, content) of its messages, and is empty for any other prompt;
    `token` is what its client comes back with, empty where it cannot."""

    record: RequestRecord
    prompt: TokenizedPrompt
    chat: tuple[tuple[str, str], ...]
    token: str


class Intake:
    """Belongs to the router's event loop; long text is tokenized in a thread beside it."""

    def __init__(self, model: ServedModel, config: RouterConfig) -> None:
        self._model = model
        self._config = config
        self.conversations = Conversations(model, config.conversation_tokens)

    async def take(self, call: GenerateCall) -> Arrival:
        """Check a call and make its record. Raises ApiError with the name of the field at fault."""
        try:
            check_call(call, self._model, self._config)
            chat = _chat(call)
            prompt = await self._tokenize(call, chat)
            token, name = secrets.token_urlsafe(16) if call.resumable else "", self._model.name
            context = Context(token=token, model=name, stop=call.stop, chat=chat, form=call.form, samples=call.n)
            record = to_record(
                call,
                prompt.ids,
                self._model,
                self._config,
                request=RequestId(secrets.token_hex(8)),
                seed=secrets.randbits(64),
                context=pack(context) if token else b"",
            )
        except FieldError as error:
            raise _refusal(error) from error
        return Arrival(record, prompt, chat, token)

    async def _tokenize(self, call: GenerateCall, chat: tuple[tuple[str, str], ...]) -> TokenizedPrompt:
        # Each message also costs what the template writes around it.
        size = sum(64 + len(content) for _, content in chat)
        if isinstance(call.prompt, str):
            size = len(call.prompt)
        if size > self._config.tokenize_inline_bytes:
            return await asyncio.to_thread(self._encode, call, chat)
        return self._encode(call, chat)

    def _encode(self, call: GenerateCall, chat: tuple[tuple[str, str], ...]) -> TokenizedPrompt:
        if isinstance(call.prompt, str):
            return TokenizedPrompt(call.prompt, self._model.encode(call.prompt, add_special=True))
        if chat:
            return self.conversations.encode(chat, namespace(call.tenant, self._config.namespace_key))
        return TokenizedPrompt("", [part for part in call.prompt if isinstance(part, int)])


def to_record(
    call: GenerateCall,
    tokens: list[int],
    model: ServedModel,
    config: RouterConfig,
    *,
    request: RequestId,
    seed: int,
    context: bytes = b"",
) -> RequestRecord:
    """The record of a checked call whose prompt is `tokens`.

    `seed` is used where the call has none. An absent max_tokens becomes the configured default or
    what room the context leaves, whichever is less. Raises FieldError and TooLongError.
    """
    field = prompt_field(call.prompt)
    if not tokens:
        raise FieldError(field, "must not be empty")
    room = model.context_tokens - len(tokens)
    if room < 1:
        holds = f"has {len(tokens)} tokens; the context holds {model.context_tokens}"
        raise TooLongError(field, f"{holds}, and at least one is needed for the answer")
    max_tokens = min(config.default_max_tokens, room) if call.max_tokens is None else call.max_tokens
    if max_tokens > room:
        raise TooLongError(
            "max_tokens",
            f"{max_tokens} output tokens after {len(tokens)} prompt tokens exceed the context of "
            f"{model.context_tokens}; at most {room} are possible",
        )
    return RequestRecord(
        request=request,
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        seed=seed if call.seed is None else call.seed,
        sampling=call.sampling,
        priority=call.priority,
        beams=beam_params(call),
        stop_token_ids=call.stop_token_ids,
        min_tokens=min(call.min_tokens, max_tokens),
        ignore_eos=call.ignore_eos,
        namespace=namespace(call.tenant, config.namespace_key),
        context=context,
    )


def namespace(tenant: str, key: str) -> bytes:
    """The cache namespace of a tenant: keyed, so that no tenant can name another's blocks."""
    if not tenant:
        return b""
    secret = blake2b(key.encode(), digest_size=32).digest()
    return blake2b(tenant.encode(), key=secret, digest_size=16, person=b"headrace tenant").digest()


def _chat(call: GenerateCall) -> tuple[tuple[str, str], ...]:
    if isinstance(call.prompt, str):
        return ()
    return tuple((m.role, m.content) for m in call.prompt if not isinstance(m, int))


def _refusal(error: FieldError) -> ApiError:
    codes = ((TooLongError, "OUT_OF_RANGE"), (UnknownModelError, "NOT_FOUND"), (FieldError, "INVALID_ARGUMENT"))
    return ApiError(next(code for kind, code in codes if isinstance(error, kind)), str(error), error.field)
