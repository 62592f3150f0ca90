"""A decode scheduler alone with memory that is really written and read: blocks hold what was computed into them, and
the next token depends on all of it. Random requests, samples and searches are preempted, cancelled, refused and forked,
while handoffs land, fail and lose their peer. With tiers in tests/integration/test_swap_fake.py, with other workers,
lost routers and leaving in tests/sim."""

import random
from collections.abc import Sequence

import pytest

from decode_worker.scheduler.events import Command, ConnectPeer, FromPeer, PeerDown, PeerUp, Tell
from engine.beam import BeamSearch
from engine.messages import (
    Accepted,
    BlockOffer,
    Cancel,
    Ended,
    Fault,
    FirstToken,
    Handoff,
    NeedPrefill,
    Offer,
    PrefillFailed,
    RequestStats,
    StartPrefill,
    Stop,
    Tokens,
    UsePrefill,
)
from engine.step import Candidates, Drawn, StepPlan
from engine.types import BeamParams, BlockId, FinishReason, Incarnation, RequestId, RequestRecord
from tests.decode_worker.scheduler.bench import HERE, POOL, Fetching, P
from transfer.handoff.commands import CancelRecv, Disconnect, Emit, PostRecv, Received

SIZE, THEIRS = 4, 3
"""Tokens in a block of the decode worker, and of the prefill worker."""


def content(namespace: bytes, tokens: Sequence[int]) -> int:
    """Return what the row of the last of `tokens` holds: it depends on every token before."""
    value = len(namespace)
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (1 << 61)
    return value


def drawn(row: int, record: RequestRecord, position: int) -> int:
    """Return the token that follows the row `row`, as the `position`-th output token."""
    return (row * 31 + record.seed * 7919 + record.sample_index * 104_729 + position * 131) % 997


def candidates(row: int, wanted: int) -> Candidates:
    return tuple(((row * 17 + 59 * rank) % 997, -0.1 * rank - (row >> 7) % 13 / 10) for rank in range(wanted))


