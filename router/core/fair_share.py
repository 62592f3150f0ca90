"""Orders the requests of several tenants that wait, so that each gets its share of tokens by weight.

Start-time fair queueing (P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queueing", SIGCOMM 1996): a request's tag is
where its tenant's last one ends, or the tag of what is being served, whichever is later; it ends its tokens / weight
further on. The lowest tag is served first. One tenant's requests keep the order in which they came, and one that has
asked for nothing meanwhile saves nothing up. Pure.
"""

MAX_TENANTS = 4096
"""Tenants remembered while the queue is never empty; beyond it those go that have been served."""


class FairShare:
    # Mutable state: the tag of what was served last, and where each tenant's last request ends.

    def __init__(self) -> None:
        self._served = 0.0
        self._ends: dict[bytes, float] = {}

    def __repr__(self) -> str:
        return f"FairShare(at {self._served:g}, {len(self._ends)} tenants)"

    def tag(self, namespace: bytes, tokens: int, weight: float) -> float:
        """Return the tag of a new request of the tenant with that namespace."""
        if len(self._ends) > MAX_TENANTS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._served}
        start = max(self._served, self._ends.get(namespace, 0.0))
        self._ends[namespace] = start + tokens / weight
        return start

    def serve(self, tag: float) -> None:
        """Note that the request with this tag is served now."""
        self._served = max(self._served, tag)

    def clear(self) -> None:
        """Begin anew: nobody waits."""
        self._served = 0.0
        self._ends.clear()
