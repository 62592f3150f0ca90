"""The records of a handoff of small blocks, as its tests need them."""

from engine.messages import BlockOffer, Handoff, Offer
from engine.types import BlockId, Incarnation, RequestId
from transfer.handoff.commands import ExpectedBlock, OutgoingBlock, Rows
from transfer.handoff.sender import KVSender

PREFILL = Incarnation(1)
DECODE = Incarnation(2)
H = Handoff(RequestId("r"), 1, 1, DECODE, PREFILL)
OTHER = Handoff(RequestId("other"), 1, 1, DECODE, PREFILL)


def block(index: int) -> OutgoingBlock:
    return OutgoingBlock(BlockId(100 + index), 7, index, 4, bytes([index]) * 16)


def expected(*indices: int) -> dict[int, ExpectedBlock]:
    return {
        i: ExpectedBlock((Rows(0, BlockId(200 + i), 0, 4),), bytes([i]) * 16, 4) for i in indices
    }


def offer(seq: int, *indices: int, tokens: int = 4) -> Offer:
    blocks = [BlockOffer(BlockId(100 + i), 7, i, tokens, 1000 + i) for i in indices]
    return Offer(H, seq, blocks)


def sender_with(*seqs: int, reads_remotely: bool = True, sent: bool = True) -> KVSender:
    sender = KVSender()
    sender.open(H, reads_remotely)
    for seq in seqs:
        sender.offer(H, [block(seq)])
        sender.posted(H, seq, [1000 + seq])
        if sent:
            sender.sent(H, seq, "")
    return sender
