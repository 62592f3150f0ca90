"""How the nccl transport meets its peers and hears them: a door, dials and sockets, driven inside `poll`."""

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from engine.messages import Endpoint
from engine.types import Incarnation
from transfer.bell import Bell
from transfer.gpu.pulse import Pulse
from transfer.host.tcp.door import TOKEN_BYTES, Door, greeting
from transfer.nccl.library import dotted
from transfer.nccl.peer import Dial, NcclDetails, NcclPeer, connected
from transfer.nccl.wire import Said, Welcome, Wire
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
        self._incarnation = incarnation
        self._host = host
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._peers = peers
        self._heard = heard
        self._lose = lose
        self._can_put = can_put
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._selector = selectors.EpollSelector()
        self._bell = Bell()
        try:
            self._door = Door(host, self._token, incarnation, self._selector, stall_s, self._admit)
        except OSError as error:
            self._selector.close()
            self._bell.close()
            raise TransferError(f"cannot listen on {host}: {error}") from error
        self._selector.register(self._bell, selectors.EVENT_READ, self._bell.hush)

    @property
    def is_dialling(self) -> bool:
        return any(peer.dial is not None and not peer.is_met and not peer.lost for peer in self._peers.values())

    def watch(self, pulse: Pulse) -> None:
        self._selector.register(pulse, selectors.EVENT_READ, pulse.hush)

    def fileno(self) -> int:
        return self._selector.fileno()

    def ring(self) -> None:
        self._bell.ring()

    def hush(self) -> None:
        self._bell.hush()

    def details(self, block_bytes: int, version: int, gpu: str) -> NcclDetails:
        return NcclDetails(self._host, self._door.port, self._token.hex(), block_bytes, version, gpu)

    def check(self, endpoint: Endpoint, received: BlockSlice, version: int) -> NcclDetails:
        """Raises TransferError for an endpoint that cannot be met."""
        try:
            details = msgspec.convert(endpoint.details, NcclDetails)
            token = bytes.fromhex(details.token)
        except (msgspec.ValidationError, ValueError) as error:
            raise TransferError(f"not an nccl endpoint: {error}") from error
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"not an nccl endpoint: its token has {len(token)} bytes")
        if details.block_bytes != received.block_bytes:
            raise TransferError(f"the peer's blocks are not those of its layout: {details.block_bytes} bytes")
        if details.version != version:
            raise TransferError(f"NCCL {dotted(details.version)} there, {dotted(version)} here: they must be equal")
        return details

    def begin(self, peer: Incarnation, details: NcclDetails, sent: BlockSlice, received: BlockSlice) -> NcclPeer:
        """Raises TransferError where its host has no address."""
        dial = None
        if self._incarnation < peer:
            hello = greeting(bytes.fromhex(details.token), self._incarnation, peer)
            try:
                dial = Dial(details, hello, time.monotonic(), self._limit_s)
            except OSError as error:
                raise TransferError(f"not an nccl endpoint: {error}") from error
        return NcclPeer(peer, sent, received, dial, self._stall_s)

    def poll(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def step(self, now: float) -> None:
        """Dial whoever is to be dialled."""
        for peer in list(self._peers.values()):
            dial = peer.dial
            if dial is None or peer.is_met or peer.lost:
                continue
            if now > dial.until_s:
                self._lose(peer, f"cannot be met within {self._limit_s:g} s")
            elif peer.wire is None and now >= dial.next_s:
                try:
                    self._watch(peer, Wire(dial.connect(now, self._stall_s), dial.greeting))
                except OSError:
                    continue  # until the limit

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
            self._selector.unregister(wire.sock)
            wire.close()

    def close(self) -> None:
        self._door.close()
        self._selector.close()
        self._bell.close()

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
        events = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(wire.sock, events, lambda: self._turn(peer, wire))

    def _turn(self, peer: NcclPeer, wire: Wire) -> None:
        if peer.wire is not wire:
            return
        try:
            connected(wire.sock)
            for said in wire.read():
                if isinstance(said, Welcome):
                    peer.can_put = said.puts
                    peer.meet()
                elif peer.wire is wire:
                    self._heard(peer, said)
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
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.wants_write else 0)
        if self._selector.get_key(wire.sock).events != events:
            self._selector.modify(wire.sock, events, self._selector.get_key(wire.sock).data)

    def _broken(self, peer: NcclPeer, wire: Wire, why: str) -> None:
        if peer.wire is not wire:
            return
        if peer.dial is not None and not peer.is_met:
            self.leave(peer)  # it does not know us yet, or does not listen: dial again
        else:
            self._lose(peer, why)
