"""The movers of a worker's ranks, driven from rank 0: stands where a `transfer.mover.Mover` does.

    rank 0                                                        rank r (transfer.ranks.follower)
      any thread       submit -> group -> own mover
                                       `- a queue per rank
      thread "tells-r"                      `- its socket ----->    thread "moves"    commands
      transfer thread  its own mover's events -> group              thread "transfer" its mover
      thread "moves-r" what rank r says -> group  <--- events ---

A worker of one rank whose peers have one has no such detour: its mover is given what the worker says, and tells it what
becomes of that. Else the group is asked under a lock, and what it tells is queued under the same, so every rank hears
its commands in the order in which the worker gave them. Nobody sends under the lock: whoever gives a command waits for
no rank, and what a rank says is heard also while it, or another, takes no commands. One that takes none for as long as
its socket may wait ends the worker.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from engine.kv.layout import KVLayout
from engine.messages import Endpoint, RankEndpoint
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.digest import Tally
from transfer.handoff.commands import MoverCommand, MoverDied, MoverEvent
from transfer.liveness import Watchdog
from transfer.mover import Mover
from transfer.ranks.group import MoverGroup, Told, ToRank, part_of
from transfer.ranks.links import (
    Alive,
    DescribedTo,
    DescribeTo,
    FromMover,
    MoveLink,
    MoverOpened,
    OpenMover,
    QueuedLink,
    Reported,
)
from transfer.transport import KVMemory, TransferError, Transport

MOST_RANKS = 8
"""The most ranks that a peer may have, where it is not known how many."""
NCCL = "nccl"


class RankMovers:
    """`heads`: those of each rank's pool, this one's, rank 0's, first. `links`: a socket to each other rank. Raises
    TransferError for a rank that cannot open its transports. Owner: as a mover's.

    Mutable state, under a lock: the group's, what each rank has reported last, and how much it has said. Besides:
    whether it is stopping, the number of the last question that a rank was asked, by the one thread that describes, and
    what the watchdogs have seen, by the one that checks."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        memory: KVMemory,
        layout: KVLayout,
        on_event: Callable[[MoverEvent], None],
        heads: Sequence[range],
        links: Mapping[int, MoveLink[FromMover]],
    ) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._group = MoverGroup(heads)
        self._own = Mover(transports, memory, layout.restricted(heads[0]), self._hear_own)
        self._links = links
        self._queued: dict[int, QueuedLink | MoveLink[FromMover]] = dict(links)  # links until the ranks have opened
        self._reports: dict[int, Reported] = {}
        self._answers: queue.SimpleQueue[DescribedTo] = queue.SimpleQueue()
        self._asked = 0
        self._stopping = False
        self._said = dict.fromkeys(links, 0)
        self._watchdogs: dict[int, Watchdog] = {}

    def open(self, incarnation: Incarnation, config: TransferConfig, host: str) -> None:
        """Have the other ranks open what rank 0 has opened."""
        for rank, link in self._links.items():
            self._watchdogs[rank] = Watchdog(config.stuck_s)
            link.say(OpenMover(part_of(incarnation, rank), config, host))
        for rank, link in self._links.items():
            opened = link.hear()
            if not isinstance(opened, MoverOpened) or opened.error:
                why = "has ended" if opened is None else getattr(opened, "error", "says something else")
                raise TransferError(f"tensor-parallel rank {rank} opens no transports: {why}")
        for rank, link in self._links.items():
            self._queued[rank] = queued = QueuedLink(link, f"tells-{rank}", partial(self._takes_none, rank))
            threading.Thread(target=self._hear, args=(rank, link, queued), name=f"moves-{rank}", daemon=True).start()

    def describe(self, rank: int, transport: str, peers: Sequence[Incarnation], wait_s: float) -> list[dict[str, Any]]:
        """Ask a rank what each of these ranks of a peer is to be told. Waits for the answer."""
        self._asked += 1
        self._queued[rank].say(DescribeTo(self._asked, transport, tuple(peers)))
        due_s = time.monotonic() + wait_s
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                raise TransferError(f"tensor-parallel rank {rank} does not say how it is reached") from None
            if answer.number == self._asked:  # another was waited for no longer
                return list(answer.details)

    def submit(self, command: MoverCommand) -> None:
        if self._group.passes(command):
            self._own.submit(command)
            return
        with self._lock:
            self._give(self._group.submit(command))

    def warm_up(self, wire: str) -> None:
        self._own.warm_up(wire)

    def start(self) -> None:
        self._own.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping = True
        self._own.stop(timeout_s)

    def run_once(self) -> bool:
        return self._own.run_once()

    @property
    def outstanding(self) -> int:
        return self._own.outstanding + sum(report.outstanding for report in self._reports.values())

    @property
    def scrapped_bytes(self) -> int:
        return self._own.scrapped_bytes + sum(report.scrapped_bytes for report in self._reports.values())

    @property
    def beat(self) -> int | None:
        """Rank 0's. The other ranks look at theirs themselves."""
        return self._own.beat

    def check_ranks(self, now: float) -> None:
        """Raise TransferError for another rank that has parts to move, and has said nothing for `transfer.stuck_s`: a
        process that is stopped, which nobody else notices while there is nothing to compute."""
        if not self._watchdogs:
            return
        with self._lock:
            at_work = self._group.at_work
        for rank, watchdog in self._watchdogs.items():
            if watchdog.is_stuck(self._said[rank] if rank in at_work else None, now):
                raise TransferError(f"tensor-parallel rank {rank} moves no blocks any more: {watchdog!r}")

    @property
    def digests(self) -> Tally:
        """Those of all ranks."""
        total = Tally(self._own.digests.made, self._own.digests.verified, self._own.digests.mismatched)
        for report in self._reports.values():
            total.made += report.made
            total.verified += report.verified
            total.mismatched += report.mismatched
        return total

    def _give(self, told: Iterable[Told]) -> None:
        for one in told:
            if not isinstance(one, ToRank):
                self._on_event(one)
            elif one.rank == 0:
                self._own.submit(one.command)
            else:
                self._queued[one.rank].say(one.command)

    def _takes_none(self, rank: int, why: str) -> None:
        if not self._stopping:
            self._on_event(MoverDied(f"at rank {rank}: {why}"))

    def _hear_own(self, event: MoverEvent) -> None:
        if self._group.is_one:
            self._on_event(event)
            return
        with self._lock:
            self._give(self._group.heard(0, event))

    def _hear(self, rank: int, link: MoveLink[FromMover], queued: QueuedLink) -> None:
        try:
            for said in link:  # until it ends: who watches its process tells of that
                self._said[rank] += 1
                match said:
                    case Alive():
                        continue
                    case DescribedTo():
                        self._answers.put(said)
                    case Reported():
                        with self._lock:
                            self._reports[rank] = said
                            self._give(self._group.heard(rank, said.event))
                    case MoverOpened():
                        raise TransferError("its transports are open already")
        except Exception as error:
            self._on_event(MoverDied(f"what rank {rank} says is not understood: {error}"))
        finally:
            queued.close()


