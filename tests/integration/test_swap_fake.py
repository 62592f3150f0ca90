"""Preemption by swapping, with the fake model, for which one wrong KV byte is a wrong token: what is copied to host
memory and back, and what is not, since there is no room, a copy fails, or one bit of it is another."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.scheduler.events import FromRouter
from decode_worker.scheduler.request import RequestState
from engine.kv.block_pool import BlockState
from engine.kv.tiers.commands import Store, Stored, TierLoad
from engine.messages import Cancel
from engine.storage.tiers.mover import TierMover
from engine.types import FinishReason
from fakes.colocated import LINK, Colocated
from tests.integration.crowd import (
    ASKED,
    CROWD,
    finish,
    free_loads,
    prompt_of,
    record_of,
    samples_beside_another,
    serve,
    small_cluster,
    wanted,
)

PLENTY = 64


def _mover(cluster: Colocated) -> TierMover:
    mover = cluster._tier_movers[1]
    assert mover is not None
    return mover


def _run(cluster: Colocated, count: int = 4) -> None:
    """Some requests that do not fit together; their tokens are right."""
    records = [record_of(f"r{i}", prompt_of(i, 9 + 3 * i), 20) for i in range(count)]
    answers = [cluster.submit(record) for record in records]
    finish(cluster, answers)
    assert [answer.tokens for answer in answers] == [wanted(record) for record in records]


@pytest.mark.parametrize("local_chunk_tokens", [1, 64])
def test_what_was_swapped_out_is_swapped_in(local_chunk_tokens: int) -> None:
    """Guards both ways: the blocks come back from host memory, and nothing but tails is computed again."""
    cluster = small_cluster(12, PLENTY, preemption="swap", local_chunk_tokens=local_chunk_tokens)
    _run(cluster)
    preemption, swapping = cluster.decode.preemption, cluster.decode.swapping
    assert preemption.preempted.total() >= 2
    assert swapping.ways["swap"] >= 2 and not swapping.ways["pool"]
    assert swapping.choices["swap"] >= 2 and not swapping.choices["recompute"]
    assert swapping.stashes is not None and swapping.stashes.stored_blocks >= 6
    assert swapping.loaded_blocks >= 2 and not swapping.fallbacks.total()
    assert not swapping.stashes.kept, "kept for nobody"
    fetched = [one.outcome for one in cluster.decode.prefills.handoffs.migrated]
    assert fetched == ["ok"] * 4, "no prompt is asked of the prefill pool twice"


def test_a_wrong_byte_in_a_copy_is_found_and_computed_again() -> None:
    """Guards the digest: without it the same bit becomes a wrong token, which the test would see."""
    cluster = small_cluster(12, PLENTY, preemption="swap")
    mover, flipped = _mover(cluster), 0
    load = mover._load

    def worn(command: TierLoad):  # type: ignore[no-untyped-def]
        nonlocal flipped
        for place in command.places[1:2]:
            mover._host.memory[place.index][3] ^= 1  # type: ignore[union-attr]
            flipped += 1
        return load(command)

    mover._load = worn  # type: ignore[method-assign]
    _run(cluster)
    swapping = cluster.decode.swapping
    assert flipped and swapping.fallbacks["lost"] == flipped
    assert cluster.decode.swapping.ways["here"] >= flipped


def test_without_digests_that_byte_becomes_a_wrong_token() -> None:
    """The test above can fail."""
    cluster = small_cluster(12, PLENTY, preemption="swap")
    mover = _mover(cluster)
    store = mover._store

    def careless(command: Store) -> Stored:
        stored = store(command)
        mover._digests.clear()
        for slot in command.slots:
            mover._host.memory[slot.index][3] ^= 1
        return stored

    mover._store = careless  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        _run(cluster)


def test_a_full_host_tier_and_a_failed_copy_fall_back() -> None:
    """Guards the answer where there is nothing to come back to."""
    full = small_cluster(12, 1, preemption="swap", local_chunk_tokens=1)
    _run(full)
    assert full.decode.swapping.fallbacks["full"] >= 2 and full.decode.swapping.ways["pool"]

    failing = small_cluster(12, PLENTY, preemption="swap", local_chunk_tokens=1)
    tried: list[int] = []

    def fails(command: Store) -> Stored:
        tried.append(command.number)
        return Stored(command.number, 0, 0.0, "no such memory")

    _mover(failing)._store = fails  # type: ignore[method-assign]
    _run(failing)
    assert tried and failing.decode.swapping.fallbacks["failed"] >= 1
    assert not failing.decode.swapping.ways["swap"] and failing.decode.swapping.ways["pool"]
    tiers = failing.decode.kv.tiers
    assert tiers is not None and not tiers.host._spoilt and not tiers.host._pins


def _held_back(cluster: Colocated) -> list[Callable[[], None]]:
    """Hold stores and loads back from now on, until the test says so."""
    mover, waiting = _mover(cluster), list[Callable[[], None]]()
    do = mover._do
    mover._do = lambda command: waiting.append(lambda: do(command))  # type: ignore[method-assign]
    return waiting


def test_no_block_is_reused_while_a_copy_reads_it() -> None:
    """Guards the fence: the victim is gone, its client too, and its blocks are still nobody's."""
    cluster = small_cluster(12, PLENTY, preemption="swap")
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 9 + 3 * i), 20)) for i in range(4)]
    waiting = _held_back(cluster)
    while not waiting:
        assert cluster.turn()
    swapping, kv = cluster.decode.swapping, cluster.decode.kv
    assert swapping.stashes is not None
    (stash,) = swapping.stashes.kept
    read = list(stash.lease.blocks)
    generations = [kv.pool.generation(block) for block in read]
    victim = next(r for r in cluster.decode.preemption.line if r.stash is stash)
    cancel = Cancel(victim.record.request, 1, FinishReason.CANCELLED)
    cluster._engines[1].receive([FromRouter(LINK, cancel)])
    for _ in range(30):
        cluster.turn()
    assert cluster.decode.preemption.preempted.total() == 1, "who wants the blocks waits for them"
    assert swapping.under_way and swapping.freeing and not cluster.decode.is_idle
    assert [kv.pool.generation(block) for block in read] == generations
    assert all(kv.pool.state(block) is BlockState.ACTIVE for block in read)
    assert sum(kv.pool.counts().values()) == kv.pool.total
    while waiting:
        waiting.pop(0)()
        for _ in range(5):
            cluster.turn()
    del _mover(cluster).__dict__["_do"]
    finish(cluster, answers)
    others = [answer for answer in answers if answer.record is not victim.record]
    assert all(answer.tokens == wanted(answer.record) for answer in others)


