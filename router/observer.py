"""What the router tells its metrics. `telemetry.metrics.RouterMetrics` fulfils it."""

from typing import Protocol


class Observer(Protocol):
    def request(
        self,
        outcome: str,
        ttft_s: float | None,
        itl_s: list[float],
        e2e_s: float,
        stages: dict[str, float],
    ) -> None: ...

    def decision(self, seconds: float, reason: str) -> None: ...

    def hits(self, expected_tokens: int, actual_tokens: int) -> None: ...

    def dropped(self, kind: str) -> None: ...

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

    def decision(self, seconds: float, reason: str) -> None:
        pass

    def hits(self, expected_tokens: int, actual_tokens: int) -> None:
        pass

    def dropped(self, kind: str) -> None:
        pass

    def render(self) -> bytes:
        return b""
