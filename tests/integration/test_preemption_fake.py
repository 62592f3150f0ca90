"""Preemption with the fake model: whatever arrives in whatever order, in a pool too small for all, every token is the
one that an undisturbed run would have, and nobody waits for ever."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.colocated import LINK, Answer, Colocated
from decode_worker.config import DecodeConfig
from decode_worker.events import FromRouter
from decode_worker.preemption import Preemption
from decode_worker.request import Request
from decode_worker.room import Room
from engine.fake import fake_next
from engine.kv.layout import KVLayout
from engine.messages import Finish
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from prefill_worker.config import PrefillConfig
from tests.integration.fake_device import VOCAB, fake_device

SIZE = 4
PATIENCE_TURNS = 200
LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=SIZE, head_dim=4)


def _cluster(blocks: int, **decode: object) -> Colocated:
    return Colocated(
        fake_device(LAYOUT, 48),
        fake_device(LAYOUT, blocks),
        prefill_config=PrefillConfig(chunk_tokens=8),
        decode_config=DecodeConfig(**{"growth_tokens": 4, **decode}),  # type: ignore[arg-type]
        check=True,
    )


def _record(name: str, prompt: list[int], max_tokens: int, **more: object) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
        **more,  # type: ignore[arg-type]
    )


def _want(record: RequestRecord) -> list[int]:
    tokens = list(record.tokens)
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(tokens, LAYOUT, VOCAB))
    return tokens[record.prompt_tokens :]


def _prompt(number: int, length: int) -> list[int]:
    return [random.Random(number).randrange(256) for _ in range(length)]


def _finish(cluster: Colocated, answers: list[Answer]) -> None:
    """To the end; raises AssertionError if nobody gets a token or ends any more."""
    so_far, idle = -1, 0
    while any(answer.ended is None for answer in answers):
        cluster.turn()
        news = sum(len(answer.tokens) + (answer.ended is not None) for answer in answers)
        so_far, idle = news, idle + 1 if news == so_far else 0
        assert idle < PATIENCE_TURNS, f"frozen: {cluster.decode!r}"
    while cluster.turn():
        pass
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        assert kv.available == kv.pool.total, "something outlived its request"
    cluster.close()


@pytest.mark.parametrize("local_chunk_tokens", [1, 64])
def test_tokens_are_the_same_with_and_without_preemption(local_chunk_tokens: int) -> None:
    """Guards every way back: on the prefill pool, computed here, and what is still cached of either."""
    records = [_record(f"r{i}", _prompt(i, 5 + 3 * i), 20) for i in range(4)]
    cluster = _cluster(12, local_chunk_tokens=local_chunk_tokens)
    answers = [cluster.submit(record) for record in records]
    _finish(cluster, answers)
    assert [answer.tokens for answer in answers] == [_want(record) for record in records]
    preemption = cluster.decode.preemption
    assert preemption.preempted.total() >= 3
    assert preemption.ways["here" if local_chunk_tokens > 1 else "pool"] >= 2
    assert sum(one.lost_tokens for one in cluster.decode.take_resumed()) > 0
    reserved = _cluster(12, preemption="off")
    answers = [reserved.submit(record) for record in records]
    _finish(reserved, answers)
    assert [answer.tokens for answer in answers] == [_want(record) for record in records]
    assert not reserved.decode.preemption.preempted


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    """Guards the order: an urgent request that comes last keeps its blocks, and so does the oldest."""
    cluster = _cluster(14)
    victims: list[str] = []
    add = cluster.decode.preemption.add
    cluster.decode.preemption.add = lambda r, now: (victims.append(r.record.request), add(r, now))[1]  # type: ignore[method-assign, func-returns-value]
    answers = [
        cluster.submit(_record("old", _prompt(1, 6), 20)),
        cluster.submit(_record("new", _prompt(2, 6), 20)),
        cluster.submit(_record("urgent", _prompt(3, 6), 20, priority=1)),
    ]
    _finish(cluster, answers)
    assert set(victims) == {"new"}
    assert all(answer.tokens == _want(answer.record) for answer in answers)


def test_samples_give_way_together_and_share_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards groups: to take one fork's blocks alone frees little; afterwards the prompt is fetched once."""
    together: list[set[str]] = []
    preempt = Room.preempt

    def noted(self: Room, victims: list[Request], now: float) -> None:
        together.append({request.record.request for request in victims})
        preempt(self, victims, now)

    monkeypatch.setattr(Room, "preempt", noted)
    cluster = _cluster(18, local_chunk_tokens=1)
    first = cluster.submit(_record("first", _prompt(1, 20), 40))
    for _ in range(6):
        cluster.turn()
    prompt = _prompt(2, 22)
    records = [_record(f"s{i}", prompt, 16, sample_index=i, group="s") for i in range(3)]
    samples = [cluster.submit(r, records[0].request if i else None) for i, r in enumerate(records)]
    _finish(cluster, [first, *samples])
    assert {"s0", "s1", "s2"} in together, together
    assert not any("first" in victims for victims in together)
    assert all(answer.tokens == _want(answer.record) for answer in (first, *samples))
    assert cluster.decode.preemption.ways["shared"] >= 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    """Guards the bound that everything else rests on: alone in the pool, whoever was taken can finish."""
    cluster = _cluster(10)
    fits = cluster.submit(_record("fits", _prompt(1, 20), 20))
    large = cluster.submit(_record("large", _prompt(2, 20), 21))
    _finish(cluster, [fits, large])
    assert large.ended is not None and large.ended.reason is FinishReason.REJECTED
    assert large.ended.fault is not None and large.ended.fault.code == "OUT_OF_RANGE"
    assert fits.tokens == _want(fits.record)


