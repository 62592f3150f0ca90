"""What peers say: frames between workers and routers, endpoints, greetings, frames of blocks, control messages."""

import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import closing
from functools import cache

import msgspec
import numpy as np

from cluster.processes.child import decode_call, decode_report
from engine.messages import (
    BlockOffer,
    Cancel,
    DecodeToPrefill,
    Ended,
    Endpoint,
    Fault,
    FirstToken,
    Handoff,
    Hello,
    Landed,
    Load,
    Offer,
    Orphan,
    PeerAddress,
    Place,
    Record,
    RequestStats,
    RouterHello,
    StartPrefill,
    Tokens,
    WorkerInfo,
    decode_from_prefill_frame,
    decode_router_frame,
    decode_to_prefill_frame,
    decode_worker_frame,
    encode,
)
from engine.storage.paged import header_bytes
from engine.text.messages import ChatMessage, ChatPrompt
from engine.types import BlockId, FinishReason, Incarnation, RequestId, RequestRecord
from router.front.resume import Context, pack, unpack
from telemetry.tracing import sound
from tests.fuzz.judge import Decoder
from transfer.handoff.negotiation import NegotiationError, negotiate
from transfer.host.peer_file import PoolFileDetails, peer_pool_file
from transfer.host.shm import _Mapping
from transfer.host.tcp.door import Door, DoorAddress, Knock, listen, peer_door
from transfer.host.tcp.link import InLink, header
from transfer.host.tcp.proof import ANSWER_BYTES, CODE_BYTES, ProofError, greeting
from transfer.nccl.wire import BuildCommunicator, Go, Ready, Welcome, Wire
from transfer.reactor import Reactor
from transfer.transport import BlockSlice, Move, Ticket, TransferError

H = Handoff(RequestId("r"), 1, 1, Incarnation(2), Incarnation(1))
RECORD = RequestRecord(request=RequestId("r"), tokens=[1, 2, 3], prompt_tokens=3, max_tokens=4, seed=5, context=b"c")
INFO = WorkerInfo(
    name="prefill-0",
    role="prefill",
    incarnation=Incarnation(1),
    address="127.0.0.1:1",
    model="tiny",
    fingerprint="f",
    block_size=16,
    blocks=8,
    context_tokens=64,
    pid=1,
    host="h",
)
LAYOUT = {"kv_heads": 2, "layers": 2, "block_size": 16, "head_dim": 8, "dtype": "float32"}
HELLO = Hello(info=INFO, layout=LAYOUT, endpoints=[Endpoint(transport="tcp", details={"host": "a", "port": 1})])
BLOCK_BYTES = 64
SLICE = BlockSlice(0, BLOCK_BYTES, BLOCK_BYTES)
MOVE = Move(H, 0)


def _nested(before: bytes, unit: bytes) -> bytes:
    return before + unit * 100_000


_DEEP = _nested(b"\x91\x82\xa4type\xa5Hello\xa6layout", b"\x81\xa1a")
"""A layout in a layout in a layout: msgspec gives up with RecursionError."""
_EXTENSION = encode([HELLO]).replace(b"\xa4host\xa1a", b"\xa4host\xd4\xa1a")
"""An endpoint whose host is a value of an extension type: it would be read, and not be what is sent on."""
_NOT_UTF8 = b"\x91\x83\xa4type\xa6Cancel\xa7request\xa1\xff\xa9placement\x01"


def _frame(name: str, decode: Callable[[bytes], list[Record]], *seeds: list[Record]) -> Decoder:
    def feed(data: bytes) -> None:
        records = decode(data)
        # What has come in can go out again: a router passes records on.
        assert repr(decode(encode(records))) == repr(records)

    inputs = tuple(map(encode, seeds))
    return Decoder(name, feed, (msgspec.MsgspecError,), inputs, (_DEEP, _NOT_UTF8, _EXTENSION))


def _hello(data: bytes) -> None:
    for record in decode_to_prefill_frame(data):
        if isinstance(record, Hello):
            negotiate(HELLO, record)


def _endpoint(data: bytes) -> Endpoint:
    records: list[DecodeToPrefill] = decode_to_prefill_frame(data)
    hello = next((record for record in records if isinstance(record, Hello) and record.endpoints), None)
    if hello is None:
        raise TransferError("no endpoint")
    return hello.endpoints[0]


def _hello_with(**details: object) -> bytes:
    return encode([msgspec.structs.replace(HELLO, endpoints=[Endpoint(transport="x", details=details)])])


