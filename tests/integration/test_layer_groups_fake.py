"""Both schedulers and the whole handoff with the fake model, whose layers are kept in three groups, two of which keep
their windows: a block that slid away too early, a tail that is stale or one block short, or a block of another group
becomes a wrong token, and one that is not there an error."""

import random

import msgspec
import pytest

from decode_worker.scheduler.events import FromRouter
from engine.beam import BeamSearch
from engine.config import TierConfig
from engine.kv.groups import LayerGroup, migrated
from engine.kv.layout import KVLayout
from engine.messages import Cancel
from engine.plan import banned_tokens, end_tokens
from engine.types import BeamParams, FinishReason, RequestId, RequestRecord, SamplingParams
from fakes.colocated import LINK, Colocated
from fakes.model import fake_candidates, fake_next
from tests.integration.crowd import free_loads, tiering
from tests.integration.fake_device import STOP_ID, VOCAB, fake_device
from transfer.host.loopback import FaultKind, ScriptedFault
from worker.config import DecodeConfig, PrefillConfig

SIZE = 4
GROUPS = (LayerGroup((2, 5)), LayerGroup((0, 1), 9), LayerGroup((3, 4), 5))
LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=SIZE, head_dim=4, groups=GROUPS)


@pytest.fixture(autouse=True, params=[False, True], ids=["one at a time", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _cluster(
    ahead: bool,
    blocks: int = 96,
    prefill_blocks: int = 96,
    chunk: int = 8,
    layout: KVLayout = LAYOUT,
    host_blocks: dict[str, int] | None = None,
    **decode: object,
) -> Colocated:
    """`host_blocks`: of the lower tiers, by role."""
    devices = {"prefill": fake_device(layout, prefill_blocks, ahead), "decode": fake_device(layout, blocks, ahead)}
    openings = {
        role: tiering(TierConfig(host_bytes=count * LAYOUT.block_bytes), devices[role], role)
        for role, count in (host_blocks or {}).items()
    }
    return Colocated(
        *devices.values(),
        tiering=openings.get("prefill"),
        decode_tiering=openings.get("decode"),
        prefill_config=PrefillConfig(chunk_tokens=chunk),
        decode_config=DecodeConfig(**decode),  # type: ignore[arg-type]
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


def _want(record: RequestRecord, layout: KVLayout = LAYOUT) -> list[int]:
    tokens = list(record.tokens)
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(tokens, layout, VOCAB))
    return tokens[record.prompt_tokens :]


def _whole(cluster: Colocated) -> None:
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        counts = kv.pool.counts()
        assert counts["free"] + counts["cached"] == kv.pool.total, counts
    cluster.close()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 10, 13, 14, 31, 32, 33, 70])
