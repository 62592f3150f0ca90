"""The transfer thread: carries out the commands of the pure sides, and only copies and hashes.

It sleeps until a command is submitted or a transport has something to do; while transfers are outstanding it also looks
every second, since what does not come wakes nobody. All events are told through `on_event`, in
this thread: the callback puts them into the engine's inbox and returns. The colocated engine and the simulator have no
such thread and call `run_once` instead.
"""

import logging
import select
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from engine.kv.layout import DTYPE_BYTES, KVLayout
from engine.messages import Handoff
from kernels.compilations import OWN
from transfer.digest import Tally
from transfer.handoff.commands import (
    CancelRecv,
    CancelSend,
    Connect,
    Disconnect,
    MoverCommand,
    MoverDied,
    MoverEvent,
    Posted,
    PostRecv,
    PostScrap,
    PostSend,
    Received,
    Sent,
    Unreachable,
)
from transfer.handoff.negotiation import AS_STORED, WP64, Agreement
from transfer.liveness import LOOK_S
from transfer.polling import Bell, PeerTable
from transfer.registry import open_route
from transfer.route import CheckedLanding, Route
from transfer.transport import Completion, KVMemory, Outcome, Ticket, TransferError, Transport

log = logging.getLogger(__name__)

IDLE_LOOK_S = 1.0
"""A mover with nothing to do looks as often at who has been at its doors for too long."""

_Key = tuple[str, Ticket]  # transport name, ticket


