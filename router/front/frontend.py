"""Answers a caller's request with events; the gRPC service and the HTTP front share it.

`Frontend.generate` takes a call in (`router/front/intake.py`, where its way goes on), submits its record, and yields
events until the end. Closing the iterator, in whatever state, cancels the request on its workers at once. A resumable
request is only left alone: it runs on, and `Frontend.resume` reads on, until the window has passed; `cancel` ends it
at once. It outlives the router: its record says what the next one needs to `revive` it. Only the
caller's own task waits for the caller: tokens are detokenized and kept when they arrive, and no
request can keep more than its `max_tokens`.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from access.limits import LimitedError, TenantAdmission, TenantLimits
from access.tenants import Tenant
from engine.messages import Orphan
from engine.text.messages import ChatPrompt
from engine.types import FieldError, FinishReason, RequestId, RequestRecord, SamplingParams
from router.config import RouterConfig
from router.core.events import Complete, Submit
from router.front.access import limited
from router.front.api import ApiError, GenerateCall, GenerateEvent, HttpForm, Position, Started, TokenizedText
from router.front.conversation import TokenizedPrompt
from router.front.intake import Arrival, Intake, sampling_of, shown_name
from router.front.outlet import Outlet, WakeQueue
from router.front.output import Output, OutputHistory, ServedModel
from router.front.parsers.choose import parser_of
from router.front.parsers.turn import turn_of
from router.front.resume import Resumables, resume_key, unknown_token, unpack
from router.front.samples import BeamSink, Remember, Samples, SamplesReader
from router.front.stream import SampleStream
from router.front.timing import Timeline
from router.front.validate import check_adopted
from router.hub import Hub
from router.status.observer import Observer

log = logging.getLogger(__name__)

CLAIM_S = 3.0
"""How long a router asks decode workers for a stream that it does not know: no worker has it while it moves from one to
another."""
CANCEL_CLAIM_S = 1.0
"""The same where the stream is only to be ended."""
CLAIM_AGAIN_S, CLAIM_AGAIN_MOST_S = 0.2, 0.8
"""The first pause before they are asked again, and the longest: each is twice the one before."""
MAX_TOKEN_CHARS = 64
"""No router has made a longer resume token; theirs have 22."""
MAX_CLAIMS, MAX_TENANT_CLAIMS = 256, 64
"""Clients whose tokens are looked for at a time, in all and of one tenant."""


@dataclass(slots=True)
class _Search:
    """One key that decode workers are asked for: `waiting` clients came with its token; asked again at `again_s`.
    `answered` is set when all have answered."""

    waiting: int = 0
    again_s: float = float("-inf")
    pause_s: float = 0.0
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class Frontend:
    # Mutable state: the chats that the intake remembers, resumable streams, whether all requests of an earlier router
    # have turned up, the tokens cancelled before that, with the tenant that did so, the keys that workers are asked
    # for, the clients who wait for that by tenant, and the answers of which another router has taken a part, with the
    # end of their window.

    def __init__(
        self,
        model: ServedModel,
        hub: Hub,
        config: RouterConfig,
        clock: Callable[[], float],
        observer: Observer,
        limits: TenantLimits | None = None,
    ) -> None:
        self.model = model
        self._limits = limits or TenantLimits(lambda name: Tenant(), config.retry_after_s)
        self._intake = Intake(model, config, self._limits.tenant, lambda: hub.kinds)
        self._hub = hub
        self._config = config
        self._clock = clock
        self._observer = observer
        self._resumables = Resumables(config.resume_window_s)
        self._turns = WakeQueue(config.wakes_per_s)
        self._settled = asyncio.Event()
        self._unwanted: dict[str, str | None] = {}
        self._searches: dict[tuple[bytes, bytes | None], _Search] = {}
        self._claiming: Counter[str | None] = Counter()
        self._given_over: OrderedDict[str, tuple[float, Samples]] = OrderedDict()
        hub.adopt_with(self.revive, self.give_over)

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is served."""
        return self._config.names(self.model.name)

    @property
    def sampling(self) -> SamplingParams:
        """The sampling of a request that says nothing of it."""
        return sampling_of(GenerateCall(prompt=""), self.model, self._config)

    async def generate(
        self, call: GenerateCall, outlet: Outlet | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield Started, Deltas and Finished. Raises ApiError, before Started if no worker took the request.

        Close the iterator (`aclosing`) to cancel. What `outlet` takes is not yielded.
        """
        received_s = self._clock()
        try:
            arrival, admission = await self._take(call, received_s)
        except ApiError:
            spent_s = self._clock() - received_s
            self._observer.request(FinishReason.REJECTED.value, None, [], spent_s, {})
            raise
        samples = self._submit(call, arrival, received_s, admission)
        async with aclosing(self._serve(samples, samples.read(outlet=outlet), outlet)) as events:
            async for event in events:
                yield event

    async def tokenize(
        self, call: GenerateCall, *, add_special: bool | None = None, strings: bool = False
    ) -> TokenizedText:
        """Return the ids of the call's text or chat (`Intake.tokenize`). Raises ApiError."""
        with self._admitted(call.tenant):
            return await self._intake.tokenize(call, add_special=add_special, strings=strings)

    async def detokenize(
        self, ids: list[int], model: str | None = None, tenant: str = "", field: str = "token_ids"
    ) -> str:
        """Return the text of token ids; `field` is where the caller wrote them. Raises ApiError."""
        with self._admitted(tenant):
            return await self._intake.detokenize(ids, model, tenant, field)

    @contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        """Count work without a sample as one that runs meanwhile and spends nothing. Raises ApiError."""
        try:
            admission = self._limits.admit(tenant, 1, self._clock())
        except LimitedError as error:
            raise limited(error) from error
        try:
            yield
        finally:
            admission.close()

    async def _take(self, call: GenerateCall, now: float) -> tuple[Arrival, TenantAdmission]:
        """Take a call in, within what its tenant may use. Raises ApiError."""
        try:
            admission = self._limits.admit(call.tenant, max(call.n, 1), now)
        except LimitedError as error:
            raise limited(error) from error
        try:
            arrival = await self._intake.take(call)
        except BaseException:
            admission.close()
            raise
        admission.spend(arrival.record.prompt_tokens)
        return arrival, admission

    def _submit(self, call: GenerateCall, arrival: Arrival, received_s: float, admission: TenantAdmission) -> Samples:
        """Hand every sample to the core. A search is one request, whose answers are the samples."""
        record, submitted_s = arrival.record, self._clock()
        deadline_s = received_s + (self._config.default_timeout_s if call.timeout_s is None else call.timeout_s)
        started = Started(
            record.request,
            shown_name(call, self.model, self._config),
            record.prompt_tokens,
            arrival.token,
            arrival.form,
            call.n,
        )
        if call.prompt_logprobs is not None or (call.form is not None and call.form.echo is not None):
            started = msgspec.structs.replace(started, prompt_ids=(tuple(record.tokens),))
        remember = self._rememberer(arrival.chat, started, record, arrival.prompt)
        samples = Samples(started, self._turns, remember, call.tenant)
        event = Submit(
            record,
            deadline_s,
            self._limits.weight(call.tenant),
            call.tenant,
            arrival.session,
            None if call.timeout_s is None else _least_tokens(call, record),
        )
        for index in range(call.n):
            one, line = record, Timeline(received_s)
            line.submitted(submitted_s)
            if record.beams is None:
                one = _sample(record, index, call.n)
                trace = self._hub.journal.received(one.request, call.traceparent, received_s)
                one = msgspec.structs.replace(one, traceparent=trace)
            output = self._output(arrival.form, call.stop, record.min_tokens, arrival.continues)
            stream = self._stream(samples, one, output, line, deadline_s=deadline_s, admission=admission)
            samples.put(index, stream)
            if record.beams is None:
                self._hub.submit(msgspec.structs.replace(event, record=one), stream)
        if record.beams is not None:
            self._hub.submit(event, BeamSink(samples.streams))
        return samples

    def _stream(
        self,
        samples: Samples,
        record: RequestRecord,
        output: Output,
        timeline: Timeline,
        *,
        is_adopted: bool = False,
        deadline_s: float = float("inf"),
        admission: TenantAdmission | None = None,
    ) -> SampleStream:
        # Kept is what may be asked for again: by a client that comes back, or by the chat's next turn.
        is_resumable = bool(samples.started.resume_token)
        keeps = is_resumable or samples.remember is not None
        history = OutputHistory(events=is_resumable) if keeps else None
        return SampleStream(
            Started(record.request, self.model.name, record.prompt_tokens),
            output,
            timeline,
            self._observer,
            samples.changed,
            self._hub.journal,
            is_adopted=is_adopted,
            deadline_s=deadline_s,
            admission=admission,
            history=history,
        )

    def _output(self, form: HttpForm | None, stop: tuple[str, ...], min_tokens: int, continues: bool) -> Output:
        parsing = None if form is None else form.parsing
        if parsing is None:
            return Output(self.model.detokenizer(continues=continues), stop, None, min_tokens)
        reasoning = parser_of(msgspec.structs.replace(parsing, tools="")) if parsing.reasoning else None
        return Output(self.model.detokenizer(parsing.marks, continues=continues), stop, reasoning, min_tokens)

    async def _serve(
        self,
        samples: Samples,
        reader: SamplesReader,
        outlet: Outlet | None = None,
        had: Callable[[], dict[str, object]] | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Yield what `reader` takes, until the end or until the client leaves. `had` returns the tokens that its client
        has, where it wants to be reminded."""
        token = samples.started.resume_token
        if outlet is not None:
            outlet.begin = partial(self._begin, samples, reader)
        try:
            while (event := await reader.next()) is not None:
                if isinstance(event, Started):
                    self._begin(samples, reader)
                    yield event if had is None else msgspec.structs.replace(event, **had())
                    continue
                at, item = event
                stream = reader.streams[at]
                if isinstance(item, Complete) and samples.remember is not None and stream.output.stopped is None:
                    is_long = await samples.remember(stream.text, stream.ids)
                    samples.remember = None if is_long else samples.remember
                told = stream.account(item, self._clock()) if isinstance(item, Complete) else item
                yield msgspec.structs.replace(told, sample=at) if at else told
            # Every sample was remembered; a resumable answer waits for its client without its prompt.
            samples.remember = None
        except ApiError as error:
            if samples.reader is reader and len(samples.streams) > 1 and not samples.is_given_over:
                self._abandon(samples, error)
            raise
        finally:
            # 1. Another reader has taken the answer over: it is no longer ours to end.
            if samples.reader is reader:
                # 2. Its client cannot come back.
                if not ((token and reader.is_known) or samples.is_given_over):
                    self._abandon(samples)
                # 3. It can, and was not given up meanwhile: the answer waits for it.
                elif self._resumables.find(token) is samples:
                    self._give_up(self._resumables.detached(token, self._clock()))
            samples.leave(reader)
            if outlet is not None:
                outlet.begin = None  # it leads back to the reader, and from there to itself

    def _begin(self, samples: Samples, reader: SamplesReader) -> Started:
        """Keep a resumable answer, since its client is told now how to come back."""
        if token := samples.started.resume_token:
            self._resumables.keep(token, samples)
            reader.is_known = True
        return samples.started

    def _abandon(self, samples: Samples, why: ApiError | None = None) -> None:
        """End an answer that nobody will read any more."""
        for request in samples.end_all(self._clock(), why):
            self._hub.leave(request)

    def _rememberer(
        self, chat: ChatPrompt | None, started: Started, record: RequestRecord, prompt: TokenizedPrompt
    ) -> Remember | None:
        """Return what keeps a finished answer for the chat's next turn; None for what is no chat."""
        if chat is None:
            return None
        parsing = None if started.form is None else started.form.parsing
        turn = partial(turn_of, parsing, started.request_id)
        return partial(self._intake.remember, chat, record, prompt, turn)

    # ---- resumable requests

    async def resume(
        self,
        token: str,
        positions: Sequence[Position] = (),
        tenant: str | None = None,
        outlet: Outlet | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Go on with a resumable request behind what the client has of each sample; without positions, from the start.

        Yields Started again. Raises ApiError: NOT_FOUND for a token that is unknown or too old, or another's than
        `tenant`'s, if one is given. Waits until the router knows what it has to go on with from an earlier one. What
        another router has is taken over from it.
        """
        await self._settled.wait()
        samples = await self._found(token, tenant, CLAIM_S)
        if samples is None or tenant not in (None, samples.tenant):
            raise unknown_token()
        reader = samples.read(positions, outlet)
        self._resumables.attached(token)
        form = samples.started.form
        had = None
        if form is not None and (form.parsing is not None or (form.logprobs is not None and not form.chat)):
            had = partial(_had, reader.streams, list(positions) or [Position()] * len(reader.streams))
        async with aclosing(self._serve(samples, reader, outlet, had)) as events:
            async for event in events:
                yield event

    async def _found(self, token: str, tenant: str | None, patience_s: float) -> Samples | None:
        """Return the answer of a token, claimed from another router where it is not here: once for all who wait for
        it. Raises ApiError where too many are looked for already."""
        samples = self._resumables.find(token)
        if (samples is not None and samples.is_whole) or not self._hub.has_siblings():
            return samples
        is_crowded = tenant is not None and self._claiming[tenant] >= MAX_TENANT_CLAIMS
        if is_crowded or self._claiming.total() >= MAX_CLAIMS:
            told = "too many streams of other routers are looked for; try later"
            raise ApiError("UNAVAILABLE", told, retry_after_s=self._config.retry_after_s)
        key, until = resume_key(token), self._clock() + patience_s
        namespace = None if tenant is None else self._intake.namespace(tenant)
        search = self._searches.setdefault((key, namespace), _Search())
        search.waiting += 1
        self._claiming[tenant] += 1
        try:
            while True:
                if self._clock() >= search.again_s:
                    search.pause_s = min(2 * search.pause_s or CLAIM_AGAIN_S, CLAIM_AGAIN_MOST_S)
                    search.again_s = self._clock() + search.pause_s
                    search.answered.clear()
                    self._hub.claim(key, namespace, search.answered.set)
                with suppress(TimeoutError):
                    async with asyncio.timeout(until - self._clock()):
                        await search.answered.wait()
                samples = self._resumables.find(token)
                if (samples is not None and samples.is_whole) or self._clock() >= until:
                    return samples
                await asyncio.sleep(CLAIM_AGAIN_S)
        finally:
            self._claiming[tenant] -= 1
            self._claiming += Counter()  # without those of whom nobody waits
            search.waiting -= 1
            if not search.waiting:
                del self._searches[key, namespace]

    def give_over(self, record: RequestRecord) -> None:
        """Forget a request that another router goes on with. Other samples of it are left alone until they are taken
        too, or their window is over."""
        context = unpack(record.context)
        if context is None:
            return
        samples = self._resumables.forget(context.token)
        if samples is None:
            _, samples = self._given_over.get(context.token, (0.0, None))
        if samples is None:
            return
        samples.is_given_over = True
        samples.drop(record.sample_index)
        self._given_over.pop(context.token, None)
        if samples.streams:
            self._given_over[context.token] = (self._clock() + self._config.resume_window_s, samples)

    async def cancel(self, token: str, tenant: str | None = None) -> bool:
        """End a resumable request at once, if it is `tenant`'s, where one is given; False if there is none of this
        token. As long as an earlier router's may still turn up, there may be one. Raises ApiError as `resume` does."""
        samples = await self._found(token, tenant, CANCEL_CLAIM_S)
        if samples is not None and tenant not in (None, samples.tenant):
            return False
        if samples is not None:
            self._resumables.forget(token)
            self._abandon(samples)
        if self._settled.is_set() or len(token) > MAX_TOKEN_CHARS:
            return samples is not None
        self._unwanted[token] = tenant
        return True

    def revive(self, orphan: Orphan, now: float) -> SampleStream | None:
        """The stream of an earlier router's request, kept for its client as if it had just lost its connection.

        None if that router wrote another kind of context, or served another model, or the client has cancelled it, or
        it is beyond what this router would have taken."""
        record = orphan.record
        context = unpack(record.context)
        if context is None or context.model not in self.names:
            return None
        if context.token in self._unwanted and self._unwanted[context.token] in (None, context.tenant):
            return None
        try:
            check_adopted(orphan, context, self.model, self._config)
        except FieldError as error:
            log.error("a request that a worker has kept is not adopted: %s", error)
            return None
        samples = self._resumables.find(context.token)
        if samples is None and context.token in self._given_over:
            # It has come back, before the rest of it had left.
            _, samples = self._given_over.pop(context.token)
            samples.is_given_over = False
            self._resumables.keep(context.token, samples)
        if samples is None:
            name, tokens = record.group or record.request, record.prompt_tokens
            started = Started(name, context.model, tokens, context.token, context.form, context.samples)
            prompt = TokenizedPrompt("", record.tokens[:tokens])
            remember = self._rememberer(context.chat, started, record, prompt)
            samples = Samples(started, self._turns, remember, context.tenant)
            self._resumables.keep(context.token, samples)
        timeline = Timeline.adopted(orphan.age_s, len(orphan.tokens), now)
        # It is let in there already, and its output so far is charged there: what comes from now on is charged here.
        admission = self._limits.take_over(context.tenant, len(orphan.tokens), now)
        output = self._output(samples.started.form, context.stop, record.min_tokens, context.continues)
        stream = self._stream(samples, record, output, timeline, is_adopted=True, admission=admission)
        self._hub.charge(record.request, context.tenant, self._limits.weight(context.tenant), context.session)
        samples.put(record.sample_index, stream)
        self._give_up(self._resumables.detached(context.token, now))
        return stream

    def tick(self) -> None:
        """End what no client came back for in time."""
        if self._hub.is_settled():
            self._settled.set()
            self._unwanted.clear()
        now = self._clock()
        self._give_up(self._resumables.expired(now))
        while self._given_over:
            token, (until, samples) = next(iter(self._given_over.items()))
            if now < until:
                break
            del self._given_over[token]
            self._abandon(samples)

    def close(self) -> None:
        """Let go of the intake's threads."""
        self._intake.close()

    def _give_up(self, late: list[Samples]) -> None:
        for samples in late:
            self._abandon(samples)


def _had(streams: Sequence[SampleStream], positions: Sequence[Position]) -> dict[str, object]:
    """Return what the client has: fields of `Started`."""
    both = list(zip(streams, positions, strict=True))
    ids = tuple([tuple(stream.ids[: at.next_index]) for stream, at in both])
    texts = tuple([stream.text.encode()[: at.text_bytes].decode(errors="replace") for stream, at in both])
    return {"had_ids": ids, "had_text": texts}


def _least_tokens(call: GenerateCall, record: RequestRecord) -> int:
    """How many tokens the answer has at the least."""
    ends_early = not call.ignore_eos or call.stop or call.stop_token_ids
    return record.min_tokens if ends_early else record.max_tokens


def _sample(record: RequestRecord, index: int, count: int) -> RequestRecord:
    """One of `count` samples: requests of their own, of one group. The first keeps the name of them all."""
    if count == 1:
        return record
    name = RequestId(f"{record.request}.{index}") if index else record.request
    told = None if index else record.prompt_logprobs
    return msgspec.structs.replace(
        record, request=name, sample_index=index, group=record.request, prompt_logprobs=told
    )
