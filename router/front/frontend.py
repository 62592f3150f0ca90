"""One request from the caller's words to events: what the gRPC service and the HTTP front share.

`Frontend.generate` validates, tokenizes, submits, and yields events until the end. Closing the
iterator, in whatever state, cancels the request on its workers at once. A resumable request is only
left alone: it runs on, and `Frontend.resume` reads on, until the window has passed; `cancel` ends it
at once. It outlives the router: its record says what the next one needs to `revive` it. Only the
caller's own task waits for the caller: tokens are detokenized and kept when they arrive, and no
request can keep more than its `max_tokens`.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from engine.messages import Orphan
from engine.types import FieldError, FinishReason, RequestId, RequestRecord, TooLongError
from router.config import RouterConfig
from router.front.api import ApiError, Delta, GenerateCall, GenerateEvent, Position, Started
from router.front.beams import BeamSink
from router.front.context import Context, pack, unpack
from router.front.conversation import Conversations, TokenizedPrompt
from router.front.output import Detokenizer, Output
from router.front.resume import Kept, Resumables, unknown_token
from router.front.samples import Samples, SamplesReader, of_sample
from router.front.stream import SampleStream
from router.front.timing import Timeline
from router.front.validate import UnknownModelError, check_call, namespace, to_record
from router.hub import Hub
from router.observer import Observer


class TextModel(Protocol):
    """`engine.text.bundle.TextModel`, as far as it is used here."""

    name: str
    vocab_size: int
    context_tokens: int
    stop_ids: frozenset[int]

    def encode(self, text: str, *, add_special: bool) -> list[int]: ...

    def render_chat(
        self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool = True
    ) -> str: ...

    def encode_chat_text(self, rendered: str) -> list[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class Frontend:
    def __init__(
        self,
        text: TextModel,
        hub: Hub,
        config: RouterConfig,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._text = text
        self._hub = hub
        self._config = config
        self._clock = clock
        self._observer = observer
        self._journal = hub.journal
        self._conversations = Conversations(text, config.conversation_tokens)
        self._resumables = Resumables(config.resume_window_s)
        self._settled = asyncio.Event()
        self._unwanted: set[str] = set()
        hub.adopt_with(self.revive)

    @property
    def model(self) -> TextModel:
        return self._text

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Started, Deltas, Finished. Raises ApiError, before Started if no worker took the request.

        Close the iterator (`aclosing`) to cancel.
        """
        timeline = Timeline(self._clock())
        try:
            check_call(call, self._text, self._config)
            prompt = await self._tokenize(call)
            token = secrets.token_urlsafe(16) if call.resumable else ""
            record = to_record(
                call,
                prompt.ids,
                self._text,
                self._config,
                request=RequestId(secrets.token_hex(8)),
                seed=secrets.randbits(64),
                context=self._context(call, token),
            )
        except FieldError as error:
            spent_s = self._clock() - timeline.received_s
            self._observer.request(FinishReason.REJECTED.value, None, [], spent_s, {})
            raise _refusal(error) from error
        limit_s = self._config.default_timeout_s if call.timeout_s is None else call.timeout_s
        deadline_s = timeline.received_s + limit_s
        submitted_s = self._clock()
        samples = Samples(
            Started(
                record.request,
                self._text.name,
                record.prompt_tokens,
                token,
                call.form,
                call.n,
            )
        )
        chat = _chat(call)
        kept = Kept(samples, lambda stream: self._remember(chat, record, prompt, stream))
        if record.beams is not None:
            self._search(samples, record, call, timeline, submitted_s, deadline_s)
        for one in _samples(record, call.n) if record.beams is None else ():
            line = Timeline(timeline.received_s)
            line.submitted(submitted_s)
            trace = self._journal.received(one.request, call.traceparent, timeline.received_s)
            one = msgspec.structs.replace(one, traceparent=trace)
            stream = self._stream(samples, one, call.stop, line, deadline_s=deadline_s)
            samples.put(one.sample_index, stream)
            self._hub.submit(one, deadline_s, stream)
        async with aclosing(self._serve(token, kept, samples.read())) as events:
            async for event in events:
                yield event

    def _search(
        self,
        samples: Samples,
        record: RequestRecord,
        call: GenerateCall,
        timeline: Timeline,
        submitted_s: float,
        deadline_s: float,
    ) -> None:
        """One request, whose answers are the samples."""
        for index in range(call.n):
            line = Timeline(timeline.received_s)
            line.submitted(submitted_s)
            samples.put(index, self._stream(samples, record, (), line))
        self._hub.submit(record, deadline_s, BeamSink(samples.streams))

    async def resume(
        self, token: str, positions: Sequence[Position] = ()
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Go on with a resumable request behind what the client has of each sample; without positions, from the start.

        Yields Started again. Raises ApiError: NOT_FOUND for a token that is unknown or too old. Waits until the router
        knows what it has to go on with from an earlier one.
        """
        await self._settled.wait()
        kept = self._resumables.find(token)
        if kept is None:
            raise unknown_token()
        reader = kept.samples.read_on(positions)
        self._resumables.attached(token)
        async with aclosing(self._serve(token, kept, reader)) as events:
            async for event in events:
                yield event

    def cancel(self, token: str) -> bool:
        """End a resumable request at once; False if there is none of this token. As long as an earlier router's may
        still turn up, there may be one."""
        kept = self._resumables.forget(token)
        if not self._settled.is_set():
            self._unwanted.add(token)
        elif kept is None:
            return False
        if kept is None:
            return True
        self._abandon(kept)
        return True

    def revive(self, orphan: Orphan, now: float) -> SampleStream | None:
        """The stream of an earlier router's request, kept for its client as if it had just lost its connection.

        None if that router wrote another kind of context, or served another model, or the client has cancelled it."""
        record = orphan.record
        context = unpack(record.context)
        if context is None or context.model != self._text.name or context.token in self._unwanted:
            return None
        if record.sample_index >= context.samples:
            return None
        kept = self._resumables.find(context.token)
        if kept is None:
            kept = self._revived(context, record)
            self._resumables.keep(context.token, kept)
        timeline = Timeline.adopted(orphan.age_s, len(orphan.tokens), now)
        stream = self._stream(kept.samples, record, context.stop, timeline, is_adopted=True)
        kept.samples.put(record.sample_index, stream)
        self._give_up(self._resumables.detached(context.token, now))
        return stream

    def _revived(self, context: Context, record: RequestRecord) -> Kept:
        chat = list(context.chat)

        def remember(stream: SampleStream) -> None:
            if chat:
                prompt = TokenizedPrompt(self._text.render_chat(chat), record.tokens[: record.prompt_tokens])
                self._remember(chat, record, prompt, stream)

        started = Started(
            record.group or record.request,
            context.model,
            record.prompt_tokens,
            context.token,
            context.form,
            context.samples,
        )
        return Kept(Samples(started), remember)

    def _stream(
        self,
        samples: Samples,
        record: RequestRecord,
        stop: tuple[str, ...],
        timeline: Timeline,
        *,
        is_adopted: bool = False,
        deadline_s: float = float("inf"),
    ) -> SampleStream:
        return SampleStream(
            Started(record.request, self._text.name, record.prompt_tokens),
            Output(self._text.detokenizer(), stop),
            timeline,
            self._observer,
            samples.changed,
            is_adopted=is_adopted,
            deadline_s=deadline_s,
            journal=self._journal,
        )

    def tick(self) -> None:
        """Time has passed: end what no client came back for in time."""
        if self._hub.is_settled():
            self._settled.set()
            self._unwanted.clear()
        self._give_up(self._resumables.expired(self._clock()))

    def _give_up(self, late: list[Kept]) -> None:
        for kept in late:
            self._abandon(kept)

    async def _serve(
        self, token: str, kept: Kept, reader: SamplesReader
    ) -> AsyncGenerator[GenerateEvent, None]:
        samples = kept.samples
        try:
            while (event := await reader.next()) is not None:
                if isinstance(event, Started):
                    if token:
                        self._resumables.keep(token, kept)
                    yield event
                    continue
                at, item = event
                if isinstance(item, Delta):
                    yield of_sample(item, at)
                    continue
                stream = samples.streams[at]
                kept.remember(stream)
                yield of_sample(stream.account(item, self._clock()), at)
        except ApiError as error:
            if samples.reader is reader and len(samples.streams) > 1:
                self._abandon(kept, error)
            raise
        finally:
            if samples.reader is reader:
                if not (token and reader.is_known):
                    self._abandon(kept)
                elif self._resumables.find(token) is kept:
                    self._give_up(self._resumables.detached(token, self._clock()))

    def _abandon(self, kept: Kept, why: ApiError | None = None) -> None:
        """Nobody will read it any more."""
        for request in kept.samples.end_all(self._clock(), why):
            self._hub.leave(request)

    def _context(self, call: GenerateCall, token: str) -> bytes:
        """Nothing, for a request that ends with its connection."""
        if not token:
            return b""
        chat = tuple(_chat(call))
        return pack(
            Context(
                token=token,
                model=self._text.name,
                stop=call.stop,
                chat=chat,
                form=call.form,
                samples=call.n,
            )
        )

    async def _tokenize(self, call: GenerateCall) -> TokenizedPrompt:
        prompt = call.prompt
        if isinstance(prompt, str):
            size = len(prompt)
        else:
            # Each message also costs what the template writes around it.
            size = sum(0 if isinstance(part, int) else 64 + len(part.content) for part in prompt)
        if size > self._config.tokenize_inline_bytes:
            return await asyncio.to_thread(self._encode, call)
        return self._encode(call)

    def _encode(self, call: GenerateCall) -> TokenizedPrompt:
        if isinstance(call.prompt, str):
            return TokenizedPrompt(call.prompt, self._text.encode(call.prompt, add_special=True))
        chat = _chat(call)
        if not chat:
            return TokenizedPrompt("", [part for part in call.prompt if isinstance(part, int)])
        space = namespace(call.tenant, self._config.namespace_key)
        return self._conversations.encode(chat, space)

    def _remember(
        self,
        chat: list[tuple[str, str]],
        record: RequestRecord,
        prompt: TokenizedPrompt,
        stream: SampleStream,
    ) -> None:
        if not chat or stream.output.stopped is not None:
            return
        try:
            self._conversations.remember(chat, record.namespace, prompt, stream.text, stream.ids)
        except FieldError:
            # The template refuses the chat with its answer; then no follow-up can come either.
            return


def _samples(record: RequestRecord, count: int) -> list[RequestRecord]:
    """The records of all samples: requests of their own, of one group. The first keeps the name of them all."""
    if count == 1:
        return [record]
    return [
        msgspec.structs.replace(
            record,
            request=RequestId(f"{record.request}.{index}") if index else record.request,
            sample_index=index,
            group=record.request,
        )
        for index in range(count)
    ]


def _chat(call: GenerateCall) -> list[tuple[str, str]]:
    """The messages of a chat; empty for any other prompt."""
    if isinstance(call.prompt, str):
        return []
    return [(m.role, m.content) for m in call.prompt if not isinstance(m, int)]


def _refusal(error: FieldError) -> ApiError:
    if isinstance(error, TooLongError):
        code = "OUT_OF_RANGE"
    elif isinstance(error, UnknownModelError):
        code = "NOT_FOUND"
    else:
        code = "INVALID_ARGUMENT"
    return ApiError(code, str(error), error.field)
