"""Log probabilities through both schedulers and the handoff, with the fake model, for which one wrong KV byte is a
wrong value: each token's are those of the uninterrupted run, once, planned ahead or not.

Workers that are killed at every token, and routers, are the simulator's (`tests/sim/test_every_token.py`).
"""

import random

import msgspec
import pytest

from engine.types import RequestRecord, TokenLogprobs
from fakes.colocated import Colocated, ColocatedAnswer
from fakes.model import fake_logprobs, fake_prompt_logprobs
from tests.integration.crowd import LAYOUT, VOCAB, finish, prompt_of, record_of, small_cluster, wanted

AHEAD = pytest.mark.parametrize("ahead", [False, True])


def told(record: RequestRecord) -> list[TokenLogprobs]:
    """What the model says of the answer's tokens."""
    tokens, said = list(record.tokens[: record.prompt_tokens]), []
    for token in wanted(record):
        assert record.logprobs is not None
        said.append(fake_logprobs(tokens, LAYOUT, VOCAB, token, record.logprobs))
        tokens.append(token)
    return said


def check(answers: list[ColocatedAnswer]) -> None:
    for answer in answers:
        prompt, count = answer.record.tokens[: answer.record.prompt_tokens], answer.record.prompt_logprobs
        assert answer.prompt_logprobs == ([] if count is None else fake_prompt_logprobs(prompt, LAYOUT, VOCAB, count))
        assert answer.tokens == wanted(answer.record)
        assert answer.logprobs == ([] if answer.record.logprobs is None else told(answer.record))


@AHEAD
def test_each_token_has_its_own_and_only_who_asks_has_any(ahead: bool) -> None:
    """Guards the first one, which the prefill worker draws, and rows that follow a token not drawn yet."""
    cluster = small_cluster(64, 0, ahead)
    wants = [3, None, 0, 20]
    records = [record_of(f"r{i}", prompt_of(i, 5 + 6 * i), 6 + i, logprobs=want) for i, want in enumerate(wants)]
    answers = [cluster.submit(record) for record in records]
    finish(cluster, answers)
    check(answers)


@AHEAD
def test_the_same_with_a_prefix_that_is_cached(ahead: bool) -> None:
    cluster, record = small_cluster(64, 0, ahead), record_of("a", prompt_of(3, 21), 5, logprobs=2)
    for name in ("a", "b"):
        answer = cluster.submit(msgspec.structs.replace(record, request=name))
        while answer.ended is None:
            cluster.turn()
        check([answer])
    assert answer.ended.stats.prefill_cached_tokens >= 16, "nothing was cached"
    finish(cluster, [answer])


@AHEAD
@pytest.mark.parametrize("turns", range(1, 9))
def test_a_prefill_worker_that_is_lost_takes_none_with_it(turns: int, ahead: bool) -> None:
    """Guards the first token's values, which cross together with it: named and then lost, or never named."""
    cluster = small_cluster(64, 0, ahead)
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 18), 7, logprobs=4)) for i in range(2)]
    for _ in range(turns):
        cluster.turn()
    cluster.lose_prefill()
    finish(cluster, answers)
    check(answers)


@AHEAD
@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (64, "swap")])
def test_requests_that_give_way_keep_theirs(host_blocks: int, mode: str, ahead: bool) -> None:
    cluster: Colocated = small_cluster(
        14, host_blocks, ahead, local_chunk_tokens=6, max_batch=4, max_handoffs=2, preemption=mode
    )
    chosen = random.Random(1)
    records = [record_of(f"r{i}", prompt_of(i, chosen.randint(3, 12)), 20, logprobs=i) for i in range(5)]
    answers = [cluster.submit(record) for record in records]
    finish(cluster, answers)
    check(answers)
    assert cluster.decode.preemption.preempted.total() > 0, "nobody gave way"


@AHEAD
def test_a_prompt_has_its_own_whatever_is_cached(ahead: bool) -> None:
    """Guards prompts in chunks, beside others that do not ask; what a cache has is computed again, and the cache
    is as good as before."""
    cluster, prompt = small_cluster(64, 0, ahead), prompt_of(3, 21)
    first = [cluster.submit(record_of(f"a{i}", prompt, 5, prompt_logprobs=want)) for i, want in enumerate((2, None, 0))]
    while any(answer.ended is None for answer in first):
        cluster.turn()
    again = cluster.submit(record_of("b", prompt, 5, prompt_logprobs=20, logprobs=1))
    while again.ended is None:
        cluster.turn()
    assert again.ended.stats.prefill_cached_tokens == again.ended.stats.decode_cached_tokens == 0
    plain = cluster.submit(record_of("c", prompt, 5))
    short = cluster.submit(record_of("d", [7], 5, prompt_logprobs=3))
    finish(cluster, [plain, short])
    assert plain.ended is not None and plain.ended.stats.prefill_cached_tokens >= 16
    check([*first, again, plain, short])


@AHEAD
@pytest.mark.parametrize("turns", range(1, 12))
def test_a_prompts_come_once_although_its_prefill_worker_is_lost(turns: int, ahead: bool) -> None:
    """Guards what was named with the first token, or lost with it: then the decode worker computes all of the prompt,
    also where its blocks have landed."""
    cluster = small_cluster(64, 0, ahead)
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 18), 7, prompt_logprobs=4)) for i in range(2)]
    for _ in range(turns):
        cluster.turn()
    cluster.lose_prefill()
    finish(cluster, answers)
    check(answers)


@AHEAD
@pytest.mark.parametrize(("host_blocks", "mode"), [(0, "recompute"), (64, "swap")])
def test_prompts_that_give_way_while_they_are_computed(host_blocks: int, mode: str, ahead: bool) -> None:
    """Guards a prompt that is preempted half way: what is known of it is kept or computed again, and nothing of it is
    taken from the cache, or a lower tier, unsaid."""
    cluster: Colocated = small_cluster(
        15, host_blocks, ahead, local_chunk_tokens=2, max_batch=4, max_handoffs=4, preemption=mode
    )
    cluster.lose_prefill()
    chosen = random.Random(3)
    shared = prompt_of(9, 9)
    records = [
        record_of(f"r{i}", shared + prompt_of(i, chosen.randint(3, 14)), 16, prompt_logprobs=i % 3 or None)
        for i in range(7)
    ]
    answers = [cluster.submit(record) for record in records]
    finish(cluster, answers)
    check(answers)
    assert cluster.decode.preemption.preempted["local"] > 0, "no prompt gave way"


@AHEAD
def test_samples_have_theirs(ahead: bool) -> None:
    cluster, prompt = small_cluster(64, 0, ahead), prompt_of(2, 22)
    records = [record_of(f"s{i}", prompt, 9, sample_index=i, group="s", logprobs=i + 1) for i in range(3)]
    answers = [cluster.submit(record, records[0].request if i else None) for i, record in enumerate(records)]
    finish(cluster, answers)
    check(answers)
