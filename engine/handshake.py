"""How two of our own processes prove to each other that they belong to one cluster, before either says anything else.
Pure.

Every stream between router and workers begins with three frames:

    dialer   -> listener   DialerGreeting   who it is, and a nonce
    listener -> dialer     ListenerAnswer   who it is, a nonce, and one code for each secret that is valid there
    dialer   -> listener   DialerProof      one code, under a secret that both have

A code is an HMAC-SHA-256 under the cluster's secret, over the stream's path, the side that speaks, both nonces, and
role, name and incarnation of both: so it opens this stream alone, between these two, and cannot be sent back to the one
that made it. Where the stream has TLS, it also covers the digest of the certificate that the dialer shows, so that
nobody who has another certificate can stand between them. Whoever does not have a secret learns a role, a name and an
incarnation, and nothing else. While a secret is replaced by another, both are valid, and it does not matter who has
heard of the new one.

The proof is of the stream's beginning. Who can rewrite packets between two hosts can speak in a stream that others have
opened: against that stands TLS, or a network that encrypts between hosts (docs/security.md).
"""

import hmac
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import msgspec

from engine.messages import guarded
from engine.types import Incarnation

PartyRole = Literal["router", "prefill", "decode"]
S = TypeVar("S", bound=msgspec.Struct)

NONCE_BYTES = 32
SECRET_BYTES = 32
"""The fewest bytes of a secret, since whoever greets a worker gets a code to guess it by."""
MAX_SECRETS = 2
MAX_HANDSHAKE_BYTES = 4096
HANDSHAKE_S = 5.0
"""The time in which the other end must have proven itself."""
_VERSION = b"headrace channel 1"
LIVES = 1 << 64
"""Incarnations have 64 bits, wherever they are written as such."""


class HandshakeError(Exception):
    """The other end has not proven that it belongs to this cluster, or is not the one that was meant."""


