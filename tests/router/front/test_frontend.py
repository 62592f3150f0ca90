"""The frontend alone: what it hands to the core, what becomes of an answer whose client leaves, and what is revived.

Tried elsewhere too, over real connections and with fake workers: streams that are cut and resumed in test_resume.py,
samples in test_samples.py, searches in test_beams.py, a router that comes back in tests/router/test_restart.py.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from access.limits import LimitedError, TenantLimits
from access.tenants import Tenant
from engine.messages import Fault, Orphan, RequestStats
from engine.text.messages import ChatPrompt
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from router.config import RouterConfig
from router.core.endings import RESUMED_ELSEWHERE
from router.core.events import Complete, Submit
from router.core.registry import ModelKey
from router.core.sessions import Session
from router.front import frontend
from router.front.api import ApiError, ChatMessage, Delta, Finished, GenerateCall, GenerateEvent, Started
from router.front.frontend import Frontend
from router.front.resume import Context, pack, unpack
from router.hub import Sink
from router.status.journal import RouterJournal
from router.status.observer import NullObserver
from tests.router.core.parts import request_record
from tests.router.fake_cluster import END, ByteDetokenizer, ByteText

WINDOW_S = 30.0


class FakeHub:
    """Takes notes of what it is told; `sinks` are the clients' sides of what was submitted, by request."""

    kinds: tuple[ModelKey, ...] = ()

    def __init__(self) -> None:
        self.journal = RouterJournal()
        self.events: list[Submit] = []
        self.records: list[RequestRecord] = []
        self.deadlines_s: list[float | None] = []
        self.sinks: dict[str, Sink] = {}
        self.left: list[str] = []
        self.owned: list[tuple[str, str, float, Session | None]] = []
        self.settled = True

    def adopt_with(
        self, revive: Callable[[Orphan, float], Sink | None], give_over: Callable[[RequestRecord], None]
    ) -> None: ...

    def has_siblings(self) -> bool:
        return False

    def submit(self, event: Submit, sink: Sink) -> None:
        self.events.append(event)
        self.records.append(event.record)
        self.deadlines_s.append(event.deadline_s)
        self.sinks[event.record.request] = sink

    def charge(self, request: RequestId, tenant: str, weight: float, session: Session | None = None) -> None:
        self.owned.append((request, tenant, weight, session))

    def leave(self, request: RequestId) -> None:
        self.left.append(request)

    def is_settled(self) -> bool:
        return self.settled

    @property
    def names(self) -> list[str]:
        return [record.request for record in self.records]

    def answer(self, request: str, ids: list[int]) -> None:
        """A worker takes the request, answers it and ends it."""
        sink = self.sinks[request]
        sink.accepted(1.0)
        sink.tokens(ids, 1.0)
        sink.completed(Complete(RequestId(request), FinishReason.LENGTH, RequestStats(), 0), 2.0)


class Outcomes(NullObserver):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.first_tokens_s: list[float | None] = []

    def request(
        self, outcome: str, ttft_s: float | None, itl_s: list[float], e2e_s: float, stages: dict[str, float]
    ) -> None:
        self.seen.append(outcome)
        self.first_tokens_s.append(ttft_s)


class Bench:
    """A frontend at time `now`, which had its first tick."""

    def __init__(self, *, settled: bool = True, **tenants: Tenant) -> None:
        self.hub, self.outcomes, self.now = FakeHub(), Outcomes(), 100.0
        self.hub.settled = settled
        config = RouterConfig(default_timeout_s=50.0, resume_window_s=WINDOW_S, namespace_key="key")
        self.tenants = tenants
        self.limits = TenantLimits(lambda name: tenants.get(name, Tenant()), 1.0)
        parts = (ByteText(), self.hub, config, lambda: self.now, self.outcomes, self.limits)
        self.front = Frontend(*parts)  # type: ignore[arg-type]
        self.session = self.front._intake.namespaces.session
        self.front.tick()

    async def ask(
        self, call: GenerateCall
    ) -> tuple[AsyncGenerator[GenerateEvent, None], "asyncio.Task[GenerateEvent]"]:
        """Begin to read an answer: its events, and the first of them once it is there."""
        events = self.front.generate(call)
        first: asyncio.Task[GenerateEvent] = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        while not (len(self.hub.records) or first.done()):
            await asyncio.sleep(0)
        return events, first

    async def whole(self, call: GenerateCall, ids: list[int]) -> list[GenerateEvent]:
        """An answer of one sample to its end."""
        self.hub.records.clear()
        events, first = await self.ask(call)
        self.hub.answer(self.hub.names[-1], ids)
        return [await first] + [event async for event in events]


