"""The intake: what a caller asks becomes the record that any worker may run, in one pass and once.

Four steps: check every field, tokenize, fill in the record, and add what a later router needs to go on with it. All bad
input stops here. The frontend submits the record to the router's core, through `router/hub.py`.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import msgspec

from engine import identity
from engine.plan import MAX_OUTPUT_VALUES, MAX_PROMPT_VALUES, TOO_LONG_TO_TELL, TOO_MANY_VALUES
from engine.text.messages import ChatMessage, ChatPrompt
from engine.types import Constraint, FieldError, RequestId, RequestRecord, SamplingParams, TooLongError
from router.config import RouterConfig
from router.core.endings import DEADLINE
from router.core.registry import ModelKey
from router.core.sessions import Session
from router.front.api import ApiError, GenerateCall, HttpForm, TokenizedText
from router.front.conversation import Conversations, FinishedChat, TokenizedPrompt
from router.front.grammars import GrammarTrials
from router.front.namespaces import CacheNamespaces, CacheTerms, OwnCache
from router.front.output import ServedModel
from router.front.parsers.choose import Parsing, opens_thinking
from router.front.parsers.forced import ReasoningBudget, budgeted, forced_calls
from router.front.resume import Context, pack, resume_key
from router.front.tokenizing import Steps, TokenizingPool, at_once, tokenize, tokenize_end
from router.front.validate import (
    UnknownModelError,
    beam_params,
    chat_of,
    check_call,
    check_held,
    check_ids,
    check_label,
    prompt_field,
)

T = TypeVar("T")
NAMED_TOKENS = 8192
"""The blocks of a prompt up to here are named where it is placed: that takes a third of a millisecond, less than a wait
for a thread."""
REMEMBER_S = 0.25
"""The end of a long chat's answer waits so long until it is remembered."""
END_TOKENS = 32
"""The last tokens of a prompt show whether a think block is open."""


class Arrival(msgspec.Struct, frozen=True):
    """A call that was taken in. `chat` is None for any other prompt;
    `token` is what its client comes back with, empty where it cannot; `session` names its conversation."""

    record: RequestRecord
    prompt: TokenizedPrompt
    chat: ChatPrompt | None
    token: str
    continues: bool
    """The answer goes on with a text, or is what a constraint says to the letter."""
    form: HttpForm | None = None
    """The call's, with how the answer is taken apart."""
    session: Session | None = None


