"""What every transport must do. One suite over all of them, in one process and across two."""

from typing import Any

import msgspec
import pytest

from transfer.ranks.group import parts
from transfer.transport import BlockSlice, Completion, Outcome, TransferError

LATE_TURNS = 40


def test_blocks_arrive_byte_equal_and_in_place(rig: Any, pattern: Any) -> None:
    """Guards against a block that lands in another block's place, or beyond its own."""
    peer = rig.peer()
    rig.poison()
    peer.fill({3: 31, 7: 71, 5: 51})
    peer.send(2**64 - 5, "r", 0, [3, 7, 5])
    ticket = rig.recv(peer, "r", 0, [(3, 0), (7, 0), (5, 0)], [10, 2, 30])
    assert rig.outcome(ticket) is Outcome.DONE
    size = rig.layout.block_bytes
    assert rig.bytes_of(10) == pattern(31, size)
    assert rig.bytes_of(2) == pattern(71, size)
    assert rig.bytes_of(30) == pattern(51, size)
    untouched = set(range(rig.blocks)) - {10, 2, 30}
    assert all(rig.is_poisoned(block) for block in untouched)


def test_many_chunks_in_flight(rig: Any, pattern: Any) -> None:
    """Guards against chunks that overtake or swallow each other when many are posted before any ends."""
    peer = rig.peer()
    peer.fill({block: block for block in range(60)})
    tickets = []
    for seq in range(20):
        blocks = [seq * 3, seq * 3 + 1, seq * 3 + 2]
        peer.send(2**64 - 5, "r", seq, blocks)
        tickets.append(rig.recv(peer, "r", seq, [(b, 0) for b in blocks], [59 - b for b in blocks]))
    assert [rig.outcome(ticket) for ticket in tickets] == [Outcome.DONE] * 20
    size = rig.layout.block_bytes
    assert all(rig.bytes_of(59 - block) == pattern(block, size) for block in range(60))


def test_cancel_is_proof(rig: Any, pattern: Any) -> None:
    """Guards the bug family of DESIGN 6: bytes that land in a block after its owner got it back."""
    peer = rig.peer()
    rig.poison()
    peer.fill({0: 1, 1: 2})
    cancelled = rig.recv(peer, "gone", 0, [(0, 0)], [4])
    assert rig.transport.cancel(cancelled)
    peer.send(2**64 - 5, "gone", 0, [0])
    peer.send(2**64 - 5, "kept", 0, [1])
    kept = rig.recv(peer, "kept", 0, [(1, 0)], [5])
    assert rig.outcome(cancelled) is Outcome.CANCELLED
    assert rig.outcome(kept) is Outcome.DONE
    assert rig.is_poisoned(4)
    assert rig.bytes_of(5) == pattern(2, rig.layout.block_bytes)


def test_an_ended_transfer_cannot_be_cancelled(rig: Any) -> None:
    """Guards against a false proof: CANCELLED for bytes that have landed."""
    peer = rig.peer()
    peer.fill({0: 1})
    peer.send(2**64 - 5, "r", 0, [0])
    ticket = rig.recv(peer, "r", 0, [(0, 0)], [4])
    assert rig.outcome(ticket) is Outcome.DONE
    assert not rig.transport.cancel(ticket)
    rig.turn()
    assert rig.ended[ticket].outcome is Outcome.DONE


def test_unwanted_blocks_are_drained(rig: Any, pattern: Any) -> None:
    """Guards against a stream that is out of step, or stuck, behind a chunk that nobody wants."""
    peer = rig.peer()
    rig.poison()
    peer.fill({0: 1, 1: 2, 2: 3})
    peer.send(2**64 - 5, "unwanted", 0, [0, 1])
    peer.send(2**64 - 5, "wanted", 0, [2])
    scrap = rig.recv(peer, "unwanted", 0, [(0, 0), (1, 0)], [])
    ticket = rig.recv(peer, "wanted", 0, [(2, 0)], [9])
    assert rig.outcome(scrap) is Outcome.DONE
    assert rig.outcome(ticket) is Outcome.DONE
    assert rig.bytes_of(9) == pattern(3, rig.layout.block_bytes)
    assert all(rig.is_poisoned(block) for block in range(rig.blocks) if block != 9)
    # Only a wire on which bytes are sent unasked has something to scrap.
    pushed = 2 * rig.layout.block_bytes if rig.kind == "tcp" else 0
    assert rig.transport.scrapped_bytes == pushed