def run(body: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await body

    asyncio.run(limited())


def orphan(
    sample: int = 0, token: str = "t", model: str = "bytes", samples: int = 2, tenant: str = ""
) -> Orphan:
    context = pack(Context(token=token, model=model, samples=samples, tenant=tenant))
    record = request_record(f"r.{sample}" if sample else "r", tokens=3, context=context, group="r", sample_index=sample)
    return Orphan(record=record, placement=1, prefill="p0", tokens=[], age_s=1.0)


@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(None, 150.0), (7.0, 107.0)])
def test_every_sample_is_a_request_of_its_own_with_one_deadline(timeout_s: float | None, deadline_s: float) -> None:
    """Guards against samples that cannot be told apart, and a time that begins when the prompt has been tokenized."""

    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=3, timeout_s=timeout_s))
        name = bench.hub.names[0]
        assert bench.hub.names == [name, f"{name}.1", f"{name}.2"]
        assert [(r.sample_index, r.group) for r in bench.hub.records] == [(0, name), (1, name), (2, name)]
        assert bench.hub.deadlines_s == [deadline_s] * 3
        for at, request in enumerate(bench.hub.names):
            bench.hub.answer(request, [97 + at])
        told = [await first] + [event async for event in events]
        assert [(e.text, e.sample) for e in told if isinstance(e, Delta)] == [("a", 0), ("b", 1), ("c", 2)]
        assert [e.sample for e in told if isinstance(e, Finished)] == [0, 1, 2]
        assert bench.outcomes.seen == ["length"] * 3

    run(body())


@pytest.mark.parametrize(
    ("call", "least"),
    [
        (GenerateCall(prompt="x", max_tokens=9), None),
        (GenerateCall(prompt="x", max_tokens=9, timeout_s=5.0), 0),
        (GenerateCall(prompt="x", max_tokens=9, timeout_s=5.0, min_tokens=4), 4),
        (GenerateCall(prompt="x", max_tokens=9, timeout_s=5.0, ignore_eos=True), 9),
        (GenerateCall(prompt="x", max_tokens=9, timeout_s=5.0, ignore_eos=True, stop=("s",)), 0),
        (GenerateCall(prompt="x", max_tokens=9, timeout_s=5.0, ignore_eos=True, stop_token_ids=(7,)), 0),
    ],
)
def test_only_a_callers_own_deadline_may_refuse_it(call: GenerateCall, least: int | None) -> None:
    """Guards callers without a deadline; and the length that is certain, which the core predicts from."""

    async def body() -> None:
        bench = Bench()
        await bench.ask(msgspec.structs.replace(call, tenant="acme", session="chat"))
        (event,) = bench.hub.events
        assert (event.least_tokens, event.tenant, event.session) == (least, "acme", bench.session("acme", "chat"))

    run(body())


def test_a_search_is_one_request_for_all_its_answers() -> None:
    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=2, beam_width=3))
        (record,) = bench.hub.records
        assert (record.group, record.beams is not None) == ("", True)
        first.cancel()
        await asyncio.wait({first})
        await events.aclose()
        assert record.request in bench.hub.left

    run(body())


