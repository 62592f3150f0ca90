"""Whom the router gives up, and whom not: the judge in the core, event by event. Over real connections it is tried in
tests/router/test_frozen.py, on real processes in tests/chaos/test_chaos_escalation.py, with any faults in tests/sim."""

import msgspec
import pytest

from engine.messages import Load, PeerAddress, Place, Tokens
from engine.types import Incarnation
from router.core.escalation import AWAY_S, Verdict
from router.core.events import (
    Command,
    Complete,
    Condemn,
    DecodeLost,
    Fail,
    Lost,
    Tick,
    WorkersNamed,
)
from tests.router.bench import A, Bench, ended, is_told
from tests.router.fake_cluster import load

ESCALATE_S, HUNG_S = 5.0, 30.0


class Court(Bench):
    """Two decode workers (lives 11 and 12) and a prefill worker; time passes in ticks, as in the router."""

    def __init__(self, **config: object) -> None:
        super().__init__(decodes=0, escalate_s=ESCALATE_S, worker_hung_s=HUNG_S, **config)
        self.join("d0", "decode", 11)
        self.join("d1", "decode", 12)

    def pass_s(self, seconds: float, reporting: tuple[str, ...] = ("p0", "d0", "d1")) -> list[Command]:
        """Ticks, and reports of the workers that make some."""
        out: list[Command] = []
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(self.now + 0.25, until)
            for name in reporting:
                out += self.hear(load(), name)
            out += self.do(Tick())
        return out

    def accuse(self, *lives: int, by: str = "p0") -> list[Command]:
        return self.hear(_silent(*lives), by)

    def condemned(self) -> list[str]:
        return [verdict.name for verdict in self.router.condemned]


def _silent(*lives: int) -> Load:
    return load(silent=list(lives))


def given_up(out: list[Command]) -> list[str]:
    return [command.verdict.name for command in out if isinstance(command, Condemn)]


def running(court: Court) -> str:
    """A request that runs and has one token; its decode worker."""
    (place,) = court.submit()
    assert is_told(place, Place)
    court.accept(worker=place.worker)
    court.hear(Tokens(A, 1, 0, [7]), place.worker)
    return place.worker


def test_a_silent_worker_that_the_router_does_not_reach_is_given_up() -> None:
    """Guards blocks that would be kept for ever for a frozen reader: somebody must be told to end it."""
    court = Court()
    court.pass_s(1.0)
    court.do(Lost("d0"))
    assert given_up(court.accuse(11)) == ["d0"]
    (verdict,) = court.router.condemned
    assert verdict == Verdict("d0", 11, "p0 and the router cannot reach it")  # type: ignore[arg-type]
    assert given_up(court.accuse(11)) == [], "said twice"
    court.pass_s(HUNG_S + 1.0, ("p0", "d1"))
    assert court.condemned() == ["d0"], "named twice"


def test_who_reports_is_not_silent_and_who_does_not_is() -> None:
    """Guards innocents: a cut between two workers says nothing about either; with no report either, it does."""
    court = Court()
    court.pass_s(20.0)
    assert given_up(court.accuse(11, 12)) == [] and not court.condemned()
    court.pass_s(ESCALATE_S - 0.5, ("p0", "d1"))
    assert given_up(court.accuse(11, 12)) == []
    court.pass_s(0.5, ("p0", "d1"))
    assert given_up(court.accuse(11, 12)) == ["d0"]


def test_former_and_unknown_lives_are_nobody() -> None:
    """Guards a replacement that would be killed for the death of its predecessor."""
    court = Court()
    court.do(Lost("d0"))
    court.join("d0", "decode", 21)
    court.do(Lost("d0"))
    assert given_up(court.accuse(11, 77)) == []


def test_a_request_of_a_hung_engine_goes_on_elsewhere_in_time() -> None:
    """Guards requests that wait for their deadline on a worker whose gRPC threads live and whose engine hangs."""
    court = Court()
    hung = running(court)
    other = {"d0": "d1", "d1": "d0"}[hung]
    assert not given_up(court.pass_s(HUNG_S - 0.5, ("p0", other)))
    out = court.pass_s(0.5, ("p0", other))
    assert given_up(out) == [hung]
    assert [type(c) for c in out if isinstance(c, DecodeLost | Complete | Fail)] == [DecodeLost]
    (again,) = [c for c in out if is_told(c, Place)]
    assert again.worker == other and again.record.record.tokens[-1] == 7
    court.accept(placement=2, worker=other)
    court.hear(Tokens(A, 1, 1, [8]), hung)  # the hung one wakes up: a ghost
    court.hear(Tokens(A, 2, 1, [9]), other)
    (done,) = court.hear(ended(placement=2, output_tokens=2), other)
    assert isinstance(done, Complete)


@pytest.mark.parametrize("again", [11, 21])
def test_a_condemned_life_never_works_again_and_the_next_one_does(again: int) -> None:
    """Guards against a worker that is about to be killed and gets requests meanwhile, and one shunned for its name."""
    court = Court()
    court.pass_s(HUNG_S, ("p0", "d1"))
    assert court.condemned() == ["d0"]
    court.do(Lost("d1"))
    out = court.join("d0", "decode", again)
    places = court.submit()
    if again == 11:
        assert given_up(out) == ["d0"] and not places and court.router.registry.get("d0") is None
    else:
        assert not given_up(out)
        (place,) = places
        assert is_told(place, Place) and place.worker == "d0"


def test_a_worker_taken_away_is_forgotten() -> None:
    """Guards a list that would grow with every worker that ever hung."""
    court = Court()
    court.pass_s(HUNG_S, ("p0", "d1"))
    assert court.condemned() == ["d0"]
    court.do(Lost("d0", for_good=True))
    assert court.router.condemned == ()


