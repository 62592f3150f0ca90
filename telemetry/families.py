"""A process's registry of metric families, the text it renders, and the port that serves it."""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from threading import Thread
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.metrics import MetricWrapperBase

VERSION = "0.1.0"
PREFIX = "headrace_"

Metric = TypeVar("Metric", bound=MetricWrapperBase)


class Family(Generic[Metric]):
    """One family with this process's labels filled in; `family[value, ...]` is a child by its own labels."""

    def __init__(self, child: Callable[..., Metric], known: Iterable[tuple[str, ...]]) -> None:
        self._child = child
        self._children = {values: child(*values) for values in known}

    def __getitem__(self, values: str | tuple[str, ...]) -> Metric:
        """The child of these label values; one that start-up did not foresee is created."""
        key = (values,) if isinstance(values, str) else values
        if key not in self._children:
            self._children[key] = self._child(*key)
        return self._children[key]


class Families:
    """Creates families that all carry the labels model, pool and worker, every known combination at zero."""

    def __init__(self, *, model: str, pool: str, worker: str) -> None:
        self.registry = CollectorRegistry()
        self._own = {"model": model, "pool": pool, "worker": worker}
        self.gauge("build_info", "Always 1; the version is a label.", version=[VERSION])[
            VERSION
        ].set(1)
        self._server: tuple[WSGIServer, Thread] | None = None

    def counter(self, name: str, text: str, **labels: Sequence[str]) -> Family[Counter]:
        return self._family(
            Counter(PREFIX + name, text, self._names(labels), registry=None), labels
        )

    def gauge(self, name: str, text: str, **labels: Sequence[str]) -> Family[Gauge]:
        return self._family(Gauge(PREFIX + name, text, self._names(labels), registry=None), labels)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], **labels: Sequence[str]
    ) -> Family[Histogram]:
        return self._family(
            Histogram(
                PREFIX + name, text, self._names(labels), buckets=tuple(buckets), registry=None
            ),
            labels,
        )

    def render(self) -> bytes:
        """All families in the Prometheus text format."""
        return generate_latest(self.registry)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Serve `/metrics` from a thread; 0 takes a free port. Returns the port. Raises OSError if it is taken."""
        if self._server is not None:
            raise RuntimeError("already serving")
        server, thread = start_http_server(port, addr=host, registry=self.registry)
        self._server = server, thread
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving; harmless when not serving."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _names(self, labels: dict[str, Sequence[str]]) -> list[str]:
        return [*self._own, *labels]

    def _family(self, metric: Metric, labels: dict[str, Sequence[str]]) -> Family[Metric]:
        self.registry.register(metric)
        own = tuple(self._own.values())
        return Family(lambda *values: metric.labels(*own, *values), product(*labels.values()))