class Intake:
    """Belongs to the router's event loop; long text is tokenized in threads beside it."""

    # Mutable state: the long chats that have ended and are not remembered yet, beside what its parts have.

    def __init__(
        self,
        model: ServedModel,
        config: RouterConfig,
        terms: Callable[[str], CacheTerms] = lambda tenant: OwnCache(),
        kinds: Callable[[], Sequence[ModelKey]] = tuple,
    ) -> None:
        """`terms` returns what the record of the tenant of this name says of the cache, and `kinds` whose blocks a
        prompt is soon looked for among."""
        self._model = model
        self._kinds = kinds
        self._config = config
        self.namespaces = CacheNamespaces(config.namespace_key, terms)
        self.conversations = Conversations(model, config.conversation_tokens)
        self._grammars = GrammarTrials(model.model_dir)
        self._pool = TokenizingPool(config.tokenize_threads, config.tokenize_budget_bytes)
        self._remembering: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._remembering:
            task.cancel()
        self._pool.close()
        self._grammars.close()

    async def take(self, call: GenerateCall) -> Arrival:
        """Check a call and make its record. Raises ApiError with the name of the field at fault."""
        try:
            call = msgspec.structs.replace(call, sampling=sampling_of(call, self._model, self._config))
            check_call(call, self._model, self._config)
            if call.constraint is not None:
                call = await self._constrained(call, call.constraint)
            chat = chat_of(call)
            continues = chat is None or chat.continue_final or call.constraint is not None
            prompt = await self._tokenize(call, chat)
            form = self._form(call, chat, prompt)
            if call.tool_choice.mode == "required" and form is not None and form.parsing is not None:
                call = await self._forced(call, form.parsing)
            elif (budget := call.reasoning_budget) is not None:
                if call.constraint is not None:
                    raise FieldError("reasoning_budget", f"is not allowed with {call.constraint_field}")
                bound = budgeted((form and form.parsing) or Parsing(), self._model.added_ids, self._budget(budget))
                call = await self._held(call, bound, "reasoning_budget")
            kept = kept_tokens(call, self._model, self._config)
            if kept is not None and len(prompt.ids) > kept:
                # Its text is no longer that of its ids, so no later turn can begin with them.
                prompt, chat = TokenizedPrompt("", prompt.ids[-kept:]), None
            token = secrets.token_urlsafe(16) if call.resumable else ""
            context = Context(
                token=token,
                model=shown_name(call, self._model, self._config),
                stop=call.stop,
                chat=chat,
                form=form,
                samples=call.n,
                tenant=call.tenant,
                session=self.namespaces.session(call.tenant, call.session) if call.session else None,
                continues=continues,
            )
            record = to_record(
                call,
                prompt.ids,
                self._model,
                self._config,
                request=RequestId(secrets.token_hex(8)),
                seed=secrets.randbits(64),
                context=pack(context) if token else b"",
                resume_key=resume_key(token),
                namespaces=self.namespaces,
            )
        except FieldError as error:
            raise _refusal(error) from error
        await self._name(call, record)
        return Arrival(record, prompt, chat, token, continues, form, context.session)

    async def remember(
        self,
        chat: ChatPrompt,
        record: RequestRecord,
        prompt: TokenizedPrompt,
        turn: Callable[[str], ChatMessage],
        answer: str,
        emitted: Sequence[int],
    ) -> bool:
        """Keep a finished turn (`Conversations.finished`) and return whether it is a long one. Such is rendered in a
        thread, where there is room for its text; that is waited for a little, so that the next turn finds it."""
        size_bytes = max(len(prompt.text), len(prompt.ids)) + len(answer)
        work = partial(
            self.conversations.finished, chat, record.namespace, prompt, turn, answer, emitted, record.stop_token_ids
        )
        if size_bytes <= self._config.tokenize_inline_bytes:
            self.conversations.keep(work())
            return False
        task = asyncio.create_task(self._remember_long(work, size_bytes))
        self._remembering.add(task)
        task.add_done_callback(self._remembering.discard)
        await asyncio.wait({task}, timeout=REMEMBER_S)
        return True

    async def _remember_long(self, work: Callable[[], dict[bytes, FinishedChat]], size_bytes: int) -> None:
        if not self._pool.has_room(size_bytes):
            return  # asked at the last moment: no prompt gives way for it
        with suppress(ApiError):  # a shorter text came, and there was no room for both
            self.conversations.keep(await self._pool.run(_one_step(work), size_bytes))

    def _form(self, call: GenerateCall, chat: ChatPrompt | None, prompt: TokenizedPrompt) -> HttpForm | None:
        """Return the form of the answer, with the parsers that it needs. Raises FieldError for tools whose calls nobody
        could read."""
        form = call.form
        if form is None or chat is None:
            return form
        dialect, config = self._model.dialect, self._config
        reasoning = dialect.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser
        tools = dialect.tools if config.tool_parser == "auto" else config.tool_parser
        if chat.tools and tools in ("", "none"):
            what = "how this model writes its calls is not known here (router.tool_parser)"
            raise FieldError("tools", what if not tools else "are switched off here")
        parsing = Parsing(
            tools=tools if chat.tools else "",
            reasoning="" if reasoning == "none" else reasoning,
            # By its ids: where its mark is a control token, the text has no name of it.
            is_open=opens_thinking(chat, self._model.text_of(prompt.ids[-END_TOKENS:])),
            single=not call.parallel_tool_calls or bool(call.tool_choice.name),
        )
        return msgspec.structs.replace(form, parsing=parsing if parsing.tools or parsing.reasoning else None)

    async def tokenize(self, call: GenerateCall, *, add_special: bool | None, strings: bool) -> TokenizedText:
        """Return the ids of the call's text or chat, cut as `take` would cut them. `add_special` adds what the model
        puts around a text: by default to a plain prompt only, since a template writes its own. Raises ApiError as
        `take` does."""
        try:
            check_call(call, self._model, self._config)
            ids = (await self._tokenize(call, chat_of(call), add_special)).ids
            if (kept := kept_tokens(call, self._model, self._config)) is not None:
                ids = ids[-kept:]
            if len(ids) > self._model.context_tokens:
                raise TooLongError(
                    prompt_field(call.prompt), f"has {len(ids)} tokens; the context holds {self._model.context_tokens}"
                )
            if not strings:
                return TokenizedText(ids, [])
            return TokenizedText(ids, await self._decoded(len(ids), partial(self._model.token_strings, ids)))
        except FieldError as error:
            raise _refusal(error) from error

    async def detokenize(
        self, ids: list[int], model: str | None = None, tenant: str = "", field: str = "token_ids"
    ) -> str:
        """Return the text of token ids, control tokens by their names. Raises ApiError."""
        try:
            check_label("tenant", tenant)
            check_ids(field, ids, model, self._model, self._config)
            return await self._decoded(len(ids), partial(self._model.text_of, ids))
        except FieldError as error:
            raise _refusal(error) from error

    async def _decoded(self, tokens: int, decode: Callable[[], T]) -> T:
        """Decode here where it is little, else in a thread, under the budget of long texts."""
        size_bytes = 4 * tokens
        steps = _one_step(decode)
        if size_bytes <= self._config.tokenize_inline_bytes:
            return at_once(steps)
        return await self._pool.run(steps, size_bytes)

    def namespace(self, tenant: str) -> bytes:
        """Return the cache namespace of a tenant of this cluster."""
        return self.namespaces.of(tenant)

    async def _forced(self, call: GenerateCall, parsing: Parsing) -> GenerateCall:
        """Return the call held to calling a tool. Raises as `_constrained` does."""
        name = call.tool_choice.name
        tools = [tool for tool in call.tools if name in ("", tool.name)]
        budget = None if call.reasoning_budget is None else self._budget(call.reasoning_budget)
        constraint = forced_calls(parsing, tools, self._model.added_ids, budget)
        return await self._held(call, constraint, "tool_choice")

    def _budget(self, tokens: int) -> ReasoningBudget:
        return ReasoningBudget(min(tokens, self._model.context_tokens), self._model.stop_ids)

    async def _held(self, call: GenerateCall, constraint: Constraint, field: str) -> GenerateCall:
        """Return the call with a constraint of ours, which `field` asks for. Raises as `_constrained` does."""
        call = msgspec.structs.replace(call, constraint=constraint, constraint_field=field)
        check_held(call, constraint)
        return await self._constrained(call, constraint)

    async def _constrained(self, call: GenerateCall, constraint: Constraint) -> GenerateCall:
        """Return the call with a constraint that workers can hold its answer to. Raises FieldError, and ApiError if
        there is no time or no room to try it out."""
        limit_s = self._config.default_timeout_s if call.timeout_s is None else call.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                approved = await self._grammars.approved(constraint, call.constraint_field, call.tenant)
        except TimeoutError as error:
            raise ApiError(DEADLINE.code, "the deadline passed before the constraint was compiled") from error
        return msgspec.structs.replace(call, constraint=approved)

    async def _tokenize(
        self, call: GenerateCall, chat: ChatPrompt | None, add_special: bool | None = None
    ) -> TokenizedPrompt:
        """Return the prompt's ids. Raises FieldError, and ApiError if there is no time or no room to tokenize it."""
        if isinstance(call.prompt, list) and chat is None:
            return TokenizedPrompt("", list(cast(list[int], call.prompt)))
        size_bytes = chat.size if chat is not None else len(call.prompt)
        return await self._in_time(call, self._steps(call, chat, add_special), size_bytes)

    async def _name(self, call: GenerateCall, record: RequestRecord) -> None:
        """Name the blocks of a long prompt in a thread: placing it finds them named (`identity.chain` remembers), and
        holds up the streams of others half as long. Where there is no time or no room, they are named there."""
        kinds = self._kinds()
        if len(record.tokens) > NAMED_TOKENS and kinds:
            size_bytes = identity.TOKEN_BYTES * len(record.tokens)
            with suppress(ApiError):
                await self._in_time(call, _one_step(partial(_name_blocks, record, kinds)), size_bytes)

    async def _in_time(self, call: GenerateCall, steps: Steps[T], size_bytes: int) -> T:
        """Run steps on the prompt here where it is little, else in a thread, within the call's deadline."""
        if size_bytes <= self._config.tokenize_inline_bytes:
            return at_once(steps)
        limit_s = self._config.default_timeout_s if call.timeout_s is None else call.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._pool.run(steps, size_bytes)
        except TimeoutError as error:
            raise ApiError(DEADLINE.code, "the deadline passed before the prompt was tokenized") from error

    def _steps(
        self, call: GenerateCall, chat: ChatPrompt | None, add_special: bool | None
    ) -> Steps[TokenizedPrompt]:
        model, known = self._model, list[int]()
        if chat is None:
            assert isinstance(call.prompt, str)
            # Unless the caller says otherwise, only those who write a whole prompt may write control tokens.
            is_literal = call.parse_control_tokens is False
            text = rest = call.prompt
            encode: Callable[[str], list[int]] = partial(
                model.encode, add_special=add_special is not False, is_literal=is_literal
            )
        elif add_special:
            text = rest = model.render_chat(chat)
            encode = partial(model.encode, add_special=True, is_literal=True)
        else:
            space = self.namespaces.of(call.tenant, call.cache_salt)
            text, known, rest = self.conversations.begin(chat, space)
            encode = model.encode_chat_text
        kept = kept_tokens(call, model, self._config)
        if kept is None:
            ids = yield from tokenize(encode, rest, prompt_field(call.prompt), model.context_tokens, len(known))
        else:
            ids = yield from tokenize_end(encode, rest, kept)
        return TokenizedPrompt(text, known + ids)