def test_a_refused_call_is_counted_and_reaches_nobody() -> None:
    async def body() -> None:
        bench = Bench()
        _, first = await bench.ask(GenerateCall(prompt=""))
        with pytest.raises(ApiError):
            await first
        assert (bench.outcomes.seen, bench.hub.records) == (["rejected"], [])

    run(body())


def test_whoever_leaves_ends_every_sample_and_the_last_first() -> None:
    """Guards workers that go on for nobody, and a sample that is forked from one which has just been let go."""

    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=3))
        for sink in bench.hub.sinks.values():
            sink.accepted(1.0)
        await first
        await events.aclose()
        assert bench.hub.left == bench.hub.names[::-1]
        assert bench.outcomes.seen == ["cancelled"] * 3

    run(body())


def test_one_sample_that_fails_takes_the_others_with_it() -> None:
    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=2, resumable=True))
        one, two = bench.hub.sinks.values()
        one.accepted(1.0)
        two.accepted(1.0)
        await first
        two.failed(Fault("UNAVAILABLE", "lost"), FinishReason.ERROR, None, 2.0)
        with pytest.raises(ApiError, match="lost"):
            await anext(events)
        assert bench.hub.left == bench.hub.names[::-1]
        assert sorted(bench.outcomes.seen) == ["cancelled", "error"]

    run(body())


def test_a_resumable_answer_waits_for_its_client_and_not_for_ever() -> None:
    """Guards both ends of the window: work thrown away for a short cut, and work for a client that stays away."""

    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", resumable=True))
        (request,) = bench.hub.names
        sink = bench.hub.sinks[request]
        sink.accepted(1.0)
        started = await first
        assert isinstance(started, Started) and started.resume_token
        await events.aclose()
        bench.now += WINDOW_S - 1.0
        bench.front.tick()
        assert bench.hub.left == []
        async with aclosing(bench.front.resume(started.resume_token)) as again:
            assert await anext(again) == started
            bench.now += WINDOW_S
            bench.front.tick()
            assert bench.hub.left == [], "somebody reads it"
        bench.now += WINDOW_S
        bench.front.tick()
        assert bench.hub.left == [request]
        with pytest.raises(ApiError) as caught:
            await anext(bench.front.resume(started.resume_token))
        assert caught.value.code == "NOT_FOUND"

    run(body())


def test_before_its_client_can_know_the_token_a_resumable_answer_ends_with_its_connection() -> None:
    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", resumable=True))
        first.cancel()
        await asyncio.wait({first})
        await events.aclose()
        assert bench.hub.left == bench.hub.names

    run(body())


@pytest.mark.parametrize(("stop", "is_exact"), [((), True), (("b",), False)])
def test_a_chat_goes_on_behind_the_ids_of_its_answer(stop: tuple[str, ...], is_exact: bool) -> None:
    """Guards the next turn's cache; and an answer cut at a stop string, whose ids say more than its text."""

    async def body() -> None:
        bench, asked = Bench(), [ChatMessage("user", "one")]
        ids = [0xF0, 0x9F, *b" ab", END]
        told = await bench.whole(GenerateCall(prompt=asked, stop=stop), ids)
        prompt = bench.hub.records[0].tokens
        text = "".join(event.text for event in told if isinstance(event, Delta))
        asked += [ChatMessage("assistant", text), ChatMessage("user", "two")]
        await bench.whole(GenerateCall(prompt=asked), [97])
        assert (bench.hub.records[0].tokens[len(prompt) :][:2] == ids[:2]) == is_exact

    run(body())


def test_an_orphan_is_kept_for_its_client() -> None:
    """Guards a restart: all samples are one answer again, given up when its client does not come."""
    bench = Bench()
    first, second = (bench.front.revive(orphan(at), bench.now) for at in (0, 1))
    assert first is not None and second is not None and first is not second
    bench.now += WINDOW_S
    bench.front.tick()
    assert bench.hub.left == ["r.1", "r"]


