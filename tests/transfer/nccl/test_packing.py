"""The next piece is packed while one is on the wire, on a device whose copies take time and end when they end."""

import time
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from tests.transfer.fake_device import LateDevice, count, fake
from tests.transfer.nccl.ends import LAYOUT, QUICK, End, Ends
from transfer.config import NcclConfig
from transfer.nccl.library import ONE_SIDED
from transfer.nccl.packing import Packing
from transfer.transport import Outcome

BLOCKS = 24
PIECE = 4
STEP_S = 0.03
"""How long a piece is packed, and how long it is on the wire."""
MOVES = 8
SENDS = msgspec.structs.replace(QUICK, limit_s=5.0, join_s=5.0)
PUTS = msgspec.structs.replace(SENDS, one_sided=True, put_bytes=PIECE * LAYOUT.block_bytes)
PIECES = BLOCKS // PIECE


@pytest.fixture(params=["send", "put"])
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NcclConfig:
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(ONE_SIDED))
    return SENDS if request.param == "send" else PUTS


@pytest.fixture(autouse=True)
def size() -> Iterator[None]:
    assert PIECE * LAYOUT.block_bytes == SENDS.piece_bytes
    yield


def met(ends: Ends, config: NcclConfig, sender: int, receiver: int, copy_s: float) -> tuple[End, End]:
    """A sender whose copies are late, and its receiver, with blocks to send and a warm communicator."""
    one, two = ends.end(sender, config, LateDevice(copy_s)), ends.end(receiver, config)
    ends.join(one, two)
    for block in range(BLOCKS):
        one.fill(block, 10 + block)
    ends.until(lambda: one.transport.report.built == two.transport.report.built == 1)
    return one, two


def copies(end: End) -> list[tuple[float, float, int]]:
    assert isinstance(end.device, LateDevice)
    return end.device.copies


def packing(end: End) -> Packing:
    return end.transport._dispatch.packing


def moves_s(ends: Ends, one: End, two: End) -> float:
    """How long BLOCKS blocks take; all of them are there, and are the right ones."""
    targets = list(range(BLOCKS, 2 * BLOCKS))
    for block in targets:
        two.fill(block, 0)
    sent, received = ends.chunk(one, two, list(range(BLOCKS)), targets)
    took_s = ends.until(lambda: received in two.ended and sent in one.ended)
    assert two.ended[received].outcome is one.ended[sent].outcome is Outcome.DONE
    assert all(two.has(BLOCKS + block, 10 + block) for block in range(BLOCKS))
    return took_s


