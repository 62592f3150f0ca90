"""A process's registry of metric families, the text it renders, and the port that serves it.

`worker` is a stable slot name, never an address or an incarnation; no request id and no tenant is ever a label.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from telemetry.build import VERSION, revision
from telemetry.page_server import PageGuard, PageServer

PREFIX = "headrace_"
QUEUE_TEXT = "Requests that wait: at the router for room, on a worker to be computed."
RUNNING_TEXT = "Requests under way: placed by the router, or being computed by a worker."

# When a series began is no use to anybody here, and would be a third of every page.
disable_created_metrics()  # type: ignore[no-untyped-call]

Wrapped = TypeVar("Wrapped", bound=MetricWrapperBase)


class MetricFamily(Generic[Wrapped]):
    """One family with this process's labels filled in; `family[value, ...]` is a child by its own labels."""

    def __init__(
        self, metric: Wrapped, own: tuple[str, ...], known: Iterable[tuple[str, ...]]
    ) -> None:
        self._metric = metric
        self._own = own
        self._children = {values: self._child(values) for values in known}

    def __getitem__(self, values: str | tuple[str, ...]) -> Wrapped:
        """The child of these label values; one that start-up did not foresee is created."""
        key = (values,) if isinstance(values, str) else values
        if key not in self._children:
            self._children[key] = self._child(key)
        return self._children[key]

    def clear(self) -> None:
        """Forget every child, as when a gauge's subjects no longer exist."""
        self._metric.clear()
        self._children.clear()

    def _child(self, values: tuple[str, ...]) -> Wrapped:
        child: Wrapped = self._metric.labels(*self._own, *values)
        return child


class Snapshot(Collector):
    """A gauge of several values that belong together: a page shows all as of one moment, whoever sets them meanwhile.
    """

    def __init__(
        self, name: str, text: str, own: Mapping[str, str], label: str, values: Sequence[str]
    ) -> None:
        self._name, self._text = name, text
        self._own, self._label = dict(own), label
        self._values: Mapping[str, float] = dict.fromkeys(values, 0.0)

    def set(self, values: Mapping[str, float]) -> None:
        """Replace all values."""
        self._values = dict(values)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=[*self._own, self._label])
        for key, value in self._values.items():
            family.add_metric([*self._own.values(), key], value)
        yield family


class PolledValues(Collector):
    """Values that are asked for when a page is rendered, by the thread that renders it. `read` must allow that."""

    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        own: Mapping[str, str],
        label: str,
        read: Callable[[], Mapping[str, float]],
    ) -> None:
        self._family, self._name, self._text = family, name, text
        self._own, self._label, self._read = dict(own), label, read

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._text, labels=[*self._own, self._label])
        for key, value in self._read().items():
            family.add_metric([*self._own.values(), key], value)
        yield family


class Families:
    """Creates families that all carry the labels model, pool and worker, every known combination at zero."""

    def __init__(self, *, model: str, pool: str, worker: str) -> None:
        self.registry = CollectorRegistry()
        self._own = {"model": model, "pool": pool, "worker": worker}
        self.registry.register(_Process(self._own))
        self.info(
            "build_info",
            "Always 1; version and git revision are labels.",
            version=VERSION,
            revision=revision(),
        )
        self._server: PageServer | None = None

    def counter(self, name: str, text: str, **labels: Sequence[str]) -> MetricFamily[Counter]:
        return self._family(
            Counter(PREFIX + name, text, self._names(labels), registry=None), labels
        )

    def gauge(self, name: str, text: str, **labels: Sequence[str]) -> MetricFamily[Gauge]:
        return self._family(Gauge(PREFIX + name, text, self._names(labels), registry=None), labels)

    def snapshot(self, name: str, text: str, label: str, values: Sequence[str]) -> Snapshot:
        """Register a gauge whose values by `label` are always shown as of one moment."""
        found = Snapshot(PREFIX + name, text, self._own, label, values)
        self.registry.register(found)
        return found

    def asked(
        self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """Register values by `label` that `read` finds out when the page is rendered: a counter where `name` ends in
        _total, else a gauge."""
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        self.registry.register(PolledValues(family, PREFIX + name, text, self._own, label, read))

    def info(self, name: str, text: str, **labels: str) -> None:
        """Register a gauge that is always 1 and says something by its labels."""
        gauge = self.gauge(name, text, **{label: [value] for label, value in labels.items()})
        gauge[tuple(labels.values())].set(1)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], **labels: Sequence[str]
    ) -> MetricFamily[Histogram]:
        return self._family(
            Histogram(
                PREFIX + name, text, self._names(labels), buckets=tuple(buckets), registry=None
            ),
            labels,
        )

    def render(self) -> bytes:
        """Render all families in the Prometheus text format."""
        return generate_latest(self.registry)

    def serve(self, host: str = "127.0.0.1", port: int = 0, guard: PageGuard | None = None) -> int:
        """Serve `/metrics` from a thread; 0 takes a free port. Returns the port. Raises OSError if it is taken."""
        if self._server is not None:
            raise RuntimeError("already serving")
        self._server = PageServer(self.render, host, port, guard)
        return self._server.port

    def close(self) -> None:
        """Stop serving; harmless when not serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _names(self, labels: dict[str, Sequence[str]]) -> list[str]:
        return [*self._own, *labels]

    def _family(self, metric: Wrapped, labels: dict[str, Sequence[str]]) -> MetricFamily[Wrapped]:
        self.registry.register(metric)
        return MetricFamily(metric, tuple(self._own.values()), product(*labels.values()))


class ProcessMetrics:
    """The metrics of one process, in one registry. The methods of its subclasses only add numbers, and are called from
    one thread at a time per family."""

    def __init__(self, *, model: str, pool: str, worker: str) -> None:
        self.families = Families(model=model, pool=pool, worker=worker)

    def render(self) -> bytes:
        """Render all families in the Prometheus text format."""
        return self.families.render()

    def serve(self, host: str = "127.0.0.1", port: int = 0, guard: PageGuard | None = None) -> int:
        """Serve `/metrics` from a thread and return the port. Raises OSError if it is taken."""
        return self.families.serve(host, port, guard)

    def certificates(self, ends_s: Callable[[], Mapping[str, float]]) -> None:
        """Show when certificates end, in seconds since 1970, by what they are for; infinity where there are none."""
        self.families.asked(
            "certificate_expires_timestamp_seconds",
            "When the certificate in force expires; +Inf without one.",
            "certificate",
            ends_s,
        )

    def close(self) -> None:
        self.families.close()


class Growth:
    """Turns totals that somebody else keeps into what a counter is to be increased by."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], int] = {}

    def of(self, name: tuple[str, str], total: int) -> int:
        """Return how much `total` has grown since the last call of this name."""
        grown = total - self._seen.get(name, 0)
        self._seen[name] = total
        return grown


class _Process(Collector):
    """The standard `process_` families, with this process's labels on them."""

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = dict(own)
        self._standard = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        for family in self._standard.collect():
            family.samples = [
                sample._replace(labels={**self._own, **sample.labels}) for sample in family.samples
            ]
            yield family
