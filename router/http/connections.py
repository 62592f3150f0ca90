"""Decides which connections a server keeps when more come than it may hold.

A connection waits for its client (for a request, or for the rest of one) or is answered. One that is answered is never
given up; of those that wait, the one that has waited longest goes when another comes and there is no room, so that
clients who hold connections open and say nothing keep nobody out. Pure.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class ConnectionTable(Generic[C]):
    """The open connections of one server: at most `total`, and `per_address` from one address."""

    # Mutable state: the address of every connection, how many each address has, and those that wait, longest first.

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._addresses: dict[C, str] = {}
        self._counts: dict[str, int] = {}
        self._waiting: OrderedDict[C, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"ConnectionTable({len(self._addresses)} connections, {len(self._waiting)} waiting)"

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: C, address: str) -> tuple[bool, C | None]:
        """Return whether a new connection is taken, and which one is given up for it. It waits for its client."""
        victim: C | None = None
        if self._counts.get(address, 0) >= self._per_address:
            victim = next((one for one in self._waiting if self._addresses[one] == address), None)
            if victim is None:
                return False, None
        elif len(self._addresses) >= self._total:
            victim = next(iter(self._waiting), None)
            if victim is None:
                return False, None
        if victim is not None:
            self.remove(victim)
        self._addresses[connection] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        self._waiting[connection] = None
        return True, victim

    def answered(self, connection: C) -> None:
        """Its request is complete, and under way."""
        self._waiting.pop(connection, None)

    def waits(self, connection: C) -> None:
        """It has been answered; its client may ask again."""
        if connection in self._addresses:
            self._waiting[connection] = None

    def remove(self, connection: C) -> None:
        """Forget a connection that is closed; harmless if it is not known."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._waiting.pop(connection, None)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def check(self) -> None:
        """Recompute what is kept twice. Raises AssertionError."""
        addresses = list(self._addresses.values())
        assert self._counts == {address: addresses.count(address) for address in addresses}
        assert set(self._waiting) <= set(self._addresses)
        assert len(addresses) <= self._total and all(count <= self._per_address for count in self._counts.values())
