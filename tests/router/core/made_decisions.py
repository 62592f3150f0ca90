"""Decisions about drawn views, with many ties."""

from random import Random

from engine.types import RequestId
from router.core.decisions import Decision, RecordedPolicy
from router.core.policy import DecodeView, Demand, PrefillView, RoutingPolicy

DEMAND = Demand(prompt_tokens=100, prompt_blocks=7, blocks=10, most_blocks=10, answer_tokens=33.3)


def drawn_views(random: Random) -> tuple[list[PrefillView], list[DecodeView]]:
    """Some workers of either role; half of the time all alike."""
    alike = random.random() < 0.5
    size = random.randrange(1, 6)
    prefills = [
        PrefillView(f"p{n}", 0, 0, 0.01, 0)
        if alike
        else PrefillView(
            f"p{n}",
            random.randrange(99),
            random.randrange(300),
            random.random() / 7,
            n,
            random.random(),
            delay=random.uniform(0.2, 5.0),
            host=n % 2,
            load_s=random.random() / 3,
        )
        for n in range(size)
    ]
    decodes = [
        DecodeView(f"d{n}", 0, 0, 64, 0.05, {}, 0)
        if alike
        else DecodeView(
            f"d{n}",
            n,
            random.randrange(64),
            64,
            random.random(),
            {"p0": random.random() / 300},
            n,
            rows=random.randrange(3),
            alone_s=random.random() / 50,
            s_per_row=random.random() / 900,
            unmeasured_s_per_block=(random.random() / 300, random.random() / 90),
            exposure=(random.random(), random.random()),
            load_s=random.random() / 9,
        )
        for n in range(size)
    ]
    return prefills, decodes


def ask(policy: RoutingPolicy, times: int, seed: int = 5) -> list[tuple[str, str]]:
    """The pairs that a policy chooses for drawn views."""
    random = Random(seed)
    pairs = []
    for number in range(times):
        if isinstance(policy, RecordedPolicy):
            policy.asked_for(RequestId(f"r{number}"), number / 3)
        choice = policy.choose(DEMAND, *drawn_views(random))
        assert choice is not None
        pairs.append((choice.prefill.name, choice.decode.name))
    return pairs


def made(name: str = "least-cost", times: int = 20, seed: int = 7) -> list[Decision]:
    """So many decisions of a policy."""
    heard: list[Decision] = []
    ask(RecordedPolicy(name, seed, [heard.append]), times)
    return heard
