"""The chunks that two workers owe each other, and which piece of which goes next. Pure: no sockets, no device.

Chunks are numbered per direction in the order in which they are posted, which is the same at both ends. The follower
says `Ready` for each of its own; the leader picks, among the chunks that are posted at both ends, the next piece, and
both carry it out. Who does not want a chunk (any more) says `Gone`, and no more of it is launched; a piece that was
launched is carried out to its end and lands nowhere.

A chunk, at either end:

    posted --(both ends have it)--> pieces launched in order --(all ended)--> done
       |------ cancelled here, or Gone from the peer ------> over, when its last launched piece has ended
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from transfer.nccl.wire import Go, Gone, Ready, Said
from transfer.transport import Outcome, Ticket, TransferError


@dataclass(slots=True, eq=False)
class Chunk:
    """One send or receive. `busy` counts its pieces that may still touch the pool: launched, or packed ahead."""

    sends: bool
    number: int
    ticket: Ticket
    key: int
    blocks: int
    launched: int = 0
    busy: int = 0
    verdict: tuple[Outcome, str] | None = None

    def __repr__(self) -> str:
        way = "send" if self.sends else "recv"
        told = f" {self.verdict[0].value}" if self.verdict else ""
        return f"{way} {self.number}({self.launched} of {self.blocks}, busy {self.busy}{told})"

    @property
    def is_over(self) -> bool:
        return self.busy == 0 and (self.verdict is not None or self.launched == self.blocks)


@dataclass(slots=True, eq=False)
class ChunkPiece:
    """Blocks `first .. first + count - 1` of a chunk, or of one that is gone (`chunk` is None)."""

    sends: bool
    number: int
    chunk: Chunk | None
    first: int
    count: int


@dataclass(slots=True, eq=False)
class _Direction:
    """The chunks of one direction, and what the peer has said of its own."""

    posted: int = 0
    chunks: OrderedDict[int, Chunk] = field(default_factory=OrderedDict)
    peer_ready: dict[int, int] = field(default_factory=dict)
    peer_gone: set[int] = field(default_factory=set)


MOST_AHEAD = 1 << 14
"""By how many chunks of a direction the peer may be ahead: what it says of each is kept until it is posted here."""


class Pair:
    """One end. `leads`: it picks."""

    # Mutable state: the two directions, and which of them was served last.

    def __init__(self, leads: bool) -> None:
        self.leads = leads
        self._directions = {True: _Direction(), False: _Direction()}
        self._served = False

    def __repr__(self) -> str:
        return f"Pair({', '.join(map(repr, self.chunks))})"

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for direction in self._directions.values() for chunk in direction.chunks.values()]

    def post(self, sends: bool, ticket: Ticket, key: int, blocks: int) -> tuple[Chunk, list[Said]]:
        """A send or a receive of `blocks` blocks. It may be over at once, if the peer has said that it is gone."""
        direction = self._directions[sends]
        chunk = Chunk(sends, direction.posted, ticket, key, blocks)
        direction.posted += 1
        if chunk.number in direction.peer_gone:
            direction.peer_gone.remove(chunk.number)
            chunk.verdict = _verdict(sends)
            return chunk, []
        direction.chunks[chunk.number] = chunk
        return chunk, [] if self.leads else [Ready(sends, chunk.number, key)]

    def skip(self) -> list[Said]:
        """A receive that nobody wants: its number is used up, and nothing comes for it."""
        direction = self._directions[False]
        number = direction.posted
        direction.posted += 1
        direction.peer_ready.pop(number, None)
        if number in direction.peer_gone:
            direction.peer_gone.remove(number)
            return []
        return [Gone(False, number)]

    def give_up(self, chunk: Chunk) -> list[Said]:
        """Drop a chunk of this end, which is not wanted any more."""
        return [Gone(chunk.sends, chunk.number)] if self.forget(chunk) else []

    def forget(self, chunk: Chunk) -> bool:
        """Drop a chunk that has ended. False where it was dropped before."""
        direction = self._directions[chunk.sends]
        direction.peer_ready.pop(chunk.number, None)
        return direction.chunks.pop(chunk.number, None) is not None

    def heard(self, said: Ready | Gone) -> Chunk | None:
        """Returns the chunk of which the peer wants no more, if it is posted here. Raises TransferError."""
        direction = self._directions[not said.sends]
        if said.number >= direction.posted + MOST_AHEAD:
            raise TransferError(f"the peer speaks of chunk {said.number}: {direction.posted} are posted here")
        if isinstance(said, Gone):
            chunk = direction.chunks.get(said.number)
            direction.peer_ready.pop(said.number, None)
            if chunk is None:
                if said.number >= direction.posted:
                    direction.peer_gone.add(said.number)
                return None
            chunk.verdict = chunk.verdict or _verdict(chunk.sends)
            return chunk
        if not self.leads:
            raise TransferError("the leader of a pair says that it is ready")
        if said.number >= direction.posted or said.number in direction.chunks:
            direction.peer_ready[said.number] = said.key
        return None

    def next_piece(self, most: dict[bool, int], may_receive: bool) -> ChunkPiece | None:
        """Leader: what to launch now, `most[sends]` blocks at most; the directions take turns. Raises TransferError if
        the two ends mean different chunks."""
        for sends in (not self._served, self._served):
            direction = self._directions[sends]
            if not sends and not may_receive:
                continue
            for chunk in direction.chunks.values():
                if chunk.verdict is not None or chunk.launched == chunk.blocks:
                    continue
                key = direction.peer_ready.get(chunk.number)
                if key is None:
                    break
                if key != chunk.key:
                    raise TransferError("the peer's next chunk is not the one that is due")
                self._served = sends
                count = min(most[sends], chunk.blocks - chunk.launched)
                return ChunkPiece(sends, chunk.number, chunk, chunk.launched, count)
        return None

    def next_send(self, most: int) -> ChunkPiece | None:
        """Return what this end will send next, as far as it can tell; nothing is launched. A leader knows what its peer
        is ready for, a follower only what comes first."""
        direction = self._directions[True]
        for chunk in direction.chunks.values():
            if chunk.verdict is None and chunk.launched < chunk.blocks:
                if self.leads and direction.peer_ready.get(chunk.number) != chunk.key:
                    return None
                count = min(most, chunk.blocks - chunk.launched)
                return ChunkPiece(True, chunk.number, chunk, chunk.launched, count)
        return None

    def piece(self, go: Go, block_bytes: int) -> ChunkPiece:
        """Follower: what the leader has launched. Raises TransferError if it cannot be."""
        sends = not go.leader_sends
        count, rest = divmod(go.nbytes, block_bytes)
        chunk = self._directions[sends].chunks.get(go.number)
        fits = chunk is None or (go.first == chunk.launched and chunk.launched + count <= chunk.blocks)
        if rest or not count or not fits or go.number >= self._directions[sends].posted:
            raise TransferError(f"{go} does not fit {chunk}")
        return ChunkPiece(sends, go.number, chunk, go.first, count)

    @property
    def is_wanted(self) -> bool:
        """Leader: is there a chunk that both ends have posted?"""
        return any(
            number in direction.peer_ready and chunk.verdict is None and chunk.launched < chunk.blocks
            for direction in self._directions.values()
            for number, chunk in direction.chunks.items()
        )

    @property
    def is_idle(self) -> bool:
        return not self.chunks


def _verdict(sends: bool) -> tuple[Outcome, str]:
    """Return the end of a chunk that is gone at the other end: what nobody wants counts as sent, what never comes has
    failed."""
    return (Outcome.DONE, "") if sends else (Outcome.FAILED, "the sender withdrew the chunk")
