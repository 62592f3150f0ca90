"""The decode worker's book of streams to prefill workers, without any network."""

import msgspec
import pytest

from decode_worker.peer import MAX_REDIALS, REDIAL_S, Peers, PeerStream
from decode_worker.scheduler.events import FromPeer, PeerDown, PeerUp
from engine.handshake import HandshakeError, Party
from engine.kv.layout import KVLayout
from engine.messages import (
    Endpoint,
    FirstToken,
    Handoff,
    Hello,
    PeerAddress,
    Stop,
    WorkerInfo,
    decode_to_prefill_frame,
    encode,
)
from engine.types import Incarnation, RequestId
from transfer.handoff.commands import Connect
from transfer.handoff.negotiation import Agreement

ADDRESS = PeerAddress("prefill-0", "somewhere:1")


LAYOUT = {"kv_heads": 4, "layers": 2, "block_size": 16, "head_dim": 8}


def _hello(
    role: str,
    incarnation: int,
    layout: dict[str, object] | None = None,
    *,
    fingerprint: str = "m",
    model: str = "m",
    **more: object,
) -> Hello:
    info = WorkerInfo(
        name=f"{role}-0",
        role=role,
        incarnation=Incarnation(incarnation),
        address="somewhere:1",
        model=model,
        fingerprint=fingerprint,
        block_size=16,
        blocks=8,
        context_tokens=64,
        pid=1,
        host="h",
    )
    endpoint = Endpoint(transport="shm")
    return Hello(info=info, layout={**LAYOUT, **(layout or {})}, endpoints=[endpoint], **more)  # type: ignore[arg-type]


class Rpc:
    """Opens nothing; keeps what would have been opened."""

    def __init__(self) -> None:
        self.links: list[PeerStream] = []
        self.sent: list[list[bytes | None]] = []
        self.unfinished: list[Handoff] = []
        self.reached: list[Connect] = []

    def connect(self, address: str, method: str, open_session) -> None:  # type: ignore[no-untyped-def]
        frames: list[bytes | None] = []
        self.sent.append(frames)
        self.links.append(open_session(frames.append))


class Way:
    """A transport that is asked for its address only."""

    def describe(self, peer: Incarnation, ranks: int = 0) -> Endpoint:
        return Endpoint(transport="shm", details={"for": peer})


def _peers() -> tuple[Peers, Rpc]:
    rpc = Rpc()
    peers = Peers(
        rpc,  # type: ignore[arg-type]
        _hello("decode", 7),
        [Way()],  # type: ignore[list-item]
        lambda item: None,
        rpc.reached.append,
        lambda: list(rpc.unfinished),
    )
    return peers, rpc


def _party(incarnation: int, name: str = "prefill-0") -> Party:
    return Party("prefill", name, Incarnation(incarnation))


def _prove(peers: Peers, link: PeerStream, incarnation: int) -> list[object]:
    told: list[object] = []
    peers.proven(link, _party(incarnation), told.append)
    return told


def _welcome(peers: Peers, link: PeerStream, hello: Hello) -> list[object]:
    """Let the other end prove itself, and say hello."""
    told = _prove(peers, link, hello.info.incarnation)
    peers.records(link, [hello], told.append)
    return told


def _ended(peers: Peers, link: PeerStream, why: str) -> list[object]:
    told: list[object] = []
    peers.ended(link, why, told.append)
    return told


def test_an_old_streams_end_does_not_take_the_new_one_away() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    assert isinstance(_welcome(peers, rpc.links[0], _hello("prefill", 1))[0], PeerUp)
    told: list[object] = []
    peers.drop(Incarnation(1), "its memory cannot be reached", told.append)
    (down,) = told
    assert isinstance(down, PeerDown) and rpc.sent[0][-1] is None, "the dropped stream stays open"
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[1], _hello("prefill", 1))
    assert not _ended(peers, rpc.links[0], "closed")
    peers.send(Incarnation(1), [])
    assert rpc.sent[1][-1] == encode([])