def test_a_reader_does_not_stay_with_a_placement_that_another_has_replaced() -> None:
    """Guards a reader that waits for ever, at a stream to which nothing comes, and an answer that is given up while
    somebody reads it: a worker that answers a claim late has a later placement."""

    async def body() -> None:
        bench = Bench()
        bench.front.revive(orphan(samples=1), bench.now)
        events = bench.front.resume("t")
        assert isinstance(await anext(events), Started)
        waiting: asyncio.Task[GenerateEvent] = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        later = bench.front.revive(msgspec.structs.replace(orphan(samples=1), placement=2), bench.now)
        assert later is not None
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.code == "UNAVAILABLE"
        later.tokens([65], bench.now)
        async with aclosing(bench.front.resume("t")) as again:
            assert isinstance(await anext(again), Started)
            bench.now += WINDOW_S
            bench.front.tick()
            assert bench.hub.left == [] and (await anext(again)).token_ids == (65,)  # type: ignore[union-attr]

    run(body())


@pytest.mark.parametrize(
    "odd",
    [
        orphan(model="another"),
        orphan(sample=2),
        msgspec.structs.replace(orphan(), record=request_record("r", context=b"of another kind")),
    ],
    ids=["model", "sample", "context"],
)
def test_what_another_router_meant_otherwise_is_not_revived(odd: Orphan) -> None:
    assert Bench().front.revive(odd, 0.0) is None


