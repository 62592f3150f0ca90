"""Output on its way to readers: joined where they are behind, and the same then as token by token."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import RequestStats
from engine.packed_logprobs import PackedLogprobs
from engine.types import FinishReason, RequestId, TokenLogprobs
from router.core.events import Complete
from router.front.api import ApiError, Delta, Position, Started
from router.front.outlet import AT_ONCE, Outlet, ReaderSignal, WakeQueue
from router.front.output import Output, OutputHistory
from router.front.samples import EVENTS_AT_ONCE, Samples
from router.front.stream import Reader, SampleStream
from router.front.timing import Timeline
from router.status.journal import RouterJournal
from router.status.observer import NullObserver
from tests.router.fake_cluster import ByteDetokenizer
from tests.router.front.test_stream import read_again

FAST = 1e9


def stream_of(samples: Samples, stop: tuple[str, ...] = ()) -> SampleStream:
    stream = SampleStream(
        Started("r", "m", 1), Output(ByteDetokenizer(), stop), Timeline(0.0), NullObserver(), samples.changed,
        RouterJournal(), history=OutputHistory(events=True),
    )  # fmt: skip
    samples.put(len(samples.streams), stream)
    stream.accepted(0.0)
    return stream


def end() -> Complete:
    return Complete(RequestId("r"), FinishReason.LENGTH, RequestStats(), 0)


def run(body: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await body

    asyncio.run(limited())


def one_by_one(data: bytes, stop: tuple[str, ...]) -> tuple[str, list[int], int | None]:
    """The answer as whoever reads each token at once has it: text, ids, and how many of them a stop string keeps."""
    output = Output(ByteDetokenizer(), stop)
    text, ids = "", []
    for token in data:
        shown, kept = output.push([token])
        text += shown
        ids += kept
    text += output.flush()
    return text, ids, output.stopped.tokens_kept if output.stopped is not None else None


words = st.text(st.sampled_from("abé🙂 "), max_size=24).map(str.encode)
stops = st.lists(st.text(st.sampled_from("abé🙂"), min_size=1, max_size=3), max_size=2).map(tuple)


@settings(max_examples=300, deadline=None)
@given(words, stops, st.integers(0, 10_000))
def test_a_reader_that_is_behind_gets_the_same_answer(data: bytes, stop: tuple[str, ...], seed: int) -> None:
    """Guards ids and text under joining: stop strings and characters that lie across a seam, and what another reader
    finds behind every event that the first one was given."""
    text, ids, kept = one_by_one(data, stop)
    random = Random(seed)
    samples = Samples(Started("r", "m", 1), WakeQueue(FAST))
    stream = stream_of(samples, stop)
    reader = Reader(stream)
    given_out: list[Delta] = []
    told: int | None = None
    left = list(data)
    while left or stream.end is None:
        size = random.randint(1, 4)
        batch, left = left[:size], left[size:]
        if batch and told is None:
            told = stream.tokens(batch, 1.0)
        if not left:
            stream.completed(end(), 2.0)
        while random.random() < 0.5:
            reader.look()
            if isinstance(event := reader.poll(), Delta):
                given_out.append(event)
    reader.look()
    while isinstance(event := reader.poll(), Delta):
        given_out.append(event)
    assert (event, told) == (stream.end, kept)
    assert "".join(delta.text for delta in given_out) == text
    assert [token for delta in given_out for token in delta.token_ids] == ids
    at, size = 0, 0
    for count, delta in enumerate(given_out, 1):
        at, size = at + len(delta.token_ids), size + len(delta.text.encode())
        assert read_again(stream, Position(at, size)) == given_out[count:]


@pytest.mark.parametrize("refusals", [0.0, 0.5, 1.0])
def test_an_outlet_and_the_reader_beside_it_give_everything_once_and_in_order(refusals: float) -> None:
    """Guards the order of two ways to one client, whichever of them takes an event."""

    async def body() -> None:
        random, outlet, samples = Random(1), Outlet(), Samples(Started("r", "m", 1, samples=2), WakeQueue(FAST))
        streams = [stream_of(samples), stream_of(samples)]
        got: list[list[int]] = [[], []]
        took = 0

        def take(delta: Delta) -> bool:
            nonlocal took
            if random.random() < refusals:
                return False
            took += 1
            got[delta.sample].extend(delta.token_ids)
            return True

        async def read() -> None:
            reader = samples.read(outlet=outlet)
            assert isinstance(await reader.next(), Started)
            outlet.take = take
            while (event := await reader.next()) is not None:
                assert not isinstance(event, Started)
                at, item = event
                if isinstance(item, Delta):
                    await asyncio.sleep(0)  # a write that waits: nothing may pass it
                    got[at].extend(item.token_ids)

        task = asyncio.create_task(read())
        said: list[list[int]] = [[], []]
        for token in range(200):
            at = random.randrange(2)
            streams[at].tokens([token % 90], 1.0)
            said[at].append(token % 90)
            if random.random() < 0.5:
                await asyncio.sleep(0)
        for stream in streams:
            stream.completed(end(), 2.0)
        await task
        assert got == said
        assert (took == 0) == (refusals == 1.0)

    run(body())


def test_what_fails_in_an_outlet_is_the_readers_to_find() -> None:
    """Guards the other readers of a turn against the failure of one."""

    async def body() -> None:
        turns = WakeQueue(FAST)
        one, other = Samples(Started("r", "m", 1), turns), Samples(Started("s", "m", 1), turns)
        broken, sound = Outlet(), Outlet()
        got: list[int] = []
        streams = [stream_of(one), stream_of(other)]
        first, second = one.read(outlet=broken), other.read(outlet=sound)
        await first.next()
        await second.next()

        def fail(delta: Delta) -> bool:
            raise RuntimeError("no such client")

        def take(delta: Delta) -> bool:
            got.extend(delta.token_ids)
            return True

        broken.take, sound.take = fail, take
        waits = [asyncio.create_task(reader.next()) for reader in (first, second)]
        await asyncio.sleep(0)
        for stream in streams:
            stream.tokens([97], 1.0)
        assert await waits[0] == (0, Delta("a", (97,)))
        assert (got, waits[1].done()) == ([97], False)
        waits[1].cancel()

    run(body())


def test_a_reader_that_is_sent_away_takes_nobodys_turn() -> None:
    """Guards a new connection that would wait for ever, as the old one has seen its signal."""

    async def body() -> None:
        turns = WakeQueue(FAST)
        other, samples = Samples(Started("s", "m", 1), turns), Samples(Started("r", "m", 1), turns)
        busy, stream = stream_of(other), stream_of(samples)
        first, away = samples.read(), other.read()
        await first.next()
        await away.next()
        waits = [asyncio.create_task(reader.next()) for reader in (first, away)]
        await asyncio.sleep(0)
        busy.tokens([97], 1.0)
        again = samples.read([Position()])
        assert isinstance(await again.next(), Started)
        stream.tokens([98], 1.0)
        with pytest.raises(ApiError, match="another connection"):
            await waits[0]
        assert await again.next() == (0, Delta("b", (98,)))
        assert await waits[1] == (0, Delta("a", (97,)))

    run(body())


def test_many_readers_leave_turns_to_what_workers_say() -> None:
    """Guards against output that piles up before us, since the loop only writes: each turn of it tells some readers."""

    async def body() -> None:
        turns, told = WakeQueue(FAST), 0

        def deliver() -> bool:
            nonlocal told
            told += 1
            return True

        signals = [ReaderSignal(turns) for _ in range(5 * AT_ONCE)]
        for signal in signals:
            signal.call()
            signal.deliver = deliver
            signal.set()
            signal.set()
        seen = [told]
        for _ in range(6):
            await asyncio.sleep(0)
            seen.append(told)
        assert max(b - a for a, b in pairwise(seen)) == AT_ONCE
        assert told == len(signals), "a signal that is set twice before its turn has one turn"

    run(body())


def test_readers_that_must_be_woken_share_what_is_allowed_in_a_second() -> None:
    """Guards a router that spends all it has on messages of one token each: with many, each takes more."""

    async def body() -> None:
        turns, rate, span_s = WakeQueue(2000.0), 2000.0, 0.3
        signals, woken = [ReaderSignal(turns) for _ in range(50)], [0] * 50

        async def wait(at: int) -> None:
            while True:
                await signals[at].wait()
                signals[at].clear()
                woken[at] += 1

        for signal in signals:
            signal.call()
        tasks = [asyncio.create_task(wait(at)) for at in range(50)]
        await asyncio.sleep(0)
        woken[:] = [0] * 50
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while (took_s := loop.time() - begin_s) < span_s:
            for signal in signals:
                signal.set()
            await asyncio.sleep(0.001)
        assert sum(woken) <= took_s * rate + 2 * AT_ONCE
        assert 1 <= max(woken) <= 2 * min(woken), "they take turns"
        for task in tasks:
            task.cancel()

    run(body())


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "untaken"])
def test_an_answer_that_is_read_again_leaves_in_pieces(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards other streams: one of thirty thousand tokens held them up for a second, and a client that had missed one
    token cost the router as much as the whole answer."""
    unpacked = 0
    part = PackedLogprobs.part

    def counted(self: PackedLogprobs, first: int, end: int | None = None) -> tuple[TokenLogprobs, ...]:
        nonlocal unpacked
        unpacked += 1
        return part(self, first, end)

    monkeypatch.setattr(PackedLogprobs, "part", counted)

    async def body() -> None:
        samples = Samples(Started("r", "m", 1), WakeQueue(FAST))
        stream = stream_of(samples)
        tokens = 1000
        for at in range(tokens):
            stream.tokens([97 + at % 20], 1.0)
            if is_taken:
                stream.taken()
        stream.completed(end(), 2.0)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(take_turns())
        for behind in (0, 500, tokens - 1):
            before = unpacked
            reader = samples.read([Position(behind, behind)])
            assert isinstance(await reader.next(), Started)
            assert unpacked - before <= 1
            taken_in = Counter[int]()
            got: list[int] = []
            while (event := await reader.next()) is not None:
                taken_in[turns] += 1
                if not isinstance(event, Started) and isinstance(event[1], Delta):
                    got += event[1].token_ids
            assert got == [97 + at % 20 for at in range(behind, tokens)]
            assert max(taken_in.values()) <= EVENTS_AT_ONCE
            assert unpacked - before == tokens - behind
        other.cancel()

    run(body())