class Machine(Fetching):
    """A worker, its memory, a router that never forgets, and a prefill worker that may do anything."""

    def __init__(self, seed: int, blocks: int, **config: object) -> None:
        self.random = random.Random(seed)
        self.memory: dict[BlockId, list[int | None]] = {}
        self.fetches: dict[Handoff, StartPrefill] = {}
        self.unoffered: dict[Handoff, list[int]] = {}
        self.unnamed: set[Handoff] = set()
        self.receives: dict[tuple[Handoff, int], PostRecv] = {}
        self.cancelled: set[tuple[Handoff, int]] = set()
        self.peer = P
        self.attached = True
        self.records: dict[str, RequestRecord] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Ended] = {}
        super().__init__(blocks, **config)
        self.tell(PeerUp(P, POOL, "shm", THEIRS))

    # the worker's memory

    def step(self) -> StepPlan | None:
        self.now += 1.0
        self._do(self.scheduler.tick(self.now))
        plan, commands = self.scheduler.plan(self.now)
        self._do(commands)
        self._wipe()
        if plan is not None:
            for source, target in plan.copies:
                self.memory[target] = list(self.memory[source])
            results = [self._compute(plan, at) for at in range(len(plan.rows))]
            drawn = [result for result in results if result is not None]
            self._do(self.scheduler.complete(plan, drawn, self.now))
        self.scheduler.check()
        return plan

    def _wipe(self) -> None:
        """Blocks that were handed out hold nothing yet."""
        for block in self.scheduler.kv.take_handed_out():
            self.memory[block] = [None] * SIZE

    def _compute(self, plan: StepPlan, at: int) -> Drawn | None:
        row = plan.rows[at]
        namespace, tokens = row.record.namespace, row.tokens
        for index in range(row.end):
            here = self.memory[row.blocks[index // SIZE]]
            if index >= row.start:
                here[index % SIZE] = content(namespace, tokens[: index + 1])
            assert here[index % SIZE] == content(namespace, tokens[: index + 1]), f"{row.request}, row {index}"
        last = self.memory[row.blocks[(row.end - 1) // SIZE]][(row.end - 1) % SIZE]
        assert last is not None and row.draw == (row.end == len(tokens))
        if not row.draw:
            return None
        if row.candidates:
            return candidates(last, row.candidates)
        return drawn(last, row.record, len(tokens) - row.record.prompt_tokens)

    # what the worker says

    def _do(self, commands: list[Command]) -> None:
        self._wipe()
        for command in commands:
            match command:
                case Tell(_, Tokens(request, _, index, ids)):
                    output = self.outputs.setdefault(request, [])
                    assert index == len(output), "a token is told twice, or left out"
                    output += ids
                case Tell(_, Ended() as ended):
                    assert ended.request not in self.ends
                    self.ends[ended.request] = ended
                case Tell(_, NeedPrefill(request, placement, _)):
                    prefill = self.random.choice([POOL, POOL, None])
                    self.router(UsePrefill(request, placement, prefill))
                case Tell(_, record):
                    self.told.append(record)
                case ConnectPeer() if not self.attached and self.random.random() < 0.5:
                    self.tell(PeerDown(POOL, None, "gone"))
                case ConnectPeer():
                    self._attach()
                case Emit(_, StartPrefill(handoff) as message):
                    first = message.have_tokens // THEIRS
                    self.fetches[handoff] = message
                    self.unoffered[handoff] = list(range(first, -(-len(message.record.tokens) // THEIRS)))
                    self.unnamed.add(handoff)
                case Emit(_, Stop(handoff)):
                    assert not any(name == handoff for name, _ in self.receives), "stopped while it is written to"
                    if self.random.random() < 0.7:  # else the word is on its way, and more is said meanwhile
                        self._forget(handoff)
                case PostRecv(_, move, _):
                    self.receives[move.handoff, move.seq] = command
                case CancelRecv(handoff, seq):
                    self.cancelled.add((handoff, seq))
                case Disconnect():
                    self.cancelled.update(self.receives)

    def _attach(self) -> None:
        self.attached = True
        self.peer = Incarnation(self.peer + 1)
        self.tell(PeerUp(self.peer, POOL, "shm", THEIRS))

    def _forget(self, handoff: Handoff) -> None:
        self.unoffered.pop(handoff, None)
        self.unnamed.discard(handoff)

    # what may happen

    def offer(self) -> None:
        handoff = self.random.choice(list(self.unoffered))
        wanted, tokens = self.unoffered[handoff], len(self.fetches[handoff].record.tokens)
        taken = [wanted.pop(0) for _ in range(self.random.randint(1, len(wanted)))]
        if not wanted:
            del self.unoffered[handoff]
        blocks = [BlockOffer(BlockId(at), 1, at, min(THEIRS, tokens - THEIRS * at), 0) for at in taken]
        self.tell(FromPeer(self.peer, Offer(handoff, taken[0], blocks)))

    def land(self) -> None:
        handoff, seq = self.random.choice(list(self.receives))
        receive = self.receives[handoff, seq]
        record, message = self.fetches[handoff].record, f"{handoff}"
        fails = (handoff, seq) in self.cancelled or self.random.random() < 0.1
        for at, block in enumerate(receive.blocks if not fails else receive.blocks[:1]):
            for rows in block.rows:
                for row in range(rows.count):
                    # The sender names its blocks by their place in the sequence.
                    index = receive.move.remote[at][0] * THEIRS + rows.first + row
                    value = content(record.namespace, record.tokens[: index + 1])
                    assert self.memory[rows.target][rows.at + row] in (None, value), message
                    self.memory[rows.target][rows.at + row] = value
        del self.receives[handoff, seq]
        self.tell(Received(handoff, seq, "its bytes are others" if fails else "", 0.1, 1))

    def name(self) -> None:
        handoff = self.random.choice(sorted(self.unnamed, key=str))
        self.unnamed.discard(handoff)
        record = self.fetches[handoff].record
        position = len(record.tokens) - record.prompt_tokens
        token = drawn(content(record.namespace, record.tokens), record, position)
        said = FirstToken(handoff=handoff, token=token, chunks=1, queue_s=0.0, run_s=0.0, cached_tokens=0)
        self.tell(FromPeer(self.peer, said))

    def fail(self) -> None:
        handoff = self.random.choice(sorted(self.unnamed, key=str))
        self._forget(handoff)
        self.tell(FromPeer(self.peer, PrefillFailed(handoff, Fault("UNAVAILABLE", "no room"))))

    def lose(self) -> None:
        """The prefill worker's process ends."""
        self.attached = False
        self.unoffered.clear()
        self.unnamed.clear()
        self.tell(PeerDown(POOL, self.peer, "gone"))

    def ask(self) -> None:
        name, live = f"r{len(self.records)}", list(self.scheduler._requests.values())
        other = self.random.choice(live) if live and self.random.random() < 0.6 else None
        if other is not None and self.random.random() < 0.8:
            tokens, namespace = other.record.tokens[: other.record.prompt_tokens], other.record.namespace
        else:
            tokens = [self.random.randrange(4)] * 5 + list(range(self.random.choice([1, 3, 8])))
            namespace = self.random.choice([b"", b"x"])
        beams = BeamParams(width=self.random.choice([2, 3]), answers=2) if self.random.random() < 0.1 else None
        more: dict[str, object] = {
            "group": f"g{tokens}" if self.random.random() < 0.5 and beams is None else "",
            "priority": self.random.choice([0, 0, 1]),
            "namespace": namespace,
            "max_tokens": self.random.choice([1, 4, 15]) if beams is None else 5,
            "beams": beams,
            "sample_index": self.random.randrange(3),
        }
        prefill = self.random.choice([HERE, POOL, POOL])
        before = len(self.told)
        if self.place(name, tokens, prefill, fork_of=other and other.record.request, **more):
            accepted = next(r for r in self.told[before:] if isinstance(r, Accepted))
            assert accepted.cached_tokens < len(tokens)
            self.records[name] = self.scheduler._requests[RequestId(name)].record

    def cancel(self) -> None:
        name = self.random.choice(list(self.scheduler._requests))
        self.router(Cancel(name, 1, FinishReason.CANCELLED))

    def anything(self) -> None:
        """Let one thing happen that can."""
        can = [(self.step, 6), (self.ask, 4)]
        if self.unoffered:
            can.append((self.offer, 4))
        if self.receives:
            can.append((self.land, 5))
        if self.unnamed:
            can += [(self.name, 3), (self.fail, 0.3)]
        if self.attached:
            can.append((self.lose, 0.2))
        if self.scheduler._requests:
            can.append((self.cancel, 0.3))
        actions = [action for action, _ in can]
        self.random.choices(actions, [weight for _, weight in can])[0]()

    def drain(self) -> None:
        """Let everything that is under way end well."""
        for _ in range(2_000):
            if self.scheduler.is_idle and not self.receives:
                return
            for waiting, act in ((self.unoffered, self.offer), (self.receives, self.land), (self.unnamed, self.name)):
                if waiting:
                    act()
            self.step()
        raise AssertionError(f"it never ends: {self.scheduler!r}")


def expected(record: RequestRecord) -> list[int]:
    """Return the output of a request, computed by itself."""
    tokens = list(record.tokens[: record.prompt_tokens])
    while len(tokens) < record.prompt_tokens + record.max_tokens:
        row = content(record.namespace, tokens)
        tokens.append(drawn(row, record, len(tokens) - record.prompt_tokens))
    return tokens[record.prompt_tokens :]


def answers(record: RequestRecord) -> list[list[int]]:
    assert record.beams is not None
    search = BeamSearch(record.beams, record.max_tokens, frozenset())
    while not search.is_over:
        rows = [content(record.namespace, [*record.tokens, *one.ids]) for one in search.live]
        search.advance([candidates(row, search.candidates) for row in rows])
    return [beam.ids for beam in search.answers[: record.beams.answers]]


@pytest.mark.parametrize("seed", range(8))
def test_every_token_follows_from_what_is_in_the_blocks(seed: int) -> None:
    """Guards tokens, and who owns which block: a row that was never computed, is another request's, or was overwritten
    gives another token; a block that is let go too early, or never, is missed at the end."""
    few = seed % 2 == 0
    machine = Machine(
        seed,
        18 if few else 48,
        preemption="off" if seed % 4 == 3 else "recompute",
        growth_tokens=2 if few else 8,
        max_batch=4,
        max_handoffs=3,
        local_chunk_tokens=3 if seed % 3 else 16,
    )
    for _ in range(250):
        machine.anything()
    machine.drain()
    scheduler = machine.scheduler
    assert len(machine.records) > 5 and machine.ends.keys() >= machine.records.keys()
    for name, record in machine.records.items():
        ended = machine.ends[name]
        if ended.reason is FinishReason.CANCELLED:
            whole = expected(record)
            told = machine.outputs.get(name, [])
            assert record.beams is not None or told == whole[: len(told)]
        elif record.beams is not None:
            assert [beam.ids for beam in ended.beams] == answers(record), name
        else:
            assert machine.outputs[name] == expected(record), name
            assert isinstance(ended.stats, RequestStats) and ended.stats.output_tokens == record.max_tokens
    counts = machine.pool
    assert counts.keys() <= {"free", "cached"}, f"somebody still holds blocks: {counts}"
    assert scheduler.kv.available == scheduler.kv.pool.total, "somebody is still promised room"
    assert not scheduler.slots[1] and not scheduler.batch.shortage