class Way(Protocol):
    """A transport, as far as peers are told of it."""

    name: str
    reads_remotely: bool

    def describe(self, peer: Incarnation, ranks: int = 0) -> Endpoint:
        """`ranks`: how many of the peer's have a pool; 0: not known."""


class RankTransport:
    """The `Way` to the pools of a worker's ranks, of which there may be one. `describe` raises TransferError where a
    rank does not answer."""

    def __init__(self, own: Transport, movers: RankMovers, heads: Sequence[range], wait_s: float) -> None:
        self._own = own
        self._movers = movers
        self._heads = heads
        self._wait_s = wait_s
        self.name = own.name
        self.reads_remotely = own.reads_remotely

    def describe(self, peer: Incarnation, ranks: int = 0) -> Endpoint:
        # Of a peer whose ranks are not known, the ranks may dial over nccl; over tcp and shm nobody does.
        lives = [part_of(peer, rank) for rank in range(ranks or (MOST_RANKS if self.name == NCCL else 1))]
        own = [self._own.describe(life) for life in lives]
        if len(self._heads) == len(own) == 1:
            return own[0]
        told = [[endpoint.details for endpoint in own]]
        told += [self._movers.describe(rank, self.name, lives, self._wait_s) for rank in range(1, len(self._heads))]
        endpoints = [
            RankEndpoint(first_head=heads.start, kv_heads=len(heads), details=details)
            for heads, details in zip(self._heads, told, strict=True)
        ]
        return Endpoint(transport=self.name, details=own[0].details, ranks=endpoints)
