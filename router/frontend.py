"""One request from the caller's words to events: what the gRPC service and the HTTP front share.

`Frontend.generate` validates, tokenizes, submits, and yields events until the end. Closing the
iterator, in whatever state, cancels the request on its workers at once. Only the caller's own task
waits for the caller: tokens are detokenized and queued when they arrive, and no request can queue
more than its `max_tokens`.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec

from engine.messages import Fault
from engine.types import FieldError, FinishReason, RequestId, TooLongError
from router.api import ApiError, Delta, Finished, GenerateCall, GenerateEvent, Started
from router.config import RouterConfig
from router.conversation import Conversations, Prompt
from router.events import Complete
from router.hub import Hub
from router.observer import Observer
from router.output import Detokenizer, Output
from router.timing import Timeline
from router.validate import UnknownModelError, check_call, namespace, to_record


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
        self._conversations = Conversations(text, config.conversation_tokens)

    @property
    def model(self) -> TextModel:
        return self._text

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateEvent]:
        """Started, Deltas, Finished. Raises ApiError, before Started if no worker took the request.

        Close the iterator (`aclosing`) to cancel.
        """
        timeline = Timeline(self._clock())
        try:
            check_call(call, self._text, self._config)
            prompt = await self._tokenize(call)
            record = to_record(
                call,
                prompt.ids,
                self._text,
                self._config,
                request=RequestId(secrets.token_hex(8)),
                seed=secrets.randbits(64),
            )
        except FieldError as error:
            spent_s = self._clock() - timeline.received_s
            self._observer.request(FinishReason.REJECTED.value, None, [], spent_s, {})
            raise _refusal(error) from error
        deadline_s = None if call.timeout_s is None else timeline.received_s + call.timeout_s
        timeline.submitted(self._clock())
        stream = _Stream(
            Started(record.request, self._text.name, record.prompt_tokens),
            Output(self._text.detokenizer(), call.stop),
            timeline,
            self._observer,
        )
        self._hub.submit(record, deadline_s, stream)
        try:
            while True:
                event = await stream.events.get()
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, Complete):
                    self._remember(call, record.namespace, prompt, stream)
                    yield stream.account(event, self._clock())
                    return
                yield event
        finally:
            self._hub.leave(record.request)
            stream.left(self._clock())

    async def _tokenize(self, call: GenerateCall) -> Prompt:
        prompt = call.prompt
        if isinstance(prompt, str):
            size = len(prompt)
        else:
            size = sum(0 if isinstance(part, int) else len(part.content) for part in prompt)
        if size > self._config.tokenize_inline_bytes:
            return await asyncio.to_thread(self._encode, call)
        return self._encode(call)

    def _encode(self, call: GenerateCall) -> Prompt:
        if isinstance(call.prompt, str):
            return Prompt(call.prompt, self._text.encode(call.prompt, add_special=True))
        chat = _chat(call)
        if not chat:
            return Prompt("", [part for part in call.prompt if isinstance(part, int)])
        space = namespace(call.tenant, self._config.namespace_key)
        return self._conversations.encode(chat, space)

    def _remember(
        self, call: GenerateCall, space: bytes, prompt: Prompt, stream: "_Stream"
    ) -> None:
        chat = _chat(call)
        if not chat or stream.output.stopped is not None:
            return
        try:
            answer = "".join(stream.text)
            self._conversations.remember(chat, space, prompt, answer, stream.ids)
        except FieldError:
            # The template refuses the chat with its answer; then no follow-up can come either.
            return


class _Stream:
    """The client's side of one request: the hub's sink, and the queue its own task reads."""

    def __init__(
        self, started: Started, output: Output, timeline: Timeline, observer: Observer
    ) -> None:
        self.events: asyncio.Queue[GenerateEvent | Complete | ApiError] = asyncio.Queue()
        self.output = output
        self.text: list[str] = []
        self.ids: list[int] = []
        self._started = started
        self._timeline = timeline
        self._observer = observer
        self._counted = False
        self._begun = False

    def offered(self, now: float) -> None:
        self._timeline.offered(now)

    def accepted(self, now: float) -> None:
        self._timeline.accepted(now)
        if not self._begun:
            self._begun = True
            self.events.put_nowait(self._started)

    def interrupted(self, now: float) -> None:
        self._timeline.interrupted(now)

    def tokens(self, ids: list[int], now: float) -> int | None:
        text, kept = self.output.push(ids)
        if kept:
            self._timeline.tokens(len(kept), now)
            self._show(text, kept)
        stopped = self.output.stopped
        return stopped.tokens_kept if stopped is not None else None

    def completed(self, end: Complete, now: float) -> None:
        self._timeline.ended_s = now
        rest = self.output.flush()
        if rest:
            self._show(rest, [])
        self.events.put_nowait(end)

    def failed(
        self, fault: Fault, outcome: FinishReason, retry_after_s: float | None, now: float
    ) -> None:
        self._count(outcome, now, {})
        error = ApiError(fault.code, fault.message, fault.field, retry_after_s)
        self.events.put_nowait(error)

    def account(self, end: Complete, now: float) -> Finished:
        stopped = self.output.stopped
        reason = FinishReason.STOP if stopped is not None else end.reason
        stats = msgspec.structs.replace(end.stats, prompt_tokens=self._started.prompt_tokens)
        matched = stopped.matched if stopped is not None else ""
        finished = self._timeline.finished(reason, stats, matched, now)
        self._count(reason, now, finished.stats.stages)
        return finished

    def left(self, now: float) -> None:
        """The client's task is over, whether or not it saw the end."""
        self._count(FinishReason.CANCELLED, now, {})

    def _show(self, text: str, ids: list[int]) -> None:
        self.text.append(text)
        self.ids += ids
        self.events.put_nowait(Delta(text, tuple(ids)))

    def _count(self, outcome: FinishReason, now: float, stages: dict[str, float]) -> None:
        if self._counted:
            return
        self._counted = True
        line = self._timeline
        first_s = line.first_token_s
        ttft_s = None if first_s is None else first_s - line.received_s
        e2e_s = now - line.received_s
        self._observer.request(outcome.value, ttft_s, line.gaps_s, e2e_s, stages)


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