def test_a_request_that_has_outgrown_the_prefill_pool_comes_back_here() -> None:
    """Guards the answer: its tokens so far are too long a prompt for any prefill worker, which is nobody's fault."""
    cluster = Colocated(
        fake_device(LAYOUT, 4),
        fake_device(LAYOUT, 14),
        decode_config=DecodeConfig(growth_tokens=4, local_chunk_tokens=1),
        check=True,
    )
    answers = [cluster.submit(_record(f"r{i}", _prompt(i, 10), 40)) for i in range(2)]
    _finish(cluster, answers)
    assert [answer.tokens for answer in answers] == [_want(answer.record) for answer in answers]
    assert cluster.decode.preemption.ways["pool"] and cluster.decode.recomputed_tokens > 16


def test_a_preempted_request_ends_by_its_router() -> None:
    """Guards the line: a stop string that is found late ends a request that has no blocks."""
    cluster = _cluster(12)
    answers = [cluster.submit(_record(f"r{i}", _prompt(i, 8), 24)) for i in range(3)]
    while not cluster.decode.preemption.line:
        assert cluster.turn()
    victim = cluster.decode.preemption.line[0].record.request
    finish = Finish(victim, 1, 1)
    cluster._engines[1].receive([FromRouter(LINK, finish)])
    ended = cluster.answers[victim].ended
    assert ended is not None and ended.reason is FinishReason.STOP and ended.stats.output_tokens == 1
    _finish(cluster, answers)


_ASKED = st.lists(
    st.tuples(
        st.integers(1, 14),  # prompt tokens of its own
        st.integers(1, 24),  # answer
        st.sampled_from((0, 0, 9)),  # tokens of a shared prefix
        st.integers(0, 2),  # priority
        st.integers(1, 3),  # samples
        st.integers(0, 6),  # turns until the next one comes
    ),
    min_size=2,
    max_size=6,
)


def _serve(asked: list[tuple[int, int, int, int, int, int]], blocks: int, chunk: int, slots: int) -> Colocated:
    cluster = _cluster(blocks, local_chunk_tokens=chunk, max_batch=slots, max_handoffs=2)
    answers: list[Answer] = []
    for number, (own, most, shared, priority, count, pause) in enumerate(asked):
        prompt = _prompt(99, shared) + _prompt(number, own)
        head = RequestId(f"r{number}.0")
        for index in range(count):
            record = _record(
                f"r{number}.{index}",
                prompt,
                max(1, most - index),
                priority=priority,
                sample_index=index,
                group=f"r{number}" if count > 1 else "",
            )
            answers.append(cluster.submit(record, head if index else None))
        for _ in range(pause):
            cluster.turn()
    _finish(cluster, answers)
    for answer in answers:
        assert answer.tokens == _want(answer.record), answer.record.request
    return cluster


@settings(max_examples=60, deadline=None)
@given(_ASKED, st.integers(12, 18), st.sampled_from((1, 6, 64)), st.integers(1, 4))
def test_no_arrival_order_freezes_a_worker(
    asked: list[tuple[int, int, int, int, int, int]], blocks: int, chunk: int, slots: int
) -> None:
    """Whoever comes when, with whatever priority, in a pool that holds any of them alone."""
    _serve(asked, blocks, chunk, slots)


CROWD = [(10, 24, 0, 0, 2, 1), (12, 20, 9, 1, 1, 2), (6, 24, 9, 0, 3, 0)]


def test_without_anybody_giving_way_the_same_worker_freezes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above can fail."""
    assert _serve(CROWD, 14, 6, 4).decode.preemption.preempted.total() > 2
    monkeypatch.setattr(Preemption, "victims", lambda *args: [])
    with pytest.raises(AssertionError, match="frozen"):
        _serve(CROWD, 14, 6, 4)


def test_who_gave_way_holds_no_slots() -> None:
    """Guards a utilization above all there is: blocks that were given away still counted as filled."""
    cluster = _cluster(12)
    shared = _prompt(9, 2 * SIZE + 1)
    first = cluster.submit(_record("first", shared, 1))
    while first.ended is None:
        cluster.turn()
    prompts = [[*shared, *_prompt(i, 3 * i)] for i in range(4)]
    answers = [cluster.submit(_record(f"r{i}", prompt, 20)) for i, prompt in enumerate(prompts)]
    waited = 0
    while any(answer.ended is None for answer in answers):
        cluster.turn()
        live, held = cluster.decode.slots
        assert 0 <= live <= held
        for request in cluster.decode.preemption.line:
            assert not request.lease.blocks and not request.have_blocks and not request.known
            waited += 1
    assert waited > 0
    _finish(cluster, answers)