def test_one_request_of_every_shape(ahead: bool, length: int) -> None:
    """Prompts shorter and longer than both windows; exactly the tail of each window goes over."""
    rng = random.Random(length)
    record = _record("r", [rng.randrange(256) for _ in range(length)])
    cluster = _cluster(ahead)
    (answer,) = cluster.run([record])
    assert answer.tokens == _want(record)
    assert answer.ended is not None and answer.ended.reason is FinishReason.LENGTH
    stats, blocks = answer.ended.stats, -(-length // SIZE)
    assert stats.migrated_blocks == len(migrated(GROUPS, range(blocks), length, SIZE))
    assert stats.migrated_blocks <= blocks + sum(-(-(group.window - 1) // SIZE) + 1 for group in GROUPS[1:])
    assert stats.migrated_bytes == stats.migrated_blocks * LAYOUT.block_bytes
    _whole(cluster)


def test_many_at_once_with_shared_prefixes_in_small_pools(ahead: bool) -> None:
    """Guards hits that only one group has, sharing, copy-on-write, eviction, refusal and preemption together."""
    rng = random.Random(5)
    stems = [[rng.randrange(256) for _ in range(rng.randrange(5, 30))] for _ in range(4)]
    records = [
        _record(f"r{n}", rng.choice(stems)[: rng.randrange(3, 31)] + [rng.randrange(256) for _ in range(n % 7)] or [1],
                max_tokens=rng.randrange(1, 20))
        for n in range(40)
    ]  # fmt: skip
    cluster = _cluster(ahead, blocks=48, prefill_blocks=60, max_batch=5, growth_tokens=4)
    for answer in cluster.run(records):
        assert answer.tokens == _want(answer.record), answer.record.request
    _whole(cluster)


def test_the_same_prompt_again_and_its_next_turn(ahead: bool) -> None:
    """Guards a hit on a prefix whose window is gone, and a tail that is sent although it is there."""
    rng = random.Random(8)
    first = _record("a", [rng.randrange(256) for _ in range(37)], max_tokens=9)
    cluster = _cluster(ahead)
    (one,) = cluster.run([first])
    (again,) = cluster.run([_record("b", list(first.tokens), max_tokens=9)])
    assert one.tokens == again.tokens == _want(first)
    assert again.ended is not None and again.ended.stats.migrated_blocks < 8
    turn = _record("c", [*first.tokens, *one.tokens, 3, 1, 4, 1, 5], max_tokens=9)
    (next_turn,) = cluster.run([turn])
    assert next_turn.tokens == _want(turn)
    assert next_turn.ended is not None and next_turn.ended.stats.decode_cached_tokens >= 40
    # A prefix from whose middle nothing can be computed any more: its windows have slid away.
    short = _record("d", first.tokens[:18], max_tokens=9)
    (middle,) = cluster.run([short])
    assert middle.tokens == _want(short)
    _whole(cluster)


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.CORRUPT, FaultKind.SWAP])
@pytest.mark.parametrize("seq", [0, 2, 4])
def test_failed_attempts_are_made_again(ahead: bool, kind: FaultKind, seq: int) -> None:
    """Guards what a failed attempt leaves: blocks of the first group whose windows' tails never came."""
    rng = random.Random(seq)
    record = _record("r", [rng.randrange(256) for _ in range(39)])
    cluster = _cluster(ahead)
    fault = ScriptedFault(kind, seq=seq)
    cluster.hub.faults.append(fault)
    (answer,) = cluster.run([record])
    assert fault.applied == 1
    assert answer.tokens == _want(record)
    _whole(cluster)


@pytest.mark.parametrize("length", [20, 23, 24])
def test_what_only_a_lost_attempt_was_to_bring_is_not_cached(ahead: bool, length: int) -> None:
    """Guards a window's block that was reserved for the prompt, and that the next attempt, with the token that was
    named, does not bring: nobody wrote it, and prompts that end there would read it."""
    rng = random.Random(length)
    record = _record("r", [rng.randrange(256) for _ in range(length)])
    cluster = _cluster(ahead, chunk=64)
    fault = ScriptedFault(FaultKind.FAIL, seq=0)
    cluster.hub.faults.append(fault)
    (answer,) = cluster.run([record])
    assert fault.applied == 1 and answer.tokens == _want(record)
    for cut in range(length - SIZE, length):
        again = _record(f"x{cut}", [*record.tokens[:cut], 1, 2, 3], max_tokens=3)
        (one,) = cluster.run([again])
        assert one.tokens == _want(again), cut
    _whole(cluster)


def test_every_attempt_fails_and_it_is_computed_here(ahead: bool) -> None:
    """Guards computing on behind what has landed: of the windows only the end's tail has."""
    rng = random.Random(3)
    record = _record("r", [rng.randrange(256) for _ in range(39)])
    cluster = _cluster(ahead)
    fault = ScriptedFault(FaultKind.FAIL, seq=3, times=9)
    cluster.hub.faults.append(fault)
    (answer,) = cluster.run([record])
    assert fault.applied >= 1
    assert answer.tokens == _want(record)
    _whole(cluster)


@pytest.mark.parametrize("turns", range(2, 16))
def test_a_lost_prefill_worker(ahead: bool, turns: int) -> None:
    rng = random.Random(turns)
    stem = [rng.randrange(256) for _ in range(14)]
    cluster = _cluster(ahead)
    cluster.run([_record("before", stem)])
    records = [_record(f"r{n}", stem + [rng.randrange(256) for _ in range(20 + n)]) for n in range(3)]
    answers = [cluster.submit(record) for record in records]
    for _ in range(turns):
        cluster.turn()
    cluster.lose_prefill()
    while any(answer.ended is None for answer in answers):
        assert cluster.turn(), "stuck"
    for answer in answers:
        assert answer.tokens == _want(answer.record)
    while cluster.turn():
        pass
    _whole(cluster)


def test_samples_of_one_prompt(ahead: bool) -> None:
    rng = random.Random(21)
    prompt = [rng.randrange(256) for _ in range(27)]
    cluster = _cluster(ahead)
    parent = cluster.submit(_record("s0", prompt, group="s"))
    others = [
        cluster.submit(_record(f"s{n}", prompt, group="s", sample_index=n), fork_of=RequestId("s0")) for n in (1, 2)
    ]
    while any(answer.ended is None for answer in (parent, *others)):
        assert cluster.turn(), "stuck"
    for answer in (parent, *others):
        assert answer.tokens == _want(answer.record)
    while cluster.turn():
        pass
    _whole(cluster)


@pytest.mark.parametrize("more", [12, 15, 16, 17])
def test_a_long_message_behind_a_cached_one(ahead: bool, more: int) -> None:
    """Guards the first row behind a prompt that fills its last block: beside the windows of what was cached and those
    that came there was no charge for a new block, and the worker ended."""
    rng = random.Random(more)
    first = _record("a", [rng.randrange(256) for _ in range(16)], max_tokens=2)
    turn = _record("b", [*first.tokens, *(rng.randrange(256) for _ in range(more))])
    cluster = _cluster(ahead, local_chunk_tokens=1 if ahead else 4)
    cluster.run([first])
    (answer,) = cluster.run([turn])
    assert answer.tokens == _want(turn)
    assert answer.ended is not None and answer.ended.stats.decode_cached_tokens == 16
    _whole(cluster)


@pytest.mark.parametrize("length", [15, 16, 17])
@pytest.mark.parametrize("gone", [False, True], ids=["stays", "gone"])
@pytest.mark.parametrize("said", [(1, 0), (1, 2), (0, 3, 2), (0, 3, 0)])
def test_samples_that_come_back_with_answers(ahead: bool, length: int, gone: bool, said: tuple[int, ...]) -> None:
    """Guards a fork of one that came back with tokens, or of an heir that did: where its cached tokens end a block, it
    kept no window of the prompt's end, and sharing it ended the worker."""
    rng = random.Random(length)
    prompt = [rng.randrange(256) for _ in range(length)]
    want = _want(_record("z", prompt))
    cluster = _cluster(ahead)
    answers = []
    for at, known in enumerate(said):
        record = _record(f"s{at}", prompt + want[:known], prompt_tokens=length, group="s", sample_index=at)
        answers.append(cluster.submit(record, fork_of=RequestId("s0") if at else None))
        answers[-1].tokens += want[:known]
    if gone:
        cluster.turn()
        assert not any(answer.ended for answer in answers)
        cancel = Cancel(RequestId("s0"), 1, FinishReason.CANCELLED)
        cluster._engines[1].receive([FromRouter(LINK, cancel)])
    while any(answer.ended is None for answer in answers):
        assert cluster.turn(), "stuck"
    assert all(answer.tokens == want for answer in answers[gone:])
    while cluster.turn():
        pass
    _whole(cluster)


@pytest.mark.parametrize("length", [17, 18, 19, 20])
def test_a_run_that_fills_the_steps_under_way(ahead: bool, length: int) -> None:
    """Guards the charge of a window: a row of a run has a token more than a step takes of prompts, so two of them
    planned one behind the other go beyond what was promised, and the worker ended."""
    rng = random.Random(length)
    groups = (GROUPS[0], *(LayerGroup(group.layers, group.window - 1) for group in GROUPS[1:]))
    layout = msgspec.structs.replace(LAYOUT, groups=groups)
    record = _record("r", [rng.randrange(256) for _ in range(length)], max_tokens=60)
    cluster = _cluster(ahead, layout=layout, local_chunk_tokens=4)
    answer = cluster.submit(record)
    while len(answer.tokens) < 2:
        assert cluster.turn(), "stuck"
    request, want = cluster.decode.admission.requests[record.request], _want(record, layout)
    run = want[request.output_tokens : request.output_tokens + 44]
    cluster._carry_out(1)(cluster.decode.endings.follow(request, run, 0.0))
    while answer.ended is None:
        assert cluster.turn(), "stuck"
    assert answer.tokens == want
    while cluster.turn():
        pass
    _whole(cluster)


@pytest.mark.parametrize("emitted", [0, 1])
@pytest.mark.parametrize("length", [20, 23, 28])
def test_samples_of_a_prompt_that_comes_with_a_token(ahead: bool, emitted: int, length: int) -> None:
    """Guards a share in windows that begin a token too late: the parent's blocks come behind a token that a lost
    attempt has named, or that was emitted elsewhere, and the others compute the prompt's last one again."""
    rng = random.Random(length)
    prompt = [rng.randrange(256) for _ in range(length)]
    cluster = _cluster(ahead, chunk=64)
    first = _record("s0", prompt, group="s")
    fault = ScriptedFault(FaultKind.FAIL, seq=0, times=1 - emitted)
    cluster.hub.faults += [fault] * fault.times
    told = _want(first)[:emitted]
    parent = cluster.submit(msgspec.structs.replace(first, tokens=[*prompt, *told]))
    parent.tokens += told
    others = [
        cluster.submit(_record(f"s{n}", prompt, group="s", sample_index=n), fork_of=RequestId("s0")) for n in (1, 2)
    ]
    while any(answer.ended is None for answer in (parent, *others)):
        assert cluster.turn(), "stuck"
    assert fault.applied == 1 - emitted
    for answer in (parent, *others):
        assert answer.tokens == _want(first)
    while cluster.turn():
        pass
    _whole(cluster)


@pytest.mark.parametrize("length", [13, 14, 17, 18])
def test_a_search_computes_the_last_token_again(ahead: bool, length: int) -> None:
    """Guards a tail that begins where the token behind the prompt sees it: a search computes the prompt's last one."""
    rng = random.Random(22)
    params = BeamParams(width=3, answers=3)
    record = _record("b", [rng.randrange(256) for _ in range(length)], max_tokens=14, beams=params)
    cluster = _cluster(ahead)
    (answer,) = cluster.run([record])
    search = BeamSearch(params, record.max_tokens, end_tokens(record, frozenset({STOP_ID})))
    while not search.is_over:
        banned = banned_tokens(record, len(search.live[0].ids), frozenset({STOP_ID}))
        sequences = [record.tokens + live.ids for live in search.live]
        search.advance([fake_candidates(s, LAYOUT, VOCAB, search.candidates, banned) for s in sequences])
    assert answer.ended is not None and answer.ended.beams == search.answers
    _whole(cluster)


def test_what_was_pushed_down_comes_back_with_its_tails(ahead: bool) -> None:
    """Guards prefixes whose blocks are below the pool while their windows' tails are not, or are another's."""
    rng = random.Random(31)
    stems = [[rng.randrange(256) for _ in range(48)] for _ in range(6)]
    below = {"prefill": 160, "decode": 160}
    cluster = _cluster(ahead, blocks=40, prefill_blocks=40, host_blocks=below, local_chunk_tokens=8)
    free_loads(cluster)
    for turn in range(3):
        for number, stem in enumerate(stems):
            record = _record(f"r{turn}.{number}", [*stem, *(turn,) * (turn + 1)], max_tokens=6)
            (answer,) = cluster.run([record])
            assert answer.tokens == _want(record)
    loaded = []
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        assert kv.tiers is not None and kv.tiers.counts.saved_blocks
        loaded.append(sum(kv.tiers.counts.loaded_blocks.values()))
    assert max(loaded) >= 12, loaded
    _whole(cluster)


def test_the_preempted_are_swapped(ahead: bool) -> None:
    """Guards what a swap keeps of the windows: the whole blocks' end, not the newest token's."""
    rng = random.Random(32)
    records = [_record(f"r{n}", [rng.randrange(256) for _ in range(9 + 3 * n)], max_tokens=60) for n in range(4)]
    swaps = {"growth_tokens": 4, "local_chunk_tokens": 8, "preemption": "swap"}
    cluster = _cluster(ahead, blocks=58, host_blocks={"decode": 120}, **swaps)
    for answer in cluster.run(records):
        assert answer.tokens == _want(answer.record), answer.record.request
    swapping = cluster.decode.swapping
    assert swapping.choices["swap"] >= 1 and swapping.ways["swap"] >= 1, (swapping.choices, swapping.ways)
    _whole(cluster)


@pytest.mark.parametrize("prefill_blocks", [24, 40])
def test_a_prompt_that_the_prefill_pool_cannot_hold_with_its_windows_is_computed_here(prefill_blocks: int) -> None:
    """Guards a prompt of twenty blocks, which the router sends to a pool of 24, where it takes 31 with its windows,
    against being refused for that: the decode worker has room for it."""
    rng = random.Random(1)
    cluster = _cluster(False, blocks=200, prefill_blocks=prefill_blocks, local_chunk_tokens=8)
    record = _record("a", [rng.randrange(256) for _ in range(80)], max_tokens=6)
    (answer,) = cluster.run([record])
    assert answer.ended is not None and answer.ended.fault is None and answer.tokens == _want(record)
    assert (answer.ended.stats.migrated_blocks == 0) == (prefill_blocks == 24)
