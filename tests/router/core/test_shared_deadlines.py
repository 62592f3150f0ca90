"""What is predicted of the wait in one of several routers' lines before the same workers, and whom it refuses."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest

from engine.messages import Place
from engine.types import RequestId, RequestRecord
from router.core.events import Command, Event, Fail, Submit
from tests.router.core.test_shared_line import Cluster, Crowd


@dataclass(slots=True, eq=False)
class Arrival:
    """A request that comes at `at_s`, to the router that is so far down their list. `left_s` is its caller's deadline;
    `predicted_s` its wait in the line, as that router predicts it, `waited_s` that until a worker took it."""

    at_s: float
    home: float
    tenant: str
    tokens: int
    left_s: float
    predicted_s: float = 0.0
    waited_s: float | None = None


def arrivals(kind: str, rate: float, until_s: float, seed: int) -> Iterator[Arrival]:
    """Requests that come `even`; in `bursts`, every other ten seconds; of four `tenants`; or `apart`, of one tenant at
    the first router and one at the others."""
    lots, at_s = Random(seed), 0.0
    while at_s < until_s:
        at_s += lots.expovariate(rate * (1.0 if kind != "bursts" else (2.5, 0.2)[int(at_s / 10) % 2]))
        home, tenant = lots.random(), lots.choice("abcd" if kind == "tenants" else "a")
        if kind == "apart":
            home, tenant = lots.choice([(0.0, "a"), (0.25 + 0.75 * home, "b")])
        yield Arrival(at_s, home, tenant, lots.randint(50, 400), lots.uniform(1.0, 12.0))


class Deadlines(Cluster):
    """Routers before the worker of `Cluster`, with a margin of 1. Every eighth request is a probe: it names no
    deadline, is never refused, and shows what a prediction was worth."""

    def __init__(self, routers: int, came: list[Arrival], seed: int) -> None:
        tenants = {one.tenant: 1.0 for one in came}
        super().__init__(routers, Crowd({}, tenants), seed, margin=1.0)
        self.got = {tenant: [] for tenant in tenants}
        self.came = {RequestId(f"r{number}"): one for number, one in enumerate(came)}
        self.refused = set[str]()
        self.probes = list(self.came.values())[::8]
        for name, one in self.came.items():
            self._owner[name] = (one.tenant, one.tokens)
            ids = [10**6 + len(self._owner)] * one.tokens
            record = RequestRecord(request=name, tokens=ids, prompt_tokens=one.tokens, max_tokens=8, seed=1)
            deadline_s = None if one in self.probes else one.at_s + one.left_s
            self._later(one.at_s, int(one.home * routers), Submit(record, deadline_s, 1.0, one.tenant, None, 1))

    def bias(self) -> float:
        """Return by what part the waits of the probes were predicted too long, or, below 0, too short."""
        waited = [(one.predicted_s, one.waited_s) for one in self.probes if one.waited_s is not None]
        waited = [both for both in waited if max(both) > 0.5]
        return sum(predicted for predicted, _ in waited) / sum(took for _, took in waited) - 1.0

    def ends(self) -> Counter[str]:
        """Count what became of those with a deadline: refused, or taken by a worker in time, or not. Of the probes, as
        if they had had theirs: how many would have been refused, and how many of those in time."""
        ends: Counter[str] = Counter()
        for name, one in self.came.items():
            is_in_time = one.waited_s is not None and one.waited_s <= one.left_s
            if one not in self.probes:
                ends["refused" if name in self.refused else "in time" if is_in_time else "late"] += 1
            elif one.predicted_s > one.left_s:
                ends["probes refused"] += 1
                ends["probes refused, in time"] += is_in_time
        return ends

    def _come(self, tenant: str, at: int) -> None:
        """Nobody comes again."""

    def _do(self, at: int, event: Event) -> None:
        if isinstance(event, Submit):
            one = self.came[event.record.request]
            one.predicted_s = self.each[at]._queue.wait_s(event.tenant, event.weight, 0, self.now)
        super()._do(at, event)

    def _offered(self, at: int, place: Place) -> list[Command]:
        out = super()._offered(at, place)
        if place.record.request in self.running:
            one = self.came[place.record.request]
            one.waited_s = self.now - one.at_s
        return out

    def _failed(self, fail: Fail) -> None:
        if fail.refusal == "deadline":
            self.refused.add(fail.request)


@pytest.mark.parametrize("routers", [1, 4])
def test_a_wait_is_predicted_as_well_by_one_of_several_routers(routers: int) -> None:
    """Guards deadlines where several routers offer to one worker: what it refused was taken to have left the line, so
    that half of the wait was predicted, and who had no hope was let in."""
    cluster = Deadlines(routers, list(arrivals("even", 20.0, 40.0, 1)), 1)
    cluster.run(60.0)
    assert abs(cluster.bias()) < 0.2
    ends = cluster.ends()
    assert ends["refused"] > 2 * ends["late"]


def main() -> None:
    """Print what was predicted, and what became of all, for three seeds together."""
    for kind in ("even", "bursts", "tenants", "apart"):
        for routers in (1, 4):
            clusters = [Deadlines(routers, list(arrivals(kind, 20.0, 60.0, seed)), seed) for seed in (1, 2, 3)]
            ends: Counter[str] = Counter()
            for cluster in clusters:
                cluster.run(100.0)
                ends += cluster.ends()
            biases = ", ".join(f"{cluster.bias():+.2f}" for cluster in clusters)
            print(f"{kind}, {routers} routers: wait predicted off by {biases}; {dict(ends)}", flush=True)


if __name__ == "__main__":
    main()
