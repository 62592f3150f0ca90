"""KV blocks over TCP, between any two hosts.

Every worker listens; the one that receives dials the one that sends, when its first receive is posted. Both prove with
the key of the sender's endpoint that they are those between whom it was told (`transfer.host.tcp.proof`), before any
block is sent, or read; the bytes themselves are neither encrypted nor authenticated: a trusted network, or a tunnel, is
assumed. One connection carries one direction, chunks in the order in which both ends post them. Sockets are
non-blocking and driven inside `poll`.

A connection that breaks, or on which nothing comes for `stall_s` although something is due, fails all that is
outstanding on it. The receiver dials again only after a new `connect`, which both ends need: what one of them sent on
the old connection, the other must not wait for on the new one.
"""

import selectors
import socket
import time
from dataclasses import dataclass, field

import msgspec

from engine.messages import Endpoint
from engine.types import BlockId, Incarnation
from transfer.host.tcp.door import (
    Door,
    DoorAddress,
    Knock,
    Target,
    dial,
    listen,
    peer_door,
    resolve,
)
from transfer.host.tcp.link import InLink, OutLink, header
from transfer.liveness import Watchdog
from transfer.polling import CompletionQueue, PeerTable
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, Completion, KVMemory, Landing, Move, Outcome, Packed, Ticket, TransferError


@dataclass(slots=True, eq=False)
class _Peer:
    target: Target
    key: str
    sent: BlockSlice
    received: BlockSlice
    watchdog: Watchdog  # of the incoming connection
    incoming: InLink = field(default_factory=InLink)
    outgoing: OutLink = field(default_factory=OutLink)
    lost: str = ""  # why the incoming connection broke