BEYOND = {
    "samples": {"samples": 10**8},
    "stop strings": {"stop": ("x",) * 1000},
    "chat": {"chat": (("user", "x" * (2 << 20)),)},
    "max_tokens": {"max_tokens": 2**31 - 1},
    "more tokens than it may": {"max_tokens": 2, "emitted": [1, 2, 3]},
    "words that there are not": {"emitted": [10**9]},
    "a prompt that is none": {"prompt_tokens": 0},
    "a prompt beyond its tokens": {"prompt_tokens": 4},
    "temperature": {"sampling": SamplingParams(temperature=1e9)},
    "priority": {"priority": 10**9},
    "a session's name": {"session": b"x" * 1000},
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_no_caller_may_ask_no_worker_may_hand_over(what: str) -> None:
    """Guards the router's memory: a context that spoke of 10**8 samples took it from 101 to 864 MB."""
    changes: dict[str, Any] = dict(BEYOND[what])
    said = {name: changes.pop(name) for name in ("samples", "stop", "chat", "session") if name in changes}
    context = pack(Context(token="t", model="bytes", **{"samples": 2, **said}))
    emitted = changes.pop("emitted", [])
    record = msgspec.structs.replace(orphan().record, context=context)
    assert Bench().front.revive(msgspec.structs.replace(orphan(), record=record), 0.0) is not None or said
    record = msgspec.structs.replace(record, **changes)
    odd = msgspec.structs.replace(orphan(), record=record, tokens=emitted)
    assert Bench().front.revive(odd, 0.0) is None


def test_who_goes_on_with_an_answer_writes_the_same_text() -> None:
    """Guards the space before the first word of an answer that another router had begun."""

    class Spaced(ByteText):
        def detokenizer(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> ByteDetokenizer:
            made = ByteDetokenizer()
            if continues:
                made.push = lambda ids: "".join(f" {chr(token)}" for token in ids)  # type: ignore[method-assign]
            return made

    async def body() -> None:
        bench = Bench()
        bench.front.model = Spaced()
        events, first = await bench.ask(GenerateCall(prompt="x", resumable=True))
        bench.hub.answer(bench.hub.names[0], [97])
        begun = await first
        told = [event async for event in events]
        assert isinstance(begun, Started) and told[0] == Delta(" a", (97,))
        other = Bench()
        other.front.model = Spaced()
        kept = Orphan(record=bench.hub.records[0], placement=1, prefill="p0", tokens=[97], age_s=1.0)
        stream = other.front.revive(kept, other.now)
        assert stream is not None
        stream.tokens([97], 1.5)
        stream.completed(Complete(kept.record.request, FinishReason.LENGTH, RequestStats(), 0), 2.0)
        resumed = [event async for event in other.front.resume(begun.resume_token)]
        assert [event.text for event in resumed if isinstance(event, Delta)] == [" a"]

    run(body())


def test_what_was_cancelled_before_it_turned_up_is_not_revived() -> None:
    """Guards a client that cancels right after a restart: it was told that its request is over."""

    async def body() -> None:
        bench = Bench(settled=False)
        assert await bench.front.cancel("t")
        assert bench.front.revive(orphan(), bench.now) is None
        assert bench.front.revive(orphan(token="u"), bench.now) is not None
        bench.hub.settled = True
        bench.front.tick()
        assert not await bench.front.cancel("t")
        assert await bench.front.cancel("u") and bench.hub.left == ["r"] and not await bench.front.cancel("u")

    run(body())


def test_a_token_that_no_router_made_is_not_kept() -> None:
    """Guards the memory of a router that has just started: it kept whatever clients wanted to end."""

    async def body() -> None:
        bench = Bench(settled=False)
        assert not await bench.front.cancel("x" * (frontend.MAX_TOKEN_CHARS + 1)) and not bench.front._unwanted
        made = Bench().front._intake.take(GenerateCall(prompt="x", resumable=True))
        token = (await made).token
        assert len(token) == 22 and await bench.front.cancel(token) and list(bench.front._unwanted) == [token]

    run(body())


def test_a_stream_stays_its_tenants_whatever_becomes_of_its_cache() -> None:
    """Guards an owner that is told that its stream is unknown, and another that reads it: both have the namespace that
    the owner's request had, or neither has."""

    async def body() -> None:
        bench = Bench(settled=False, a=Tenant(shared_cache="common"), b=Tenant(shared_cache="common"))
        assert await bench.front.cancel("u", "b"), "it may be b's, for all that is known"
        for token in ("t", "u"):
            one = orphan(samples=1, token=token, tenant="a")
            whose = msgspec.structs.replace(one.record, namespace=bench.front._intake.namespace("a"))
            assert bench.front.revive(msgspec.structs.replace(one, record=whose), bench.now) is not None
        bench.hub.settled = True
        bench.front.tick()
        bench.tenants["a"] = Tenant()
        for token in ("t", "u"):
            with pytest.raises(ApiError, match="unknown"):
                await anext(bench.front.resume(token, tenant="b"))
            assert not await bench.front.cancel(token, "b")
            async with aclosing(bench.front.resume(token, tenant="a")) as events:
                assert await anext(events) == Started("r", "bytes", 3, token)
            assert await bench.front.cancel(token, "a")

    run(body())


def test_nobody_is_told_that_a_token_is_unknown_before_all_orphans_have_turned_up() -> None:
    async def body() -> None:
        bench = Bench(settled=False)
        first: asyncio.Task[GenerateEvent] = asyncio.ensure_future(anext(bench.front.resume("t")))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert not first.done()
        bench.front.revive(orphan(samples=1), bench.now)
        bench.hub.settled = True
        bench.front.tick()
        assert await first == Started("r", "bytes", 3, "t")

    run(body())


@pytest.mark.parametrize("how", ["it ends", "it fails", "its window is over", "it is given over", "it is cancelled"])
def test_what_goes_on_here_counts_and_is_charged_here(how: str) -> None:
    """Guards a tenant's limits, which it got around by resuming each stream at another router: nobody counted it."""

    async def body() -> None:
        bench = Bench(a=Tenant(concurrency=1, tokens_per_s=1.0, burst_tokens=100, weight=2.0))
        one = msgspec.structs.replace(orphan(samples=1, tenant="a"), tokens=[65, 66])
        stream = bench.front.revive(one, bench.now)
        assert stream is not None and bench.hub.owned == [("r", "a", 2.0, None)]
        with pytest.raises(LimitedError, match="1 of 1 samples run already"):
            bench.limits.admit("a", 1, bench.now)
        for ids in ([65], [66]):
            stream.tokens(ids, bench.now)
        assert bench.limits._usage["a"].bucket.level == 100, "charged where it began"
        stream.tokens([67, 68, 69], bench.now)
        assert bench.limits._usage["a"].bucket.level == 97
        # It is refused nothing, whatever its tenant may have.
        again = msgspec.structs.replace(one, placement=2)
        stream = bench.front.revive(again, bench.now)
        assert stream is not None and bench.limits._usage["a"].running == 1, "in the place of a lower placement"
        if how == "it ends":
            stream.completed(Complete(RequestId("r"), FinishReason.LENGTH, RequestStats(), 0), bench.now)
        elif how == "it fails":
            stream.failed(Fault("INTERNAL", "x"), FinishReason.ERROR, None, bench.now)
        elif how == "its window is over":
            bench.now += WINDOW_S
            bench.front.tick()
        elif how == "it is given over":
            bench.front.give_over(one.record)
            stream.failed(RESUMED_ELSEWHERE, FinishReason.CANCELLED, None, bench.now)
        else:
            assert await bench.front.cancel("t")
        assert bench.limits._usage["a"].running == 0
        bench.limits.admit("a", 1, bench.now)

    run(body())


def test_whose_it_is_is_told_to_who_goes_on_with_it() -> None:
    async def body() -> None:
        bench = Bench()
        call = GenerateCall(prompt="abc", tenant="a", session="chat", resumable=True)
        events, first = await bench.ask(call)
        record = bench.hub.records[0]
        context = unpack(record.context)
        assert context is not None and context.tenant == "a"
        assert context.session == bench.session("a", "chat") and b"chat" not in record.context
        bench.hub.answer(bench.hub.names[0], [65])
        there = Bench()
        left = Orphan(record=record, placement=1, prefill="p0", tokens=[], age_s=1.0)
        assert there.front.revive(left, there.now) is not None
        assert there.hub.owned == [(record.request, "a", 1.0, bench.session("a", "chat"))]
        await first
        await events.aclose()

    run(body())


@pytest.mark.parametrize("samples", [1, 2])
def test_what_another_router_takes_over_is_read_here_to_where_it_was_left(samples: int) -> None:
    """Guards the reader of a taken answer: its last tokens and its taking come in one turn of the event loop."""

    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=samples, resumable=True))
        sinks = list(bench.hub.sinks.values())
        for sink in sinks:
            sink.accepted(1.0)
        await first
        sinks[0].tokens([104], 2.0)
        bench.front.give_over(bench.hub.records[0])
        sinks[0].failed(RESUMED_ELSEWHERE, FinishReason.CANCELLED, None, 2.0)
        delta = await anext(events)
        assert isinstance(delta, Delta) and (delta.sample, delta.token_ids) == (0, (104,))
        with pytest.raises(ApiError) as caught:
            await anext(events)
        assert (caught.value.code, caught.value.message) == (RESUMED_ELSEWHERE.code, RESUMED_ELSEWHERE.message)
        assert bench.hub.left == []

    run(body())


