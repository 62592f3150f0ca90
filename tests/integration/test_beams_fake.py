"""Beam search through both schedulers and the handoff, with the fake model, against the same search without any KV."""

import random

import pytest

from decode_worker.scheduler.events import FromRouter
from engine.beam import BeamSearch
from engine.kv.layout import KVLayout
from engine.messages import Cancel
from engine.plan import banned_tokens, end_tokens
from engine.types import Beam, BeamParams, FinishReason, RequestId, RequestRecord
from fakes.colocated import LINK, Colocated
from fakes.model import fake_candidates
from tests.integration.fake_device import VOCAB, fake_device
from worker.config import DecodeConfig, PrefillConfig

SIZE = 4
LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=SIZE, head_dim=4)


def _cluster(blocks: int, **decode: object) -> Colocated:
    return Colocated(
        fake_device(LAYOUT, 48),
        fake_device(LAYOUT, blocks),
        prefill_config=PrefillConfig(chunk_tokens=8),
        decode_config=DecodeConfig(**{"growth_tokens": 4, **decode}),  # type: ignore[arg-type]
        check=True,
    )


def _record(name: str, length: int, max_tokens: int, width: int, **more: object) -> RequestRecord:
    prompt = [random.Random(name).randrange(256) for _ in range(length)]
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=length,
        max_tokens=max_tokens,
        seed=1,
        beams=BeamParams(width=width, answers=width) if width else None,
        **more,  # type: ignore[arg-type]
    )


def _want(record: RequestRecord, stop_ids: frozenset[int]) -> list[Beam]:
    assert record.beams is not None
    search = BeamSearch(record.beams, record.max_tokens, end_tokens(record, stop_ids))
    while not search.is_over:
        banned = banned_tokens(record, len(search.live[0].ids), stop_ids)
        sequences = [record.tokens + live.ids for live in search.live]
        search.advance(
            [fake_candidates(s, LAYOUT, VOCAB, search.candidates, banned) for s in sequences]
        )
    return search.answers


def _finish(cluster: Colocated) -> None:
    while cluster.turn():
        pass
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        assert kv.available == kv.pool.total, "something outlived its request"
    cluster.close()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_answers_are_exact_and_hypotheses_share_blocks(length: int, width: int) -> None:
    """Guards the forks: at every offset in a block, whichever hypotheses go on, each reads its own rows."""
    ends = tuple(range(0, VOCAB, 9))
    record = _record("r", length, 14, width, stop_token_ids=ends, min_tokens=2)
    cluster = _cluster(64)
    answer = cluster.submit(record)
    most = 0
    while answer.ended is None:
        assert cluster.turn()
        most = max(most, cluster.decode.kv.pool.counts()["active"])
    assert answer.ended.beams == _want(record, cluster.decode.batch.stop_ids)
    assert not answer.tokens, "nothing is said before the search is over"
    assert (cluster.decode.batch.beams.forked > 0) == (width > 1)
    shared = (length - 1) // SIZE
    assert most <= shared + width * (-(-(length + 14) // SIZE) - shared)
    _finish(cluster)


def test_searches_are_exact_when_they_are_preempted() -> None:
    """Guards the restart: a search that lost its blocks to an older request, or gave way to one, finds the same."""
    cluster = _cluster(21)
    records = [
        _record("a", 9, 16, 3, ignore_eos=True),
        _record("b", 14, 16, 0, ignore_eos=True),
        _record("c", 6, 16, 4, ignore_eos=True),
    ]
    answers = [cluster.submit(record) for record in records]
    while any(answer.ended is None for answer in answers):
        cluster.turn()
    assert cluster.decode.preemption.preempted.total() >= 1
    for answer in (answers[0], answers[2]):
        assert answer.ended is not None
        assert answer.ended.beams == _want(answer.record, cluster.decode.batch.stop_ids)
    _finish(cluster)


def test_a_cancelled_search_lets_every_hypothesis_go() -> None:
    """Guards leases: whenever the client leaves, in whatever state the forks are."""
    for turns in range(1, 200):
        cluster = _cluster(40)
        answer = cluster.submit(_record("r", 10, 12, 4))
        for _ in range(turns):
            cluster.turn()
        done = answer.ended is not None
        cancel = Cancel(RequestId("r"), 1, FinishReason.CANCELLED)
        cluster._engines[1].receive([FromRouter(LINK, cancel)])
        _finish(cluster)
        if done:
            return
    raise AssertionError("it never ended")


def test_the_prefill_worker_may_die_at_any_turn() -> None:
    for turns in range(1, 200):
        cluster = _cluster(40)
        record = _record("r", 10, 8, 3)
        answer = cluster.submit(record)
        for _ in range(turns):
            cluster.turn()
        done = answer.ended is not None
        cluster.lose_prefill()
        _finish(cluster)
        assert answer.ended is not None
        assert answer.ended.beams == _want(record, cluster.decode.batch.stop_ids)
        if done:
            return
    raise AssertionError("it never ended")


def test_what_cannot_be_searched_here_is_refused() -> None:
    """Guards the bound: alone in the pool, a search that was taken can finish."""
    cluster = _cluster(4 + 3 * 4)
    fits = cluster.submit(_record("fits", 17, 15, 3))
    large = cluster.submit(_record("large", 17, 15, 4))
    wide = cluster.submit(_record("wide", 1, 1, 16))
    _finish(cluster)
    assert fits.ended is not None and fits.ended.beams == _want(fits.record, cluster.decode.batch.stop_ids)
    assert large.ended is not None and large.ended.fault is not None
    assert large.ended.fault.code == "OUT_OF_RANGE"
    assert wide.ended is not None and wide.ended.beams
