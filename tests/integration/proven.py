"""A stream to a worker that a test opens itself, as a router would, with the secret of the worker's cluster."""

import os
import queue
from collections.abc import Iterator

import grpc

from engine.handshake import NONCE_BYTES, Dialer, Keyring, Party
from engine.types import Incarnation

WAITS_S = 10.0


class ProvenStream:
    """Iterate over it for the worker's frames."""

    def __init__(self, channel: grpc.Channel, path: str, secrets: tuple[bytes, ...], name: str = "test") -> None:
        """Raises grpc.RpcError where nobody is there, and HandshakeError."""
        me = Party("router", name, Incarnation(int.from_bytes(os.urandom(8), "little")))
        dialer = Dialer(Keyring(secrets), path, me, os.urandom(NONCE_BYTES))
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(path)(iter(self._said.get, None))
        self.send(dialer.greet())
        self.peer, proof = dialer.answer(next(iter(self._call)))
        self.send(proof)

    def send(self, data: bytes) -> None:
        self._said.put(data)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._call)

    def close(self) -> None:
        self._said.put(None)
        self._call.cancel()
