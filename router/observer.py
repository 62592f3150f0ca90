"""What the router tells its metrics. `telemetry.router_metrics.RouterMetrics` fulfils it."""

from collections.abc import Sequence
from typing import Protocol

from telemetry.router_metrics import WorkerView


class Observer(Protocol):
    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: list[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None: ...

    def decided(self, seconds: float) -> None: ...

    def placed(self, reason: str) -> None: ...

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


class NullObserver:
    """Counts nothing."""

    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: list[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None:
        pass

    def decided(self, seconds: float) -> None:
        pass

    def placed(self, reason: str) -> None:
        pass

    def hits(self, expected_tokens: int, actual_tokens: int) -> None:
        pass

    def dropped(self, kind: str) -> None:
        pass

    def continued(self, cause: str) -> None:
        pass

    def poisonous(self) -> None:
        pass

    def lag(self, seconds: float) -> None:
        pass

    def expected_worker(self, peer: str, role: str) -> None:
        pass

    def joined(self, peer: str, role: str) -> None:
        pass

    def lost(self, peer: str, role: str, how: str) -> None:
        pass

    def cluster(self, waiting: int, running: int, workers: Sequence[WorkerView]) -> None:
        pass

    def render(self) -> bytes:
        return b""