def test_a_sample_that_ends_beside_a_taken_one_has_its_own_account() -> None:
    async def body() -> None:
        bench = Bench()
        events, first = await bench.ask(GenerateCall(prompt="x", n=3, resumable=True))
        names = list(bench.hub.names)
        for name in names:
            bench.hub.sinks[name].accepted(1.0)
        await first
        bench.hub.answer(names[1], [104, 105, 106])
        bench.front.give_over(bench.hub.records[0])
        told = [await anext(events), await anext(events)]
        while not isinstance(told[-1], Finished):
            told.append(await anext(events))
        assert told[-1].sample == 1
        assert bench.outcomes.first_tokens_s == [1.0 - 100.0], "the stream that ended, and not one without a token"
        await events.aclose()

    run(body())


@pytest.mark.parametrize("worker", ["none has seen it", "one has had it"])
def test_what_no_worker_has_seen_is_not_charged(worker: str) -> None:
    """Guards the rate of a tenant whose requests are refused at the line or for their deadline: each paid for its
    prompt, and the tenant was then refused for a rate that it had not used."""

    async def body() -> None:
        bench = Bench(a=Tenant(tokens_per_s=1.0, burst_tokens=100))
        events, first = await bench.ask(GenerateCall(prompt="abc", tenant="a", n=2))
        assert bench.limits._usage["a"].bucket.level == 97
        for name in bench.hub.names:
            assert bench.limits._usage["a"].bucket.level == 97, "one of its samples may run yet"
            if worker != "none has seen it":
                bench.hub.sinks[name].accepted(bench.now)
            bench.hub.sinks[name].failed(Fault("RESOURCE_EXHAUSTED", "x"), FinishReason.REJECTED, 1.0, bench.now)
        assert bench.limits._usage["a"].bucket.level == (100 if worker == "none has seen it" else 97)
        await asyncio.wait([first])
        await events.aclose()
        assert (first.exception() is not None) == (worker == "none has seen it")

    run(body())


