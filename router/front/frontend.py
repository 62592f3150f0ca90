"""Answers a caller's request with events; the gRPC service and the HTTP front share it.

`Frontend.generate` takes a call in (`router/front/intake.py`, where its way goes on), submits its record, and yields
events until the end. Closing the iterator, in whatever state, cancels the request on its workers at once. A resumable
request is only left alone: it runs on, and `Frontend.resume` reads on, until the window has passed; `cancel` ends it
at once. It outlives the router: its record says what the next one needs to `revive` it. Only the
caller's own task waits for the caller: tokens are detokenized and kept when they arrive, and no
request can keep more than its `max_tokens`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from engine.messages import Orphan
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.events import Complete
from router.front.api import ApiError, GenerateCall, GenerateEvent, Position, Started
from router.front.conversation import TokenizedPrompt
from router.front.intake import Arrival, Intake
from router.front.output import Output, ServedModel
from router.front.resume import Resumables, unknown_token, unpack
from router.front.samples import BeamSink, Samples, SamplesReader
from router.front.stream import SampleStream
from router.front.timing import Timeline
from router.hub import Hub
from router.status.observer import Observer


class Frontend:
    # Mutable state: the chats that the intake remembers, resumable streams, whether all requests of an earlier router
    # have turned up, and the tokens cancelled before that.

    def __init__(
        self,
        model: ServedModel,
        hub: Hub,
        config: RouterConfig,
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.model = model
        self._intake = Intake(model, config)
        self._hub = hub
        self._default_timeout_s = config.default_timeout_s
        self._clock = clock
        self._observer = observer
        self._resumables = Resumables(config.resume_window_s)
        self._settled = asyncio.Event()
        self._unwanted: set[str] = set()
        hub.adopt_with(self.revive)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateEvent, None]:
        """Yield Started, Deltas and Finished. Raises ApiError, before Started if no worker took the request.

        Close the iterator (`aclosing`) to cancel.
        """
        received_s = self._clock()
        try:
            arrival = await self._intake.take(call)
        except ApiError:
            spent_s = self._clock() - received_s
            self._observer.request(FinishReason.REJECTED.value, None, [], spent_s, {})
            raise
        samples = self._submit(call, arrival, received_s)
        async with aclosing(self._serve(samples, samples.read())) as events:
            async for event in events:
                yield event

    def _submit(self, call: GenerateCall, arrival: Arrival, received_s: float) -> Samples:
        """Hand every sample to the core. A search is one request, whose answers are the samples."""
        record, submitted_s = arrival.record, self._clock()
        deadline_s = received_s + (self._default_timeout_s if call.timeout_s is None else call.timeout_s)
        started = Started(record.request, self.model.name, record.prompt_tokens, arrival.token, call.form, call.n)
        samples = Samples(started, self._rememberer(arrival.chat, record, arrival.prompt))
        for index in range(call.n):
            one, line = record, Timeline(received_s)
            line.submitted(submitted_s)
            if record.beams is None:
                one = _sample(record, index, call.n)
                trace = self._hub.journal.received(one.request, call.traceparent, received_s)
                one = msgspec.structs.replace(one, traceparent=trace)
            stream = self._stream(samples, one, call.stop, line, deadline_s=deadline_s)
            samples.put(index, stream)
            if record.beams is None:
                self._hub.submit(one, deadline_s, stream)
        if record.beams is not None:
            self._hub.submit(record, deadline_s, BeamSink(samples.streams))
        return samples

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
            Started(record.request, self.model.name, record.prompt_tokens),
            Output(self.model.detokenizer(), stop),
            timeline,
            self._observer,
            samples.changed,
            self._hub.journal,
            is_adopted=is_adopted,
            deadline_s=deadline_s,
        )

    async def _serve(self, samples: Samples, reader: SamplesReader) -> AsyncGenerator[GenerateEvent, None]:
        """Yield what `reader` takes, until the end or until the client leaves."""
        token = samples.started.resume_token
        try:
            while (event := await reader.next()) is not None:
                if isinstance(event, Started):
                    if token:
                        self._resumables.keep(token, samples)
                    yield event
                    continue
                at, item = event
                stream = samples.streams[at]
                if isinstance(item, Complete) and samples.remember is not None and stream.output.stopped is None:
                    samples.remember(stream.text, stream.ids)
                told = stream.account(item, self._clock()) if isinstance(item, Complete) else item
                yield msgspec.structs.replace(told, sample=at) if at else told
        except ApiError as error:
            if samples.reader is reader and len(samples.streams) > 1:
                self._abandon(samples, error)
            raise
        finally:
            # 1. Another reader has taken the answer over: it is no longer ours to end.
            if samples.reader is reader:
                # 2. Its client cannot come back.
                if not (token and reader.is_known):
                    self._abandon(samples)
                # 3. It can, and was not given up meanwhile: the answer waits for it.
                elif self._resumables.find(token) is samples:
                    self._give_up(self._resumables.detached(token, self._clock()))

    def _abandon(self, samples: Samples, why: ApiError | None = None) -> None:
        """End an answer that nobody will read any more."""
        for request in samples.end_all(self._clock(), why):
            self._hub.leave(request)

    def _rememberer(
        self, chat: Sequence[tuple[str, str]], record: RequestRecord, prompt: TokenizedPrompt
    ) -> Callable[[str, list[int]], None] | None:
        """Return what keeps a finished answer for the chat's next turn; None for what is no chat."""
        remember = self._intake.conversations.remember
        return partial(remember, chat, record.namespace, prompt) if chat else None

    # ---- resumable requests

    async def resume(self, token: str, positions: Sequence[Position] = ()) -> AsyncGenerator[GenerateEvent, None]:
        """Go on with a resumable request behind what the client has of each sample; without positions, from the start.

        Yields Started again. Raises ApiError: NOT_FOUND for a token that is unknown or too old. Waits until the router
        knows what it has to go on with from an earlier one.
        """
        await self._settled.wait()
        samples = self._resumables.find(token)
        if samples is None:
            raise unknown_token()
        reader = samples.read(positions)
        self._resumables.attached(token)
        async with aclosing(self._serve(samples, reader)) as events:
            async for event in events:
                yield event

    def cancel(self, token: str) -> bool:
        """End a resumable request at once; False if there is none of this token. As long as an earlier router's may
        still turn up, there may be one."""
        samples = self._resumables.forget(token)
        if samples is not None:
            self._abandon(samples)
        if self._settled.is_set():
            return samples is not None
        self._unwanted.add(token)
        return True

    def revive(self, orphan: Orphan, now: float) -> SampleStream | None:
        """The stream of an earlier router's request, kept for its client as if it had just lost its connection.

        None if that router wrote another kind of context, or served another model, or the client has cancelled it."""
        record = orphan.record
        context = unpack(record.context)
        if context is None or context.model != self.model.name or context.token in self._unwanted:
            return None
        if record.sample_index >= context.samples:
            return None
        samples = self._resumables.find(context.token)
        if samples is None:
            name, tokens = record.group or record.request, record.prompt_tokens
            started = Started(name, context.model, tokens, context.token, context.form, context.samples)
            prompt = TokenizedPrompt("", record.tokens[:tokens])
            samples = Samples(started, self._rememberer(context.chat, record, prompt))
            self._resumables.keep(context.token, samples)
        timeline = Timeline.adopted(orphan.age_s, len(orphan.tokens), now)
        stream = self._stream(samples, record, context.stop, timeline, is_adopted=True)
        samples.put(record.sample_index, stream)
        self._give_up(self._resumables.detached(context.token, now))
        return stream

    def tick(self) -> None:
        """End what no client came back for in time."""
        if self._hub.is_settled():
            self._settled.set()
            self._unwanted.clear()
        self._give_up(self._resumables.expired(self._clock()))

    def _give_up(self, late: list[Samples]) -> None:
        for samples in late:
            self._abandon(samples)


def _sample(record: RequestRecord, index: int, count: int) -> RequestRecord:
    """One of `count` samples: requests of their own, of one group. The first keeps the name of them all."""
    if count == 1:
        return record
    name = RequestId(f"{record.request}.{index}") if index else record.request
    return msgspec.structs.replace(record, request=name, sample_index=index, group=record.request)
