"""Who is called when which descriptor is readable. Transports that wait on it are in test_conformance.py, connections
that break in test_faults.py and tests/transfer/host/test_broken_way.py."""

import select
import selectors
import socket
from collections.abc import Iterator

import pytest

from transfer.reactor import Reactor


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_what_is_due_is_done(ends: tuple[socket.socket, socket.socket]) -> None:
    reactor, done = Reactor(), list[str]()
    reactor.watch(ends[0], lambda: done.append(ends[0].recv(10).decode()))
    reactor.wait(0.0)
    assert not done
    ends[1].send(b"news")
    assert select.select([reactor], [], [], 10.0)[0], "one descriptor stands for all"
    reactor.wait(10.0)
    assert done == ["news"]
    reactor.unwatch(ends[0])
    reactor.unwatch(ends[0])
    ends[1].send(b"more")
    reactor.wait(0.0)
    assert done == ["news"] and not reactor.is_watched(ends[0])
    reactor.close()


def test_its_own_bell_is_hushed_when_it_has_woken() -> None:
    """Guards a thread that spins: a bell that nobody hushes is readable for ever."""
    reactor = Reactor()
    reactor.ring()
    assert select.select([reactor], [], [], 0.0)[0]
    reactor.wait(10.0)
    assert not select.select([reactor], [], [], 0.0)[0]
    reactor.close()


def test_a_socket_is_writable_only_for_who_asks(ends: tuple[socket.socket, socket.socket]) -> None:
    reactor, done = Reactor(), list[str]()
    reactor.watch(ends[0], lambda: done.append("turn"))
    reactor.wait(0.0)
    assert not done
    reactor.rewatch(ends[0], selectors.EVENT_READ | selectors.EVENT_WRITE)
    reactor.wait(10.0)
    reactor.rewatch(ends[0], selectors.EVENT_READ)
    reactor.wait(0.0)
    assert done == ["turn"]
    reactor.close()
