"""Parallel samples that fork one lease, with the fake model, whose every token depends on every KV byte.

The fake model draws the same tokens for each sample, so samples are told apart by their lengths and their histories.
"""

import random

import pytest

from decode_worker.scheduler.events import FromRouter
from engine.kv.layout import KVLayout
from engine.messages import Cancel
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from fakes.colocated import LINK, Colocated, ColocatedAnswer
from fakes.model import fake_next
from tests.integration.fake_device import VOCAB, fake_device
from worker.config import DecodeConfig, PrefillConfig

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)


def _cluster(blocks: int = 48, **decode: int) -> Colocated:
    return Colocated(
        fake_device(LAYOUT, 48),
        fake_device(LAYOUT, blocks),
        prefill_config=PrefillConfig(chunk_tokens=8),
        decode_config=DecodeConfig(**decode),
        check=True,
    )


def _record(index: int, prompt: list[int], max_tokens: int, history: int = 0) -> RequestRecord:
    """Sample `index`; the first `history` tokens of its answer are known already."""
    record = RequestRecord(
        request=RequestId(f"r.{index}"),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=1,
        sample_index=index,
        group="r",
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    return _behind(record, _want(record)[:history])


def _behind(record: RequestRecord, history: list[int]) -> RequestRecord:
    return RequestRecord(
        **{name: getattr(record, name) for name in record.__struct_fields__ if name != "tokens"},
        tokens=[*record.tokens, *history],
    )


def _want(record: RequestRecord) -> list[int]:
    tokens = record.tokens[: record.prompt_tokens]
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(tokens, LAYOUT, VOCAB))
    return tokens[record.prompt_tokens :]


def _submit(cluster: Colocated, records: list[RequestRecord]) -> list[ColocatedAnswer]:
    answers = []
    for record in records:
        answer = cluster.submit(record, records[0].request if answers else None)
        answer.tokens += record.tokens[record.prompt_tokens :]
        answers.append(answer)
    return answers


def _finish(cluster: Colocated) -> None:
    while cluster.turn():
        pass
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        counts = kv.pool.counts()
        assert counts["free"] + counts["cached"] == kv.pool.total, counts
        assert kv.available == kv.pool.total, "a promise outlived its request"
    cluster.close()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 31, 32, 33])
