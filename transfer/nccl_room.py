"""Which pairs have a communicator. Each holds device memory at both ends, so there is a limit at each end.

A pair is given one when its workers meet, as long as there is room, and later when both ends have posted a chunk. Who
needs room takes it from the pair that was used least recently: a leader drops its communicator, a follower asks for
that.
"""

from collections.abc import Iterable

from transfer.nccl_communicator import Communicator, Stage
from transfer.nccl_peer import Peer


def is_due(peer: Peer, has_room: bool) -> bool:
    """Leader: shall this pair's communicator be made now, or room for it?"""
    if peer.communicator is not None or not peer.is_met or peer.lost or not peer.pair.leads:
        return False
    return peer.pair.is_wanted or (has_room and not peer.epoch)


def spare(peers: Iterable[Peer], busy: Communicator | None) -> Peer | None:
    """Whose communicator shall go: one that nothing waits for, if there is such a one, else one that has served since
    it was made. None while one is on its way out already, or none can be missed."""
    found: list[tuple[bool, float, Peer]] = []
    for peer in peers:
        communicator = peer.communicator
        if communicator is None or communicator is busy:
            continue
        if communicator.stage is Stage.DROPPING or peer.spare_asked:
            return None
        has_served = communicator.used_s > communicator.began_s
        if communicator.stage is Stage.WARM and (peer.pair.is_idle or has_served):
            found.append((not peer.pair.is_idle, communicator.used_s, peer))
    return min(found, key=lambda entry: entry[:2])[2] if found else None