def test_a_request_that_ends_while_it_is_loaded_keeps_its_blocks_until_then() -> None:
    """Guards the way back: the tier thread writes to blocks whose request is over."""
    cluster = small_cluster(12, PLENTY, preemption="swap", local_chunk_tokens=1)
    answers = [cluster.submit(record_of(f"r{i}", prompt_of(i, 9 + 3 * i), 20)) for i in range(4)]
    requests = cluster.decode._requests
    while not any(r.state is RequestState.LOADING for r in requests.values()):
        assert cluster.turn()
    victim = next(r for r in requests.values() if r.state is RequestState.LOADING)
    blocks, kv = victim.lease.blocks[victim.have_blocks :], cluster.decode.kv
    cancel = Cancel(victim.record.request, 1, FinishReason.CANCELLED)
    cluster._engines[1].receive([FromRouter(LINK, cancel)])
    assert cluster.answers[victim.record.request].ended is not None, "told at once"
    assert victim.state is RequestState.ENDING and not cluster.decode.is_idle
    assert all(kv.pool.state(block) is BlockState.RESERVED for block in blocks)
    finish(cluster, answers)
    assert victim.lease.released


def test_samples_share_their_copies() -> None:
    """Guards groups: the prompt of three samples is copied once, and comes back once."""
    cluster = small_cluster(18, PLENTY, preemption="swap", local_chunk_tokens=1)
    answers = samples_beside_another(cluster)
    stored: list[bytes] = []
    mover = _mover(cluster)
    store = mover._store
    mover._store = lambda command: (stored.extend(command.identities), store(command))[1]  # type: ignore[method-assign]
    finish(cluster, answers)
    assert all(answer.tokens == wanted(answer.record) for answer in answers)
    assert len(stored) == len(set(stored)) >= 5
    assert cluster.decode.swapping.ways["swap"] >= 1