@pytest.mark.parametrize("head", [0, 1])
def test_a_slice_of_each_block_travels(rig: Any, pattern: Any, head: int) -> None:
    """Guards against more bytes than were agreed on, and against a slice that is read from another place."""
    rig.poison()
    size = rig.layout.head_bytes
    slim = msgspec.structs.replace(rig.layout, kv_heads=3, total_heads=0)
    of_theirs = BlockSlice((head + 1) * size, size, slim.block_bytes)
    of_ours = BlockSlice(head * size, size, rig.layout.block_bytes)
    peer = rig.peer(slim, of_theirs)
    peer.fill({0: 1, 1: 2})
    peer.send(2**64 - 5, "r", 0, [0, 1])
    ticket = rig.recv(peer, "r", 0, [(0, 0), (1, 0)], [7, 8], of_ours)
    assert rig.outcome(ticket) is Outcome.DONE
    for block, seed in ((7, 1), (8, 2)):
        got, theirs = rig.bytes_of(block), pattern(seed, slim.block_bytes)
        assert got[head * size : (head + 1) * size] == theirs[(head + 1) * size : (head + 2) * size]
        other = (1 - head) * size
        assert got[other : other + size] == bytes([0xA5]) * size
    assert all(rig.is_poisoned(block) for block in range(rig.blocks) if block not in (7, 8))


