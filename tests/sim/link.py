"""One stream of the router to one worker, as `router.dispatch.Links` keeps it."""

from typing import TYPE_CHECKING

from engine.handshake import Party
from engine.messages import (
    Load,
    PeerAddress,
    RouterHello,
    RouterRecord,
    WorkerInfo,
    decode_worker_frame,
    encode,
)
from engine.types import Incarnation
from router.dispatch import PAUSE_S
from tests.sim.network import Send

if TYPE_CHECKING:
    from tests.sim.front import Front


class Link:
    """One stream of a worker to its router. Mutable state: whether the worker has said who it is, and whether the
    router has ended the stream."""

    def __init__(self, front: "Front", role: str, peer: PeerAddress, send: Send) -> None:
        self._front = front
        self._role = role
        self._peer = peer
        self._send = send
        self._joined = self._over = False

    def proven(self, peer: Party) -> None:
        """Take who has answered: what that end says of itself is checked in tests/router/test_dispatch.py."""

    def tell(self, record: RouterRecord) -> None:
        """Say something, if anybody is there."""
        if self._joined and not self._over:
            self._send(encode([record]))

    def frame(self, data: bytes) -> None:
        if self._over:
            return
        front, name = self._front, self._peer.name
        records = list(decode_worker_frame(data))
        promises = front.world.promises
        for record in records:
            front.world.witness.heard(record)
        if not self._joined:
            info = records.pop(0)
            assert isinstance(info, WorkerInfo)
            self._joined = True
            if self._role == "decode":
                self._send(encode([RouterHello(Incarnation(front.process.incarnation))]))
            front.pauses[name] = PAUSE_S[0]
            if self._role == "decode":
                front.outboxes[name] = self._send
            front.met(info)
            front.hub.joined(self._peer, info)
            promises.met(name, info.incarnation)
        if self._over:
            return
        if data not in promises.forged:
            for record in records:
                promises.heard(name, record)
        front.hub.heard(name, records)
        if len(records) != 1 or not isinstance(records[0], Load):
            front.check()

    def closed(self, why: str) -> None:
        if not self._over:
            self._lose()
            self._front.redial(self._peer.name)

    def end(self) -> None:
        """The router wants no more of it."""
        if not self._over:
            self._send(None)
            self._lose()

    def _lose(self) -> None:
        self._over = True
        front, name = self._front, self._peer.name
        front.outboxes.pop(name, None)
        if self._joined:
            front.hub.lost(name)
            front.check()