@pytest.mark.parametrize("most", [1, 2, 9])
def test_every_sample_is_exact_and_the_prompt_moves_once(length: int, most: int) -> None:
    """Guards the fork: a prompt of whole blocks, with a boundary block, and a parent that ends with its first token."""
    prompt = [random.Random(length).randrange(256) for _ in range(length)]
    cluster = _cluster()
    answers = _submit(cluster, [_record(i, prompt, max(1, most - i)) for i in range(4)])
    _finish(cluster)
    assert [answer.tokens for answer in answers] == [_want(a.record) for a in answers]
    stats = [answer.ended.stats for answer in answers if answer.ended]
    assert sum(migrated.blocks for migrated in cluster.decode.prefills.handoffs.migrated) == -(-length // 4)
    assert [s.migrated_blocks for s in stats[1:]] == [0, 0, 0]
    assert [s.prefill_cached_tokens for s in stats] == [0] + [length - 1] * 3
    assert cluster.decode.prefills.forks.forked == 3
    assert cluster.decode.batch.prefilled_tokens == 3, "a sample computes the prompt's last token, and no more"


def test_forks_promise_only_what_they_do_not_share() -> None:
    """Guards admission: 4 x (8 shared + 3 own) blocks are taken by a pool of 20, at once, and all of them end."""
    prompt = list(range(32))
    cluster = _cluster(blocks=8 + 4 * 3)
    answers = _submit(cluster, [_record(i, prompt, 8) for i in range(4)])
    while any(answer.ended is None for answer in answers):
        assert cluster.turn()
    assert not any(answer.refused for answer in answers)
    assert [answer.tokens for answer in answers] == [_want(a.record) for a in answers]
    _finish(cluster)


def test_a_sample_with_a_history_forks_too() -> None:
    """Guards recovery: samples of a lost worker are placed again behind what each of them has said."""
    cluster = _cluster()
    records = [_record(i, list(range(30)), 12, history) for i, history in enumerate((5, 0, 11, 2))]
    answers = _submit(cluster, records)
    _finish(cluster)
    assert [answer.tokens for answer in answers] == [_want(a.record) for a in answers]
    assert cluster.decode.prefills.forks.forked == 3


def test_samples_go_on_when_their_parent_is_cancelled_at_any_turn() -> None:
    """Guards promises and heirs: whoever is gone at whatever moment, in a pool without a block to spare."""
    seen = set()
    for victim in range(3):
        for turns in range(1, 200):
            cluster = _cluster(blocks=8 + 3 * 3)
            answers = _submit(cluster, [_record(i, list(range(33)), 7) for i in range(3)])
            for _ in range(turns):
                cluster.turn()
            done = answers[victim].ended is not None
            before = cluster.decode.prefills.forks.forked
            cancel = Cancel(answers[victim].record.request, 1, FinishReason.CANCELLED)
            cluster._engines[1].receive([FromRouter(LINK, cancel)])
            while any(answer.ended is None for answer in answers):
                assert cluster.turn()
            for at, answer in enumerate(answers):
                want = _want(answer.record)
                assert answer.tokens == (want if at != victim else want[: len(answer.tokens)])
            assert not any(answer.refused for answer in answers), "a promise was not kept"
            seen.add((victim, before, cluster.decode.prefills.forks.forked))
            _finish(cluster)
            if done:
                break
    assert (0, 0, 1) in seen, "no parent was gone before its forks"
    assert (1, 0, 1) in seen, "no fork was gone before it began"


def test_samples_are_exact_though_the_prefill_worker_dies_at_any_turn() -> None:
    for turns in range(1, 200):
        cluster = _cluster()
        answers = _submit(cluster, [_record(i, list(range(33)), 7) for i in range(3)])
        for _ in range(turns):
            cluster.turn()
        done = all(answer.ended is not None for answer in answers)
        cluster.lose_prefill()
        _finish(cluster)
        assert [answer.tokens for answer in answers] == [_want(a.record) for a in answers]
        assert cluster.decode.prefills.forks.forked == 2
        if done:
            return
    raise AssertionError("they never ended")


def test_another_prompt_is_no_fork() -> None:
    """Guards the worker's border: what does not fit the request that is named runs as a request of its own."""
    cluster = _cluster()
    first = cluster.submit(_record(0, list(range(20)), 4))
    others = [
        cluster.submit(_record(1, list(range(1, 21)), 4), first.record.request),
        cluster.submit(_record(2, list(range(20)), 5), first.record.request),
        cluster.submit(_record(3, list(range(20)), 4), RequestId("nobody")),
    ]
    _finish(cluster)
    assert all(answer.tokens == _want(answer.record) for answer in (first, *others))
    assert cluster.decode.prefills.forks.forked == 0


def test_a_step_has_no_more_rows_than_its_memory_was_counted_for() -> None:
    """Guards the workspace: sixteen forks that begin at once do not join a batch of two in one step."""
    rows: list[int] = []
    cluster = _cluster(max_batch=2)
    launch = cluster._engines[1]._runner.launch
    cluster._engines[1]._runner.launch = lambda plan: (rows.append(len(plan.rows)), launch(plan))[1]  # type: ignore[method-assign, func-returns-value]
    answers = _submit(cluster, [_record(i, list(range(9)), 3) for i in range(16)])
    _finish(cluster)
    assert [answer.tokens for answer in answers] == [_want(a.record) for a in answers]
    assert cluster.decode.prefills.forks.forked == 15 and max(rows) == 3
