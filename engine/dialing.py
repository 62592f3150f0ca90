"""The dialer's part in a stream's beginning, over whatever carries its frames: what `engine.handshake` says, sent and
awaited. Of the router's streams to its workers and of those between workers."""

import asyncio
import os
from contextlib import suppress
from typing import Protocol

from engine.handshake import HANDSHAKE_S, NONCE_BYTES, Dialer, HandshakeError, Party, Secrets


class FrameStream(Protocol):
    """An open stream. A read behind its end returns what is no bytes; gRPC's own are such."""

    async def write(self, request: bytes, /) -> None: ...

    async def read(self) -> object: ...


async def prove(stream: FrameStream, secrets: Secrets, path: str, me: Party, channel: bytes = b"") -> Party:
    """Say who we are at the beginning of a stream that we have opened at `path`; return who the other end has proven to
    be. `channel` is as the `Dialer`'s. Raises HandshakeError, TimeoutError where it does not answer, and what the
    stream raises where nobody is there."""
    dialer = Dialer(secrets, path, me, os.urandom(NONCE_BYTES), channel)
    async with asyncio.timeout(HANDSHAKE_S):
        with suppress(asyncio.InvalidStateError):  # it has ended, and the read says why
            await stream.write(dialer.greet())
        told = await stream.read()
        if not isinstance(told, bytes):
            raise HandshakeError("it closed the stream")
        peer, proof = dialer.answer(told)
        with suppress(asyncio.InvalidStateError):
            await stream.write(proof)
    return peer