@pytest.mark.parametrize("was", ["dropped", "refused"])
def test_an_old_streams_end_does_not_open_a_third(was: str) -> None:
    """Guards a request that hangs for good: while a stream is being opened, the end of the one before it comes late,
    and the next placement opens another; the peer takes the newest, and what was said on the one between is lost."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1, model="m" if was == "dropped" else "n"))
    if was == "dropped":
        peers.drop(Incarnation(1), "its memory cannot be reached", lambda event: None)
    peers.connect(ADDRESS)
    assert not _ended(peers, rpc.links[0], "closed")
    peers.connect(ADDRESS)
    assert len(rpc.links) == 2, "it is dialled twice at once"
    assert isinstance(_welcome(peers, rpc.links[1], _hello("prefill", 1))[0], PeerUp)


def test_a_worker_that_is_named_by_a_second_address_keeps_its_stream() -> None:
    """Guards two streams to one life, each of which ended the other for ever, so that everybody prefilled alone."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    (up,) = _welcome(peers, rpc.links[0], _hello("prefill", 1))
    second = PeerAddress("prefill-0", "elsewhere:1")
    for _ in range(3):
        peers.connect(second)
        (up_there,) = _prove(peers, rpc.links[-1], 1)
        assert isinstance(up, PeerUp) and up_there == msgspec.structs.replace(up, address=second)
        assert rpc.sent[-1] == [None], "it says hello twice to one life"
        assert not _ended(peers, rpc.links[-1], "closed")
    peers.send(Incarnation(1), [])
    assert rpc.sent[0][-1] == encode([]) and len(rpc.reached) == 1
    assert _ended(peers, rpc.links[0], "closed") == [PeerDown(ADDRESS, Incarnation(1), "closed")]


def test_another_worker_at_the_address_of_a_lost_one_is_told_nothing() -> None:
    """Guards contexts and tokens: a lost life's port may be another's by now."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    with pytest.raises(HandshakeError, match="'prefill-1' answers at the address of 'prefill-0'"):
        rpc.links[0].proven(_party(1, "prefill-1"))
    assert not rpc.sent[0]
    (down,) = _ended(peers, rpc.links[0], "another")
    assert down == PeerDown(ADDRESS, None, "another")


def test_nothing_is_said_before_the_other_end_has_proven_itself() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    assert not rpc.sent[0]
    assert not _prove(peers, rpc.links[0], 1)
    ((frame,),) = rpc.sent
    (hello,) = decode_to_prefill_frame(frame or b"")
    assert isinstance(hello, Hello) and hello.endpoints == [Endpoint(transport="shm", details={"for": 1})]


def test_a_hello_of_another_life_than_the_proven_one_is_refused() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    told = _prove(peers, rpc.links[0], 1)
    peers.records(rpc.links[0], [_hello("prefill", 2)], told.append)
    (down,) = told
    assert isinstance(down, PeerDown) and "has proven to be" in down.why and rpc.sent[0][-1] is None


def test_a_peer_speaks_of_its_own_handoffs_alone() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1))
    own, other = (
        FirstToken(Handoff(RequestId("r"), 1, 1, Incarnation(7), Incarnation(life)), token=1, chunks=1, queue_s=0.0,
                   run_s=0.0, cached_tokens=0)
        for life in (1, 2)
    )  # fmt: skip
    told: list[object] = []
    peers.records(rpc.links[0], [other, own], told.append)
    assert told == [FromPeer(Incarnation(1), own)]


def test_the_next_stream_to_a_life_brings_the_renewal_of_the_last() -> None:
    """Guards a worker that comes back before its cut was noticed at the other end: it would be refused."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1, renewal=b"first"))
    _ended(peers, rpc.links[0], "cut")
    peers.connect(ADDRESS)
    _prove(peers, rpc.links[1], 1)
    (hello,) = decode_to_prefill_frame(rpc.sent[1][0] or b"")
    assert isinstance(hello, Hello) and hello.renewal == b"first"


