"""What routers that have attached are still to be told of this worker's cache. Pure.

A telling belongs to one life of a router. It begins when that attaches; where its stream breaks before all has been
heard, and the same life is back within RESUME_S, it goes on behind what the router has heard (`RouterHello`). Every
other router is told from the beginning. For one router no number comes twice in the worker's life, in whichever
telling: so what it has heard of an earlier one is nothing of the one that goes on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.handshake import Party
from engine.kv.holding import Holding
from engine.kv.manager import KVCacheManager
from engine.messages import HeldRun, HoldingTold

RESUME_S = 30.0
"""How long a telling that was cut is kept."""
HELLO_S = 1.0
"""How long a router that is back may take to say what it has heard; then it is told from the beginning."""
LATE_S = 2.0
"""How long after its end a telling can still be cut: what was said last may be on its way."""
MOST_CUT = 16
"""Tellings that were cut and are kept."""
MOST_CUT_BLOCKS = 1 << 21
"""Blocks that they remember together to have told; past it, the oldest are forgotten."""


@dataclass(slots=True, eq=False)
class Telling:
    router: Party
    holding: Holding
    begins_s: float = 0.0
    """Until then the router may say what it has heard; 0.0: it has said it, or there is nothing to say."""
    over_s: float = 0.0
    """When it will have been heard, after its end."""


class Tellings:
    """Mutable state: the tellings by link, those that were cut, by the router's life, with the time at which they
    are forgotten, and the highest number of any piece. Owner: the engine thread."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._open: dict[int, Telling] = {}
        self._cut: dict[Party, tuple[Holding, float]] = {}
        self._number = 0

    def __bool__(self) -> bool:
        """True while there is something to be told now."""
        return any(telling.holding and not telling.begins_s for telling in self._open.values())

    def __repr__(self) -> str:
        return f"Tellings({len(self._open)} open, {len(self._cut)} cut)"

    def attached(self, link: int, router: Party, now: float) -> None:
        """Begin to tell a router, or wait for what one that is back has heard. A life has one stream: an earlier one
        is dead, whether that has been noticed or not."""
        for other, telling in list(self._open.items()):
            if telling.router == router:
                self.lost(other, now)
        cut = self._cut.pop(router, None)
        if cut is None:
            self._open[link] = Telling(router, Holding(self._kv, self._number))
        else:
            self._open[link] = Telling(router, cut[0], now + HELLO_S)

    def greeted(self, link: int, heard: int) -> None:
        """Go on with a router that has heard the record of this number last."""
        telling = self._open.get(link)
        if telling is not None and telling.begins_s:
            telling.begins_s = 0.0
            telling.holding.resume(heard)

    def lost(self, link: int, now: float) -> None:
        """Keep the telling of a stream that is gone, if it may not have been heard to its end."""
        telling = self._open.pop(link, None)
        if telling is not None:
            telling.holding.pause()
            self._cut[telling.router] = telling.holding, now + RESUME_S
            told_blocks = sum(holding.told_blocks for holding, _ in self._cut.values())
            while len(self._cut) > MOST_CUT or told_blocks > MOST_CUT_BLOCKS:
                told_blocks -= self._cut.pop(next(iter(self._cut)))[0].told_blocks

    def evicted(self, identities: Iterable[bytes]) -> None:
        """Note what is held no more: if it comes back, it is told again."""
        for telling in self._open.values():
            telling.holding.forget(identities)
        for holding, _ in self._cut.values():
            holding.forget(identities)

    def tick(self, now: float) -> None:
        """Forget what nobody has come back for, and what must have been heard; begin with who has said nothing."""
        self._cut = {router: cut for router, cut in self._cut.items() if now < cut[1]}
        for link, telling in list(self._open.items()):
            if telling.begins_s and now >= telling.begins_s:
                self.greeted(link, 0)
            if telling.over_s and now >= telling.over_s:
                del self._open[link]

    def take(self, limit: int, now: float) -> list[tuple[int, HoldingTold]]:
        """Return what comes next for each link, after looking at `limit` blocks."""
        said = []
        for link, telling in self._open.items():
            if telling.begins_s or telling.over_s:
                continue
            runs = [HeldRun(*run) for run in telling.holding.take(limit)]
            if not telling.holding:
                telling.over_s = now + LATE_S
            if runs:
                self._number = max(self._number, telling.holding.number)
                said.append((link, HoldingTold(runs, telling.holding.number)))
        return said
