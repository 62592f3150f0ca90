"""The mover of a tensor-parallel rank other than rank 0, on a pool of the rank's own."""

import select
import socket
import time
from collections.abc import Callable, Mapping

from engine.kv.layout import KVLayout
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.handoff.commands import MoverCommand, MoverEvent
from transfer.liveness import LOOK_S, Watchdog
from transfer.mover import Mover
from transfer.ranks.links import Alive, DescribedTo, DescribeTo, MoveLink, MoverOpened, OpenMover, Reported, ToMover
from transfer.registry import open_transports
from transfer.transport import KVMemory, TransferError, Transport

OpenWays = Callable[[KVMemory, Incarnation, TransferConfig, str], Mapping[str, Transport]]
"""`transfer.registry.open_transports`."""


def serve(
    sock: socket.socket,
    memory: KVMemory,
    layout: KVLayout,
    fail: Callable[[str], None],
    open_ways: OpenWays = open_transports,
) -> None:
    """Carry out what rank 0 tells of moving this rank's blocks, `memory`, until it tells nothing any more. `fail` is
    told why the rank must end: its transfer thread has stopped, or what was told is not what was meant."""
    link: MoveLink[ToMover] = MoveLink(sock, ToMover)
    try:
        opening = link.hear()
        if opening is None:
            return
        if not isinstance(opening, OpenMover):
            raise TransferError(f"{type(opening).__name__} is told before the transports are open")
        try:
            ways = open_ways(memory, opening.incarnation, opening.config, opening.host)
            service = RankMover(link, memory, layout, opening.config, ways)
        except Exception as error:
            link.say(MoverOpened((), f"{type(error).__name__}: {error}"))
            return
        service.run()
    except Exception as error:  # nobody looks at this thread, and the worker would wait for what it was to move
        fail(f"moves no blocks any more: {type(error).__name__}: {error}")


class RankMover:
    """Raises TransferError as a link does, and where its transfer thread is stuck. Owner: the thread that hears."""

    def __init__(
        self,
        link: MoveLink[ToMover],
        memory: KVMemory,
        layout: KVLayout,
        config: TransferConfig,
        ways: Mapping[str, Transport],
    ) -> None:
        self._link = link
        self._transports = ways
        self._mover = Mover(ways, memory, layout, self._tell)
        self._mover.warm_up(config.wire)
        self._watchdog = Watchdog(config.stuck_s)

    def run(self) -> None:
        self._mover.start()
        self._link.say(MoverOpened(tuple(self._transports)))
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLIN)
        is_at_work, said_s = False, time.monotonic()
        while True:
            is_told = bool(poller.poll(LOOK_S * 1000 if is_at_work else None))
            beat, now = self._mover.beat, time.monotonic()
            if self._watchdog.is_stuck(beat, now):
                raise TransferError(f"the transfer thread is stuck in one call: {self._watchdog!r}")
            is_at_work = is_told or beat is not None or self._mover.outstanding > 0
            # Also amid commands: those of which nothing has ended yet are no reason to be silent.
            if is_at_work and (not is_told or now - said_s >= LOOK_S):
                self._link.say(Alive())
                said_s = now
            if not is_told:
                continue
            told = self._link.hear()
            if told is None:
                return
            self._carry_out(told)

    def _carry_out(self, told: ToMover) -> None:
        match told:
            case DescribeTo(number, name, peers):
                transport = self._transports[name]
                self._link.say(DescribedTo(number, tuple(transport.describe(peer).details for peer in peers)))
            case OpenMover():
                raise TransferError("the transports are open already")
            case _ if isinstance(told, MoverCommand):
                self._mover.submit(told)

    def _tell(self, event: MoverEvent) -> None:
        mover, digests = self._mover, self._mover.digests
        counts = digests.made, digests.verified, digests.mismatched
        self._link.say(Reported(event, *counts, mover.outstanding, mover.scrapped_bytes))
