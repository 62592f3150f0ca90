"""The data connection breaks or falls silent while the control stream lives: the pair must notice, and come back."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from engine.messages import Endpoint, Handoff
from engine.types import BlockId, RequestId
from tests.transfer.pair import BLOCKS, DECODE, LAYOUT, PREFILL, H, Pair
from tests.transfer.wire import Into, whole
from transfer.handoff.commands import (
    Arrived,
    Broken,
    Connect,
    Fenced,
    Received,
    Settled,
    Unreachable,
)
from transfer.handoff.negotiation import Agreement
from transfer.host.tcp.link import header
from transfer.host.tcp.proof import CODE_BYTES, NONCE_BYTES, answer
from transfer.host.tcp.transport import TcpTransport
from transfer.transport import Move, Outcome

STALL_S = 0.3
AGAIN = Handoff(RequestId("again"), 1, 1, DECODE, PREFILL)


@contextlib.contextmanager
def opened(**options: object) -> Iterator[Pair]:
    pair = Pair("tcp", **options)  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.close()


def data_socket(pair: Pair) -> socket.socket:
    transport = pair.decode.transport
    assert isinstance(transport, TcpTransport)
    sock = transport._peers[PREFILL].incoming.sock
    assert sock is not None
    return sock


def arrives(pair: Pair, handoff: Handoff) -> None:
    pair.start(3, handoff=handoff)
    pair.offer(0, 1, handoff=handoff)
    pair.offer(2, handoff=handoff)
    pair.until(lambda: Arrived(handoff) in pair.told)
    assert all(pair.same(index) for index in range(3))


def begin_anew(pair: Pair, handoff: Handoff) -> None:
    """Do as the workers do upon `Unreachable`: the stream is dropped, what was under way is fenced, new hellos follow.
    """
    pair.at_decode(pair.receiver.peer_lost(PREFILL))
    pair.at_decode(pair.receiver.stop(handoff))
    pair.at_prefill(pair.sender.peer_lost(DECODE))
    pair.until(lambda: any(isinstance(t, Fenced) and t.handoff == handoff for t in pair.told))
    pair.until(lambda: Settled(handoff) in pair.told)
    pair.connect()
    if not pair.threaded:
        pair.turn()


def mislead(pair: Pair, deaf: socket.socket) -> None:
    """The decode worker dials `deaf`, which lets it in and says nothing."""
    details = {**pair.prefill.transport.describe(DECODE).details, "port": deaf.getsockname()[1]}
    hole = Endpoint(transport="tcp", details=details)
    pair.decode.mover.submit(Connect(PREFILL, hole, Agreement(LAYOUT)))


@pytest.mark.parametrize("threaded", [False, True])
def test_a_cut_between_two_handoffs(threaded: bool) -> None:
    """Guards against a pair that never again moves a block after its data connection broke: the first handoff behind
    the cut says so, once and before its own failure, and behind a new hello the next one is whole."""
    with opened(threaded=threaded) as pair:
        arrives(pair, H)
        data_socket(pair).shutdown(socket.SHUT_RDWR)
        cut = Handoff(RequestId("cut"), 1, 1, DECODE, PREFILL)
        pair.events.clear()
        pair.start(1, handoff=cut)
        pair.offer(0, handoff=cut)
        pair.until(lambda: any(isinstance(event, Received) for event in pair.events))
        lost = [e for e in pair.events if isinstance(e, Unreachable | Received)]
        assert [type(event) for event in lost] == [Unreachable, Received]
        assert isinstance(lost[0], Unreachable) and lost[0].peer == PREFILL
        begin_anew(pair, cut)
        arrives(pair, AGAIN)


def test_a_new_hello_alone_is_no_loss() -> None:
    """Guards against a pair that drops its new stream because the old connection was closed on purpose."""
    with opened() as pair, socket.create_server(("", 0)) as deaf:
        mislead(pair, deaf)
        pair.start(1)
        pair.offer(0)
        pair.until(lambda: pair.decode.mover.outstanding == 1)
        pair.connect()
        pair.until(lambda: any(isinstance(event, Received) for event in pair.events))
        (received,) = [event for event in pair.events if isinstance(event, Received)]
        assert received.error == "disconnected"
        assert not any(isinstance(event, Unreachable) for event in pair.events)


def test_a_peer_that_accepts_and_says_nothing() -> None:
    """Guards against a receive that never ends, with blocks kept on both sides, where the data path swallows all."""
    with opened(threaded=True, stall_s=STALL_S) as pair, socket.create_server(("", 0)) as deaf:
        mislead(pair, deaf)
        pair.start(1)
        began_s = time.monotonic()
        pair.offer(0)
        pair.until(lambda: any(isinstance(told, Broken) for told in pair.told))
        # The thread looks once a second, and the machine may be busy.
        assert STALL_S <= time.monotonic() - began_s < STALL_S + 5
        with deaf.accept()[0] as dialled:
            assert dialled.recv(8), "nobody dialled: the fault did not take effect"
        (broken,) = [told for told in pair.told if isinstance(told, Broken)]
        assert "nothing came for 0.3 s" in broken.why
        begin_anew(pair, H)
        assert pair.prefill.mover.outstanding == pair.decode.mover.outstanding == 0
        arrives(pair, AGAIN)


class Slow:
    """A peer that is a listening socket and no more, and whose key is known to the one that dials it."""

    def __init__(self, pair: Pair, listener: socket.socket) -> None:
        self.transport = TcpTransport(pair.decode.pool, DECODE, "127.0.0.1", STALL_S)
        details = {**self.transport.describe(PREFILL).details, "port": listener.getsockname()[1]}
        self.transport.connect(PREFILL, Endpoint(transport="tcp", details=details), *[whole(LAYOUT)] * 2)
        move = Move(H, 0, remote=((BlockId(0), 0),))
        self.ticket = self.transport.recv(PREFILL, move, Into(pair.decode.pool, [BLOCKS - 1]))
        self.sock = listener.accept()[0]
        self.transport.poll(1.0)
        self.answer = answer(bytes.fromhex(details["key"]), self.sock.recv(4096), bytes(NONCE_BYTES))
        self.frame = header(move, 1, LAYOUT.block_bytes) + bytes(LAYOUT.block_bytes) + b"\x01"

    def close(self) -> None:
        self.transport.close()
        self.sock.close()


def test_slow_is_not_silent() -> None:
    """Guards against a limit on the whole transfer: bytes that keep coming, however slowly, are waited for."""
    with opened() as pair, socket.create_server(("", 0)) as listener, contextlib.closing(Slow(pair, listener)) as slow:
        transport = slow.transport
        slow.sock.send(slow.answer)
        transport.poll(1.0)
        assert len(slow.sock.recv(4096)) == CODE_BYTES
        began_s = time.monotonic()
        ended = []
        for byte in range(20):
            slow.sock.send(slow.frame[byte : byte + 1])
            ended += transport.poll(0.0)
            time.sleep(STALL_S / 10)
        assert time.monotonic() - began_s > 1.5 * STALL_S and not ended
        slow.sock.sendall(slow.frame[20:])
        while not ended:
            ended = transport.poll(1.0)
        assert (ended[0].ticket, ended[0].outcome) == (slow.ticket, Outcome.DONE)


def test_a_proof_that_comes_by_the_byte_is_not_waited_for() -> None:
    """Guards a receive from one that answers for ever without ever proving itself: only blocks' bytes are progress."""
    with opened() as pair, socket.create_server(("", 0)) as listener, contextlib.closing(Slow(pair, listener)) as slow:
        began_s, said, ended = time.monotonic(), 0, []
        while not ended:
            assert said < len(slow.answer) - 1, "it is waited for"
            with contextlib.suppress(ConnectionError):
                slow.sock.send(slow.answer[said : said + 1])
            said += 1
            ended = slow.transport.poll(0.0)
            time.sleep(STALL_S / 10)
        assert time.monotonic() - began_s >= STALL_S and said > 5
        assert (ended[0].ticket, ended[0].outcome) == (slow.ticket, Outcome.LOST)
        assert "nothing came" in ended[0].error
