"""Lower tiers under the real schedulers, with real files, and a model whose every token depends on every KV byte: a
block that comes back with one wrong byte becomes a wrong token."""

import random
from pathlib import Path

import pytest

from engine.config import TierConfig
from engine.kv.layout import KVLayout
from engine.kv.tiers.commands import TierSlot
from engine.kv.tiers.disk_index import header_bytes
from fakes.colocated import Colocated
from tests.integration.crowd import free_loads, record_of, tiering, wanted
from tests.integration.fake_device import fake_device
from worker.config import PrefillConfig

LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)
HOST_BLOCKS, ANSWER = 48, 3


def _cluster(blocks: int, host_blocks: int, disk_dir: Path | None = None) -> Colocated:
    """Loads are free, and no time passes: whether a load pays, and how long a prompt waits for it, is not a matter of
    how busy the machine is."""
    device = fake_device(LAYOUT, blocks)
    config = TierConfig(
        host_bytes=host_blocks * LAYOUT.block_bytes,
        disk_bytes=2**20 if disk_dir else 0,
        disk_dir=str(disk_dir or ""),
    )
    cluster = Colocated(
        device,
        fake_device(LAYOUT, 200),
        prefill_config=PrefillConfig(chunk_tokens=16),
        clock=lambda: 0.0,
        check=True,
        tiering=tiering(config, device, "prefill-0"),
    )
    free_loads(cluster)
    return cluster


def _prompts(count: int, length: int, first: int = 0) -> list[list[int]]:
    """No two have a token in common at their beginning: their first ones count from `first`."""
    rng = random.Random(count)
    return [[first + n, *(rng.randrange(250) for _ in range(length - 1))] for n in range(count)]


def _serve(cluster: Colocated, name: str, tokens: list[int]) -> int:
    """One request to its end, on decode workers that know nothing: its tokens are right; how many were cached."""
    (answer,) = cluster.run([record_of(name, tokens, ANSWER)])
    assert answer.tokens == wanted(answer.record, LAYOUT)
    assert answer.ended is not None
    cluster.decode.kv.release(_all(cluster))  # what it had cached is pushed out
    return answer.ended.stats.prefill_cached_tokens


def _all(cluster: Colocated):  # type: ignore[no-untyped-def]
    kv = cluster.decode.kv
    lease = kv.acquire(b"x", [0], match_limit=0, room_tokens=kv.available * kv.block_size)
    assert lease is not None
    return lease


def _idle(cluster: Colocated) -> None:
    while cluster.turn():
        pass


def test_what_left_the_device_comes_back_from_host_memory() -> None:
    """Three prompts of ten blocks, a device of twelve: each pushes the one before it out."""
    cluster = _cluster(12, 64)
    prompts = _prompts(3, 40)
    assert [_serve(cluster, f"a{n}", p) for n, p in enumerate(prompts)] == [0, 0, 0]
    assert [_serve(cluster, f"b{n}", p) for n, p in enumerate(prompts)] == [36, 36, 36], (
        "all whole blocks but the one of the last token"
    )
    tiers = cluster.prefill.kv.tiers
    assert tiers is not None and tiers.counts.loaded_blocks == {"host": 27, "disk": 0}
    cluster.close()


def test_a_wrong_byte_in_a_tier_becomes_a_wrong_token() -> None:
    """The test above can fail: one bit of one saved block."""
    cluster = _cluster(12, 64)
    one, other = _prompts(2, 40)
    right = cluster.run([record_of("a", one, ANSWER)])[0].tokens
    cluster.decode.kv.release(_all(cluster))
    _serve(cluster, "b", other)
    tiers, mover = cluster.prefill.kv.tiers, cluster._tier_movers[0]
    assert tiers is not None and mover is not None and len(tiers.host) >= 8
    for index in range(64):
        mover._host.block(TierSlot(index))[5] ^= 1
    assert cluster.run([record_of("c", one, ANSWER)])[0].tokens != right
    cluster.close()


