"""What a second copy costs others, and when it is worth it."""

import pytest

from router.core import reuse
from router.core.reuse import (
    FEWEST_BEGINNINGS,
    LEAST_DELAYED,
    MOST_BEGINNINGS,
    MOST_DELAYED,
    Shares,
    delaying_tokens,
    depths,
)

SIZE = 16


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{n}".encode() for n in range(blocks)]


def came(shares: Shares, beginning: list[bytes], uncached: int, workers: int = 4) -> None:
    shares.came(beginning, uncached, (len(beginning) + 1) * SIZE, SIZE, workers)


def test_depths_are_the_same_for_every_prompt_and_few() -> None:
    """Guards counting at the same blocks of two prompts, and a decision whose time does not grow with the prompt."""
    assert depths(0) == () and depths(3) == (1, 2, 3)
    assert depths(20) == (*range(1, 17), 18, 20)
    long = depths(100_000)
    assert len(long) < 150
    for blocks in (1, 17, 40, 1000):
        assert depths(blocks) == tuple(depth for depth in long if depth <= blocks)


def test_a_share_is_the_part_of_the_work_behind_a_beginning() -> None:
    shares = Shares()
    assert shares.share(chain("a", 4), 2) == 0.0
    came(shares, chain("a", 4), uncached=80)
    # 48 of its 80 tokens are behind the first two blocks.
    assert shares.share(chain("a", 4), 2) == pytest.approx(48 / 80)
    came(shares, chain("b", 4), uncached=80)
    assert shares.share(chain("a", 4), 2) == pytest.approx(24 / 80, rel=0.01)
    assert shares.share(chain("c", 4), 2) == 0.0
    # What is computed anyway is the last of it: a hot prefix of long ago counts by its tails.
    for _ in range(2000):
        came(shares, chain("b", 4), uncached=16)
    assert shares.share(chain("b", 4), 4) == pytest.approx(1.0, abs=0.02)
    assert shares.share(chain("a", 4), 2) < 0.01, "the past fades"


def test_depths_that_are_not_counted_take_the_next_one() -> None:
    shares = Shares()
    came(shares, chain("a", 40), uncached=16)
    assert shares.share(chain("a", 40), 17) == shares.share(chain("a", 40), 18) > 0
    assert shares.share(chain("a", 17), 17) == 0.0, "nothing deeper was counted"


def test_memory_is_bounded_and_the_largest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MOST_BEGINNINGS", 100)
    monkeypatch.setattr(reuse, "FEWEST_BEGINNINGS", 40)
    assert MOST_BEGINNINGS > 100
    shares = Shares()
    for n in range(500):
        came(shares, chain("hot", 4), uncached=64, workers=1000)
        came(shares, chain(f"{n}", 4), uncached=16, workers=1000)
        assert len(shares) <= 104
    assert shares.share(chain("hot", 4), 1) > 0.5


def test_what_cannot_change_a_price_is_forgotten_and_what_can_stays() -> None:
    """Guards against a memory that grows with every prompt for 65,536 beginnings, of which four workers can use few:
    five MB more between a router's thousandth and its three-thousandth request."""
    shares = Shares()
    for n in range(4000):
        came(shares, chain(f"{n}", 12), uncached=192)
        if n % 30 == 0:
            came(shares, chain("warm", 12), uncached=192)
        assert len(shares) <= FEWEST_BEGINNINGS + 12
    # One of 31 requests: just enough that a second copy is weighed (1 / (HEADROOM * workers) of the work).
    assert shares.share(chain("warm", 12), 1) == pytest.approx(1 / 31, rel=0.15)


def test_weights_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a router of many days: the weight of the newest request grows for ever otherwise."""
    monkeypatch.setattr(reuse, "_LARGEST", 4.0)
    shares, other = Shares(), Shares()
    for n in range(3000):
        came(shares, chain(f"{n % 3}", 4), uncached=16)
    monkeypatch.undo()
    for n in range(3000):
        came(other, chain(f"{n % 3}", 4), uncached=16)
    for n in range(3):
        assert shares.share(chain(f"{n}", 4), 4) == pytest.approx(other.share(chain(f"{n}", 4), 4))


def test_what_one_client_goes_on_with_weighs_in_full() -> None:
    """Guards a conversation that is computed again wherever a queue is a little shorter."""
    shares = Shares()
    for n in range(100):
        came(shares, chain(f"{n}", 10), uncached=32)
    found = delaying_tokens(shares, chain("7", 10), {"a": 10, "b": 0, "c": 4}, SIZE, waiting=0.0)
    assert found == {"a": 0.0, "c": LEAST_DELAYED * 6 * SIZE, "b": LEAST_DELAYED * 10 * SIZE}
    assert delaying_tokens(shares, chain("7", 10), {"a": 3, "b": 3}, SIZE, 0.0) == {"a": 0.0, "b": 0.0}
    assert delaying_tokens(shares, chain("7", 10), {}, SIZE, 0.0) == {}


@pytest.mark.parametrize(("waiting", "delayed"), [(0.0, LEAST_DELAYED), (10.0, 10.0), (1000.0, MOST_DELAYED)])
def test_as_many_are_delayed_as_wait(waiting: float, delayed: float) -> None:
    found = delaying_tokens(Shares(), chain("a", 10), {"a": 10, "b": 0}, SIZE, waiting)
    assert found["b"] == delayed * 10 * SIZE


def test_what_everybody_asks_for_is_copied_freely() -> None:
    """Guards a hot prefix against being served by its first holder alone."""
    shares = Shares()
    for _ in range(200):
        came(shares, chain("hot", 10), uncached=32)
    workers = {f"w{n}": 0 for n in range(8)}
    for holders in range(1, 8):
        workers[f"w{holders}"] = 10
        assert delaying_tokens(shares, chain("hot", 10), workers, SIZE, 0.0)["w0"] == 0.0


def test_the_more_hold_it_the_less_another_copy_is_worth() -> None:
    """Guards caches that fill up with copies. It comes with an eighth of all requests and half of their work, hence a
    sixteenth of all: four of eight holders are enough."""
    shares = Shares()
    for n in range(4000):
        came(shares, chain("warm" if n % 8 == 0 else f"cold{n}", 10), uncached=32)
    workers = {f"w{n}": 0 for n in range(8)}
    lost = []
    for holders in range(1, 6):
        workers[f"w{holders}"] = 10
        lost.append(delaying_tokens(shares, chain("warm", 10), workers, SIZE, 0.0)["w0"])
    assert lost[0] == 0.0 and lost[-1] == LEAST_DELAYED * 10 * SIZE and lost == sorted(lost)
    assert 0.0 < lost[2] < lost[-1]