def test_a_lost_peer_is_dialled_again_and_told_what_is_still_read() -> None:
    """Guards blocks that a living prefill worker keeps for us for ever, because our last word was lost."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1))
    (down,) = _ended(peers, rpc.links[0], "no answer to a ping")
    assert down == PeerDown(ADDRESS, Incarnation(1), "no answer to a ping")
    kept = Handoff(RequestId("r"), 1, 0, Incarnation(7), Incarnation(1))
    rpc.unfinished = [kept]
    peers.redial(1.0)
    assert len(rpc.links) == 2
    _prove(peers, rpc.links[1], 1)
    (hello,) = rpc.sent[1]
    (said,) = decode_to_prefill_frame(hello or b"")
    assert isinstance(said, Hello) and said.unfinished == [kept]
    peers.redial(2.0)
    assert len(rpc.links) == 2, "it is dialled twice at once"
    rpc.unfinished = []  # it ended before the answer came: nobody could be told
    peers.records(rpc.links[1], [_hello("prefill", 1)], lambda event: None)
    assert rpc.sent[1] == [hello, encode([Stop(kept)])]
    peers.redial(3.0)
    assert len(rpc.links) == 2, "it is dialled although it is up"


def test_redialling_ends() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1))
    _ended(peers, rpc.links[0], "killed")
    for at in range(1, MAX_REDIALS + 10):
        peers.redial(at * REDIAL_S)
        _ended(peers, rpc.links[-1], "connection refused")
    assert len(rpc.links) == 1 + MAX_REDIALS


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (_hello("prefill", 1, protocol=2), "its protocol is 2, this worker's is 1"),
        (_hello("prefill", 1, model="n"), "its model is n, this worker's is m"),
        (
            _hello("prefill", 1, fingerprint="other"),
            "its model fingerprint is other, this worker's is m",
        ),
        (
            _hello("prefill", 1, {"dtype": "float16"}),
            "its dtype is float16, this worker's is float32",
        ),
        (_hello("prefill", 1, {"layers": 3}), "its number of layers is 3, this worker's is 2"),
        (_hello("prefill", 1, {"kv_heads": 2}), "its number of KV heads is 2, this worker's is 4"),
        (_hello("prefill", 1, {"head_dim": 16}), "its head size is 16, this worker's is 8"),
        (_hello("prefill", 1, digest="crc32"), "its digest is crc32, this worker's is xxh3-64"),
        (
            _hello("prefill", 1, {"kv_heads": 2, "first_head": 2, "total_heads": 4}),
            "it holds KV heads 2 to 3 of 4, this worker needs KV heads 0 to 3 of 4 from one sender",
        ),
        (_hello("prefill", 1, {"block_size": 0}), "is not a KV layout: every size"),
        (_hello("prefill", 1, {"block_size": "many"}), "is not a KV layout: Expected `int`"),
        (_hello("prefill", 1, digest_share=1.5), "1.5 is no share of blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_does_not_fit_is_refused_at_once_with_both_values(
    theirs: Hello, message: str
) -> None:
    """Guards against blocks of another model, or bytes in another order, that are taken for this worker's own."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    (down,) = _welcome(peers, rpc.links[0], theirs)
    assert isinstance(down, PeerDown) and down.peer is None and message in down.why
    assert rpc.sent[0][-1] is None, "its stream stays open"
    assert not rpc.reached


@pytest.mark.parametrize(
    ("theirs", "agreement"),
    [
        (_hello("prefill", 1), Agreement(KVLayout(**LAYOUT), 1.0)),  # type: ignore[arg-type]
        (
            _hello("prefill", 1, {"block_size": 24}, digest_share=0.25),
            Agreement(KVLayout(**{**LAYOUT, "block_size": 24}), 1.0),  # type: ignore[arg-type]
        ),
        (
            # Without the new fields, as a worker of an older version says hello.
            _hello("prefill", 1, {"first_head": 0, "total_heads": 0}),
            Agreement(KVLayout(**LAYOUT), 1.0),  # type: ignore[arg-type]
        ),
    ],
)
def test_what_can_be_converted_is_agreed_on(theirs: Hello, agreement: Agreement) -> None:
    """Guards against a refusal of what can be repacked, and against the laxer of two digest modes."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    (up,) = _welcome(peers, rpc.links[0], theirs)
    assert up == PeerUp(Incarnation(1), ADDRESS, "shm", agreement.layout.block_size)
    assert [connect.agreement for connect in rpc.reached] == [agreement]


@pytest.mark.parametrize(("transport", "nbytes"), [("tcp", 4 * 2 * 2 * 16 * (8 + 4)), ("shm", 0)])
def test_what_travels_in_8_bits_is_counted_so(transport: str, nbytes: int) -> None:
    """Guards a metric of bytes that tells nothing of what a narrow wire saves."""
    rpc = Rpc()
    mine = msgspec.structs.replace(_hello("decode", 7), wire="int8")
    peers = Peers(rpc, mine, [], lambda item: None, rpc.reached.append, list)  # type: ignore[arg-type]
    peers.connect(ADDRESS)
    theirs = msgspec.structs.replace(_hello("prefill", 1, wire="int8"), endpoints=[Endpoint(transport=transport)])
    (up,) = _welcome(peers, rpc.links[0], theirs)
    assert isinstance(up, PeerUp) and up.block_bytes == nbytes