def test_a_missing_worker_is_named_and_forgiven_when_it_is_back() -> None:
    """Guards a pool that is one frozen worker short for ever, and a worker behind a cut network that comes back."""
    court = Court()
    court.do(Lost("d0"))
    assert not given_up(court.pass_s(HUNG_S + 0.5, ("p0", "d1")))
    assert court.condemned() == ["d0"]
    assert not given_up(court.join("d0", "decode", 11))
    court.do(Tick())
    assert not court.condemned() and court.router.registry.get("d0") is not None


def test_a_worker_that_was_frozen_before_the_router_began_is_missing_too() -> None:
    """Guards a slot that is lost for ever because the router that knew its life died while it was frozen."""
    court = Court()
    court.do(WorkersNamed(("d0", "d1", "d2"), (("d2", Incarnation(13)),)))
    court.pass_s(HUNG_S - 0.5)
    assert not court.condemned()
    court.pass_s(1.0)
    assert court.condemned() == ["d2"]
    court.join("d2", "decode", 13)
    court.do(Tick())
    assert not court.condemned(), "it is back"


def test_whom_the_router_never_reached_is_judged_once_it_has_tried() -> None:
    """Guards blocks kept for ever for such a reader; and an innocent accused before the new router has dialled it."""
    court = Court()
    court.do(WorkersNamed(("d0", "d1", "d2"), (("d2", Incarnation(13)),)))
    assert given_up(court.accuse(13)) == [], "not yet dialled"
    court.pass_s(ESCALATE_S - 0.5)
    assert given_up(court.accuse(13)) == []
    court.pass_s(1.0)
    assert given_up(court.accuse(13)) == ["d2"]
    court.do(WorkersNamed(("d0", "d1", "d2"), (("d2", Incarnation(23)),)))
    assert given_up(court.accuse(13)) == [], "a former life"


def test_a_life_that_was_only_named_still_brings_its_cache() -> None:
    """Guards the prefix index: the first connection of a life must tell its blocks, known by name or not."""
    court = Court()
    court.router.registry.named([("d2", Incarnation(13))])
    worker = court.router.registry.get("d0")
    assert worker is not None
    info = msgspec.structs.replace(worker.info, incarnation=Incarnation(13))
    assert court.router.registry.join(PeerAddress("d2", "h:2"), info, court.now)


def test_a_router_that_slept_blames_nobody() -> None:
    """Guards a cluster that is killed whole because its router was stopped for a minute."""
    court = Court()
    court.pass_s(1.0)
    court.do(Lost("d1"))
    court.now += 60.0
    assert not given_up(court.accuse(11))
    assert not given_up(court.do(Tick())) and not court.condemned()
    assert not given_up(court.pass_s(HUNG_S - 1.0, ("p0",)))
    assert sorted(given_up(court.pass_s(2.0, ("p0",)))) == ["d0"]
    assert sorted(court.condemned()) == ["d0", "d1"]


def test_a_severed_stream_is_told_once() -> None:
    """Guards the end of the stream, which the link reports as a loss of its own after the worker was given up."""
    court = Court()
    hung = running(court)
    other = {"d0": "d1", "d1": "d0"}[hung]
    court.pass_s(HUNG_S, ("p0", other))
    assert court.do(Lost(hung)) == []
    assert court.hear(load(), hung) == [], "a report that was under way"


def test_a_router_that_slept_counts_from_when_it_woke() -> None:
    """Guards a worker that was away for a moment when its router fell asleep."""
    court = Court()
    court.do(Lost("d0"))
    court.pass_s(20.0, ("p0", "d1"))
    court.now += 60.0
    court.do(Tick())
    court.pass_s(HUNG_S - 0.5, ("p0", "d1"))
    assert not court.condemned()
    court.pass_s(0.5, ("p0", "d1"))
    assert court.condemned() == ["d0"]


@pytest.mark.parametrize(("away_s", "names"), [(AWAY_S, ["d0"]), (AWAY_S + 0.01, [])])
def test_a_router_that_looks_once_a_second_has_not_slept(away_s: float, names: list[str]) -> None:
    court = Court()
    court.do(Tick())
    court.do(Lost("d0"))
    court.now += away_s
    assert given_up(court.accuse(11)) == names


@pytest.mark.parametrize(("away_s", "names"), [(AWAY_S, ["d0"]), (AWAY_S + 0.01, [])])
def test_what_it_has_not_heard_for_a_second_is_not_its_own_fault(away_s: float, names: list[str]) -> None:
    """Guards the border: a look that comes a second after the last one judges, a later one waits."""
    court = Court()
    court.pass_s(HUNG_S - AWAY_S, ("p0", "d1"))
    court.now += away_s
    assert given_up(court.do(Tick())) == names


def test_an_unknown_worker_is_judged_after_just_so_long() -> None:
    court = Court()
    court.do(WorkersNamed(("d0", "d1", "d2"), (("d2", Incarnation(13)),)))
    court.do(Tick())
    court.pass_s(ESCALATE_S)
    assert given_up(court.accuse(13)) == ["d2"]


def test_verdicts_that_were_read_do_not_change() -> None:
    """Guards the thread that serves the supervisor: it reads them while the router goes on."""
    court = Court()
    court.pass_s(HUNG_S, ("p0", "d1"))
    before = court.router.condemned
    court.do(Lost("d1"))
    assert given_up(court.accuse(12)) == ["d1"]
    assert [verdict.name for verdict in before] == ["d0"] and court.condemned() == ["d0", "d1"]
    between = court.router.condemned
    court.pass_s(HUNG_S, ())
    assert [verdict.name for verdict in between] == ["d0", "d1"]
