"""A device with the fake model (`fakes.model`), for both schedulers without weights."""

from engine.device import EngineDevice
from engine.drafts import Drafter
from engine.kv.layout import KVLayout
from engine.messages import MemoryUse
from engine.storage.paged import PagedKV
from fakes.model import FakeRunner
from fakes.vocabulary import byte_matchers

VOCAB = 257
STOP_ID = 256


def fake_device(
    layout: KVLayout, blocks: int, ahead: bool = False, jumps: bool = True, drafter: Drafter | None = None
) -> EngineDevice:
    kv, matchers = PagedKV(layout, blocks), byte_matchers(STOP_ID, jumps)
    return EngineDevice(
        model="fake",
        layout=layout,
        blocks=blocks,
        kv=kv,
        runner=FakeRunner(kv, VOCAB, matchers),
        fingerprint="fake",
        vocab=VOCAB,
        context_tokens=4096,
        stop_ids=frozenset({STOP_ID}),
        memory=MemoryUse(),
        plans_ahead=ahead,
        matchers=matchers,
        drafter=drafter,
    )
