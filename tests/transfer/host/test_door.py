"""Who is let in where KV bytes leave, and whom the one that dials believes: those between whom a key was told, and
nobody in their name."""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from engine.messages import Endpoint
from engine.types import Incarnation
from tests.transfer.pair import DECODE, LAYOUT, Pair
from tests.transfer.wire import whole
from transfer.host.tcp.door import MAX_STRANGERS, Door, DoorAddress, Knock, dial, listen, peer_door, resolve
from transfer.host.tcp.proof import (
    ANSWER_BYTES,
    CODE_BYTES,
    GREETING_BYTES,
    MAGIC,
    NONCE_BYTES,
    ProofError,
    answer,
    greeting,
    proof,
)
from transfer.mover import IDLE_LOOK_S
from transfer.reactor import Reactor
from transfer.transport import TransferError

ME, ONE, OTHER = Incarnation(1), Incarnation(2), Incarnation(3)
STALL_S = 10.0
TURNS = 6
NONCE = bytes(range(NONCE_BYTES))


class Listening:
    def __init__(self) -> None:
        self.reactor = Reactor()
        self.admitted: list[Incarnation] = []
        self._inside: list[socket.socket] = []
        self.door = Door(listen("127.0.0.1"), ME, self.reactor, STALL_S, self._admit)
        self.there = self.door.address(64, ONE)

    def _admit(self, dialer: Incarnation, sock: socket.socket) -> bool:
        self.admitted.append(dialer)
        self._inside.append(sock)
        return True

    def close(self) -> None:
        self.door.close()
        self.reactor.close()
        for sock in self._inside:
            sock.close()

    def address(self, peer: Incarnation) -> DoorAddress:
        return self.door.address(64, peer)

    def turn(self, turns: int = TURNS) -> None:
        for _ in range(turns):
            self.reactor.wait(0.005)

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        with socket.create_connection((self.there.host, self.there.port), 5.0) as sock:
            yield sock

    def hears(self, sock: socket.socket, said: bytes, most: int = ANSWER_BYTES) -> bytes | None:
        """Say it; return what comes back, None once the connection is closed."""
        with contextlib.suppress(OSError):
            sock.sendall(said)
        self.turn()
        sock.setblocking(False)
        try:
            return sock.recv(most) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None
        finally:
            sock.setblocking(True)

    def come(self, key: bytes, dialer: Incarnation, wanted: Incarnation = ME) -> list[Incarnation]:
        """Come with that key, in that name, and say the proof whoever answers; return who was let in."""
        self.admitted.clear()
        with self.stranger() as sock:
            said = greeting(dialer, wanted, NONCE)
            heard = self.hears(sock, said)
            if heard:
                self.hears(sock, _proof_anyhow(key, said, heard))
        self.turn()
        return list(self.admitted)


def _proof_anyhow(key: bytes, said: bytes, heard: bytes) -> bytes:
    """A dialer that does not care whom it has reached."""
    return proof(key, said, answer(key, said, heard[:NONCE_BYTES]))


def _key(address: DoorAddress) -> bytes:
    return bytes.fromhex(address.key)


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening()
    yield found
    found.close()


def test_a_key_lets_in_the_one_that_was_told_it(listening: Listening) -> None:
    """Guards a request's KV: with one key for all, any peer, and whoever had it from a peer, could take over the
    connection of another and read what was sent there."""
    mine, others = listening.address(ONE), listening.address(OTHER)
    assert mine.key != others.key and mine.key == listening.address(ONE).key
    assert listening.come(_key(mine), ONE) == [ONE]
    assert listening.come(_key(mine), OTHER) == listening.come(_key(others), ONE) == []
    assert listening.come(_key(mine), ONE, wanted=OTHER) == []
    assert listening.come(bytes(32), ONE) == []


def test_another_life_has_other_keys(listening: Listening) -> None:
    before = listening.address(ONE).key
    again = Listening()
    try:
        assert again.address(ONE).key != before
    finally:
        again.close()


def test_what_was_overheard_opens_nothing(listening: Listening) -> None:
    """Guards against one that has seen a whole connection begin: a key that is shown, or a proof without the listener's
    nonce, would let it in for as long as the listener lives."""
    with listening.stranger() as sock:
        said = greeting(ONE, ME, NONCE)
        heard = listening.hears(sock, said)
        assert heard
        code = proof(_key(listening.there), said, heard)
        listening.hears(sock, code)
    assert listening.admitted == [ONE], "nothing is shown"
    assert _key(listening.there) not in said + heard + code
    listening.admitted.clear()
    with listening.stranger() as sock:
        again = listening.hears(sock, said)
        assert again and again != heard, "the listener's nonce is the same"
        assert listening.hears(sock, code) is None
    with listening.stranger() as sock:
        assert listening.hears(sock, said + code, most=1024) != b"", "both at once"
    listening.turn()
    assert listening.admitted == []


