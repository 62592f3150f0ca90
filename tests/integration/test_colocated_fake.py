"""Both schedulers and the whole handoff with the fake model, whose every token depends on every KV byte.

A block that is misplaced, stale, cut short or reused too early becomes a wrong token here. All of it with blocks of
equal size on both sides, and with smaller and larger ones on the prefill side, which are converted on landing.
"""

import random
import sys

import msgspec
import pytest

from decode_worker.scheduler.events import FromRouter
from engine.device import EngineDevice
from engine.kv.layout import KVLayout
from engine.messages import Cancel
from engine.types import FinishReason, RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated
from fakes.model import fake_next
from tests.integration.fake_device import VOCAB, fake_device
from transfer.host.loopback import FaultKind, ScriptedFault
from transfer.host.pull import BLOCKS_PER_RUN
from worker.config import DecodeConfig, PrefillConfig

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
PREFILL_LAYOUT = LAYOUT


@pytest.fixture(autouse=True, params=[4, 3, 6], ids="prefill blocks of {} tokens".format)
def prefill_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> KVLayout:
    found = msgspec.structs.replace(LAYOUT, block_size=request.param)
    monkeypatch.setattr(sys.modules[__name__], "PREFILL_LAYOUT", found)
    return found


def _device(blocks: int = 48, layout: KVLayout = LAYOUT) -> EngineDevice:
    return fake_device(layout, blocks)


def _cluster(blocks: int = 48, chunk: int = 8, **decode: int) -> Colocated:
    tokens = blocks * LAYOUT.block_size
    return Colocated(
        _device(PREFILL_LAYOUT.blocks_for(tokens), PREFILL_LAYOUT),
        _device(blocks),
        prefill_config=PrefillConfig(chunk_tokens=chunk),
        decode_config=DecodeConfig(**decode),
        check=True,
    )


def _record(name: str, tokens: list[int], max_tokens: int = 12, **more: object) -> RequestRecord:
    fields = {"prompt_tokens": len(tokens), "max_tokens": max_tokens, "seed": 1, "ignore_eos": True}
    return RequestRecord(
        request=RequestId(name),
        tokens=tokens,
        sampling=SamplingParams(temperature=0.0),
        **{**fields, **more},  # type: ignore[arg-type]
    )


def _want(record: RequestRecord) -> list[int]:
    tokens = list(record.tokens)
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(tokens, LAYOUT, VOCAB))
    return tokens[record.prompt_tokens :]


def test_a_copy_in_pieces_is_something_left_to_do() -> None:
    """Guards `turn`: a chunk of more blocks than one poll copies tells of its end only."""
    cluster = _cluster(blocks=2 * BLOCKS_PER_RUN, chunk=512)
    (answer,) = cluster.run([_record("r", [7] * (BLOCKS_PER_RUN * 6 + 5), max_tokens=2)])
    assert answer.tokens == _want(answer.record)
    _all_free(cluster)
    cluster.close()


def _all_free(cluster: Colocated) -> None:
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        counts = kv.pool.counts()
        assert counts["free"] + counts["cached"] == kv.pool.total, counts


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 70])
def test_one_request_of_every_shape(length: int) -> None:
    rng = random.Random(length)
    record = _record("r", [rng.randrange(256) for _ in range(length)])
    cluster = _cluster()
    (answer,) = cluster.run([record])
    assert answer.tokens == _want(record)
    assert answer.ended is not None and answer.ended.reason is FinishReason.LENGTH
    stats = answer.ended.stats
    assert stats.migrated_blocks == -(-length // 4)
    assert stats.migrated_bytes == stats.migrated_blocks * LAYOUT.block_bytes
    _all_free(cluster)
    cluster.close()


def test_many_at_once_with_shared_prefixes_in_small_pools() -> None:
    """Guards sharing, copy-on-write, eviction and refusal together: 40 requests over 24 blocks a side."""
    rng = random.Random(5)
    stems = [[rng.randrange(256) for _ in range(n)] for n in (0, 5, 17, 24)]
    records = [
        _record(
            f"r{n}",
            rng.choice(stems) + [rng.randrange(256) for _ in range(rng.randint(1, 12))],
            max_tokens=rng.randint(1, 16),
        )
        for n in range(40)
    ]
    cluster = _cluster(blocks=24, chunk=8, max_batch=4, max_handoffs=3)
    answers = cluster.run(records)
    for answer in answers:
        assert answer.tokens == _want(answer.record), answer.record.request
    assert any(answer.refused for answer in answers), "the pools were never short"
    ended = [answer.ended.stats for answer in answers if answer.ended]
    assert any(stats.prefill_cached_tokens % 4 for stats in ended), "no copy-on-write happened"
    assert any(stats.decode_cached_tokens for stats in ended), "no delta migration happened"
    _all_free(cluster)
    cluster.close()


def test_the_next_turn_migrates_only_what_is_new() -> None:
    cluster = _cluster()
    first = _record("t1", list(range(1, 30)))
    (one,) = cluster.run([first])
    second = _record("t2", [*first.tokens, *one.tokens, 7, 8, 9])
    (two,) = cluster.run([second])
    assert two.tokens == _want(second)
    assert two.ended is not None
    known = len(first.tokens) + len(one.tokens) - 1  # the newest token's KV was never computed
    assert two.ended.stats.decode_cached_tokens == known // 4 * 4
    assert two.ended.stats.migrated_blocks == -(-len(second.tokens) // 4) - known // 4
    assert two.ended.stats.prefill_cached_tokens == len(first.tokens)
    cluster.close()


def test_history_is_never_sampled_again() -> None:
    """Guards resumption: a record that carries emitted tokens continues with the next one, index and all."""
    whole = _record("w", [3, 1, 4, 1, 5], max_tokens=10)
    want = _want(whole)
    cluster = _cluster()
    resumed = _record("r", [3, 1, 4, 1, 5, *want[:6]], max_tokens=10, prompt_tokens=5)
    answer = cluster.submit(resumed)
    answer.tokens += want[:6]
    while answer.ended is None:
        assert cluster.turn()
    assert answer.tokens == want
    cluster.close()


def test_an_end_token_ends_it_and_min_tokens_holds_it_off() -> None:
    prompt = [9, 8, 7]
    want = _want(_record("w", prompt, max_tokens=6))
    cluster = _cluster()
    for name, record, tokens in (
        ("first", _record("a", prompt, stop_token_ids=(want[0],)), want[:1]),
        ("third", _record("b", prompt, stop_token_ids=(want[2],)), want[:3]),
        ("held off", _record("c", prompt, max_tokens=5, stop_token_ids=(want[1],), min_tokens=2), want[:5]),
    ):
        (answer,) = cluster.run([record])
        assert answer.tokens == tokens, name
        assert answer.ended is not None
        ended = FinishReason.LENGTH if name == "held off" else FinishReason.STOP
        assert answer.ended.reason is ended, name
    _all_free(cluster)
    cluster.close()


@pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.SWAP, FaultKind.FAIL])
def test_a_bad_chunk_is_a_failed_attempt_never_a_wrong_token(kind: FaultKind) -> None:
    cluster = _cluster()
    record = _record("r", list(range(30)))
    cluster.hub.faults.append(ScriptedFault(kind))
    (answer,) = cluster.run([record])
    assert cluster.hub.faults[0].applied == 1, "the fault did not take effect"
    assert answer.tokens == _want(record)
    _all_free(cluster)
    cluster.close()