class Keyring:
    """The secrets that are valid now, the newest first. May be read and replaced from any thread."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        """Raises ValueError, as `replace` does."""
        self.replace(secrets)

    def __repr__(self) -> str:
        return f"Keyring({len(self._secrets)} secrets)"

    def replace(self, secrets: tuple[bytes, ...]) -> None:
        """Raises ValueError for none, for too many, and for one that could be guessed."""
        if not 0 < len(secrets) <= MAX_SECRETS:
            raise ValueError(f"one secret is valid, or two while one replaces the other, not {len(secrets)}")
        if any(len(secret) < SECRET_BYTES for secret in secrets):
            raise ValueError(f"a secret must have at least {SECRET_BYTES} bytes")
        self._secrets = secrets

    def valid(self) -> tuple[bytes, ...]:
        return self._secrets


class Secrets(Protocol):
    """Fulfilled by `Keyring`, and by a file that is read again when it changes (`cluster.secret`)."""

    def valid(self) -> tuple[bytes, ...]: ...


class Party(msgspec.Struct, frozen=True):
    """One end of a stream."""

    role: PartyRole
    name: str
    incarnation: Incarnation

    def __post_init__(self) -> None:
        """Raises ValueError, which a decoder says of what it was given."""
        if not 0 <= self.incarnation < LIVES:
            raise ValueError(f"no process has the incarnation {self.incarnation}")

    def is_called(self, role: str, name: str, incarnation: Incarnation) -> bool:
        """Say whether it is this one of whom a record speaks."""
        return (self.role, self.name, self.incarnation) == (role, name, incarnation)


class DialerGreeting(msgspec.Struct, frozen=True, tag=True):
    party: Party
    nonce: bytes


class ListenerAnswer(msgspec.Struct, frozen=True, tag=True):
    party: Party
    nonce: bytes
    codes: list[bytes]


class DialerProof(msgspec.Struct, frozen=True, tag=True):
    code: bytes


_encode = msgspec.msgpack.Encoder().encode
_greeting = guarded(msgspec.msgpack.Decoder(DialerGreeting).decode)
_answer = guarded(msgspec.msgpack.Decoder(ListenerAnswer).decode)
_proof = guarded(msgspec.msgpack.Decoder(DialerProof).decode)


class _Exchange(msgspec.Struct, frozen=True):
    """All that both ends have said, which a code covers."""

    path: str
    dialer: DialerGreeting
    party: Party
    nonce: bytes
    channel: bytes

    def code(self, secret: bytes, side: str) -> bytes:
        said = _encode((_VERSION, side, self.path, self.dialer, self.party, self.nonce, self.channel))
        return hmac.digest(secret, said, "sha256")


class Dialer:
    """The end that opens a stream. `nonce` is NONCE_BYTES that nobody could have guessed, `channel` what both ends know
    of the encryption below: empty where there is none."""

    def __init__(self, secrets: Secrets, path: str, me: Party, nonce: bytes, channel: bytes = b"") -> None:
        self._secrets = secrets
        self._path = path
        self._greeting = DialerGreeting(me, nonce)
        self._channel = channel

    def greet(self) -> bytes:
        return _encode(self._greeting)

    def answer(self, data: bytes) -> tuple[Party, bytes]:
        """Return who has welcomed us, and our proof. Raises HandshakeError."""
        told = _read(data, _answer)
        exchange = _Exchange(self._path, self._greeting, told.party, _nonce(told.nonce), self._channel)
        for secret in self._secrets.valid():
            if _is_among(exchange.code(secret, "listener"), told.codes):
                return told.party, _encode(DialerProof(exchange.code(secret, "dialer")))
        raise HandshakeError(_refusal(told.party, self._channel))


class Listener:
    """The end at which a stream is opened, by one of `roles`. `nonce` and `channel` are as the dialer's are."""

    def __init__(
        self,
        secrets: Secrets,
        path: str,
        me: Party,
        roles: frozenset[PartyRole],
        nonce: bytes,
        channel: bytes = b"",
    ) -> None:
        self._secrets = secrets
        self._path = path
        self._me = me
        self._roles = roles
        self._nonce = nonce
        self._channel = channel
        self._exchange: _Exchange | None = None

    def welcome(self, data: bytes) -> bytes:
        """Answer a greeting. Raises HandshakeError."""
        told = _read(data, _greeting)
        _nonce(told.nonce)
        if told.party.role not in self._roles:
            raise HandshakeError(f"a {told.party.role} has no business here")
        self._exchange = exchange = _Exchange(self._path, told, self._me, self._nonce, self._channel)
        codes = [exchange.code(secret, "listener") for secret in self._secrets.valid()]
        return _encode(ListenerAnswer(self._me, self._nonce, codes))

    def check(self, data: bytes) -> Party:
        """Return who has greeted us, once it has proven itself. Raises HandshakeError."""
        exchange, told = self._exchange, _read(data, _proof)
        if exchange is None:
            raise HandshakeError("a proof came before the greeting")
        codes = [exchange.code(secret, "dialer") for secret in self._secrets.valid()]
        party = exchange.dialer.party
        if not _is_among(told.code, codes):
            raise HandshakeError(_refusal(party, self._channel))
        return party


def _refusal(party: Party, channel: bytes) -> str:
    between = ", or somebody with another certificate is between" if channel else ""
    return f"{party.role} {party.name!r} does not know the secret of this cluster{between}"


def _read(data: bytes, decode: Callable[[bytes], S]) -> S:
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise HandshakeError(f"its {len(data)} bytes are no handshake")
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"what it says is no handshake: {error}") from error


def _nonce(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise HandshakeError(f"its nonce has {len(nonce)} bytes, not {NONCE_BYTES}")
    return nonce


def _is_among(code: bytes, codes: list[bytes]) -> bool:
    """Compare in a time that does not depend on the bytes."""
    return any([hmac.compare_digest(code, one) for one in codes[:MAX_SECRETS]])