def test_what_the_listener_says_is_no_proof_to_it(listening: Listening) -> None:
    """Guards against a code that is of no side: the listener would tell every stranger what opens its door."""
    with listening.stranger() as sock:
        heard = listening.hears(sock, greeting(ONE, ME, NONCE))
        assert heard and len(heard) == ANSWER_BYTES
        assert listening.hears(sock, heard[NONCE_BYTES:]) is None
    assert listening.admitted == []


def test_a_peer_is_told_an_address_and_never_a_name() -> None:
    """Guards the transfer thread, which would wait for a name server as long as that does not answer."""
    reactor = Reactor()
    door = Door(listen("localhost"), ME, reactor, STALL_S, lambda dialer, sock: False)
    try:
        told = door.address(64, ONE)
        family, (host, port) = resolve(told)
        assert host == told.host in ("127.0.0.1", "::1") and port == told.port
        dial((family, (host, port)), STALL_S).close()
    finally:
        door.close()
        reactor.close()


def test_a_name_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a worker against a peer that names a host for which no name server answers."""
    found = socket.getaddrinfo

    def by_number_alone(host: str, *rest: Any, flags: int = 0, **more: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST, f"a name server is asked for {host}"
        return found(host, *rest, flags=flags, **more)

    monkeypatch.setattr(socket, "getaddrinfo", by_number_alone)
    with pytest.raises(TransferError, match="cannot find 'localhost'"):
        resolve(DoorAddress("localhost", 4000, "07" * 32, 64))
    assert resolve(DoorAddress("::1", 4000, "07" * 32, 64)) == (socket.AF_INET6, ("::1", 4000))


class Answering:
    """Somebody who listens at a port that was a peer's, and the dialer that believes it is."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.key = "07" * 32
        here = DoorAddress("127.0.0.1", self.listener.getsockname()[1], self.key, 64)
        self.sock = dial(resolve(here), STALL_S)
        self.knock = Knock(self.sock, self.key, ONE, ME)
        self.there, _ = self.listener.accept()
        assert not self.knock.step()
        self.said = self.there.recv(4096)

    def tell(self, said: bytes) -> bool:
        self.there.sendall(said)
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            selector.select(5.0)
        return self.knock.step()

    def close(self) -> None:
        for sock in (self.there, self.sock, self.listener):
            sock.close()


@pytest.fixture
def answering() -> Iterator[Answering]:
    found = Answering()
    yield found
    found.close()


def test_the_peer_is_believed_and_nothing_of_what_it_says_next_is_lost(answering: Answering) -> None:
    told = answer(bytes.fromhex(answering.key), answering.said, NONCE)
    assert answering.tell(told + b"blocks")
    assert len(answering.there.recv(4096)) == CODE_BYTES and answering.sock.recv(4096) == b"blocks"


_WRONG: dict[str, Callable[[bytes, bytes], bytes]] = {
    "another key": lambda key, said: answer(bytes(32), said, NONCE),
    "another connection's answer": lambda key, said: answer(key, greeting(ONE, ME, NONCE), NONCE),
    "an answer to another life": lambda key, said: answer(key, greeting(OTHER, ME, said[-NONCE_BYTES:]), NONCE),
    "an answer of another life": lambda key, said: answer(key, greeting(ONE, OTHER, said[-NONCE_BYTES:]), NONCE),
    "another nonce than the code's": lambda key, said: bytes(NONCE_BYTES) + answer(key, said, NONCE)[NONCE_BYTES:],
    "what a dialer would say": lambda key, said: NONCE + proof(key, said, answer(key, said, NONCE)),
    "what it has said itself": lambda key, said: said + bytes(ANSWER_BYTES - len(said)),
}


@pytest.mark.parametrize("wrong", list(_WRONG))
def test_a_false_listener_learns_nothing_and_is_refused(answering: Answering, wrong: str) -> None:
    """Guards a dialer whose peer's port has come to somebody else: it would read blocks of their making, and with a key
    that is shown it would hand over what opens the peer's door."""
    key = bytes.fromhex(answering.key)
    assert len(answering.said) == GREETING_BYTES and key not in answering.said
    with pytest.raises(ProofError, match="not the peer"):
        answering.tell(_WRONG[wrong](key, answering.said))
    answering.there.setblocking(False)
    with pytest.raises(BlockingIOError):
        answering.there.recv(1)


def test_every_attempt_has_a_nonce_of_its_own(answering: Answering) -> None:
    other = Answering()
    try:
        assert other.said[:-NONCE_BYTES] == answering.said[:-NONCE_BYTES]
        assert other.said[-NONCE_BYTES:] != answering.said[-NONCE_BYTES:]
    finally:
        other.close()


