"""A tenant that probes for another one's prompts learns nothing, by counts or by time; where both share, it sees them.

Before each pair of probes the victim asks a prompt of its own. Then the prober asks that very prompt and one that
nobody has asked, in random order: whatever else the machine does meets both kinds alike.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from access.client import ClientCredentials
from access.config import AccessConfig
from access.keys import make_key
from access.tenants import CredentialTable, Tenant
from cluster.config import ClusterConfig
from cluster.processes.launch import Cluster, make_launcher
from engine.types import SamplingParams
from router.config import RouterConfig
from router.front.api import Delta, Finished, GenerateCall
from router.grpc.client import Client
from tests.integration.ranks import mann_whitney_p

pytestmark = pytest.mark.slow

PAIRS = 100
PROMPT_TOKENS = 65
TRIES = 2
"""Two equal samples differ by chance as much as is allowed here once in a hundred runs; what is really different does
so in both."""


@dataclass
class Probes:
    """What the prober has seen of the victim's prompts, and of fresh ones."""

    theirs_s: list[float] = field(default_factory=list)
    fresh_s: list[float] = field(default_factory=list)
    theirs_cached: list[int] = field(default_factory=list)
    fresh_cached: list[int] = field(default_factory=list)


class Place:
    """A running cluster with two tenants."""

    def __init__(self, keys_file: Path, stack: ExitStack, model_dir: Path) -> None:
        self._keys_file = keys_file
        self._keys = {name: make_key(name, "tenant", "") for name in ("victim", "prober")}
        self._rng = random.Random(11)
        self.say()
        config = ClusterConfig(
            launcher="process",
            router=RouterConfig(grpc_port=0, http_port=-1),
            access=AccessConfig(keys_file=str(keys_file)),
        )
        cluster = stack.enter_context(Cluster(config, make_launcher("process"), model_dir=str(model_dir)))
        address = cluster.start().grpc
        self.clients = {
            name: stack.enter_context(Client(address, ClientCredentials(api_key=shown)))
            for name, (shown, _) in self._keys.items()
        }

    def say(self, **shared: str) -> None:
        """Write the tenants' records: which cache each shares, if any."""
        tenants = {name: Tenant(shared_cache=shared.get(name, "")) for name in self._keys}
        table = CredentialTable(tenants=tenants, keys=[kept for _, kept in self._keys.values()])
        fresh = self._keys_file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(table))
        fresh.rename(self._keys_file)

    def prompt(self) -> list[int]:
        return [self._rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]

    def ask(self, who: str, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, as the client sees them, and how many tokens were cached."""
        call = GenerateCall(prompt=prompt, max_tokens=1, ignore_eos=True, sampling=SamplingParams(temperature=0.0))
        began_s, first_s = time.monotonic(), 0.0
        for event in self.clients[who].generate(call):
            if isinstance(event, Delta) and not first_s:
                first_s = time.monotonic() - began_s
            elif isinstance(event, Finished):
                return first_s or time.monotonic() - began_s, event.cached_tokens
        raise AssertionError("the stream has no end")

    def probe(self) -> Probes:
        seen = Probes()
        for _ in range(PAIRS):
            theirs, fresh = self.prompt(), self.prompt()
            self.ask("victim", theirs)
            probes = [(theirs, seen.theirs_s, seen.theirs_cached), (fresh, seen.fresh_s, seen.fresh_cached)]
            self._rng.shuffle(probes)
            for prompt, times, counts in probes:
                took_s, cached = self.ask("prober", prompt)
                times.append(took_s)
                counts.append(cached)
        return seen


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        one = Place(tmp_path_factory.mktemp("access") / "keys.json", stack, demo_model)
        for name in one.clients:  # the first request of a process takes longer than any other
            one.ask(name, one.prompt())
        yield one


def test_two_hundred_probes_reveal_nothing_of_another_tenants_prompts(place: Place) -> None:
    """Guards against a cache that answers whether somebody else has asked this before."""
    found = []
    for _ in range(TRIES):
        seen = place.probe()
        assert seen.theirs_cached == seen.fresh_cached == [0] * PAIRS
        found.append(mann_whitney_p(seen.theirs_s, seen.fresh_s))
        if found[-1] > 0.01:
            break
    print(f"\nno difference, p = {found}")
    assert found[-1] > 0.01, found


def test_the_same_probes_see_what_both_share(place: Place) -> None:
    """The test above would pass with probes that can see nothing. One record alone opens nothing, and a record counts
    from the moment on when it is written."""
    place.say(prober="team")
    time.sleep(3.0)
    theirs = place.prompt()
    place.ask("victim", theirs)
    assert place.ask("prober", theirs)[1] == 0, "the victim has not agreed"
    place.say(prober="team", victim="team")
    time.sleep(3.0)
    seen = place.probe()
    assert seen.theirs_cached == [PROMPT_TOKENS - 1] * PAIRS and seen.fresh_cached == [0] * PAIRS
    p = mann_whitney_p(seen.theirs_s, seen.fresh_s)
    print(f"\nshared, p = {p}")
    assert p < 1e-6


def _ranked(values: Sequence[float], one: Sequence[float]) -> float:
    """Return how far the sum of ranks of `one` lies from its mean, where all values are `values`."""
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for at, value in enumerate(ordered, 1):
        places.setdefault(value, []).append(at)
    return abs(sum(sum(places[v]) / len(places[v]) for v in one) - len(one) * (len(values) + 1) / 2)


@pytest.mark.parametrize("shift", [0.0, 0.4, 0.7])
def test_the_probability_is_that_of_shuffled_samples(shift: float) -> None:
    """Guards against a test of significance that is always, or never, significant: among shuffled samples, as many
    differ so much as it says."""
    rng = random.Random(5)
    one = [round(rng.gauss(0.0, 1.0), 1) for _ in range(40)]
    other = [round(rng.gauss(shift, 1.0), 1) for _ in range(40)]
    both, found = [*one, *other], _ranked([*one, *other], one)
    tries, as_far = 4000, 0
    for _ in range(tries):
        rng.shuffle(both)
        as_far += _ranked(both, both[:40]) >= found
    assert mann_whitney_p(one, other) == pytest.approx(as_far / tries, abs=0.01)
    assert mann_whitney_p([1.0] * 30, [1.0] * 30) == 1.0
    assert mann_whitney_p(range(100), range(60, 160)) < 1e-6