class TcpTransport:
    """`transfer.transport.Transport` over TCP. Raises TransferError if it cannot listen on `host`."""

    name = "tcp"
    device = None
    reads_remotely = False

    def __init__(self, memory: KVMemory, incarnation: Incarnation, host: str, stall_s: float) -> None:
        listener = listen(host)
        self._memory = memory
        self._incarnation = incarnation
        self._stall_s = stall_s
        self._peers: PeerTable[_Peer] = PeerTable()
        self.scrapped_bytes = 0
        self._reactor = Reactor()
        self._completions = CompletionQueue(self._reactor.ring)
        self._door = Door(listener, incarnation, self._reactor, stall_s, self._admit)

    def describe(self, peer: Incarnation) -> Endpoint:
        address = self._door.address(self._memory.block_bytes, peer)
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(address))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        """Remember where `peer` listens; forgets an earlier connection with it. The endpoint must name a plain
        address."""
        address = peer_door(endpoint, DoorAddress, received)
        target = resolve(address)
        self.disconnect(peer)
        self._peers[peer] = _Peer(target, address.key, sent, received, Watchdog(self._stall_s))

    def send(self, peer: Incarnation, move: Move, packed: Packed | None = None) -> Ticket:
        found = self._peers[peer]
        link, span = found.outgoing, found.sent
        end = span.offset + span.nbytes
        blocks = packed or [self._block(block)[span.offset : end] for block in move.local]
        ticket = self._completions.ticket()
        link.post(ticket, header(move, len(blocks), span.nbytes), blocks)
        if link.sock is not None:
            self._reactor.rewatch(link.sock, _events(link))
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: Landing | None) -> Ticket:
        found = self._peers[peer]
        ticket = self._completions.ticket()
        if found.lost:
            self._completions.end(ticket, Outcome.LOST, found.lost)
            return ticket
        head = header(move, len(move.remote), found.received.nbytes)
        found.incoming.post(ticket, head, landing, len(move.remote) * found.received.nbytes)
        if found.incoming.sock is None:
            self._dial(peer, found)
        else:
            self._watch_incoming(found)
        return ticket

    def fileno(self) -> int:
        return self._reactor.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        self._reactor.wait(timeout_s)
        now = time.monotonic()
        self._give_up_stalled(now)
        self._door.step(now)
        self._reactor.hush()
        return self._completions.take()

    def cancel(self, ticket: Ticket) -> bool:
        for peer in self._peers.values():
            if peer.incoming.cancel(ticket) or peer.outgoing.cancel(ticket):
                self._completions.end(ticket, Outcome.CANCELLED)
                return True
        return False

    def disconnect(self, peer: Incarnation) -> None:
        found = self._peers.pop(peer, None)
        if found is not None:
            self._lose_incoming(found, "disconnected", Outcome.FAILED)
            self._lose_outgoing(found, "disconnected")

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._door.close()
        self._reactor.close()

    # ---- sending side

    def _admit(self, dialer: Incarnation, sock: socket.socket) -> bool:
        """This peer has dialled, and proven itself: from now on its chunks go out over `sock`."""
        found = self._peers.get(dialer)
        if found is None:
            return False
        if found.outgoing.sock is not None:
            self._lose_outgoing(found, "the peer dialled again")
        found.outgoing.sock = sock
        self._reactor.watch(sock, lambda: self._write(found, sock), _events(found.outgoing))
        return True

    def _write(self, peer: _Peer, sock: socket.socket) -> None:
        link = peer.outgoing
        if link.sock is not sock:
            return
        try:
            if self._closed_by_peer(sock):
                raise ConnectionResetError("the peer closed the connection")
            self._completions.add(link.write())
        except OSError as error:
            self._lose_outgoing(peer, f"connection lost: {error}")
            return
        self._reactor.rewatch(sock, _events(link))

    @staticmethod
    def _closed_by_peer(sock: socket.socket) -> bool:
        """A receiver says nothing after its proof, so anything to read is its end (or nonsense: also the end)."""
        try:
            sock.recv(1)
        except BlockingIOError:
            return False
        return True

    # ---- receiving side: dial, prove, read

    def _dial(self, incarnation: Incarnation, peer: _Peer) -> None:
        try:
            peer.incoming.sock = sock = dial(peer.target, self._stall_s)
            knock = Knock(sock, peer.key, self._incarnation, incarnation)
        except (OSError, TransferError) as error:
            self._lose_incoming(peer, f"cannot connect: {error}")
            return
        self._reactor.watch(sock, lambda: self._knock(peer, sock, knock), selectors.EVENT_WRITE)

    def _knock(self, peer: _Peer, sock: socket.socket, knock: Knock) -> None:
        if peer.incoming.sock is not sock:
            return
        try:
            is_open = knock.step()
        except (OSError, TransferError) as error:
            self._lose_incoming(peer, f"cannot connect: {error}")
            return
        if is_open:
            self._reactor.unwatch(sock)
            self._watch_incoming(peer)
        elif not knock.wants_write:
            self._reactor.rewatch(sock, selectors.EVENT_READ)

    def _watch_incoming(self, peer: _Peer) -> None:
        sock = peer.incoming.sock
        assert sock is not None
        watched = self._reactor.is_watched(sock)
        if peer.incoming.is_due and not watched:
            self._reactor.watch(sock, lambda: self._read(peer, sock))
        elif watched and not peer.incoming.is_due:
            # What comes before its receive is posted waits in the socket, and must not wake the thread meanwhile.
            self._reactor.unwatch(sock)

    def _read(self, peer: _Peer, sock: socket.socket) -> None:
        if peer.incoming.sock is not sock:
            return
        before = peer.incoming.scrapped_bytes
        try:
            self._completions.add(peer.incoming.read())
        except (OSError, TransferError) as error:
            self._lose_incoming(peer, f"connection lost: {error}")
            return
        finally:
            self.scrapped_bytes += peer.incoming.scrapped_bytes - before
        self._watch_incoming(peer)

    def _give_up_stalled(self, now: float) -> None:
        """Called behind the reads, so that what came while this process was stopped counts."""
        for peer in self._peers.values():
            link = peer.incoming
            if peer.watchdog.is_stuck(link.read_bytes if link.is_due else None, now):
                self._lose_incoming(peer, f"nothing came for {self._stall_s:g} s")

    # ---- both

    def _lose_incoming(self, peer: _Peer, why: str, outcome: Outcome = Outcome.LOST) -> None:
        peer.lost = why
        if peer.incoming.sock is not None:
            self._reactor.unwatch(peer.incoming.sock)
        self._completions.add(peer.incoming.abandon(outcome, why))

    def _lose_outgoing(self, peer: _Peer, why: str) -> None:
        if peer.outgoing.sock is not None:
            self._reactor.unwatch(peer.outgoing.sock)
        self._completions.add(peer.outgoing.abandon(Outcome.FAILED, why))

    def _block(self, block: BlockId) -> memoryview:
        if not 0 <= block < self._memory.blocks:
            raise TransferError(f"no block {block} in this pool")
        return self._memory.block(block)


def _events(link: OutLink) -> int:
    # Reading is watched too, so that the end of an idle connection is noticed.
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.is_due else 0)
