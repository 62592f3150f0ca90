"""KVSender and KVReceiver against each other, over a wire that reorders, repeats and loses messages.

The model keeps what the pure sides cannot see: which copies really run, and which blocks their owners hold. It fails if
a target block is freed while a copy into it runs, if a source block is unpinned while it can be read, or if something
is left when everything has come to rest. Message by message: test_migration.py, test_sender.py and test_receiver.py;
with schedulers and every fault: tests/sim.
"""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Handoff, Landed, Offer, Stop
from engine.types import BlockId, Incarnation, RequestId
from transfer.handoff.commands import (
    Arrived,
    Broken,
    CancelRecv,
    CancelSend,
    Command,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    OutgoingBlock,
    PostRecv,
    PostScrap,
    PostSend,
    Rows,
    Settled,
)
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender

PREFILL, DECODE = Incarnation(1), Incarnation(2)
BLOCKS = 3


class World:
    def __init__(self, reads_remotely: bool) -> None:
        self.reads_remotely = reads_remotely
        self.sender, self.receiver = KVSender(), KVReceiver()
        self.wire: list[Offer | Landed | Stop] = []
        self.said: list[Offer | Landed | Stop] = []
        self.sends: dict[tuple[Handoff, int], bool] = {}  # -> posted
        self.copies: set[tuple[Handoff, int]] = set()
        self.cancelled: set[tuple[Handoff, int]] = set()
        self.offered: dict[Handoff, int] = {}
        self.closed: set[Handoff] = set()
        self.broken: set[Handoff] = set()
        self.pinned: set[Handoff] = set()
        self.reserved: set[Handoff] = set()
        self.decode_alive = True

    # ---- what the shells do with commands

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case PostSend(move=move):
                    self.sends[move.handoff, move.seq] = False
                case PostRecv(move=move):
                    key = (move.handoff, move.seq)
                    assert key not in self.copies, "one chunk is copied twice"
                    assert move.handoff in self.reserved, "a copy into blocks that were freed"
                    if self.reads_remotely:
                        assert move.handoff in self.pinned, "a read of blocks that were unpinned"
                    self.copies.add(key)
                case CancelRecv(handoff=handoff, seq=seq):
                    self.cancelled.add((handoff, seq))
                case Emit(record=record):
                    self.wire.append(record)
                    self.said.append(record)
                case Settled(handoff=handoff):
                    assert not any(key[0] == handoff for key in self.sends), "own send runs"
                    if self.reads_remotely:
                        assert not any(key[0] == handoff for key in self.copies), "still read"
                    self.pinned.remove(handoff)
                case Arrived(handoff=handoff) | Fenced(handoff=handoff):
                    assert not any(key[0] == handoff for key in self.copies), "a copy still runs"
                    self.reserved.remove(handoff)
                case Broken(handoff=handoff):
                    self.broken.add(handoff)
                case Disconnect() | PostScrap() | CancelSend():
                    pass
                case _:
                    raise AssertionError(command)

    # ---- what the schedulers do

    def start(self) -> None:
        if not self.decode_alive or len(self.offered) == 6:
            return
        handoff = Handoff(RequestId(f"r{len(self.offered)}"), 1, 1, DECODE, PREFILL)
        self.receiver.expect(
            handoff,
            {i: ExpectedBlock((Rows(0, BlockId(i), 0, 4),), b"i" * 16, 4) for i in range(BLOCKS)},
        )
        self.reserved.add(handoff)
        self.sender.open(handoff, self.reads_remotely)
        self.pinned.add(handoff)
        self.offered[handoff] = 0

    def offer(self, pick: int) -> None:
        ready = [h for h, n in self.offered.items() if n < BLOCKS and self.sender.is_open(h)]
        if ready:
            handoff = ready[pick % len(ready)]
            index = self.offered[handoff]
            self.offered[handoff] += 1
            block = OutgoingBlock(BlockId(index), 0, index, 4, b"i" * 16)
            self.carry_out(self.sender.offer(handoff, [block]))

    def close(self, pick: int, give_up: bool) -> None:
        """All is offered, or the prefill worker gives up."""
        ready = [
            h
            for h in self.sender.unsettled
            if h not in self.closed and (give_up or self.offered[h] == BLOCKS)
        ]
        if ready:
            handoff = ready[pick % len(ready)]
            self.closed.add(handoff)
            self.carry_out(self.sender.close(handoff))

    def stop(self, pick: int) -> None:
        ready = self.receiver.unfinished if self.decode_alive else []
        if not ready:
            return
        self.carry_out(self.receiver.stop(ready[pick % len(ready)]))

    # ---- what the transfer threads do

    def send_goes_on(self, pick: int, error: str = "") -> None:
        if self.sends:
            key = sorted(self.sends)[pick % len(self.sends)]
            if not self.sends[key] and not error:
                self.sends[key] = True
                self.carry_out(self.sender.posted(*key, [0]))
            else:
                del self.sends[key]
                self.carry_out(self.sender.sent(*key, error))

    def copy_ends(self, pick: int, error: str = "") -> None:
        if self.copies:
            key = sorted(self.copies)[pick % len(self.copies)]
            self.copies.remove(key)
            if key in self.cancelled and pick % 2:
                error = "cancelled"
            self.carry_out(self.receiver.received(*key, error))

    def transfer_fails(self, pick: int, sending: bool) -> None:
        (self.send_goes_on if sending else self.copy_ends)(pick, "failed")

    # ---- what the wire does

    def deliver(self, message: Offer | Landed | Stop) -> None:
        match message:
            case Offer():
                if self.decode_alive:
                    self.carry_out(self.receiver.offer(message))
            case Landed():
                self.carry_out(self.sender.landed(message))
            case Stop():
                self.carry_out(self.sender.stop(message))

    def deliver_any(self, pick: int) -> None:
        if self.wire:
            self.deliver(self.wire.pop(pick % len(self.wire)))

    def repeat_any(self, pick: int) -> None:
        """Any message that was ever said comes again."""
        if self.said:
            self.deliver(self.said[pick % len(self.said)])

    def lose_any(self, pick: int) -> None:
        if self.wire:
            self.wire.pop(pick % len(self.wire))

    def sender_loses_channel(self) -> None:
        self.carry_out(self.sender.peer_lost(DECODE))

    def receiver_loses_channel(self) -> None:
        if self.decode_alive:
            self.carry_out(self.receiver.peer_lost(PREFILL))

    def decode_dies(self) -> None:
        self.decode_alive = False
        self.copies.clear()
        self.carry_out(self.sender.peer_dead(DECODE))

    def check(self) -> None:
        self.sender.check()
        self.receiver.check()

    def come_to_rest(self) -> None:
        """Everything comes to rest: copies end, what is broken is stopped, the peer dies at last."""
        if self.decode_alive:
            for handoff in self.receiver.unfinished:
                self.carry_out(self.receiver.stop(handoff))
            for key in sorted(self.copies):
                self.copies.remove(key)
                self.carry_out(self.receiver.received(*key, "cancelled"))
            assert not self.reserved and not self.receiver.unfinished, "target blocks leak"
        self.carry_out(self.sender.peer_lost(DECODE))
        for key in sorted(self.sends):
            del self.sends[key]
            self.carry_out(self.sender.sent(*key, "disconnected"))
        if not self.reads_remotely:
            assert not self.pinned, "quarantined although nobody else reads"
        self.decode_alive = False
        self.carry_out(self.sender.peer_dead(DECODE))
        assert not self.pinned and not self.sender.unsettled, "source blocks leak"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    reads_remotely=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    chaos=st.sampled_from([0, 1, 4]),
)
def test_handoffs_in_any_order(reads_remotely: bool, seed: int, chaos: int) -> None:
    """Guards the two promises of `transfer.handoff.migration`: no early unpin, no early free, and nothing left.

    The walk is drawn from the seed by weights, since hypothesis's own choice of rules hardly gets a handoff under way.
    """
    rng = random.Random(seed)
    world = World(reads_remotely)
    weighted: list[tuple[Callable[[], None], int]] = [
        (world.start, 8),
        (lambda: world.offer(rng.randrange(64)), 24),
        (lambda: world.send_goes_on(rng.randrange(64)), 40),
        (lambda: world.deliver_any(rng.randrange(64)), 40),
        (lambda: world.copy_ends(rng.randrange(64)), 20),
        (lambda: world.close(rng.randrange(64), give_up=rng.random() < 0.2), 10),
        (lambda: world.stop(rng.randrange(64)), 3),
        (lambda: world.repeat_any(rng.randrange(64)), 12),
        (lambda: world.transfer_fails(rng.randrange(64), rng.random() < 0.5), chaos),
        (lambda: world.lose_any(rng.randrange(64)), chaos),
        (world.sender_loses_channel, chaos),
        (world.receiver_loses_channel, chaos),
        (world.decode_dies, chaos // 2),
    ]
    acts = [act for act, _ in weighted]
    weights = [weight for _, weight in weighted]
    for act in rng.choices(acts, weights, k=160):
        act()
        world.check()
    assert chaos or not world.broken, "order and repetition alone broke a handoff"
    world.come_to_rest()