@pytest.mark.parametrize(
    "degrees", [(1, 2), (2, 1), (2, 2), (3, 1), (2, 3)], ids=lambda degrees: "{}-{}".format(*degrees)
)
def test_ranks_of_any_degree_take_the_heads_that_they_share(
    rig: Any, make_rig: Any, pattern: Any, degrees: tuple[int, int]
) -> None:
    """Guards a block that is put together from several pools, or goes to several, with a head missing, twice, or in
    another's place: each pair of ranks moves one range of it. Block 1 of six heads goes to block 7."""
    senders, receivers = ([range(6 * at // n, 6 * (at + 1) // n) for at in range(n)] for n in degrees)
    size, layout = rig.layout.head_bytes, msgspec.structs.replace(rig.layout, kv_heads=6, total_heads=0)
    held = [pattern(31 + sender, len(heads) * size) for sender, heads in enumerate(senders)]
    wanted = b"".join(held)
    for receiver, heads in enumerate(receivers):
        taker = make_rig(rig.kind, layout.restricted(heads), 12, in_process=rig.in_process)
        taker.poison()
        tickets = []
        for part in parts(senders, receivers):
            if part.receiver != receiver:
                continue
            theirs, both = senders[part.sender], shared(senders[part.sender], heads)
            whole = [len(one) * size for one in (theirs, heads)]
            of_theirs, of_ours = (
                BlockSlice((both.start - one.start) * size, len(both) * size, nbytes)
                for one, nbytes in zip((theirs, heads), whole, strict=True)
            )
            peer = taker.peer(layout.restricted(theirs), of_theirs)
            peer.fill({1: 31 + part.sender})
            peer.send(2**64 - 5, "r", 0, [1])
            tickets.append(taker.recv(peer, "r", 0, [(1, 0)], [7], of_ours))
        assert [taker.outcome(ticket) for ticket in tickets] == [Outcome.DONE] * len(tickets) != []
        assert taker.bytes_of(7) == wanted[heads.start * size : heads.stop * size]
        assert all(taker.is_poisoned(block) for block in range(12) if block != 7)


def shared(ours: range, theirs: range) -> range:
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def test_disconnect_ends_everything(rig: Any) -> None:
    """Guards against a receive that is still alive after its peer was forgotten."""
    peer = rig.peer()
    rig.poison()
    peer.fill({0: 1})
    tickets = [rig.recv(peer, "r", seq, [(0, 0)], [seq]) for seq in range(3)]
    rig.transport.disconnect(peer.me)
    assert [rig.outcome(ticket) for ticket in tickets] == [Outcome.FAILED] * 3
    peer.send(2**64 - 5, "r", 0, [0])
    for _ in range(LATE_TURNS):
        rig.turn()
    assert all(rig.is_poisoned(block) for block in range(3))
    with pytest.raises(TransferError):
        rig.recv(peer, "r", 3, [(0, 0)], [3])


def test_a_second_life_of_the_connection(rig: Any, pattern: Any) -> None:
    """Guards against a peer that stays unreachable once it was disconnected."""
    peer = rig.peer()
    peer.fill({0: 1})
    peer.send(2**64 - 5, "first", 0, [0])
    first = rig.recv(peer, "first", 0, [(0, 0)], [1])
    assert rig.outcome(first) is Outcome.DONE
    rig.transport.disconnect(peer.me)
    rig.turn()
    reconnect(rig, peer)
    peer.send(2**64 - 5, "second", 0, [0])
    second = rig.recv(peer, "second", 0, [(0, 0)], [2])
    assert rig.outcome(second) is Outcome.DONE
    assert rig.bytes_of(2) == pattern(1, rig.layout.block_bytes)


def reconnect(rig: Any, peer: Any) -> None:
    from engine.messages import Endpoint

    rig.connect(peer.me, Endpoint(transport=rig.kind, details=peer.details))
    peer.connect(2**64 - 5, dict(rig.transport.describe(peer.me).details))


def test_several_peers_do_not_mix(rig: Any, pattern: Any) -> None:
    """Guards against bytes of one peer that land in the receive posted for another."""
    one, two = rig.peer(), rig.peer()
    one.fill({0: 100})
    two.fill({0: 200})
    tickets = [rig.recv(one, "r", 0, [(0, 0)], [0]), rig.recv(two, "r", 0, [(0, 0)], [1])]
    two.send(2**64 - 5, "r", 0, [0])
    one.send(2**64 - 5, "r", 0, [0])
    assert [rig.outcome(ticket) for ticket in tickets] == [Outcome.DONE] * 2
    assert rig.bytes_of(0) == pattern(100, rig.layout.block_bytes)
    assert rig.bytes_of(1) == pattern(200, rig.layout.block_bytes)


def test_a_stale_block_is_refused(rig: Any) -> None:
    """Guards against reading a block that its owner has handed out anew."""
    if not rig.transport.reads_remotely:
        pytest.skip("the sender pushes its own blocks: there is no remote read to go stale")
    peer = rig.peer()
    peer.fill({0: 1})
    peer.advance([0])
    stale = rig.recv(peer, "r", 0, [(0, 0)], [1])
    fresh = rig.recv(peer, "r", 1, [(0, 1)], [2])
    assert rig.outcome(stale) is Outcome.FAILED
    assert "StaleBlockError" in rig.ended[stale].error
    assert rig.outcome(fresh) is Outcome.DONE


def test_a_block_that_changes_while_it_is_read_is_refused(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second look at the generation, after the copy: until then its owner may hand the block out anew, and
    the bytes are half of one sequence, half of another."""
    if not rig.transport.reads_remotely:
        pytest.skip("the sender pushes its own blocks: there is no remote read to go stale")
    peer = rig.peer()
    peer.fill({0: 1})
    looks: list[int] = []

    def generation(block: int) -> int:
        looks.append(block)
        return len(looks) - 1

    for source in {type(source) for source in rig.transport._peers.values()}:
        monkeypatch.setattr(source, "generation", lambda self, block: generation(block), raising=False)
        # Of all blocks at once.
        monkeypatch.setattr(source, "are_at", lambda self, blocks, generations: False, raising=False)
    changed = rig.recv(peer, "r", 0, [(0, 0)], [1])
    assert rig.outcome(changed) is Outcome.FAILED
    assert "StaleBlockError" in rig.ended[changed].error and looks == [0, 0]


@pytest.mark.parametrize("number", [-1, 2**31, 2**70])
@pytest.mark.parametrize("place", [0, 1])
def test_numbers_that_no_pool_has_cost_the_receive_alone(rig: Any, number: int, place: int) -> None:
    """Guards the transfer thread: what a peer says may fail a receive, and ends no worker."""
    if not rig.transport.reads_remotely:
        pytest.skip("the sender pushes its own blocks: the receiver reads none by its number")
    peer = rig.peer()
    peer.fill({0: 1})
    for remote in ((number, 0), (0, number)):
        blocks = [(0, 0), (0, 0)]
        blocks[place] = remote
        failed = rig.recv(peer, "r", 0, blocks, [1, 2])
        assert rig.outcome(failed) is Outcome.FAILED


def test_a_foreign_endpoint_is_refused(rig: Any) -> None:
    """Guards against peers whose blocks have another size, and against endpoints of another transport."""
    from engine.messages import Endpoint

    peer = rig.peer()
    details = dict(peer.details)
    if rig.kind == "loopback":
        details["incarnation"] = 4711
    else:
        details["block_bytes"] += 8
    for wrong in (details, {"nonsense": 1} if rig.kind != "loopback" else details):
        with pytest.raises(TransferError):
            rig.connect(4711, Endpoint(transport=rig.kind, details=wrong))


def test_wakes_a_waiting_thread(rig: Any) -> None:
    """Guards against a transport whose descriptor stays quiet while `poll` has a completion to tell."""
    import select

    peer = rig.peer()
    peer.fill({0: 1})
    peer.send(2**64 - 5, "r", 0, [0])
    ticket = rig.recv(peer, "r", 0, [(0, 0)], [1])
    poller = select.poll()
    poller.register(rig.transport.fileno(), select.POLLIN)
    found: list[Completion] = []
    for _ in range(1000):
        peer.pump()
        if poller.poll(5):
            found += rig.transport.poll(0.0)
        if found:
            break
    assert [completion.ticket for completion in found] == [ticket]
    assert not poller.poll(20), "it wakes a thread that has nothing to do"
