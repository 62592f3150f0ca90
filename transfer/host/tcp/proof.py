"""How the two ends of a data connection prove to each other that they are those to whom its key is known. Pure.

A listener makes a key for each peer, and tells it to that peer alone, on the stream on which both have proven role,
name and incarnation (`engine/handshake.py`). The key never crosses the connection that it opens:

    dialer   -> listener   greeting   MAGIC, who it is, whom it means to reach, and a nonce
    listener -> dialer     answer     a nonce, and its code
    dialer   -> listener   proof      its code

A code is an HMAC-SHA-256 under the key, over the side that speaks, the greeting and the listener's nonce. So it is of
this connection alone, between these two lives, and cannot be sent back to the one that made it. The listener's comes
first: whoever sits at a port that was another's hears two incarnations and a nonce, and nothing that opens a door. The
listener's own code, which anybody may ask for, tells nothing of a key of 32 bytes that was drawn.

The proof is of a connection's beginning, as that of the streams is. Ends of another version do not understand each
other's endpoints, so none of them dials (`DoorAddress`).
"""

import hmac
import struct

from engine.types import Incarnation
from transfer.transport import TransferError

MAGIC = b"HRKVTCP2"
KEY_BYTES = 32
NONCE_BYTES = 32
CODE_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + CODE_BYTES
_GREETING = struct.Struct(f"<8sQQ{NONCE_BYTES}s")
GREETING_BYTES = _GREETING.size


class ProofError(TransferError):
    """Whoever answers has not proven that it is the peer, or nobody could."""


def greeting(dialer: Incarnation, wanted: Incarnation, nonce: bytes) -> bytes:
    """Return what the one that dials says first. `nonce` is NONCE_BYTES that nobody could have guessed. Raises
    ProofError for an incarnation that no process can have."""
    try:
        return _GREETING.pack(MAGIC, dialer, wanted, nonce)
    except struct.error as error:
        raise ProofError(f"there are no {dialer} and {wanted} to meet: {error}") from error


def greeted(said: bytes) -> tuple[Incarnation, Incarnation] | None:
    """Return who has greeted and whom it means to reach; None where that is no greeting. It has proven nothing."""
    if len(said) != GREETING_BYTES:
        return None
    magic, dialer, wanted, _ = _GREETING.unpack(said)
    return (Incarnation(dialer), Incarnation(wanted)) if magic == MAGIC else None


def answer(key: bytes, said: bytes, nonce: bytes) -> bytes:
    """Return the listener's answer to the greeting `said`."""
    return nonce + _code(key, b"listener", said, nonce)


def proof(key: bytes, said: bytes, heard: bytes) -> bytes:
    """Return the dialer's proof, once the answer `heard` has proven the listener. Raises ProofError."""
    nonce, code = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
    if not hmac.compare_digest(code, _code(key, b"listener", said, nonce)):
        raise ProofError("whoever listens there is not the peer: it does not know the key")
    return _code(key, b"dialer", said, nonce)


def is_proven(key: bytes, said: bytes, answered: bytes, code: bytes) -> bool:
    """Say whether `code` is the proof of the one that has said `said` and was told `answered`."""
    return hmac.compare_digest(code, _code(key, b"dialer", said, answered[:NONCE_BYTES]))


def _code(key: bytes, side: bytes, said: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + said + nonce, "sha256")