def test_the_fake_model_notices_blocks_that_changed_places() -> None:
    """Guards the guard: without digests, a misplaced block must become a wrong token, or these tests prove nothing."""
    cluster = Colocated(_device(64, PREFILL_LAYOUT), _device(), digest_share=0.0)
    record = _record("r", list(range(30)))
    cluster.hub.faults.append(ScriptedFault(FaultKind.SWAP))
    (answer,) = cluster.run([record])
    assert cluster.hub.faults[0].applied == 1, "the fault did not take effect"
    want = _want(record)
    assert answer.tokens[0] == want[0], "the first token comes from the prefill side"
    assert answer.tokens[1:] != want[1:]
    cluster.close()


def test_a_wire_that_stays_bad_is_given_up_and_the_prompt_computed_here() -> None:
    cluster = _cluster()
    cluster.hub.faults.append(ScriptedFault(FaultKind.CORRUPT, times=99))
    record = _record("r", list(range(30)))
    (answer,) = cluster.run([record])
    assert cluster.hub.faults[0].applied > 1, "the fault did not take effect"
    assert answer.tokens == _want(record)
    assert answer.ended is not None and answer.ended.stats.prefill_worker == "decode-0"
    _all_free(cluster)
    cluster.close()


def test_without_any_prefill_worker_prompts_are_computed_here_in_chunks() -> None:
    """Guards running requests, too: chunks of new prompts and their next tokens share the steps."""
    cluster = _cluster(local_chunk_tokens=4)
    first = _record("first", list(range(20)), max_tokens=30)
    second = _record("second", [*range(12), *range(100, 130)])
    cluster.submit(first)
    for _ in range(12):
        cluster.turn()
    cluster.lose_prefill()
    cluster.submit(second)
    while cluster.turn():
        pass
    for record in (first, second):
        assert cluster.answers[record.request].tokens == _want(record)
    ended = cluster.answers[second.request].ended
    assert ended is not None and ended.stats.migrated_blocks == 0
    assert ended.stats.prefill_cached_tokens == 12, "what the first left in the cache was not used"
    _all_free(cluster)
    cluster.close()


def test_a_prefill_worker_lost_at_every_turn_changes_no_token() -> None:
    """Guards recovery: what has landed is kept, the rest is computed here, and no token is lost, doubled or changed."""
    kept = 0
    for turns in range(1, 200):
        cluster = _cluster()
        record, other = _record("r", list(range(50))), _record("o", [*range(30), 99, 98])
        answers = cluster.submit(record), cluster.submit(other)
        for _ in range(turns):
            cluster.turn()
        done = all(answer.ended is not None for answer in answers)
        cluster.lose_prefill()
        while cluster.turn():
            pass
        for answer in answers:
            assert answer.tokens == _want(answer.record), turns
            assert answer.ended is not None
            stats = answer.ended.stats
            kept += stats.migrated_blocks > 0 and stats.prefill_worker == "decode-0"
        _all_free(cluster)
        cluster.close()
        if done:
            break
    assert kept, "nothing that had landed was ever kept"


def test_cancel_at_every_turn_frees_both_pools() -> None:
    """Guards leaks on cancel: whatever the moment, all blocks are back once the messages have settled."""
    turns = 1
    while True:
        cluster = _cluster()
        record = _record("r", list(range(50)), max_tokens=6)
        other = _record("o", [*range(20), 99], max_tokens=20)
        answer, bystander = cluster.submit(record), cluster.submit(other)
        for _ in range(turns):
            cluster.turn()
        finished = answer.ended is not None
        cancel = Cancel(record.request, 1, FinishReason.CANCELLED)
        cluster._engines[1].receive([FromRouter(1, cancel)])
        while cluster.turn():
            pass
        assert answer.ended is not None and bystander.tokens == _want(other)
        assert finished or answer.ended.reason is FinishReason.CANCELLED
        assert answer.tokens == _want(record)[: len(answer.tokens)]
        _all_free(cluster)
        cluster.close()
        if finished:
            return
        turns += 1
        assert turns < 200
