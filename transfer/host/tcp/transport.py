"""KV blocks over TCP, between any two hosts.

Every worker listens; the one that receives dials the one that sends, when its first receive is posted, and proves with
the token of the sender's endpoint that it was told the address (the token travels on the control channel; the bytes
themselves are neither encrypted nor authenticated: a trusted network, or a tunnel, is assumed). One connection carries
one direction, chunks in the order in which both ends post them. Sockets are non-blocking and driven inside `poll`.

A connection that breaks, or on which nothing comes for `stall_s` although something is due, fails all that is
outstanding on it. The receiver dials again only after a new `connect`, which both ends need: what one of them sent on
the old connection, the other must not wait for on the new one.
"""

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable

import msgspec

from engine.messages import Endpoint
from engine.types import BlockId, Incarnation
from transfer.bell import Bell
from transfer.host.tcp.door import TOKEN_BYTES, Door, greeting, tune
from transfer.host.tcp.link import InLink, OutLink, header
from transfer.liveness import Watchdog
from transfer.transport import (
    BlockSlice,
    Completion,
    KVMemory,
    Landing,
    Move,
    Outcome,
    Packed,
    Ticket,
    TransferError,
)


class TcpDetails(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str
    block_bytes: int


class _Peer:
    __slots__ = (
        "address",
        "family",
        "greeting",
        "incoming",
        "lost",
        "outgoing",
        "received",
        "sent",
        "watchdog",
    )

    def __init__(
        self,
        family: int,
        address: tuple[str, int],
        greeting: bytes,
        sent: BlockSlice,
        received: BlockSlice,
        stall_s: float,
    ) -> None:
        self.sent = sent
        self.received = received
        self.family = family
        self.address = address
        self.greeting = greeting
        self.incoming = InLink()
        self.outgoing = OutLink()
        self.lost = ""  # why the incoming connection broke
        self.watchdog = Watchdog(stall_s)  # of the incoming connection


class TcpTransport:
    """`transfer.transport.Transport` over TCP."""

    name = "tcp"
    device = None
    reads_remotely = False

    def __init__(self, memory: KVMemory, incarnation: Incarnation, host: str, stall_s: float) -> None:
        self._memory = memory
        self._incarnation = incarnation
        self._host = host
        self._stall_s = stall_s
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._peers: dict[Incarnation, _Peer] = {}
        self._completions: list[Completion] = []
        self._last_ticket = 0
        self.scrapped_bytes = 0
        self._selector = selectors.EpollSelector()
        self._bell = Bell()
        try:
            self._door = Door(host, self._token, incarnation, self._selector, stall_s, self._admit)
        except OSError as error:
            self._selector.close()
            self._bell.close()
            raise TransferError(f"cannot listen on {host}: {error}") from error
        self._watch(self._bell, selectors.EVENT_READ, self._bell.hush)

    def describe(self) -> Endpoint:
        details = TcpDetails(self._host, self._door.port, self._token.hex(), self._memory.block_bytes)
        return Endpoint(transport=self.name, details=msgspec.structs.asdict(details))

    def connect(self, peer: Incarnation, endpoint: Endpoint, sent: BlockSlice, received: BlockSlice) -> None:
        """Remember where `peer` listens; forgets an earlier connection with it. Resolves a host name, so that it may
        wait for a name server where the endpoint names no plain address."""
        try:
            details = msgspec.convert(endpoint.details, TcpDetails)
            token = bytes.fromhex(details.token)
            found = socket.getaddrinfo(details.host, details.port, type=socket.SOCK_STREAM)
        except (msgspec.ValidationError, ValueError, OSError) as error:
            raise TransferError(f"not a tcp endpoint: {error}") from error
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"not a tcp endpoint: its token has {len(token)} bytes")
        if details.block_bytes != received.block_bytes:
            raise TransferError(f"the peer's blocks are not those of its layout: {details.block_bytes} bytes")
        self.disconnect(peer)
        hello = greeting(token, self._incarnation, peer)
        family, _, _, _, address = found[0]
        place = (str(address[0]), int(address[1]))
        self._peers[peer] = _Peer(family, place, hello, sent, received, self._stall_s)

    def send(self, peer: Incarnation, move: Move, packed: Packed | None = None) -> Ticket:
        found = self._known(peer)
        link, span = found.outgoing, found.sent
        end = span.offset + span.nbytes
        blocks = packed or [self._block(block)[span.offset : end] for block in move.local]
        ticket = self._ticket()
        link.post(ticket, header(move, len(blocks), span.nbytes), list(blocks))
        if link.sock is not None:
            self._rewatch(link.sock, self._out_events(link))
        return ticket

    def recv(self, peer: Incarnation, move: Move, landing: Landing | None) -> Ticket:
        found = self._known(peer)
        ticket = self._ticket()
        if found.lost:
            self._finish([Completion(ticket, Outcome.LOST, found.lost)])
            return ticket
        head = header(move, len(move.remote), found.received.nbytes)
        found.incoming.post(ticket, head, landing, len(move.remote) * found.received.nbytes)
        if found.incoming.sock is None:
            self._dial(found)
        else:
            self._watch_incoming(found)
        return ticket

    def fileno(self) -> int:
        return self._selector.fileno()

    def poll(self, timeout_s: float) -> list[Completion]:
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._give_up_stalled(time.monotonic())
        completions, self._completions = self._completions, []
        self._bell.hush()
        return completions

    def cancel(self, ticket: Ticket) -> bool:
        for peer in self._peers.values():
            if peer.incoming.cancel(ticket) or peer.outgoing.cancel(ticket):
                self._finish([Completion(ticket, Outcome.CANCELLED)])
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
        self._selector.close()
        self._bell.close()

    # ---- sending side

    def _admit(self, dialer: Incarnation, sock: socket.socket) -> bool:
        """Somebody who knows our token has dialled: from now on its chunks go out over `sock`."""
        found = self._peers.get(dialer)
        if found is None:
            return False
        if found.outgoing.sock is not None:
            self._lose_outgoing(found, "the peer dialled again")
        found.outgoing.sock = sock
        self._watch(sock, self._out_events(found.outgoing), lambda: self._write(found, sock))
        return True

    def _write(self, peer: _Peer, sock: socket.socket) -> None:
        link = peer.outgoing
        if link.sock is not sock:
            return
        try:
            if self._closed_by_peer(sock):
                raise ConnectionResetError("the peer closed the connection")
            self._finish(link.write())
        except OSError as error:
            self._lose_outgoing(peer, f"connection lost: {error}")
            return
        self._rewatch(sock, self._out_events(link))

    @staticmethod
    def _closed_by_peer(sock: socket.socket) -> bool:
        """A receiver says nothing after its greeting, so anything to read is its end (or nonsense: also the end)."""
        try:
            sock.recv(1)
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def _out_events(link: OutLink) -> int:
        # Reading is watched too, so that the end of an idle connection is noticed.
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if link.wants_write else 0)

    # ---- receiving side: dial, greet, read

    def _dial(self, peer: _Peer) -> None:
        sock = socket.socket(peer.family, socket.SOCK_STREAM)
        tune(sock, self._stall_s)
        peer.incoming.sock = sock
        with contextlib.suppress(BlockingIOError):
            try:
                sock.connect(peer.address)
            except BlockingIOError:
                raise
            except OSError as error:
                self._lose_incoming(peer, f"cannot connect: {error}")
                return
        self._watch(sock, selectors.EVENT_WRITE, lambda: self._introduce(peer, sock))

    def _introduce(self, peer: _Peer, sock: socket.socket) -> None:
        if peer.incoming.sock is not sock:
            return
        try:
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            # A fresh connection's buffer takes these few bytes whole.
            if sock.send(peer.greeting) != len(peer.greeting):
                raise OSError("the greeting went out in part")
        except OSError as error:
            self._lose_incoming(peer, f"cannot connect: {error}")
            return
        self._unwatch(sock)
        self._watch_incoming(peer)

    def _watch_incoming(self, peer: _Peer) -> None:
        sock = peer.incoming.sock
        assert sock is not None
        watched = self._is_watched(sock)
        if peer.incoming.wants_read and not watched:
            self._watch(sock, selectors.EVENT_READ, lambda: self._read(peer, sock))
        elif watched and not peer.incoming.wants_read:
            # What comes before its receive is posted waits in the socket, and must not wake the thread meanwhile.
            self._unwatch(sock)

    def _read(self, peer: _Peer, sock: socket.socket) -> None:
        if peer.incoming.sock is not sock:
            return
        before = peer.incoming.scrapped_bytes
        try:
            self._finish(peer.incoming.read())
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
            if peer.watchdog.is_stuck(link.read_bytes if link.wants_read else None, now):
                self._lose_incoming(peer, f"nothing came for {self._stall_s:g} s")

    # ---- both

    def _lose_incoming(self, peer: _Peer, why: str, outcome: Outcome = Outcome.LOST) -> None:
        peer.lost = why
        if peer.incoming.sock is not None:
            self._unwatch(peer.incoming.sock)
        self._finish(peer.incoming.abandon(outcome, why))

    def _lose_outgoing(self, peer: _Peer, why: str) -> None:
        if peer.outgoing.sock is not None:
            self._unwatch(peer.outgoing.sock)
        self._finish(peer.outgoing.abandon(why))

    def _finish(self, completions: list[Completion]) -> None:
        if completions:
            self._completions += completions
            self._bell.ring()

    def _known(self, peer: Incarnation) -> _Peer:
        found = self._peers.get(peer)
        if found is None:
            raise TransferError(f"{peer} is not connected")
        return found

    def _ticket(self) -> Ticket:
        self._last_ticket += 1
        return Ticket(self._last_ticket)

    def _block(self, block: BlockId) -> memoryview:
        if not 0 <= block < self._memory.blocks:
            raise TransferError(f"no block {block} in this pool")
        return self._memory.block(block)

    def _watch(self, what: socket.socket | Bell, events: int, act: Callable[[], None]) -> None:
        self._selector.register(what, events, act)

    def _rewatch(self, sock: socket.socket, events: int) -> None:
        key = self._selector.get_key(sock)
        if key.events != events:
            self._selector.modify(sock, events, key.data)

    def _is_watched(self, sock: socket.socket) -> bool:
        return sock.fileno() in self._selector.get_map()

    def _unwatch(self, sock: socket.socket) -> None:
        if self._is_watched(sock):
            self._selector.unregister(sock)
