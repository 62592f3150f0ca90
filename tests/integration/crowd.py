"""Requests that come in any order to a decode worker whose pool is too small for all of them, with the fake model."""

import random
from collections.abc import Callable

from hypothesis import strategies as st

from engine.config import TierConfig
from engine.device import EngineDevice
from engine.drafts import Drafter
from engine.kv.layout import KVLayout
from engine.storage.tiers.opening import Tiering, open_tiers
from engine.types import RequestId, RequestRecord, SamplingParams
from fakes.colocated import Colocated, ColocatedAnswer
from fakes.model import fake_next
from tests.integration.fake_device import VOCAB, fake_device
from worker.config import DecodeConfig, PrefillConfig

SIZE = 4
PATIENCE_TURNS = 200
LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=SIZE, head_dim=4)


def small_cluster(
    blocks: int,
    host_blocks: int = 0,
    ahead: bool = False,
    jumps: bool = True,
    drafter: Drafter | None = None,
    **decode: object,
) -> Colocated:
    """A decode pool of so many blocks, over so many in host memory. `ahead`: steps are planned while others run.
    `jumps`: tokens that a constraint forces take no step. `drafter`: of the decode worker."""
    device = fake_device(LAYOUT, blocks, ahead, jumps, drafter)
    tiers = TierConfig(host_bytes=host_blocks * LAYOUT.block_bytes)
    return Colocated(
        fake_device(LAYOUT, 48, ahead, jumps),
        device,
        decode_tiering=tiering(tiers, device, "decode-0") if host_blocks else None,
        prefill_config=PrefillConfig(chunk_tokens=8),
        decode_config=DecodeConfig(**{"growth_tokens": 4, **decode}),  # type: ignore[arg-type]
        check=True,
    )


def tiering(
    config: TierConfig, device: EngineDevice, name: str
) -> Callable[[Callable[[object], None]], Tiering]:
    """Return a function for `Colocated` that opens the lower tiers of the worker `name`."""

    def opens(on_event: Callable[[object], None]) -> Tiering:
        opened = open_tiers(config, device, name, on_event)
        assert opened is not None
        return opened

    return opens


def free_loads(cluster: Colocated) -> None:
    """Have no load from a lower tier cost anything, however long it takes on a busy machine."""
    for kv in (cluster.prefill.kv, cluster.decode.kv):
        if kv.tiers is not None:
            kv.tiers.cost.measured = lambda *_: None  # type: ignore[method-assign]


def record_of(name: str, prompt: list[int], max_tokens: int, **more: object) -> RequestRecord:
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


def wanted(record: RequestRecord, layout: KVLayout = LAYOUT) -> list[int]:
    tokens = list(record.tokens)
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        tokens.append(fake_next(tokens, layout, VOCAB))
    return tokens[record.prompt_tokens :]


def prompt_of(number: int, length: int) -> list[int]:
    return [random.Random(number).randrange(256) for _ in range(length)]


def samples_beside_another(cluster: Colocated) -> list[ColocatedAnswer]:
    """A long answer, `first`, and after some turns three samples, `s0` to `s2`, of another prompt beside it."""
    first = cluster.submit(record_of("first", prompt_of(1, 20), 40))
    for _ in range(6):
        cluster.turn()
    prompt = prompt_of(2, 22)
    records = [record_of(f"s{i}", prompt, 16, sample_index=i, group="s") for i in range(3)]
    return [
        first,
        *(cluster.submit(r, records[0].request if i else None) for i, r in enumerate(records)),
    ]


def finish(cluster: Colocated, answers: list[ColocatedAnswer]) -> None:
    """Run to the end; raises AssertionError if nobody gets a token or ends any more."""
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


ASKED = st.lists(
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


def serve(
    asked: list[tuple[int, int, int, int, int, int]],
    blocks: int,
    chunk: int,
    slots: int,
    host_blocks: int = 0,
    preemption: str = "recompute",
    meddle: Callable[[Colocated], None] = lambda cluster: None,
    ahead: bool = False,
) -> Colocated:
    """Run all of them to the end, with the tokens that they would have alone. `meddle` may change the cluster first."""
    cluster = small_cluster(
        blocks,
        host_blocks,
        ahead,
        local_chunk_tokens=chunk,
        max_batch=slots,
        max_handoffs=2,
        preemption=preemption,
    )
    meddle(cluster)
    answers: list[ColocatedAnswer] = []
    for number, (own, most, shared, priority, count, pause) in enumerate(asked):
        prompt = prompt_of(99, shared) + prompt_of(number, own)
        head = RequestId(f"r{number}.0")
        for index in range(count):
            record = record_of(
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
    finish(cluster, answers)
    for answer in answers:
        assert answer.tokens == wanted(answer.record), answer.record.request
    return cluster


CROWD = [(10, 24, 0, 0, 2, 1), (12, 20, 9, 1, 1, 2), (6, 24, 9, 0, 3, 0)]
