"""The decode worker's book of streams to prefill workers, without any network."""

import msgspec

from decode_worker.events import PeerDown, PeerUp
from decode_worker.peer import MAX_REDIALS, PeerFrame, PeerGone, PeerLink, Peers
from engine.messages import Endpoint, Handoff, Hello, PeerAddress, Stop, WorkerInfo, encode
from engine.types import Incarnation, RequestId

ADDRESS = PeerAddress("prefill-0", "somewhere:1")


def _hello(role: str, incarnation: int, fingerprint: str = "m", protocol: int = 1) -> Hello:
    info = WorkerInfo(
        name=f"{role}-0",
        role=role,
        incarnation=Incarnation(incarnation),
        address="somewhere:1",
        model="m",
        fingerprint=fingerprint,
        block_size=16,
        blocks=8,
        context_tokens=64,
        pid=1,
        host="h",
    )
    endpoint = Endpoint(transport="shm")
    return Hello(info=info, layout={"heads": 1}, endpoints=[endpoint], protocol=protocol)


class Rpc:
    """Opens nothing; keeps what would have been opened."""

    def __init__(self) -> None:
        self.links: list[PeerLink] = []
        self.sent: list[list[bytes | None]] = []
        self.unfinished: list[Handoff] = []

    def connect(self, address: str, method: str, accept) -> None:  # type: ignore[no-untyped-def]
        frames: list[bytes | None] = []
        self.sent.append(frames)
        self.links.append(accept(frames.append))


def _peers() -> tuple[Peers, Rpc]:
    rpc = Rpc()
    peers = Peers(
        rpc,  # type: ignore[arg-type]
        _hello("decode", 7),
        lambda item: None,
        lambda peer, hello: None,
        lambda: list(rpc.unfinished),
    )
    return peers, rpc


def _welcome(peers: Peers, link: PeerLink, hello: Hello) -> list[object]:
    return list(peers.events(PeerFrame(link, encode([hello]))))


def test_an_old_streams_end_does_not_take_the_new_one_away() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    assert isinstance(_welcome(peers, rpc.links[0], _hello("prefill", 1))[0], PeerUp)
    (down,) = peers.drop(Incarnation(1), "its memory cannot be reached")
    assert isinstance(down, PeerDown) and rpc.sent[0][-1] is None, "the dropped stream stays open"
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[1], _hello("prefill", 1))
    assert peers.events(PeerGone(rpc.links[0], "closed")) == []
    peers.send(Incarnation(1), [])
    assert rpc.sent[1][-1] == encode([])


def test_a_lost_peer_is_dialled_again_and_told_what_is_still_read() -> None:
    """Guards blocks that a living prefill worker keeps for us for ever, because our last word was lost."""
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1))
    (down,) = peers.events(PeerGone(rpc.links[0], "no answer to a ping"))
    assert down == PeerDown(ADDRESS, Incarnation(1), "no answer to a ping")
    kept = Handoff(RequestId("r"), 1, 0, Incarnation(7), Incarnation(1))
    rpc.unfinished = [kept]
    peers.redial()
    assert len(rpc.links) == 2
    hello = encode([_hello_with([kept], stream=2)])
    assert rpc.sent[1] == [hello]
    peers.redial()
    assert len(rpc.links) == 2, "it is dialled twice at once"
    rpc.unfinished = []  # it ended before the answer came: nobody could be told
    _welcome(peers, rpc.links[1], _hello("prefill", 1))
    assert rpc.sent[1] == [hello, encode([Stop(kept)])]
    peers.redial()
    assert len(rpc.links) == 2, "it is dialled although it is up"


def _hello_with(unfinished: list[Handoff], stream: int) -> Hello:

    return msgspec.structs.replace(_hello("decode", 7), unfinished=unfinished, stream=stream)


def test_redialling_ends() -> None:
    peers, rpc = _peers()
    peers.connect(ADDRESS)
    _welcome(peers, rpc.links[0], _hello("prefill", 1))
    peers.events(PeerGone(rpc.links[0], "killed"))
    for _ in range(MAX_REDIALS + 9):
        peers.redial()
        peers.events(PeerGone(rpc.links[-1], "connection refused"))
    assert len(rpc.links) == 1 + MAX_REDIALS


def test_a_peer_of_another_kind_is_refused_by_name_and_left() -> None:
    for hello, word in (
        (_hello("prefill", 1, fingerprint="other"), "fingerprint"),
        (_hello("prefill", 1, protocol=2), "protocol"),
    ):
        peers, rpc = _peers()
        peers.connect(ADDRESS)
        (down,) = _welcome(peers, rpc.links[0], hello)
        assert isinstance(down, PeerDown) and down.peer is None and word in down.why
        assert rpc.sent[0][-1] is None
