"""Who is let in where KV bytes leave: the one that was told its token, and nobody in its name."""

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from engine.types import Incarnation
from transfer.host.tcp.door import Door, DoorAddress, greeting, listen
from transfer.reactor import Reactor

ME, ONE, OTHER = Incarnation(1), Incarnation(2), Incarnation(3)
TURNS = 50


class Listening:
    def __init__(self) -> None:
        self.reactor = Reactor()
        self.admitted: list[Incarnation] = []
        self.door = Door(listen("127.0.0.1"), ME, self.reactor, 10.0, self._admit)

    def _admit(self, dialer: Incarnation, sock: socket.socket) -> bool:
        self.admitted.append(dialer)
        sock.close()
        return True

    def address(self, peer: Incarnation) -> DoorAddress:
        return self.door.address("127.0.0.1", 64, peer)

    def come(self, address: DoorAddress, dialer: Incarnation, wanted: Incarnation = ME) -> list[Incarnation]:
        """Dial with that token, in that name; return who was let in."""
        self.admitted.clear()
        with closing(socket.create_connection((address.host, address.port), 5.0)) as sock:
            sock.sendall(greeting(address, dialer, wanted))
            for _ in range(TURNS):
                self.reactor.wait(0.01)
        return list(self.admitted)


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening()
    yield found
    found.door.close()
    found.reactor.close()


def test_a_token_lets_in_the_one_that_was_told_it(listening: Listening) -> None:
    """Guards a request's KV: with one token for all, any peer, and whoever had it from a peer, could take over the
    connection of another and read what was sent there."""
    mine, others = listening.address(ONE), listening.address(OTHER)
    assert mine.token != others.token and mine.token == listening.address(ONE).token
    assert listening.come(mine, ONE) == [ONE]
    assert listening.come(mine, OTHER) == listening.come(others, ONE) == []
    assert listening.come(mine, ONE, wanted=OTHER) == []


def test_another_life_has_other_tokens(listening: Listening) -> None:
    before = listening.address(ONE).token
    again = Listening()
    try:
        assert again.address(ONE).token != before
    finally:
        again.door.close()
        again.reactor.close()
