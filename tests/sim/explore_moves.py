"""Every move from one state of the handoff to another (`tests.sim.explore_state`), and the faults that each costs."""

from collections.abc import Iterator
from functools import partial

from engine.messages import Handoff
from engine.types import BlockId, Incarnation
from tests.sim.explore_state import Part, State
from transfer.handoff import commands as c
from transfer.handoff.migration import R
from transfer.handoff.receiver import KVReceiver
from transfer.handoff.sender import KVSender


def moves(state: State) -> Iterator[tuple[str, partial[None], int]]:
    """(name, the change to make on a clone, faults it costs)."""
    for name, n in state.offered.items():
        p, chunks = name.prefill, state.chunks[int(name.request[1])]
        if state.alive[2 + p] and state.senders[p].is_open(name):
            what = "offer" if n < chunks else "close"
            yield f"{what} {name.request}", partial(_offer, name, n, chunks), 0
            yield f"give up {name.request}", partial(_give_up, name), 1
        d = name.decode
        receiving = state.receivers[d]._handoffs.get(name)
        if state.alive[d] and receiving is not None and receiving.state is R.OPEN:
            yield f"abort {name.request}", partial(_abort, name), 1
    for key, posted in state.sends.items():
        yield f"{'sent' if posted else 'posted'} {key}", partial(_send, key, ""), 0
        yield f"send fails {key}", partial(_send, key, "failed"), 1
    for key in state.copies:
        yield f"copied {key}", partial(_copied, key, ""), 0
        yield f"copy fails {key}", partial(_copied, key, "failed"), 1
    for lane, queue in state.lanes.items():
        for at in range(len(queue)):
            yield f"deliver {at} of {lane}", partial(_deliver, lane, at, False), int(at > 0)
            yield f"deliver {at} of {lane}, and again", partial(_deliver, lane, at, True), 1
    for notice in state.notices:
        yield f"{notice}", partial(_notice, notice), 0
    for pair in {(h.decode, h.prefill) for h in state.offered} - state.cut:
        yield f"cut {pair}", partial(_cut, pair), 1
    for at in {h.decode for h in state.offered} | {2 + h.prefill for h in state.offered}:
        if state.alive[at]:
            yield f"crash {at}", partial(_crash, at), 1


def _offer(name: Handoff, n: int, chunks: int, new: State) -> None:
    sender = new.senders[name.prefill]
    if n == chunks:
        new.sender_says(name.prefill, sender.close(name))
        return
    new.offered[name] = n + 1
    block = c.OutgoingBlock(BlockId(n), 0, n, 1, b"")
    new.sender_says(name.prefill, sender.offer(name, [block]))


def _give_up(name: Handoff, new: State) -> None:
    new.give_up(name.prefill, name)


def _abort(name: Handoff, new: State) -> None:
    new.carry_out(new.receivers[name.decode].stop(name))


def _send(part: Part, error: str, new: State) -> None:
    if not new.sends[part] and not error:
        new.sends[part] = True
        new.tell(part, c.Posted(part.name, part.seq, (0,)))
    else:
        del new.sends[part]
        new.tell(part, c.Sent(part.name, part.seq, error, 0.0))


def _copied(part: Part, error: str, new: State) -> None:
    new.copies -= {part}
    if not error:
        new.landed |= {part}
    new.tell(part, c.Received(part.name, part.seq, error, 0.0, 0))


def _deliver(lane: tuple[int, int, int], at: int, again: bool, new: State) -> None:
    queue = new.lanes[lane]
    if not again:
        new.lanes[lane] = queue[:at] + queue[at + 1 :]
    new.deliver(queue[at])


def _notice(notice: tuple[str, int, int], new: State) -> None:
    what, d, p = notice
    new.notices -= {notice}
    if what == "receiver":
        new.carry_out(new.receivers[d].peer_lost(Incarnation(p)))
        return
    sender = new.senders[p]
    lost = sender.peer_dead if what == "dead" else sender.peer_lost
    new.sender_says(p, lost(Incarnation(d)))
    if what == "lost" and not new.alive[d]:
        new.notices |= {("dead", d, p)}


def _cut(pair: tuple[int, int], new: State) -> None:
    d, p = pair
    new.cut |= {pair}
    for way in (0, 1):
        new.lanes.pop((way, d, p), None)
    if new.alive[d]:
        new.notices |= {("receiver", d, p)}
    if new.alive[2 + p]:
        new.notices |= {("lost", d, p)}


def _crash(at: int, new: State) -> None:
    new.alive[at] = False
    new.movers[at] = new.group(at)
    is_sender = at >= 2
    mine = {h for h in new.offered if (h.prefill == at - 2 if is_sender else h.decode == at)}
    if is_sender:
        new.senders[at - 2] = KVSender()
        new.sends = {part: posted for part, posted in new.sends.items() if part.at != at}
        new.pinned -= mine
    else:
        new.receivers[at] = KVReceiver()
        new.copies = frozenset(part for part in new.copies if part.at != at)
        new.landed = frozenset(part for part in new.landed if part.at != at)
        new.reserved -= mine
    deaf = {("receiver", at)} if not is_sender else {("lost", at - 2), ("dead", at - 2)}
    new.notices = frozenset(
        (what, d, p) for what, d, p in new.notices if (what, p if is_sender else d) not in deaf
    )
    for pair in {(h.decode, h.prefill) for h in mine}:
        if pair in new.cut:
            if not is_sender and ("lost", *pair) not in new.notices and new.alive[2 + pair[1]]:
                new.notices |= {("dead", *pair)}
        else:
            _cut(pair, new)