class SiblingHub(FakeHub):
    """One of several routers; no decode worker knows what is asked for. Workers that are `slow` have not answered yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.claimed: list[bytes] = []
        self.is_slow = False
        self.answers: list[Callable[[], object]] = []

    def has_siblings(self) -> bool:
        return True

    def claim(self, key: bytes, namespace: bytes | None, answered: Callable[[], object]) -> None:
        self.claimed.append(key)
        if self.is_slow:
            self.answers.append(answered)
        else:
            answered()


def beside_siblings(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, SiblingHub, Callable[[str, str | None], Any]]:
    """A frontend among several, and a client of a tenant that comes with a token that nobody knows."""
    monkeypatch.setattr(frontend, "CLAIM_AGAIN_S", 0.02)
    bench, hub = Bench(), SiblingHub()
    bench.front._hub = hub  # type: ignore[assignment]

    def come(token: str, tenant: str | None = None) -> "asyncio.Future[GenerateEvent]":
        return asyncio.ensure_future(anext(bench.front.resume(token, tenant=tenant)))  # type: ignore[arg-type]

    return bench, hub, come


def test_a_key_is_asked_for_once_for_all_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards decode workers, which are all asked each time."""

    async def body() -> None:
        bench, hub, come = beside_siblings(monkeypatch)
        waiting = [come("t") for _ in range(20)] + [come("other")]
        await asyncio.sleep(0.005)
        assert len(hub.claimed) == 2 and len(set(hub.claimed)) == 2
        bench.now += frontend.CLAIM_AGAIN_S
        await asyncio.sleep(0.05)
        assert len(hub.claimed) == 4, "again, once for each"
        bench.now += frontend.CLAIM_S
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert {error.code for error in errors if isinstance(error, ApiError)} == {"NOT_FOUND"}
        assert not bench.front._searches and not bench.front._claiming

    run(body())


