"""Who opens a stream, and what it takes: every word of it is covered by a code that needs the secret."""

import msgspec
import pytest

from engine.handshake import (
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    Dialer,
    DialerGreeting,
    DialerProof,
    HandshakeError,
    Keyring,
    Listener,
    ListenerAnswer,
    Party,
)
from engine.types import Incarnation

OLD, NEW, WRONG = b"o" * 32, b"n" * 32, b"w" * 32
WORKER = Party("prefill", "prefill-0", Incarnation(1))
ROUTER = Party("router", "router", Incarnation(2))
PATH = "/headrace.test/Attach"
ONE, OTHER = b"1" * NONCE_BYTES, b"2" * NONCE_BYTES
encode = msgspec.msgpack.encode


def meet(
    dialers: tuple[bytes, ...], listeners: tuple[bytes, ...], path: str = PATH, there: str = PATH
) -> tuple[Party, Party]:
    dialer = Dialer(Keyring(dialers), path, ROUTER, ONE)
    listener = Listener(Keyring(listeners), there, WORKER, frozenset({"router"}), OTHER)
    found, proof = dialer.answer(listener.welcome(dialer.greet()))
    return found, listener.check(proof)


@pytest.mark.parametrize(
    ("dialers", "listeners"),
    [((OLD,), (OLD,)), ((OLD,), (NEW, OLD)), ((NEW, OLD), (OLD,)), ((NEW,), (NEW, OLD)), ((NEW, OLD), (OLD, NEW))],
)
def test_who_have_a_secret_in_common_know_each_other(
    dialers: tuple[bytes, ...], listeners: tuple[bytes, ...]
) -> None:
    """Guards a rotation: at no moment of it may a stream be refused."""
    assert meet(dialers, listeners) == (WORKER, ROUTER)


def test_a_listener_without_the_secret_learns_nothing_more() -> None:
    with pytest.raises(HandshakeError, match="'prefill-0' does not know the secret"):
        meet((OLD,), (WRONG,))


def test_a_stream_opens_this_path_alone() -> None:
    with pytest.raises(HandshakeError, match="does not know the secret"):
        meet((OLD,), (OLD,), there="/headrace.test/Other")


def test_a_proof_is_of_the_certificate_that_was_shown() -> None:
    """Guards against one that has a certificate of the same authority, but no secret, and passes on what both say."""

    def between(dialer_knows: bytes, listener_knows: bytes) -> Party:
        dialer = Dialer(Keyring((OLD,)), PATH, ROUTER, ONE, dialer_knows)
        listener = Listener(Keyring((OLD,)), PATH, WORKER, frozenset({"router"}), OTHER, listener_knows)
        _, proof = dialer.answer(listener.welcome(dialer.greet()))
        return listener.check(proof)

    assert between(b"mine", b"mine") == ROUTER
    for known in ((b"mine", b"that of another"), (b"mine", b""), (b"", b"mine")):
        with pytest.raises(HandshakeError, match="does not know the secret"):
            between(*known)
    with pytest.raises(HandshakeError, match="or somebody with another certificate is between"):
        between(b"mine", b"that of another")


def listening(secret: bytes = OLD) -> Listener:
    return Listener(Keyring((secret,)), PATH, WORKER, frozenset({"router"}), OTHER)


def greeted(listener: Listener, party: Party = ROUTER, nonce: bytes = ONE) -> ListenerAnswer:
    return msgspec.msgpack.decode(listener.welcome(encode(DialerGreeting(party, nonce))), type=ListenerAnswer)


def test_a_stranger_cannot_send_a_code_back_to_the_one_that_made_it() -> None:
    listener = listening()
    welcome = greeted(listener)
    for code in (*welcome.codes, b"", bytes(32)):
        with pytest.raises(HandshakeError, match="does not know the secret"):
            listener.check(encode(DialerProof(code)))