def to_record(
    call: GenerateCall,
    tokens: list[int],
    model: ServedModel,
    config: RouterConfig,
    *,
    request: RequestId,
    seed: int,
    namespaces: CacheNamespaces,
    context: bytes = b"",
    resume_key: bytes = b"",
) -> RequestRecord:
    """The record of a checked call whose prompt is `tokens`.

    `seed` is used where the call has none. An absent max_tokens becomes the configured default or
    what room the context leaves, whichever is less. Raises FieldError and TooLongError.
    """
    field = prompt_field(call.prompt)
    if not tokens:
        raise FieldError(field, "must not be empty")
    # Several prompts are answered as one, which their values share.
    prompts = 1 if call.form is None else call.form.prompts
    values = 0 if call.prompt_logprobs is None else len(tokens) * (call.prompt_logprobs + 1)
    if values > (most := MAX_PROMPT_VALUES // prompts):
        raise FieldError("prompt_logprobs", TOO_MANY_VALUES.format(values, most))
    room = model.context_tokens - len(tokens)
    if room < 1:
        holds = f"has {len(tokens)} tokens; the context holds {model.context_tokens}"
        raise TooLongError(field, f"{holds}, and at least one is needed for the answer")
    usual = max(config.default_max_tokens, call.min_tokens)
    max_tokens = min(usual, room) if call.max_tokens is None else call.max_tokens
    for bound, count in ("max_tokens", max_tokens), ("min_tokens", call.min_tokens):
        if count > room:
            raise TooLongError(
                bound,
                f"{count} output tokens after {len(tokens)} prompt tokens exceed the context of "
                f"{model.context_tokens}; at most {room} are possible",
            )
    values = 0 if call.logprobs is None else call.n * max_tokens * (call.logprobs + 1)
    if values > (most := MAX_OUTPUT_VALUES // prompts):
        raise FieldError("logprobs", TOO_LONG_TO_TELL.format(values, most))
    return RequestRecord(
        request=request,
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        seed=seed if call.seed is None else call.seed,
        sampling=sampling_of(call, model, config),
        priority=call.priority,
        beams=beam_params(call),
        stop_token_ids=call.stop_token_ids,
        min_tokens=call.min_tokens,
        ignore_eos=call.ignore_eos,
        constraint=call.constraint,
        logit_bias=call.logit_bias,
        allowed_token_ids=call.allowed_token_ids,
        logprobs=call.logprobs,
        prompt_logprobs=call.prompt_logprobs,
        namespace=namespaces.of(call.tenant, call.cache_salt),
        cache_share=namespaces.share(call.tenant),
        context=context,
        resume_key=resume_key,
    )


def sampling_of(call: GenerateCall, model: ServedModel, config: RouterConfig) -> SamplingParams:
    """Return by what a call's answer is drawn: its own values, and for those that it does not name the model's, or with
    `generation_config` off those that change nothing. A beam search draws nothing, and has its own values alone."""
    if isinstance(call.sampling, SamplingParams):
        return call.sampling
    is_own = config.generation_config == "model" and call.beam_width is None
    return call.sampling.over(model.sampling if is_own else SamplingParams())


def shown_name(call: GenerateCall, model: ServedModel, config: RouterConfig) -> str:
    """Return the name by which an answer calls the model: the caller's own, or the first that it is served under."""
    return call.model or config.names(model.name)[0]


def kept_tokens(call: GenerateCall, model: ServedModel, config: RouterConfig) -> int | None:
    """Return how many of the prompt's last tokens a call keeps at most; None: all of them, or it is too long."""
    if call.truncate_prompt_tokens != -1:
        return call.truncate_prompt_tokens
    answer = min(config.default_max_tokens, model.context_tokens // 2) if call.max_tokens is None else call.max_tokens
    return max(1, model.context_tokens - answer)


def _one_step(work: Callable[[], T]) -> Steps[T]:
    yield from ()
    return work()


def _name_blocks(record: RequestRecord, kinds: Sequence[ModelKey]) -> int:
    """Name the full blocks of a prompt as each kind of worker has them, and return how many there are."""
    chains = [identity.chain(identity.root(record.space, model), record.tokens, size) for model, size in kinds]
    return sum(map(len, chains))


def _refusal(error: FieldError) -> ApiError:
    codes = ((TooLongError, "OUT_OF_RANGE"), (UnknownModelError, "NOT_FOUND"), (FieldError, "INVALID_ARGUMENT"))
    return ApiError(next(code for kind, code in codes if isinstance(error, kind)), str(error), error.field)
