"""Both ends of a pair, with every message late, in any interleaving: all chunks end, both mean the same ones."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.nccl.pair import MOST_AHEAD, Chunk, ChunkPiece, Pair
from transfer.nccl.wire import Go, Gone, Ready, Said
from transfer.transport import Outcome, Ticket, TransferError

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["post", "post", "skip", "cancel", "deliver", "deliver", "launch", "end"]),
        st.booleans(),
        st.integers(0, 5),
    ),
    max_size=80,
)


class Side:
    def __init__(self, leads: bool) -> None:
        self.pair = Pair(leads)
        self.inbox: deque[Said] = deque()
        self.chunks: list[Chunk] = []
        self.launched: deque[tuple[bool, int, int, int, Chunk | None]] = deque()
        self.moved: list[tuple[bool, int, int, int]] = []


class World:
    """Messages go one way in order; what was launched ends in order, at each side when it likes."""

    def __init__(self) -> None:
        self.sides = {True: Side(True), False: Side(False)}
        self.posted = {True: 0, False: 0}  # by: does the leader send?
        self.owed: dict[bool, deque[tuple[int, int]]] = {True: deque(), False: deque()}

    def say(self, to_leader: bool, said: list[Said]) -> None:
        self.sides[to_leader].inbox += said

    def post(self, leader_sends: bool, blocks: int, wanted: bool) -> None:
        """Both ends post, the receiver later (`receive`)."""
        number = self.posted[leader_sends]
        self.posted[leader_sends] += 1
        self._post(leader_sends, True, number, blocks)
        self.owed[leader_sends].append((number, blocks if wanted else 0))

    def receive(self, leader_sends: bool) -> None:
        if self.owed[leader_sends]:
            number, blocks = self.owed[leader_sends].popleft()
            if blocks:
                self._post(not leader_sends, False, number, blocks)
            else:
                self.say(leader_sends, self.sides[not leader_sends].pair.skip())

    def _post(self, leads: bool, sends: bool, number: int, blocks: int) -> None:
        side = self.sides[leads]
        key = 1000 * (leads == sends) + number
        chunk, said = side.pair.post(sends, Ticket(len(side.chunks)), key, blocks)
        side.chunks.append(chunk)
        self.say(not leads, said)

    def cancel(self, leads: bool, at: int) -> None:
        side = self.sides[leads]
        open_ = [chunk for chunk in side.chunks if chunk in side.pair.chunks]
        if open_:
            chunk = open_[at % len(open_)]
            chunk.verdict = (Outcome.CANCELLED, "")
            self.say(not leads, side.pair.give_up(chunk))

    def deliver(self, leads: bool) -> None:
        side = self.sides[leads]
        if not side.inbox:
            return
        match side.inbox.popleft():
            case Go() as go:
                self._launch(side, side.pair.piece(go, 1))
            case Ready() | Gone() as said:
                chunk = side.pair.heard(said)
                if chunk is not None and chunk.is_over:
                    side.pair.forget(chunk)

    def launch(self) -> None:
        leader = self.sides[True]
        piece = leader.pair.next_piece({True: 2, False: 3}, True)
        if piece is not None:
            self._launch(leader, piece)
            self.say(False, [Go(1, piece.sends, piece.number, piece.first, piece.count)])

    def _launch(self, side: Side, piece: ChunkPiece) -> None:
        if piece.chunk is not None:
            assert piece.chunk.verdict is None, "a chunk that is gone is launched"
            piece.chunk.launched += piece.count
            piece.chunk.busy += 1
        leader_sends = piece.sends == side.pair.leads
        entry = (leader_sends, piece.number, piece.first, piece.count)
        side.moved.append(entry)
        side.launched.append((*entry, piece.chunk))

    def end(self, leads: bool) -> None:
        side = self.sides[leads]
        if side.launched:
            chunk = side.launched.popleft()[4]
            if chunk is not None:
                chunk.busy -= 1
                if chunk.is_over:
                    side.pair.forget(chunk)

    def settle(self) -> None:
        for _ in range(400):
            for leads in (True, False):
                self.receive(leads)
                self.deliver(leads)
                self.end(leads)
            self.launch()


@settings(max_examples=300)
@given(STEPS)
def test_both_ends_carry_out_the_same(steps: list[tuple[str, bool, int]]) -> None:
    """Guards against an operation that one end launches alone, which would wait in a kernel for ever, and against
    chunks that never end."""
    world = World()
    for act, side, at in steps:
        match act:
            case "post":
                world.post(side, at + 1, True) if at else world.receive(side)
            case "skip":
                world.post(side, at + 1, False)
            case "cancel":
                world.cancel(side, at)
            case "deliver":
                world.deliver(side)
            case "launch":
                world.launch()
            case "end":
                world.end(side)
    world.settle()
    leader, follower = world.sides[True], world.sides[False]
    assert leader.moved == follower.moved
    for side in (leader, follower):
        assert not side.inbox and not side.launched
        assert all(chunk.is_over for chunk in side.chunks), side.pair
        assert side.pair.is_idle


@pytest.mark.parametrize("said", [lambda number: Gone(True, number), lambda number: Ready(True, number, 7)])
def test_a_peer_is_ahead_by_so_much_at_most(said: Callable[[int], Gone | Ready]) -> None:
    """Guards the memory of an end whose peer speaks of chunks that nobody will post."""
    pair = Pair(leads=True)
    pair.heard(said(MOST_AHEAD - 1))
    with pytest.raises(TransferError, match="0 are posted here"):
        pair.heard(said(MOST_AHEAD))
    pair.post(False, Ticket(1), 7, 1)
    pair.heard(said(MOST_AHEAD))
