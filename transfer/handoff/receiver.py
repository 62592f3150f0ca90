"""The receiving side of handoffs (in a decode worker). The theory of operation is in `transfer.handoff.migration`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from engine.messages import BlockOffer, Handoff, Landed, Offer, Stop
from engine.types import Incarnation
from transfer.handoff.commands import (
    Arrived,
    Broken,
    CancelRecv,
    Command,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    IncomingBlock,
    PostRecv,
    PostScrap,
)
from transfer.handoff.migration import RECEIVER_TABLE, HandoffError, R
from transfer.transport import Move


@dataclass(slots=True, eq=False)
class _Receiving:
    expected: dict[int, ExpectedBlock]
    wanted: set[int]  # indices of expected blocks that are not offered yet
    state: R = R.OPEN
    seen: set[int] = field(default_factory=set)  # chunks offered
    outstanding: dict[int, list[int]] = field(default_factory=dict)  # chunk -> block indices being received
    landed: set[int] = field(default_factory=set)  # block indices


class KVReceiver:
    """The receiving side of every handoff of one decode worker. Used by its engine thread alone."""

    def __init__(self) -> None:
        self._handoffs: dict[Handoff, _Receiving] = {}
        self.dropped: Counter[str] = Counter()

    def expect(self, handoff: Handoff, blocks: Mapping[int, ExpectedBlock]) -> None:
        """Begin. `blocks` maps positions in the sequence, in blocks of the sender, to rows of target blocks, which are
        reserved until `Arrived` or `Fenced`. No row of a target may be named twice."""
        if handoff in self._handoffs:
            raise HandoffError(f"{handoff} is already expected")
        rows = sorted((r.target, r.at, r.count) for block in blocks.values() for r in block.rows)
        twice = any(before[0] == after[0] and before[1] + before[2] > after[1] for before, after in pairwise(rows))
        if twice or not blocks or not all(block.rows for block in blocks.values()):
            raise HandoffError(f"{handoff}: rows of target blocks must be distinct, and at least one")
        self._handoffs[handoff] = _Receiving(dict(blocks), set(blocks))

    def offer(self, message: Offer) -> list[Command]:
        """Blocks are ready at the peer, or on their way."""
        handoff = message.handoff
        receiving = self._handoffs.get(handoff)
        # 1. Nobody here reads for it, and the sender may not know: say so again.
        if receiving is None:
            return [*self._scrap(message, "offer: unknown handoff"), Emit(handoff.prefill, Stop(handoff))]
        # 2. The same message again: whatever bytes it announced already have their receive.
        if message.seq in receiving.seen:
            return self._drop("offer: duplicate")
        receiving.seen.add(message.seq)
        # 3. No more is wanted, but bytes may be on their way.
        if receiving.state is not R.OPEN:
            return self._scrap(message, "offer: stopped")
        # 4. Other blocks than those that are still expected, one of them twice, or none.
        indices = [block.index for block in message.blocks]
        if not indices or not all(self._takes(receiving, block) for block in message.blocks):
            commands = self._scrap(message, "offer: not what was asked for")
            why = f"chunk {message.seq} offers blocks {indices}, not what was asked for"
            return commands + self._break(handoff, receiving, why)
        # 5. What was asked for.
        receiving.outstanding[message.seq] = indices
        incoming = tuple(self._incoming(receiving, block) for block in message.blocks)
        return [PostRecv(handoff.prefill, _move(message), incoming)]

    def received(self, handoff: Handoff, seq: int, error: str) -> list[Command]:
        """The transfer thread's receive of a chunk has ended."""
        receiving = self._handoffs.get(handoff)
        if receiving is None or seq not in receiving.outstanding:
            raise HandoffError(f"{handoff} chunk {seq}: no receive is outstanding")
        indices = receiving.outstanding.pop(seq)
        if not error:
            receiving.landed.update(indices)
        if receiving.state is R.STOPPING:
            return self._fence(handoff, receiving)
        if error:
            return self._break(handoff, receiving, f"chunk {seq}: {error}")
        commands: list[Command] = [Emit(handoff.prefill, Landed(handoff, seq))]
        if receiving.state is R.OPEN and len(receiving.landed) == len(receiving.expected):
            del self._handoffs[handoff]
            commands.append(Arrived(handoff))
        return commands

    def stop(self, handoff: Handoff) -> list[Command]:
        """Want no more of it: cancelled, broken, or the sender failed. `Fenced` follows, at once or later."""
        receiving = self._handoffs.get(handoff)
        if receiving is None:
            raise HandoffError(f"{handoff} is not expected")
        if receiving.state is R.STOPPING:
            return []
        receiving.state = RECEIVER_TABLE[receiving.state, "stop"]
        cancels: list[Command] = [CancelRecv(handoff, seq) for seq in receiving.outstanding]
        return cancels + self._fence(handoff, receiving)

    def peer_lost(self, peer: Incarnation) -> list[Command]:
        """The channel to `peer` is gone: what is outstanding fails, each of its handoffs breaks."""
        commands: list[Command] = [Disconnect(peer)]
        for handoff, receiving in self._handoffs.items():
            if handoff.prefill == peer:
                commands += self._break(handoff, receiving, "the prefill worker is lost")
        return commands

    def is_expected(self, handoff: Handoff) -> bool:
        """True until `Arrived` or `Fenced`."""
        return handoff in self._handoffs

    @property
    def unfinished(self) -> list[Handoff]:
        return list(self._handoffs)

    def check(self) -> None:
        """Raise if a handoff is kept that is over, or a block is both landed and being received."""
        for handoff, receiving in self._handoffs.items():
            busy = [index for indices in receiving.outstanding.values() for index in indices]
            if len(set(busy)) != len(busy) or receiving.landed.intersection(busy):
                raise HandoffError(f"{handoff}: a block is received twice")
            if not receiving.landed.union(busy) <= receiving.expected.keys():
                raise HandoffError(f"{handoff}: a block is received that nobody expects")
            if not receiving.wanted.isdisjoint(receiving.landed.union(busy)):
                raise HandoffError(f"{handoff}: a block is wanted that is here, or on its way")
            if receiving.state is R.STOPPING and not receiving.outstanding:
                raise HandoffError(f"{handoff} is fenced but kept")

    def __repr__(self) -> str:
        parts = [
            f"{name.request}/{name.placement}.{name.attempt}:{receiving.state.value}"
            f"(landed {len(receiving.landed)} of {len(receiving.expected)} blocks,"
            f" receiving {sorted(receiving.outstanding)})"
            for name, receiving in self._handoffs.items()
        ]
        return f"KVReceiver({', '.join(parts)})"

    @staticmethod
    def _takes(receiving: _Receiving, block: BlockOffer) -> bool:
        """Want a block no more that is wanted as it is offered; False where it is not."""
        if block.index not in receiving.wanted or receiving.expected[block.index].tokens != block.tokens:
            return False
        receiving.wanted.remove(block.index)
        return True

    @staticmethod
    def _incoming(receiving: _Receiving, block: BlockOffer) -> IncomingBlock:
        expected = receiving.expected[block.index]
        known = expected.rows, block.generation, expected.tokens, expected.identity, block.digest
        return IncomingBlock(*known, tuple(block.more)) if block.more else IncomingBlock(*known)

    def _break(self, handoff: Handoff, receiving: _Receiving, why: str) -> list[Command]:
        if receiving.state is not R.OPEN:
            return []
        receiving.state = RECEIVER_TABLE[receiving.state, "break"]
        return [Broken(handoff, why)]

    def _fence(self, handoff: Handoff, receiving: _Receiving) -> list[Command]:
        if receiving.outstanding:
            return []
        del self._handoffs[handoff]
        return [Emit(handoff.prefill, Stop(handoff)), Fenced(handoff, tuple(sorted(receiving.landed)))]

    def _scrap(self, message: Offer, why: str) -> list[Command]:
        self.dropped[why] += 1
        return [PostScrap(message.handoff.prefill, _move(message))]

    def _drop(self, why: str) -> list[Command]:
        self.dropped[why] += 1
        return []


def _move(message: Offer) -> Move:
    remote = tuple((block.source, block.generation) for block in message.blocks)
    return Move(message.handoff, message.seq, remote=remote)
