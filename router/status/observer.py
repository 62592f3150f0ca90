"""The interface through which the router reports to its metrics (`telemetry.router_metrics.RouterMetrics`)."""

from collections.abc import Sequence
from typing import Protocol

from telemetry.router_metrics import WorkerView


class Observer(Protocol):
    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: Sequence[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def placed(self, reason: str) -> None: ...

    def logged(self, written: int, dropped: int) -> None: ...

    def shadowed(self, policy: str, what: str, cost_s: float) -> None: ...

    def hits(self, expected_tokens: int, actual_tokens: int) -> None: ...

    def dropped(self, kind: str) -> None: ...

    def continued(self, cause: str) -> None: ...

    def poisonous(self) -> None: ...

    def lag(self, seconds: float) -> None: ...

    def expected_worker(self, peer: str, role: str) -> None: ...

    def joined(self, peer: str, role: str) -> None: ...

    def lost(self, peer: str, role: str, how: str) -> None: ...

    def cluster(self, waiting: int, running: int, workers: Sequence[WorkerView]) -> None: ...

    def render(self) -> bytes: ...


class NullObserver(Observer):
    """Counts nothing."""

    def render(self) -> bytes:
        return b""