def test_what_comes_byte_by_byte_is_put_together(listening: Listening, answering: Answering) -> None:
    said = greeting(ONE, ME, NONCE)
    with listening.stranger() as sock:
        for at in range(GREETING_BYTES - 1):
            assert listening.hears(sock, said[at : at + 1]) == b""
        heard = listening.hears(sock, said[-1:])
        assert heard and len(heard) == ANSWER_BYTES
        code = proof(_key(listening.there), said, heard)
        for at in range(CODE_BYTES):
            assert not listening.admitted
            assert listening.hears(sock, code[at : at + 1]) == b""
        assert listening.admitted == [ONE]
    told = answer(bytes.fromhex(answering.key), answering.said, NONCE)
    assert [answering.tell(told[at : at + 1]) for at in range(ANSWER_BYTES)] == [False] * (ANSWER_BYTES - 1) + [True]


@pytest.mark.parametrize("greets", [False, True], ids=["silent", "greeted"])
def test_one_that_proves_nothing_has_its_time(listening: Listening, greets: bool) -> None:
    """Guards descriptors from one that says nothing, or goes on a byte at a time, for as long as the worker lives."""
    with listening.stranger() as sock, listening.stranger() as later:
        before_s = time.monotonic()
        assert listening.hears(sock, greeting(ONE, ME, NONCE) + b"x" if greets else b"H") is not None
        listening.door.step(before_s)
        assert listening.hears(sock, b"x") is not None, "it has time left"
        listening.door.step(time.monotonic() + STALL_S + 0.01)
        assert listening.hears(sock, b"x", 1024) is None and listening.hears(later, b"x") is None
    assert listening.come(_key(listening.there), ONE) == [ONE]


def test_those_that_have_greeted_are_held_to_their_number(listening: Listening) -> None:
    """Guards against a flood of those that go half the way: one leaves for each that is too many, and a true peer still
    comes in."""
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(listening.stranger()) for _ in range(MAX_STRANGERS + 5)]
        answers = [listening.hears(sock, greeting(OTHER, ME, NONCE)) for sock in flood]
        assert len(set(filter(None, answers))) >= MAX_STRANGERS, "nobody was answered: nothing is shown"
        assert [listening.hears(sock, b"x") for sock in flood].count(None) >= 5
        assert listening.come(_key(listening.there), ONE) == [ONE]


def test_those_that_say_nothing_leave_before_one_that_has_greeted(listening: Listening) -> None:
    """Guards a true peer, between its greeting and its proof, against a flood that knows nothing of this life."""
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(listening.stranger())
        heard = listening.hears(peer, said := greeting(ONE, ME, NONCE))
        assert heard is not None and len(heard) == ANSWER_BYTES
        flood = [stack.enter_context(listening.stranger()) for _ in range(MAX_STRANGERS + 5)]
        listening.turn(len(flood))
        assert listening.hears(flood[0], b"") is None, "nobody had to leave: nothing is shown"
        listening.hears(peer, proof(_key(listening.there), said, heard))
        assert listening.admitted == [ONE]


@pytest.mark.parametrize("kind", ["tcp"])
def test_a_stranger_at_an_idle_workers_door_has_its_time(kind: str) -> None:
    """Guards a transfer thread that sleeps for as long as it has nothing to do: then nobody would look at the clock."""
    pair = Pair(kind, threaded=True, stall_s=0.5)
    try:
        details = pair.prefill.way.describe(DECODE).details
        began_s = time.monotonic()
        with socket.create_connection((details["host"], details["port"]), 5.0) as sock:
            sock.settimeout(0.5 + 5 * IDLE_LOOK_S)
            assert sock.recv(1) == b"" and time.monotonic() - began_s > 0.4
        assert pair.prefill.mover.outstanding == 0
    finally:
        pair.close()


@pytest.mark.parametrize(
    "said",
    [
        b"HRKVTCP1" + greeting(ONE, ME, NONCE)[len(MAGIC) :],
        bytes(GREETING_BYTES),
        greeting(ONE, OTHER, NONCE),
        greeting(ONE, ME, NONCE)[:-1],
    ],
    ids=["an older release", "zeros", "for another life", "cut short"],
)
def test_what_is_no_greeting_hears_nothing(listening: Listening, said: bytes) -> None:
    with listening.stranger() as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert listening.hears(sock, b"") is None
    assert not listening.admitted


def test_an_older_release_is_no_way_and_is_shown_nothing() -> None:
    """Guards a key against a neighbour that would send it in the clear: neither end takes the other's endpoint."""
    assert "token" not in msgspec.structs.asdict(DoorAddress("127.0.0.1", 1, "00" * 32, 64))
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        theirs.setblocking(False)
        older = {"host": "127.0.0.1", "port": theirs.getsockname()[1], "token": "00" * 32, "block_bytes": 64}
        with pytest.raises(TransferError, match="key"):
            peer_door(Endpoint(transport="tcp", details=older), DoorAddress, whole(LAYOUT))
        with pytest.raises(BlockingIOError):
            theirs.accept()
