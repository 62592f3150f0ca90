"""Meets and hears the peers of the nccl transport: a door, dials and sockets, driven inside `poll`."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.host.tcp.door import Door, Knock, check_connected, listen, peer_door, resolve
from transfer.host.tcp.proof import ProofError
from transfer.liveness import Watchdog
from transfer.nccl.library import dotted
from transfer.nccl.pair import Pair
from transfer.nccl.peer import Dial, NcclDetails, NcclPeer
from transfer.nccl.wire import Said, Welcome, Wire
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, TransferError


class Meeting:
    """`heard` is called for what a peer says, `lose` when its socket is lost; `can_put` tells whether this worker can
    have rings. Raises TransferError if it cannot listen."""

    def __init__(
        self,
        incarnation: Incarnation,
        host: str,
        stall_s: float,
        limit_s: float,
        peers: Mapping[Incarnation, NcclPeer],
        heard: Callable[[NcclPeer, Said], None],
        lose: Callable[[NcclPeer, str], None],
        can_put: Callable[[], bool],
    ) -> None:
        listener = listen(host)
        self._incarnation = incarnation
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._peers = peers
        self._heard = heard
        self._lose = lose
        self._can_put = can_put
        self.reactor = Reactor()
        self._door = Door(listener, incarnation, self.reactor, stall_s, self._admit)

    @property
    def is_dialling(self) -> bool:
        return any(peer.dial is not None and not peer.is_met and not peer.lost for peer in self._peers.values())

    def details(self, peer: Incarnation, block_bytes: int, version: int, gpu: str) -> NcclDetails:
        """Return what `peer` alone is told. From any thread."""
        address = msgspec.structs.asdict(self._door.address(block_bytes, peer))
        return NcclDetails(**address, version=version, gpu=gpu)

    def check(self, endpoint: Endpoint, received: BlockSlice, version: int) -> NcclDetails:
        """Raises TransferError for an endpoint that cannot be met."""
        details = peer_door(endpoint, NcclDetails, received)
        if details.version != version:
            raise TransferError(f"NCCL {dotted(details.version)} there, {dotted(version)} here: they must be equal")
        return details

    def begin(self, peer: Incarnation, details: NcclDetails, sent: BlockSlice, received: BlockSlice) -> NcclPeer:
        """Raises TransferError where its host is no plain address."""
        dial = None
        if self._incarnation < peer:
            now = time.monotonic()
            dial = Dial(resolve(details), details.key, now, now + self._limit_s)
        return NcclPeer(peer, sent, received, dial, Watchdog(self._stall_s), Pair(leads=dial is not None))

    def step(self, now: float) -> None:
        """Dial whoever is to be dialled; close the door to those that have had their time."""
        self._door.step(now)
        for peer in list(self._peers.values()):
            dial = peer.dial
            if dial is None or peer.is_met or peer.lost:
                continue
            if now > dial.until_s:
                self._lose(peer, f"cannot be met within {self._limit_s:g} s")
            elif peer.wire is None and now >= dial.next_s:
                try:
                    sock = dial.connect(now, self._stall_s)
                except OSError:
                    continue  # until the limit
                try:
                    knock = Knock(sock, dial.key, self._incarnation, peer.incarnation)
                except ProofError as error:
                    sock.close()
                    self._lose(peer, str(error))
                    continue
                self._watch(peer, Wire(sock, knock))

    def flush(self) -> None:
        """Send what was said, as far as the sockets take it."""
        for peer in list(self._peers.values()):
            if peer.wire is not None and peer.wire.wants_write:
                self._write(peer, peer.wire)

    def leave(self, peer: NcclPeer) -> None:
        wire, peer.wire, peer.is_met = peer.wire, None, False
        if wire is not None:
            # What was said last may tell the peer more than the end of the socket does.
            with contextlib.suppress(OSError):
                wire.write()
            self.reactor.unwatch(wire.sock)
            wire.close()

    def close(self) -> None:
        self._door.close()
        self.reactor.close()

    def _admit(self, dialer: Incarnation, sock: socket.socket) -> bool:
        peer = self._peers.get(dialer)
        if peer is None or peer.dial is not None or peer.lost:
            return False
        if peer.wire is not None:
            self._lose(peer, "the peer dialled again")
            return False
        wire = Wire(sock)
        wire.say(Welcome(self._can_put()))
        self._watch(peer, wire)
        peer.meet()
        return True

    def _watch(self, peer: NcclPeer, wire: Wire) -> None:
        peer.wire = wire
        self.reactor.watch(wire.sock, lambda: self._turn(peer, wire), selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _turn(self, peer: NcclPeer, wire: Wire) -> None:
        if peer.wire is not wire:
            return
        try:
            check_connected(wire.sock)
            for said in wire.read():
                if isinstance(said, Welcome):
                    peer.can_put = said.puts
                    peer.meet()
                elif peer.wire is wire:
                    self._heard(peer, said)
        except ProofError as error:
            self._lose(peer, str(error))
            return
        except (OSError, TransferError) as error:
            self._broken(peer, wire, f"connection lost: {error}")
            return
        if peer.wire is wire:
            self._write(peer, wire)

    def _write(self, peer: NcclPeer, wire: Wire) -> None:
        try:
            wire.write()
        except OSError as error:
            self._broken(peer, wire, f"connection lost: {error}")
            return
        self.reactor.rewatch(wire.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.wants_write else 0))

    def _broken(self, peer: NcclPeer, wire: Wire, why: str) -> None:
        if peer.wire is not wire:
            return
        if peer.dial is not None and not peer.is_met:
            self.leave(peer)  # it does not know us yet, or does not listen: dial again
        else:
            self._lose(peer, why)