def test_an_evicted_prefix_comes_back_from_the_decode_workers_tier() -> None:
    """Guards tiers without preemption: a prompt that was pushed out is loaded, not computed or moved again."""
    cluster = small_cluster(12, PLENTY, preemption="off")
    free_loads(cluster)
    prompts = [prompt_of(i, 30) for i in range(3)]
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            (answer,) = cluster.run([record_of(f"r{turn}.{i}", prompt, 3)])
            assert answer.tokens == wanted(answer.record)
            assert answer.ended is not None
            assert answer.ended.stats.decode_cached_tokens == (28 if turn else 0)
            assert answer.ended.stats.migrated_blocks == (1 if turn else 8)
    tiers = cluster.decode.kv.tiers
    assert tiers is not None and tiers.counts.loaded_blocks == {"host": 21, "disk": 0}
    cluster.close()


def test_auto_takes_the_cheaper() -> None:
    """Guards the choice: prices as measured, on either side of each other."""
    for price, choice in ((1e-9, "swap"), (1e3, "recompute")):
        cluster = small_cluster(12, PLENTY, preemption="auto")
        free_loads(cluster)
        swapping, tiers = cluster.decode.swapping, cluster.decode.kv.tiers
        assert tiers is not None
        swapping.costs.store_s = price
        swapping.costs.stored = lambda blocks, seconds: None  # type: ignore[method-assign]
        _run(cluster)
        assert swapping.choices[choice] >= 2 and swapping.choices.total() == swapping.choices[choice]
        assert swapping.costs.predicted["recompute"] > 0.0
        assert (swapping.costs.predicted["swap"] > swapping.costs.predicted["recompute"]) == (
            choice == "recompute"
        )


def test_to_swap_takes_a_host_tier() -> None:
    with pytest.raises(ValueError, match="host tier"):
        small_cluster(12, preemption="swap")


def _unlucky(seed: int) -> Callable[[Colocated], None]:
    """Make a store fail now and then, or flip a bit of what was stored."""

    def meddle(cluster: Colocated) -> None:
        rng, mover = random.Random(seed), _mover(cluster)
        store = mover._store

        def stores(command: Store) -> Stored:
            luck = rng.random()
            if luck < 0.15:
                mover._digests.update(dict.fromkeys(command.slots, -1))
                return Stored(command.number, 0, 0.0, "unlucky")
            stored = store(command)
            if luck < 0.4:
                mover._host.memory[rng.choice(command.slots).index][5] ^= 4
            return stored

        mover._store = stores  # type: ignore[method-assign]

    return meddle


@settings(max_examples=60, deadline=None)
@given(
    ASKED,
    st.integers(12, 18),
    st.sampled_from((1, 6, 64)),
    st.integers(1, 4),
    st.sampled_from((4, 8, PLENTY)),
    st.sampled_from(("swap", "auto")),
    st.integers(0, 9),
)
def test_no_arrival_order_freezes_a_worker_that_swaps(
    asked: list[tuple[int, int, int, int, int, int]],
    blocks: int,
    chunk: int,
    slots: int,
    host_blocks: int,
    mode: str,
    seed: int,
) -> None:
    """Whoever comes when, with host memory for few or for many, and copies that fail or are worn."""
    serve(asked, blocks, chunk, slots, host_blocks, mode, _unlucky(seed))


def test_the_crowd_swaps() -> None:
    """The property above meets what it is about."""
    cluster = serve(CROWD, 14, 6, 4, PLENTY, "swap")
    assert cluster.decode.swapping.ways["swap"] >= 1
    assert cluster.decode.swapping.loaded_blocks