@pytest.mark.parametrize("changed", ["role", "name", "incarnation", "nonce", "listener", "its nonce"])
def test_a_proof_is_of_these_two_and_of_this_stream(changed: str) -> None:
    """Guards a proof that was overheard, or made for another: each word of the exchange must be covered."""
    heard = Listener(Keyring((OLD,)), PATH, WORKER, frozenset({"router", "decode"}), OTHER)
    dialer = Dialer(Keyring((OLD,)), PATH, ROUTER, ONE)
    _, proof = dialer.answer(heard.welcome(dialer.greet()))
    me = msgspec.structs.replace(WORKER, name="prefill-1") if changed == "listener" else WORKER
    nonce = b"3" * NONCE_BYTES if changed == "its nonce" else OTHER
    other = Listener(Keyring((OLD,)), PATH, me, frozenset({"router", "decode"}), nonce)
    values = {"role": "decode", "name": "other", "incarnation": Incarnation(3)}
    party = msgspec.structs.replace(ROUTER, **{changed: values[changed]}) if changed in values else ROUTER
    greeted(other, party, b"4" * NONCE_BYTES if changed == "nonce" else ONE)
    assert heard.check(proof) == ROUTER
    with pytest.raises(HandshakeError, match="does not know the secret"):
        other.check(proof)


def test_a_welcome_of_another_stream_is_not_taken() -> None:
    first = Dialer(Keyring((OLD,)), PATH, ROUTER, ONE)
    second = Dialer(Keyring((OLD,)), PATH, ROUTER, b"3" * NONCE_BYTES)
    told = listening().welcome(first.greet())
    assert first.answer(told)[0] == WORKER
    with pytest.raises(HandshakeError, match="does not know the secret"):
        second.answer(told)


def test_only_some_roles_have_business_at_a_path() -> None:
    with pytest.raises(HandshakeError, match="a decode has no business here"):
        greeted(listening(), Party("decode", "decode-0", Incarnation(3)))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff\xff",
        encode([1, 2]),
        encode(DialerProof(bytes(32))),
        encode({"type": "DialerGreeting", "party": {"role": "king", "name": "a", "incarnation": 1}, "nonce": ONE}),
        encode(DialerGreeting(ROUTER, b"short")),
        encode(DialerGreeting(msgspec.structs.replace(ROUTER, name="n" * MAX_HANDSHAKE_BYTES), ONE)),
    ],
)
def test_what_is_no_greeting_is_refused(said: bytes) -> None:
    with pytest.raises(HandshakeError):
        listening().welcome(said)


def test_what_is_no_answer_is_refused() -> None:
    dialer = Dialer(Keyring((OLD,)), PATH, ROUTER, ONE)
    right = msgspec.msgpack.decode(listening().welcome(dialer.greet()), type=ListenerAnswer)
    replace = msgspec.structs.replace
    for told in (b"\x00", encode(replace(right, nonce=b"")), encode(replace(right, codes=[]))):
        with pytest.raises(HandshakeError):
            dialer.answer(told)
    # A right one among many: no more are looked at than there can be secrets.
    many = msgspec.structs.replace(right, codes=[bytes(32), bytes(32), *right.codes])
    with pytest.raises(HandshakeError, match="does not know the secret"):
        dialer.answer(encode(many))


@pytest.mark.parametrize("life", [-1, -(1 << 63)])
def test_a_life_that_cannot_be_is_refused(life: int) -> None:
    """Guards what writes an incarnation in 64 bits, such as a transfer port's key, against one with the secret."""
    greeting = msgspec.msgpack.decode(Dialer(Keyring((OLD,)), PATH, ROUTER, ONE).greet())
    listening().welcome(encode(greeting))
    greeting["party"]["incarnation"] = life
    with pytest.raises(HandshakeError, match="incarnation"):
        listening().welcome(encode(greeting))


def test_a_proof_before_the_greeting_is_refused() -> None:
    with pytest.raises(HandshakeError, match="before the greeting"):
        listening().check(encode(DialerProof(bytes(32))))


@pytest.mark.parametrize("secrets", [(), (OLD, NEW, WRONG), (b"short",)])
def test_a_keyring_takes_one_or_two_that_cannot_be_guessed(secrets: tuple[bytes, ...]) -> None:
    keyring = Keyring((OLD,))
    with pytest.raises(ValueError, match="secret"):
        keyring.replace(secrets)
    assert keyring.valid() == (OLD,)


def test_no_secret_is_printed() -> None:
    assert OLD.decode() not in repr(Keyring((OLD,)))
