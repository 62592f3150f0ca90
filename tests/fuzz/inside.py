"""What a cluster tells itself: how streams are opened, what ranks say of their movers, who reads a page of metrics, and
the small files beside it, which a full disk or an operator's editor may have left in any state."""

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cache
from typing import Any

import msgspec

from access.config import AccessConfig, AccessError
from access.keys import make_key
from access.page import MonitorGuard
from access.tenants import parse_table
from cluster.config import ClusterConfig, ConfigError
from cluster.rundir import ProcessIdentity, RunDir
from cluster.secret import SecretFile
from engine.handshake import NONCE_BYTES, Dialer, HandshakeError, Listener, Party
from engine.types import Incarnation
from telemetry.page_server import HEAD_BYTES, PageServer
from tests.fuzz.files import scratch
from tests.fuzz.judge import Decoder
from tests.secrets_of_tests import SECRETS
from transfer.config import TransferConfig
from transfer.ranks.links import _HEAD, FromMover, MoveLink, MoverOpened, OpenMover, ToMover, _digest
from transfer.transport import TransferError

ROUTER, WORKER = Party("router", "router", Incarnation(1)), Party("decode", "decode-0", Incarnation(2))


def _ends() -> tuple[Dialer, Listener]:
    dialer = Dialer(SECRETS, "/attach", ROUTER, b"d" * NONCE_BYTES)
    return dialer, Listener(SECRETS, "/attach", WORKER, frozenset(("router",)), b"l" * NONCE_BYTES)


_GREETING = _ends()[0].greet()
_ANSWER = _ends()[1].welcome(_GREETING)
_PROOF = _ends()[0].answer(_ANSWER)[1]


def _greeted(data: bytes) -> None:
    """Somebody greets with `data`, and has no other proof than one of our router's."""
    _, listener = _ends()
    listener.welcome(data)
    if data != _GREETING:
        with suppress(HandshakeError):
            assert listener.check(_PROOF) == ROUTER, "a proof is taken for that of another"


def _answered(data: bytes) -> None:
    party, _ = _ends()[0].answer(data)
    assert party == WORKER, "the answer of another was believed"


def _proven(data: bytes) -> None:
    _, listener = _ends()
    listener.welcome(_GREETING)
    assert listener.check(data) == ROUTER


def _rank(data: bytes, kind: Any) -> None:
    """A rank says `data` as it is, where its head would be, and then as a frame."""
    with suppress(TransferError):
        _hear(data, kind)
    _hear(_HEAD.pack(1, len(data), _digest(data, 1)) + data, kind)


def _hear(said: bytes, kind: Any) -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        theirs.sendall(said[:65536])
        theirs.shutdown(socket.SHUT_WR)
        for _ in MoveLink[Any](ours, kind):
            pass


_KEY, _KEPT = make_key("", "monitor", "2026-11-27")
_KEYS = json.dumps(
    {
        "tenants": {"a": {"weight": 2.0, "tokens_per_s": 5.0, "concurrency": 2, "cache_share": 0.25}},
        "keys": [msgspec.to_builtins(_KEPT)],
        "certificates": [{"name": "c", "tenant": "a"}],
    }
).encode()


@cache
def _page() -> PageServer:
    """A page that is for monitors, without its socket."""
    keys = scratch() / "keys.json"
    keys.write_bytes(_KEYS)
    made: Any = PageServer.__new__(PageServer)
    made._guard, made._render = MonitorGuard(AccessConfig(keys_file=str(keys))), lambda: b"the page"
    return made  # type: ignore[no-any-return]


def _head(data: bytes) -> None:
    """Somebody asks for the page by `data`, and hangs up."""

    async def ask() -> None:
        reader = asyncio.StreamReader(limit=HEAD_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        head = await reader.readuntil(b"\r\n\r\n")
        answer = _page()._answer(head, None)
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"the page" not in answer or _KEY.encode() in head, "it is told to somebody without a key"

    asyncio.run(ask())


def _secret(data: bytes) -> None:
    path = scratch() / "secret"
    path.touch(0o600)
    path.write_bytes(data)
    SecretFile(path).valid()


class _Folder(RunDir):
    """A run folder of a host on which nothing else is looked for."""

    def _marked(self) -> Iterator[ProcessIdentity]:
        return iter(())

    _holders = _marked


def _run_folder(data: bytes) -> None:
    """Each of its files holds `data`, and each is read."""
    folder = _Folder(ClusterConfig(run_dir=str(scratch() / "run")), {})
    folder.make()
    key = folder.folder / f"{folder.name}.key"
    for path in (folder._left, folder._fault, key):
        path.write_bytes(data)
        path.chmod(0o600)
    assert all(one.runs for one in folder.processes())
    folder.take_fault()
    assert len(folder.namespace_key()) == 64
    with suppress(ConfigError):
        folder.secret.touch(0o600)
        folder.secret.write_bytes(data)
        SecretFile(folder.secret)


_LISTED = msgspec.json.encode([ProcessIdentity.of("router", os.getpid()), {"name": "x", "pid": 1, "started": 0}])
_OPENING = msgspec.msgpack.encode(OpenMover(Incarnation(1), TransferConfig(), "127.0.0.1"))
_TOKEN = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % _KEY.encode()
_NOBODY = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer hr_1_\xff\r\nauthorization: x\r\n\r\n"
_NESTED = b'{"tenants":' + b'{"a":' * 100_000
_NO_HEAD = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)

INSIDE = (
    Decoder("handshake-greeting", _greeted, (HandshakeError,), (_GREETING,)),
    Decoder("handshake-answer", _answered, (HandshakeError,), (_ANSWER,)),
    Decoder("handshake-proof", _proven, (HandshakeError,), (_PROOF,)),
    Decoder("rank-to-mover", lambda data: _rank(data, ToMover), (TransferError,), (_OPENING,), (b"\xc1", b"\xa1\xff")),
    Decoder(
        "rank-from-mover",
        lambda data: _rank(data, FromMover),
        (TransferError,),
        (msgspec.msgpack.encode(MoverOpened(("tcp",))),),
    ),
    Decoder("keys-file", parse_table, (AccessError,), (_KEYS, b"{}"), (_NESTED, b'{"tenants":{"\xff":{}}}')),
    Decoder("metrics-head", _head, _NO_HEAD, (_TOKEN, _NOBODY), (b"GET /metrics HTTP/1.1\r\n" + b"a" * 9000,)),
    Decoder("secret-file", _secret, (ConfigError,), (b"ab" * 32 + b"\n", b"a secret that is in words of its own\n")),
    Decoder("run-folder", _run_folder, (), (_LISTED, b"ab" * 32), (b"\xff" * 64, b'[{"name":"\xff"}]', b"[" * 100_000)),
)