@pytest.mark.parametrize("leads", [True, False], ids=["sender leads", "receiver leads"])
def test_packing_and_sending_overlap(
    ends: Ends, config: NcclConfig, leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a wire that waits for each piece to be packed, and one that does not wait for its own piece: a late copy
    would send what the slot had before. Beside it the same without looking ahead, which takes two steps for each piece
    at least, however fast the machine is. A busy one slows what overlaps, so one quick move of several shows it."""
    one, two = met(ends, config, 2 if leads else 7, 5, STEP_S)
    # A put is two operations: the blocks, and the word that they are there.
    fake().fake_pace(int(STEP_S * 1e6) // (2 if config.one_sided else 1))
    apart_s = 2 * PIECES * STEP_S
    for move in range(1, MOVES + 1):
        overlapped_s = moves_s(ends, one, two)
        assert packing(one).ahead == move * (PIECES - 1)
        if overlapped_s < 0.8 * apart_s:
            break
    else:
        pytest.fail(f"the last of {MOVES} moves took {overlapped_s:.3f} s, of {apart_s:.3f} s without an overlap")
    assert len({target for _, _, target in copies(one)}) == 2, "one slot cannot be packed and sent"
    with monkeypatch.context() as patched:
        patched.setattr(Packing, "look_ahead", lambda *_: None)
        assert moves_s(ends, one, two) > apart_s
    assert packing(one).ahead == move * (PIECES - 1)


def test_at_most_one_piece_is_ahead_and_one_on_the_wire(ends: Ends, config: NcclConfig) -> None:
    """Guards slots that are packed while they are sent: as long as a piece is on the wire, one more is packed."""
    one, two = met(ends, config, 2, 5, 0.001)
    fake().fake_pace(1_500_000)
    sent, received = ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
    ends.until(lambda: len(copies(one)) >= 1)
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        ends.turn()
    assert len(copies(one)) == 2 and f"{PIECE} blocks of send 0({PIECE}" in repr(packing(one))
    assert count("running") > 0 and sent not in one.ended, "nothing is on the wire: nothing is shown"
    fake().fake_pace(0)
    assert ends.outcome(two, received) is Outcome.DONE
    assert all(two.has(block, 10 + block) for block in range(BLOCKS))


@pytest.mark.parametrize("leads", [True, False], ids=["sender leads", "receiver leads"])
def test_a_cancelled_send_is_not_read_any_more(ends: Ends, config: NcclConfig, leads: bool) -> None:
    """Guards blocks that are given to somebody else while a copy ahead still reads them."""
    one, two = met(ends, config, 2 if leads else 7, 5, 0.1)
    sent, received = ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
    ends.until(lambda: f"{PIECE} blocks of send 0({PIECE}" in repr(packing(one)))
    assert len(copies(one)) < 2, "the copy ahead has ended: nothing is shown"
    assert one.transport.cancel(sent)
    ended_s = time.monotonic()
    assert len(copies(one)) == 2, "it is still being copied, or was never begun"
    assert "nothing ahead" in repr(packing(one))
    assert ends.outcome(one, sent) is Outcome.CANCELLED
    assert ends.outcome(two, received) is Outcome.FAILED
    ends.arrives(one, two, 99)
    assert all(began_s < ended_s for began_s, _, _ in copies(one)[:2])
    assert moves_of_all_slots(ends, one, two) == Outcome.DONE


@pytest.mark.parametrize("leads", [True, False], ids=["sender leads", "receiver leads"])
def test_what_nobody_wants_is_not_kept(ends: Ends, config: NcclConfig, leads: bool) -> None:
    """Guards a send that never ends, and a slot that is lost, since a piece of it was packed and never called for."""
    one, two = met(ends, config, 2 if leads else 7, 5, 0.05)
    sent, received = ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
    ends.until(lambda: f"{PIECE} blocks of send 0({PIECE}" in repr(packing(one)))
    assert two.transport.cancel(received)
    assert ends.outcome(one, sent) is Outcome.DONE
    assert "nothing ahead" in repr(packing(one))
    assert moves_of_all_slots(ends, one, two) is Outcome.DONE


def moves_of_all_slots(ends: Ends, one: End, two: End) -> Outcome:
    for block in range(BLOCKS):
        one.fill(block, 150 + block)
    _, received = ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
    outcome = ends.outcome(two, received)
    assert all(two.has(block, 150 + block) for block in range(BLOCKS))
    return outcome


def test_a_receiver_that_is_gone_takes_no_slot_with_it(ends: Ends, config: NcclConfig) -> None:
    """Guards the time between packing and launching: the receiver ends while a piece for it lies in its slot."""
    one, two = met(ends, config, 2, 5, 0.05)
    other = ends.end(6, config)
    ends.join(one, other)
    ends.until(lambda: other.transport.report.built == 1)
    for _ in range(3):
        sent, _ = ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
        ends.until(lambda: f"{PIECE} blocks of send" in repr(packing(one)))
        two.transport.disconnect(one.me)
        assert ends.outcome(one, sent) is Outcome.FAILED
        assert "nothing ahead" in repr(packing(one))
        assert moves_of_all_slots(ends, one, other) is Outcome.DONE
        ends.join(one, two)
        ends.arrives(one, two, 3)
        for block in range(BLOCKS):
            one.fill(block, 10 + block)


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_guess_costs_nothing_but_time(ends: Ends, config: NcclConfig, seed: int) -> None:
    """Guards a slot that was packed for one chunk and sent for another: four peers, both directions, cancels."""
    random, size = Random(seed), 2 * PIECE
    hub = ends.end(50, config, LateDevice(0.002))
    peers = [ends.end(me, config, LateDevice(0.001)) for me in (10, 20, 70, 80)]
    for n, end in enumerate([hub, *peers]):
        for block in range(size):
            end.fill(block, 1 + n * size + block)
    for peer in peers:
        ends.join(peer, hub)
    for _ in range(3):
        ways = [(hub, peer, n, 0) for n, peer in enumerate(peers, 1)]
        ways += [(peer, hub, n, n) for n, peer in enumerate(peers, 1)]
        random.shuffle(ways)
        posted = []
        for source, target, n, filled in ways:
            blocks = random.choices(range(size), k=random.randint(1, size))
            targets = list(range(n * size, n * size + len(blocks)))
            sent, received = ends.chunk(source, target, blocks, targets)
            posted.append((target, received, blocks, targets, filled))
            for _ in range(random.randrange(30)):
                ends.turn()
            if random.random() < 0.2:
                source.transport.cancel(sent)
        for target, received, blocks, targets, filled in posted:
            if ends.outcome(target, received) is Outcome.DONE:
                wanted = [1 + filled * size + block for block in blocks]
                assert all(map(target.has, targets, wanted)), (seed, target.me, wanted)
    assert packing(hub).ahead > 0, "no guess came true"


def test_a_communicator_that_makes_room_leaves_nothing_ahead(ends: Ends, config: NcclConfig) -> None:
    """Guards a piece that lies in a ring that is freed, or is put out of it when its pair has a new one. The pair in
    whose place another comes is never the one on the wire, so it is the one that is packed for."""
    one, two = met(ends, config, 2, 5, 0.05)
    other = ends.end(6, config)
    ends.join(one, other)
    ends.until(lambda: other.transport.report.built == 1)
    fake().fake_pace(300_000)
    ends.chunk(one, two, list(range(BLOCKS)), list(range(BLOCKS)))
    ends.until(lambda: count("running") > 0)
    ends.chunk(one, other, list(range(2 * PIECE)), list(range(2 * PIECE)))
    ends.until(lambda: f"{PIECE} blocks of send 0(0" in repr(packing(one)))
    transport, made = one.transport, other.transport.report.built
    peer = transport._peers[other.me]
    assert transport._dispatch.busy is transport._peers[two.me]
    fake().fake_pace(0)
    transport._room.abort(peer, transport._dispatch, time.monotonic())
    assert "nothing ahead" in repr(packing(one))
    transport._lose(peer, "let go")
    ends.until(lambda: other.transport.report.lost == 1)
    ends.join(one, other)
    assert moves_of_all_slots(ends, one, other) is Outcome.DONE
    assert other.transport.report.built == made + 1