def test_what_left_host_memory_comes_back_from_disk_in_the_next_life_too(tmp_path: Path) -> None:
    prompts = _prompts(8, 40)
    cluster = _cluster(12, HOST_BLOCKS, tmp_path)
    for n, prompt in enumerate(prompts):
        assert _serve(cluster, f"a{n}", prompt) == 0
    _idle(cluster)
    tiers = cluster.prefill.kv.tiers
    assert tiers is not None and tiers.counts.spilled_blocks > 20
    cached = [_serve(cluster, f"b{n}", prompt) for n, prompt in enumerate(prompts)]
    assert tiers.counts.loaded_blocks["disk"] > 20 and sum(cached) > 150, (cached, tiers)
    cluster.close()

    again = _cluster(12, HOST_BLOCKS, tmp_path)
    cached = [_serve(again, f"c{n}", prompt) for n, prompt in enumerate(prompts[:4])]
    tiers = again.prefill.kv.tiers
    assert tiers is not None and tiers.counts.loaded_blocks["disk"] >= 9 and sum(cached) >= 36, cached
    again.close()


def test_a_damaged_segment_is_dropped_and_its_tokens_are_computed(tmp_path: Path) -> None:
    prompts = _prompts(8, 40)
    cluster = _cluster(12, HOST_BLOCKS, tmp_path)
    for n, prompt in enumerate(prompts):
        _serve(cluster, f"a{n}", prompt)
    cluster.close()
    damaged = 0
    for file in (tmp_path / "prefill-0").glob("*.segment"):
        data = bytearray(file.read_bytes())
        for at in range(header_bytes(1), len(data), LAYOUT.block_bytes):
            data[at] ^= 1
        file.write_bytes(data)
        damaged += 1
    again = _cluster(12, HOST_BLOCKS, tmp_path)
    for n, prompt in enumerate(prompts):
        _serve(again, f"b{n}", prompt)  # whose tokens are right
    tiers = again.prefill.kv.tiers
    assert tiers is not None and tiers.counts.broken_blocks > 0 and damaged > 0
    again.close()


def test_a_tenant_finds_nothing_of_another_in_any_tier(tmp_path: Path) -> None:
    """A probe learns nothing from cached-token counts: of a prompt that is cached for another it is told 0, on the
    device, in host memory and on disk, and the same as of a prompt that nobody has asked."""
    prompts = _prompts(8, 40)
    cluster = _cluster(12, HOST_BLOCKS, tmp_path)
    for n, prompt in enumerate(prompts):
        cluster.run([record_of(f"a{n}", prompt, ANSWER, namespace=b"owner")])
    probes = [*prompts, *_prompts(3, 40, first=100)]
    tiers = cluster.prefill.kv.tiers
    assert tiers is not None and len(tiers.host) and tiers.disk is not None and len(tiers.disk)
    for n, prompt in enumerate(probes):
        (answer,) = cluster.run([record_of(f"p{n}", prompt, ANSWER, namespace=b"probe")])
        assert answer.ended is not None and answer.ended.stats.prefill_cached_tokens == 0
        assert tiers.counts.loaded_blocks == {"host": 0, "disk": 0}
    (own,) = cluster.run([record_of("own", probes[-1], ANSWER, namespace=b"probe")])
    assert own.ended is not None and own.ended.stats.prefill_cached_tokens > 0, "its own it does find"
    cluster.close()


@pytest.mark.parametrize("seed", range(4))
def test_many_requests_at_once_over_all_tiers(seed: int, tmp_path: Path) -> None:
    """Prompts with common beginnings, far more than the device holds, in any order; every token is right."""
    rng = random.Random(seed)
    roots = _prompts(6, 24)
    cluster = _cluster(24, HOST_BLOCKS, tmp_path)
    records = []
    for n in range(40):
        root = rng.choice(roots)
        tokens = root[: rng.randrange(8, 25)] + [rng.randrange(250) for _ in range(rng.randrange(1, 20))]
        records.append(record_of(f"r{n}", tokens, ANSWER, namespace=rng.choice([b"", b"t"])))
    answers = []
    for at in range(0, 40, 8):
        answers += cluster.run(records[at : at + 8])
    assert [answer.record for answer in answers] == records
    assert all(answer.tokens == wanted(answer.record, LAYOUT) for answer in answers)
    tiers = cluster.prefill.kv.tiers
    assert tiers is not None and sum(tiers.counts.loaded_blocks.values()) > 0
    cluster.close()
