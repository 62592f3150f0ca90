"""KVSender and KVReceiver against each other, over a wire that reorders, repeats and loses messages.

The model keeps what the pure sides cannot see: which copies really run, and which blocks their owners hold. It fails if
a target block is freed while a copy into it runs, if a source block is unpinned while it can be read, or if something
is left when everything has come to rest.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.messages import Handoff, Landed, Offer, Stop
from engine.types import BlockId, Incarnation, RequestId
from transfer.commands import (
    Arrived,
    Broken,
    CancelRecv,
    Command,
    Disconnect,
    Emit,
    ExpectedBlock,
    Fenced,
    OutgoingBlock,
    PostRecv,
    PostScrap,
    PostSend,
    Settled,
)
from transfer.receiver import KVReceiver
from transfer.sender import KVSender

PREFILL, DECODE = Incarnation(1), Incarnation(2)
BLOCKS = 3
STEPS = 30
PICKS = st.integers(0, 7)


class HandoffMachine(RuleBasedStateMachine):
    @initialize(reads_remotely=st.booleans(), calm_steps=st.integers(0, STEPS))
    def begin(self, reads_remotely: bool, calm_steps: int) -> None:
        self.calm_steps = calm_steps  # nobody is lost or dies before
        self.steps = 0
        self.happened: set[str] = set()
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
                    self.broken.discard(handoff)
                case Broken(handoff=handoff):
                    if handoff in self.reserved and self.receiver.is_expected(handoff):
                        self.broken.add(handoff)
                case Disconnect() | PostScrap():
                    pass
                case _:
                    raise AssertionError(command)

    # ---- what the schedulers do

    @precondition(lambda self: self.decode_alive and len(self.offered) < 4)
    @rule()
    def start(self) -> None:
        handoff = Handoff(RequestId(f"r{len(self.offered)}"), 1, 1, DECODE, PREFILL)
        self.receiver.expect(
            handoff, {i: ExpectedBlock(BlockId(i), b"i" * 16, 4) for i in range(BLOCKS)}
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

    @rule(pick=PICKS, give_up=st.sampled_from([False, False, True]))
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

    @precondition(lambda self: self.decode_alive and self.receiver.unfinished)
    @rule(pick=PICKS)
    def stop(self, pick: int) -> None:
        ready = self.receiver.unfinished
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

    @rule(pick=PICKS, sending=st.booleans())
    def transfer_fails(self, pick: int, sending: bool) -> None:
        (self.send_goes_on if sending else self.copy_ends)(pick, "failed")

    @rule(moves=st.lists(st.tuples(st.integers(0, 3), PICKS), min_size=1, max_size=10))
    def flow(self, moves: list[tuple[int, int]]) -> None:
        """Several things that go well, in some order."""
        acts = (self.offer, self.send_goes_on, self.deliver_any, self.copy_ends)
        for act, pick in moves:
            acts[act](pick)

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

    @precondition(lambda self: self.said)
    @rule(pick=PICKS)
    def repeat_any(self, pick: int) -> None:
        """Any message that was ever said comes again."""
        self.deliver(self.said[pick % len(self.said)])

    @precondition(lambda self: self.wire)
    @rule(pick=PICKS)
    def lose_any(self, pick: int) -> None:
        self.wire.pop(pick % len(self.wire))

    def may_break(self, what: str) -> bool:
        return self.steps > self.calm_steps and what not in self.happened

    @precondition(lambda self: self.may_break("sender loses channel"))
    @rule()
    def sender_loses_channel(self) -> None:
        self.happened.add("sender loses channel")
        self.carry_out(self.sender.peer_lost(DECODE))

    @precondition(lambda self: self.decode_alive and self.may_break("receiver loses channel"))
    @rule()
    def receiver_loses_channel(self) -> None:
        self.happened.add("receiver loses channel")
        self.carry_out(self.receiver.peer_lost(PREFILL))

    @precondition(lambda self: self.may_break("decode dies"))
    @rule()
    def decode_dies(self) -> None:
        self.happened.add("decode dies")
        self.decode_alive = False
        self.copies.clear()
        self.carry_out(self.sender.peer_dead(DECODE))

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "sender"):
            self.steps += 1
            self.sender.check()
            self.receiver.check()

    def teardown(self) -> None:
        """Everything comes to rest: copies end, what is broken is stopped, the peer dies at last."""
        if not hasattr(self, "sender"):
            return
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


HandoffMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestHandoffs = HandoffMachine.TestCase