def _tcp_endpoint(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        Knock(ours, peer_door(_endpoint(data), DoorAddress, SLICE).key, Incarnation(1), Incarnation(2))


def _shm_endpoint(data: bytes) -> None:
    _Mapping(peer_pool_file(_endpoint(data), PoolFileDetails, SLICE), SLICE)


@cache
def _pool() -> dict[str, int]:
    """A pool of four blocks in this process's memory, as it is told to peers."""
    fd = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, header_bytes(4) + 4 * BLOCK_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    found = os.fstat(fd)
    told = PoolFileDetails(os.getpid(), fd, found.st_dev, found.st_ino, 4, BLOCK_BYTES)
    return msgspec.structs.asdict(told)


def _door(data: bytes) -> None:
    """A stranger that dials, says `data` and hangs up."""
    let_in: list[Incarnation] = []

    def admit(dialer: Incarnation, sock: socket.socket) -> bool:
        let_in.append(dialer)
        return False

    with closing(Reactor()) as reactor, closing(listen("127.0.0.1")) as listener:
        door = Door(listener, Incarnation(2), reactor, 1.0, admit)
        with socket.create_connection(listener.getsockname()) as dialer:
            dialer.sendall(data[:4096])
            dialer.shutdown(socket.SHUT_WR)
            for _ in range(4):
                reactor.wait(0.01)
        door.close()
    assert not let_in, "a stranger without the key was let in"


def _knock(data: bytes) -> None:
    """Whoever listens where a peer is meant to be says `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        ours.setblocking(False)
        knock = Knock(ours, "07" * 32, Incarnation(1), Incarnation(2))
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        try:
            while not knock.step():
                assert len(data) < ANSWER_BYTES, "it waits for more than an answer"
        except ProofError:
            return  # as it must
        raise AssertionError("one without the key was believed")


class _Scrap:
    """Two blocks in memory. Fulfils `transfer.transport.Landing`."""

    def __init__(self) -> None:
        self.rows = np.zeros((2, BLOCK_BYTES), dtype=np.uint8)

    def place(self, at: int) -> memoryview:
        return memoryview(self.rows[at])

    def landed(self, at: int) -> None:
        pass


def _tcp_link(data: bytes) -> None:
    """A peer whose frame of two blocks is waited for says `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        link = InLink()
        link.sock = ours
        ours.setblocking(False)
        link.post(Ticket(1), header(MOVE, 2, BLOCK_BYTES), _Scrap(), 2 * BLOCK_BYTES)
        theirs.sendall(data[:65536])
        theirs.shutdown(socket.SHUT_WR)
        while link.is_due:
            link.read()


def _nccl_wire(data: bytes) -> None:
    """The other end of a pair says `data` and hangs up."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        ours.setblocking(False)
        theirs.sendall(data[:65536])
        Wire(ours).read()


def _said(*messages: object) -> bytes:
    parts = [msgspec.msgpack.encode(message) for message in messages]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


_PLACE = Place(record=RECORD, placement=1, prefill=PeerAddress("prefill-0", "127.0.0.1:1"))
_STATS = RequestStats(stages={"run": 1.0})
_ENDED = Ended(RequestId("r"), 1, reason=FinishReason.ERROR, stats=_STATS, fault=Fault("X", "y"))
_TOKENS = Tokens(RequestId("r"), 1, 0, [5])
_CANCEL = Cancel(RequestId("r"), 1, FinishReason.CANCELLED)
_CONTEXT = Context(token="t", model="m", chat=ChatPrompt(messages=(ChatMessage("user", "hi"),)))
_TRACE = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"
_LOADED = b'{"type":"LoadProgress","done":1,"total":2}'
_ORPHAN = Orphan(record=RECORD, placement=1, prefill="", tokens=[4], age_s=1.0)
_LOAD = Load(step=1, free_blocks=1, cached_blocks=1, active_blocks=1, reserved_blocks=0, quarantined_blocks=0)
_OFFER = Offer(H, 0, [BlockOffer(BlockId(1), 2, 0, 16, 7)])
_FIRST = FirstToken(H, token=1, chunks=1, queue_s=0.1, run_s=0.2, cached_tokens=3)
_START = StartPrefill(H, record=RECORD, have_tokens=0)
_GREETING = greeting(Incarnation(1), Incarnation(2), bytes(32))
_LINK_FRAME = header(MOVE, 2, BLOCK_BYTES) + bytes(2 * BLOCK_BYTES) + b"\x01"

WIRE = (
    _frame("frame-from-router", decode_router_frame, [RouterHello(Incarnation(1)), _PLACE], [_CANCEL]),
    _frame("frame-from-worker", decode_worker_frame, [INFO, _LOAD], [_TOKENS, _ENDED, _ORPHAN]),
    _frame("frame-to-prefill", decode_to_prefill_frame, [HELLO], [_START, Landed(H, 1)]),
    _frame("frame-from-prefill", decode_from_prefill_frame, [HELLO], [_OFFER, _FIRST]),
    Decoder("hello", _hello, (msgspec.MsgspecError, NegotiationError), (encode([HELLO]),)),
    Decoder(
        "endpoint-tcp",
        _tcp_endpoint,
        (msgspec.MsgspecError, TransferError),
        (_hello_with(host="127.0.0.1", port=1, key="00" * 32, block_bytes=BLOCK_BYTES),),
        (_hello_with(host="127.0.0.1", port=2**64 - 1, key="00" * 32, block_bytes=BLOCK_BYTES),),
    ),
    Decoder(
        "endpoint-shm",
        _shm_endpoint,
        (msgspec.MsgspecError, TransferError),
        (_hello_with(**_pool()),),
        (_hello_with(**_pool() | {"blocks": 2**63 - 1}), _hello_with(**_pool() | {"pid": -1})),
    ),
    Decoder("tcp-door", _door, (), (_GREETING, _GREETING + bytes(CODE_BYTES), b"")),
    Decoder("tcp-knock", _knock, (OSError,), (bytes(ANSWER_BYTES), _GREETING + bytes(CODE_BYTES))),
    Decoder("tcp-link", _tcp_link, (OSError, TransferError), (_LINK_FRAME, _LINK_FRAME[:-1] + b"\0")),
    Decoder(
        "nccl-wire",
        _nccl_wire,
        (OSError, TransferError),
        (_said(Welcome(), Ready(True, 1, 2)), _said(BuildCommunicator(1, b"x" * 128), Go(1, True, 1, 0, 64))),
        (_said([2**63]),),
    ),
    Decoder("pipe-to-child", decode_call, (msgspec.MsgspecError,), (b'{"type":"IsReady"}',)),
    Decoder("pipe-from-child", decode_report, (msgspec.MsgspecError,), (_LOADED,)),
    Decoder("resume-context", unpack, (), (pack(_CONTEXT),)),
    Decoder("traceparent", lambda data: sound(data.decode("latin-1")), (), (_TRACE,)),
)
