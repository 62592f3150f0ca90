"""Every kind of record that a handoff drops, provoked through the pure objects and seen as a counter."""

from collections import Counter

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from decode_worker.scheduler.events import FromPeer
from engine.kv.layout import KVLayout
from engine.messages import (
    BlockOffer,
    Fault,
    FirstToken,
    Handoff,
    Landed,
    Offer,
    PrefillFailed,
    Stop,
)
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams
from fakes.colocated import DECODE, PREFILL, Colocated
from telemetry.labels import HANDOFF_DROPS
from telemetry.metrics import WorkerMetrics
from tests.integration.fake_device import fake_device
from transfer.handoff.commands import ExpectedBlock, OutgoingBlock, Rows
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender
from transfer.host.loopback import FaultKind
from transfer.host.loopback import ScriptedFault as WireFault
from worker.config import PrefillConfig

H = Handoff(RequestId("r"), 1, 0, DECODE, PREFILL)
GONE = Handoff(RequestId("gone"), 1, 0, DECODE, PREFILL)
LAYOUT = KVLayout(kv_heads=2, layers=2, block_size=4, head_dim=4)


def counted(side: str, totals: Counter[str]) -> dict[str, float]:
    """What the worker's metrics say after `totals`, of one side and above zero."""
    metrics = WorkerMetrics("m", "worker-0", "any")
    metrics.handoffs_dropped(side, totals)
    return {
        sample.labels["what"]: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == "headrace_handoff_dropped_total"
        and sample.labels["side"] == side
        and sample.value
    }


def test_what_a_sender_drops() -> None:
    """Guards against a kind without a counter, and against a counter that nothing can move."""
    sender = KVSender()
    sender.open(H, reads_remotely=True)
    sender.offer(H, [OutgoingBlock(BlockId(1), 7, 0, 4, b"i" * 16)])
    sender.posted(H, 0, [5])
    sender.landed(Landed(GONE, 0))
    sender.landed(Landed(H, 9))
    sender.landed(Landed(H, 0))
    sender.landed(Landed(H, 0))
    sender.stop(Stop(GONE))
    sender.stop(Stop(H))
    sender.stop(Stop(H))
    assert counted("sender", sender.dropped) == dict.fromkeys(HANDOFF_DROPS["sender"], 1)


def test_what_a_receiver_drops() -> None:
    receiver = KVReceiver()
    expected = {i: ExpectedBlock((Rows(0, BlockId(i), 0, 4),), b"i" * 16, 4) for i in range(3)}
    receiver.expect(H, expected)
    offers = [Offer(H, seq, [BlockOffer(BlockId(seq), 1, seq, 4, 0)]) for seq in range(3)]
    receiver.offer(Offer(GONE, 0, []))
    receiver.offer(offers[0])
    receiver.offer(offers[0])
    receiver.offer(Offer(H, 1, [BlockOffer(BlockId(1), 1, 77, 4, 0)]))
    receiver.offer(offers[2])
    kinds = [kind for kind in HANDOFF_DROPS["receiver"] if kind.startswith("offer")]
    assert counted("receiver", receiver.dropped) == dict.fromkeys(kinds, 1)


def _record(name: RequestId) -> RequestRecord:
    return RequestRecord(
        request=name,
        tokens=list(range(20)),
        prompt_tokens=20,
        max_tokens=4,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )


def _first_token(handoff: Handoff) -> FirstToken:
    return FirstToken(handoff=handoff, token=9, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0)


def test_what_a_decode_worker_drops_of_its_prefill_workers_words() -> None:
    """A first token or a failure that comes late, or twice: the request goes on as if it had not been said."""
    cluster = Colocated(
        fake_device(LAYOUT, 24),
        fake_device(LAYOUT, 24),
        prefill_config=PrefillConfig(chunk_tokens=4),
        check=True,
    )
    stalls = [WireFault(FaultKind.STALL), WireFault(FaultKind.STALL)]
    cluster.hub.faults += stalls

    def say(*records: FirstToken | PrefillFailed) -> None:
        cluster._engines[1].receive([FromPeer(PREFILL, record) for record in records])

    answer = cluster.submit(_record(H.request))
    while not stalls[0].applied:
        assert cluster.turn()
    failed = PrefillFailed(H, Fault("UNAVAILABLE", "lost"))
    none = msgspec.structs.replace(_first_token(H), token=-1)
    say(_first_token(GONE), PrefillFailed(GONE, failed.fault), none, failed, failed, _first_token(H))
    assert answer.tokens == [], "a token of a failed attempt was believed"
    cluster.hub.release()
    while answer.ended is None:
        assert cluster.turn()

    again = Handoff(RequestId("again"), 1, 0, DECODE, PREFILL)
    stalls[1].applied = 0
    answer = cluster.submit(_record(again.request))
    while not (answer.tokens and stalls[1].applied):
        assert cluster.turn()
    before = list(answer.tokens)
    say(_first_token(again))
    assert answer.tokens == before
    dropped = counted("receiver", cluster.decode.prefills.handoffs.dropped)
    kinds = {kind for kind in HANDOFF_DROPS["receiver"] if not kind.startswith("offer")}
    assert dropped.keys() == kinds
    cluster.close()