def test_workers_are_asked_again_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards decode workers against tokens that nobody knows: all were asked five times a second for each."""

    async def body() -> None:
        bench, hub, come = beside_siblings(monkeypatch)
        monkeypatch.setattr(frontend, "CLAIM_AGAIN_MOST_S", 0.08)
        waiting, asked_s, began_s = come("t"), list[float](), bench.now
        while not waiting.done() and bench.now < began_s + 0.5:
            await asyncio.sleep(0.005)
            if len(hub.claimed) > len(asked_s):
                asked_s.append(bench.now - began_s)
            bench.now += 0.004
        gaps = [after_s - before_s for before_s, after_s in pairwise(asked_s)]
        wanted_s = [0.02, 0.04, 0.08, 0.08]
        late_s = [gap_s - one_s for gap_s, one_s in zip(gaps[:4], wanted_s, strict=True)]
        assert all(-1e-9 < one_s < 0.03 for one_s in late_s), gaps
        bench.now += frontend.CLAIM_S
        await asyncio.gather(waiting, return_exceptions=True)

    run(body())


def test_who_waits_for_workers_is_woken_by_their_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the loop against clients who look two hundred times a second whether all have answered; and those who
    come later for the same token."""

    async def body() -> None:
        bench, hub, come = beside_siblings(monkeypatch)
        hub.is_slow = True
        sleeps: list[float] = []
        sleep = asyncio.sleep

        async def counted(delay: float, *result: object) -> None:
            sleeps.append(delay)
            await sleep(delay)

        monkeypatch.setattr("router.front.frontend.asyncio.sleep", counted)
        waiting = [come("t"), come("t")]
        await sleep(0.05)
        assert not sleeps and len(hub.answers) == 1
        assert bench.front.revive(orphan(samples=1), bench.now) is not None
        hub.answers[0]()
        for _ in range(5):
            await sleep(0)
        assert waiting[0].done() and not sleeps
        await asyncio.gather(*waiting)

    run(body())


def test_a_tenants_unknown_tokens_leave_claims_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        bench, hub, come = beside_siblings(monkeypatch)
        waiting = [come(f"t{number}", "acme") for number in range(frontend.MAX_TENANT_CLAIMS + 1)]
        await asyncio.sleep(0.005)
        refused = [one for one in waiting if one.done()]
        assert len(refused) == 1 and len(hub.claimed) == frontend.MAX_TENANT_CLAIMS
        error = refused[0].exception()
        assert isinstance(error, ApiError) and (error.code, error.retry_after_s) == ("UNAVAILABLE", 1.0)
        other = come("t", "other")
        await asyncio.sleep(0.005)
        assert not other.done() and len(hub.claimed) == frontend.MAX_TENANT_CLAIMS + 1
        bench.now += frontend.CLAIM_S
        await asyncio.gather(*waiting, other, return_exceptions=True)

    run(body())


@pytest.mark.parametrize(("chars", "kept"), [(100, 2), (5000, 1)], ids=["short", "long"])
def test_a_long_chat_is_remembered_in_a_thread_and_once(chars: int, kept: int) -> None:
    """Guards the event loop: the end of a chat of a megabyte held up all streams, once for each of its samples."""

    class Watched(ByteText):
        context_tokens = 1 << 16

        def __init__(self) -> None:
            super().__init__()
            self.threads: list[str] = []

        def render_chat(self, chat: ChatPrompt) -> str:
            self.threads.append(threading.current_thread().name)
            return super().render_chat(chat)

    async def body() -> None:
        bench, model = Bench(), Watched()
        bench.front._intake.close()
        config = RouterConfig(default_timeout_s=50.0, resume_window_s=WINDOW_S, namespace_key="key")
        front = Frontend(model, bench.hub, config, lambda: bench.now, bench.outcomes, bench.limits)  # type: ignore[arg-type]
        events = front.generate(GenerateCall(prompt=[ChatMessage("user", "x" * chars)], n=2))
        first = asyncio.ensure_future(anext(events))
        while len(bench.hub.records) < 2:
            await asyncio.sleep(0.001)
        model.threads.clear()
        for number, name in enumerate(bench.hub.names):
            bench.hub.answer(name, [97 + number])
        await first
        ends = [event async for event in events if isinstance(event, Finished)]
        chats = front._intake.conversations
        assert (len(ends), len(chats._known), len(model.threads)) == (2, kept, kept)
        is_inline = {name == threading.main_thread().name for name in model.threads}
        assert is_inline == {chars == 100}
        turn = [ChatMessage("user", "x" * chars), ChatMessage("assistant", "a"), ChatMessage("user", "more")]
        found = chats.begin(ChatPrompt(messages=tuple(turn)), front._intake.namespace(""))
        assert len(found[1]) > chars, "the next turn begins with its ids"
        front.close()

    run(body())
