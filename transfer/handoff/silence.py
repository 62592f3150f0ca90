"""Which readers a sender calls silent: their channel is lost, and blocks are kept for them because they may still read.

Pure: time is an argument. A sender can do nothing about such a reader but keep the blocks; it tells the router, which
knows whether anybody else still hears of it, and whom the supervisor asks (docs/handoff.md, "The ladder").
"""

from collections.abc import Iterable

from engine.messages import Handoff
from engine.types import Incarnation


class Silence:
    # Mutable state: since when blocks have been quarantined for each lost reader.

    def __init__(self, escalate_s: float) -> None:
        self._escalate_s = escalate_s
        self._since_s: dict[Incarnation, float] = {}

    def __repr__(self) -> str:
        return f"Silence({', '.join(f'{peer:x}' for peer in self._since_s) or 'none'})"

    def overdue(self, quarantined: Iterable[Handoff], now: float) -> list[Incarnation]:
        """Readers for whom blocks have been in quarantine for `escalate_s` without a break. To be asked regularly:
        a quarantine is counted from when it is first seen."""
        readers = {handoff.decode for handoff in quarantined}
        self._since_s = {peer: self._since_s.get(peer, now) for peer in sorted(readers)}
        return [peer for peer, since in self._since_s.items() if now - since >= self._escalate_s]