class Mover:
    """Drives the transports of one worker. `submit` may be called from any thread; all else happens in one."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        memory: KVMemory,
        layout: KVLayout,
        on_event: Callable[[MoverEvent], None],
    ) -> None:
        self._transports = dict(transports)
        self._memory = memory
        self._layout = layout
        self.digests = Tally()
        self._on_event = on_event
        self._commands: deque[MoverCommand] = deque()
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._busy = False
        self._calls = 0
        self._routes: PeerTable[Route] = PeerTable()
        self._sends: dict[_Key, tuple[PostSend, float]] = {}
        self._recvs: dict[_Key, tuple[PostRecv, CheckedLanding, int, float]] = {}
        self._scraps: set[_Key] = set()
        self._tickets: dict[tuple[Handoff, int], _Key] = {}

    def submit(self, command: MoverCommand) -> None:
        """Queue a command; never blocks."""
        self._commands.append(command)
        self._bell.ring()

    def warm_up(self, wire: str) -> None:
        """Have everything compiled that blocks need on their way to and from workers like this one, as they are stored
        and as `wire`. Before `start`; for a peer of another kind it is done when they meet."""
        wires = {AS_STORED, wire if self._layout.dtype in DTYPE_BYTES else AS_STORED}
        for transport, form in product(self._transports.values(), sorted(wires)):
            if transport.device is not None:
                agreement = Agreement(self._layout, digest=WP64, wire=form)
                try:
                    open_route(transport, self._memory, self._layout, agreement, Tally()).warm_up()
                except (ValueError, TransferError) as error:
                    log.warning("blocks cannot travel as %s over %s: %s", form, transport.name, error)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, if any, and close the transports. Raises TransferError if the thread does not end."""
        self._stopping = True
        self._bell.ring()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TransferError(f"the transfer thread did not end within {timeout_s} s")
            self._thread = None
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._bell.close()

    @property
    def outstanding(self) -> int:
        """Transfers posted and not ended, scrap included."""
        return len(self._sends) + len(self._recvs) + len(self._scraps)

    @property
    def scrapped_bytes(self) -> int:
        """Bytes that came too late and landed nowhere, since the start; to be asked before `stop`."""
        return sum(transport.scrapped_bytes for transport in self._transports.values())

    @property
    def beat(self) -> int | None:
        """Changes with every command and transport that the thread comes back from, and with every kernel that is
        compiled meanwhile, of which a call may need several; None while it waits for work."""
        return self._calls + OWN.total if self._busy else None

    def run_once(self) -> bool:
        """Carry out what is queued and poll every transport once, without waiting. True if anything happened."""
        self._bell.hush()
        worked = False
        while self._commands:
            worked = True
            self._execute(self._commands.popleft())
            self._calls += 1
        for name, transport in self._transports.items():
            for completion in transport.poll(0.0):
                worked = True
                self._ended((name, completion.ticket), completion)
            self._calls += 1
        return worked

    def _main(self) -> None:
        # For `top -H` and for benchmarks: threads that one looks at from outside have no other name.
        with suppress(OSError):
            Path("/proc/thread-self/comm").write_text("transfer")
        poller = select.poll()
        poller.register(self._bell.fileno(), select.POLLIN)
        for transport in self._transports.values():
            poller.register(transport.fileno(), select.POLLIN)
        try:
            while not self._stopping:
                self._busy = False
                poller.poll((LOOK_S if self.outstanding else IDLE_LOOK_S) * 1000)
                self._busy = True
                self.run_once()
        except Exception:
            self._on_event(MoverDied(traceback.format_exc()))

    def _execute(self, command: MoverCommand) -> None:
        match command:
            case PostSend(move=move):
                try:
                    self._send(command)
                except Exception as error:
                    self._on_event(Sent(move.handoff, move.seq, _describe(error), 0.0))
            case PostRecv(move=move):
                try:
                    self._recv(command)
                except Exception as error:
                    self._on_event(Received(move.handoff, move.seq, _describe(error), 0.0, 0))
            case PostScrap():
                try:
                    self._scrap(command)
                except Exception as error:
                    # What comes on its way from now on is not what is waited for.
                    self._on_event(Unreachable(command.peer, _describe(error)))
            case CancelRecv(handoff, seq) | CancelSend(handoff, seq):
                key = self._tickets.get((handoff, seq))
                if key is not None:
                    self._transports[key[0]].cancel(key[1])
            case Connect():
                self._connect(command)
            case Disconnect():
                route = self._routes.pop(command.peer, None)
                if route is not None:
                    route.transport.disconnect(command.peer)

    def _connect(self, command: Connect) -> None:
        name = command.endpoint.transport
        try:
            transport = self._transports[name]
            route = open_route(transport, self._memory, self._layout, command.agreement, self.digests)
            route.warm_up()
            transport.connect(command.peer, command.endpoint, route.sent, route.received)
        except Exception as error:
            # Whatever a peer says of itself may cost its own connection, never this thread.
            self._on_event(Unreachable(command.peer, f"over {name}: {_describe(error)}"))
            return
        self._routes[command.peer] = route

    def _send(self, command: PostSend) -> None:
        move = command.move
        started_s = time.perf_counter()
        route = self._routes[command.peer]
        packed = route.pack(command)
        digests = route.digests(command, packed)
        key = (route.transport.name, route.transport.send(command.peer, move, packed))
        self._sends[key] = (command, started_s)
        self._tickets[move.handoff, move.seq] = key
        self._on_event(Posted(move.handoff, move.seq, digests))

    def _recv(self, command: PostRecv) -> None:
        started_s = time.perf_counter()
        route = self._routes[command.peer]
        landing = route.landing(command)
        key = (route.transport.name, route.transport.recv(command.peer, command.move, landing))
        nbytes = len(command.blocks) * route.incoming.block_bytes
        self._recvs[key] = (command, landing, nbytes, started_s)
        self._tickets[command.move.handoff, command.move.seq] = key

    def _scrap(self, command: PostScrap) -> None:
        route = self._routes.get(command.peer)
        if route is not None:  # a peer that is gone has nothing to drain
            ticket = route.transport.recv(command.peer, command.move, None)
            self._scraps.add((route.transport.name, ticket))

    def _ended(self, key: _Key, completion: Completion) -> None:
        error = "" if completion.outcome is Outcome.DONE else completion.error or "cancelled"
        if key in self._sends:
            send, started_s = self._sends.pop(key)
            del self._tickets[send.move.handoff, send.move.seq]
            seconds = time.perf_counter() - started_s
            self._on_event(Sent(send.move.handoff, send.move.seq, error, seconds))
        elif key in self._recvs:
            recv, landing, nbytes, started_s = self._recvs.pop(key)
            if completion.outcome is Outcome.LOST:
                # Told first: what is made again because of it needs a way.
                self._on_event(Unreachable(recv.peer, error))
            del self._tickets[recv.move.handoff, recv.move.seq]
            if not error and landing.wrong:
                error = f"digest mismatch in {landing.wrong} of {len(recv.blocks)} blocks"
            seconds = time.perf_counter() - started_s
            nbytes = 0 if error else nbytes
            self._on_event(Received(recv.move.handoff, recv.move.seq, error, seconds, nbytes))
        else:
            self._scraps.remove(key)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
