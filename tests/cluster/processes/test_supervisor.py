"""Who is started again, and when: the pure decision first, then both launchers with processes that are killed."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cluster.processes.events import (
    Accused,
    Announce,
    AskToLeave,
    Command,
    Discard,
    EndCluster,
    KillProcess,
    Launch,
    LeaveWanted,
    ProcessEnded,
    Refuse,
    Resize,
    RouterProbed,
    TimePassed,
    Up,
)
from cluster.processes.launch import Cluster, make_launcher
from cluster.processes.leftovers import descendants
from cluster.processes.slots import SlotState
from cluster.processes.spec import ChildReady, Kind, Launcher, LaunchError
from cluster.processes.supervisor import LEAVE_MARGIN_S, NO_REASON, RestartConfig, Supervisor
from engine.types import Incarnation
from tests.cluster.processes.test_launchers import (
    CONFIG,
    FAKES,
    LAUNCHERS,
    LentRay,
    eventually,
    gone,
)

POLICY = RestartConfig(limit=3, window_s=100.0, first_pause_s=1.0, longest_pause_s=3.0)
START_TIMEOUT_S = 20.0


def up(name: str, port: int, life: int = 1) -> ChildReady:
    return ChildReady(name=name, pid=1, address=f"h:{port}", incarnation=Incarnation(life))


def supervisor(policy: RestartConfig = POLICY) -> Supervisor:
    children: dict[str, tuple[Kind, ChildReady]] = {
        "prefill-0": ("prefill", up("prefill-0", 1)),
        "decode-0": ("decode", up("decode-0", 2)),
        "router": ("router", up("router", 3)),
    }
    return Supervisor(policy, START_TIMEOUT_S, children)


def names(commands: list[Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def addresses(announce: Command) -> tuple[list[str], list[str]]:
    assert isinstance(announce, Announce)
    reached = [[p.address for p in pool if p.address] for pool in (announce.prefill, announce.decode)]
    return reached[0], reached[1]


def down(announce: Command) -> list[str]:
    assert isinstance(announce, Announce)
    return [p.name for p in (*announce.prefill, *announce.decode) if not p.address]


def test_every_death_has_a_reason() -> None:
    """Guards `headrace status`, and the log's last line, against a cause that is empty."""
    one = supervisor()
    one.handle(ProcessEnded("prefill-0", ""), 10.0)
    assert {slot.name: slot.why for slot in one.view()}["prefill-0"] == NO_REASON
    (end,) = supervisor(msgspec.structs.replace(POLICY, limit=0)).handle(ProcessEnded("router", ""), 10.0)
    assert end == EndCluster(f"router: {NO_REASON}")


def test_a_death_is_told_before_the_replacement_exists() -> None:
    """Guards against a router that dials a dead worker's port, which may be another worker's by then, and against a
    pool that shrinks for good."""
    one = supervisor()
    discard, announce = one.handle(ProcessEnded("prefill-0", "killed by SIGKILL"), 10.0)
    assert discard == Discard("prefill-0") and addresses(announce) == ([], ["h:2"])
    assert one.handle(TimePassed(), 10.9) == []
    assert one.handle(TimePassed(), 11.0) == [Launch("prefill-0")]
    (announce,) = one.handle(Up(up("prefill-0", 7)), 14.0)
    assert addresses(announce) == (["h:7"], ["h:2"])
    assert repr(one) == "Supervisor(prefill-0=up(1), decode-0=up(0), router=up(0))"


def test_pauses_double_and_a_storm_ends_the_cluster_with_the_reason() -> None:
    """Guards against a restart storm: a worker that dies as it starts must cost ever less, and end in a clear word."""
    one, now, pauses = supervisor(), 0.0, []
    for _ in range(POLICY.limit):
        assert names(one.handle(ProcessEnded("decode-0", "no memory"), now))[0] == "Discard"
        died = now
        while not (commands := one.handle(TimePassed(), now)):
            now += 0.125
        assert commands == [Launch("decode-0")]
        pauses.append(now - died)
    assert pauses == [1.0, 2.0, 3.0]
    assert one.handle(ProcessEnded("decode-0", "no memory"), now) == [
        EndCluster("decode-0: no memory (4 times in 100 s)")
    ]


def pools(prefill: int, decode: int, policy: RestartConfig = POLICY) -> Supervisor:
    kinds: list[tuple[Kind, int]] = [("prefill", prefill), ("decode", decode), ("router", 1)]
    children: dict[str, tuple[Kind, ChildReady]] = {}
    for kind, count in kinds:
        for number in range(count):
            name = kind if kind == "router" else f"{kind}-{number}"
            children[name] = (kind, up(name, len(children)))
    return Supervisor(policy, START_TIMEOUT_S, children)


def die_often(one: Supervisor, name: str, now: float, deaths: int) -> tuple[float, list[Command]]:
    """Let it die and start again, until the last death; when that was, and what followed."""
    for _ in range(deaths - 1):
        one.handle(ProcessEnded(name, "no memory"), now)
        while Launch(name) not in one.handle(TimePassed(), now):
            now += 0.125
    return now, one.handle(ProcessEnded(name, "no memory"), now)


def test_one_that_keeps_dying_is_left_alone_while_another_serves() -> None:
    """Guards a whole cluster that is ended by its worst worker, and one that is never tried again."""
    one = pools(1, 2)
    now, commands = die_often(one, "decode-1", 0.0, POLICY.limit + 1)
    assert commands == [Discard("decode-1")] and one.state("decode-1") is SlotState.FAILED
    assert one.is_steady, "nothing is to happen: orders are not held up"
    view = {slot.name: (slot.state, slot.deaths, slot.why) for slot in one.view()}
    assert view["decode-1"] == (SlotState.FAILED, 4, "no memory")
    quiet = [one.handle(TimePassed(), now + second) for second in range(int(POLICY.window_s))]
    assert not any(quiet)
    assert one.handle(TimePassed(), now + POLICY.window_s) == [Launch("decode-1")]
    assert names(one.handle(Up(up("decode-1", 9)), now + POLICY.window_s)) == ["Announce"]


def test_the_last_of_a_pool_that_keeps_dying_ends_the_cluster() -> None:
    """Guards a cluster that goes on, and answers nothing, without a decode worker."""
    one = pools(2, 2)
    now, _ = die_often(one, "decode-1", 0.0, POLICY.limit + 1)
    _, commands = die_often(one, "decode-0", now, POLICY.limit + 1)
    assert commands == [EndCluster("decode-0: no memory (4 times in 100 s)")]


def test_prefill_workers_that_keep_dying_end_nothing_while_a_decode_worker_serves() -> None:
    """Guards a cluster of one pool against a prefill worker that is added to it and cannot start: decode workers read
    prompts themselves. The router is told that it will be tried again, and, once it is taken away, that it will not."""
    one = pools(1, 1)
    now, commands = die_often(one, "prefill-0", 0.0, POLICY.limit + 1)
    assert not any(isinstance(command, EndCluster) for command in commands)
    assert one.state("prefill-0") is SlotState.FAILED
    assert addresses(one.announcement())[0] == [] and down(one.announcement()) == ["prefill-0"]
    one.handle(Resize("prefill", 0, 9.0), now)
    commands = one.handle(TimePassed(), now)
    assert commands == [Discard("prefill-0"), one.announcement()] and one.announcement().prefill == ()
    _, commands = die_often(one, "decode-0", now, POLICY.limit + 1)
    assert any(isinstance(command, EndCluster) for command in commands)


def test_many_that_die_together_do_not_start_together() -> None:
    """Guards a host that loses its workers for want of memory, and loses them again as all load at once."""
    one = pools(1, 8, RestartConfig(limit=3, first_pause_s=1.0, at_once=2))
    for number in range(8):
        one.handle(ProcessEnded(f"decode-{number}", "killed by SIGKILL"), 0.0)
    one.handle(ProcessEnded("router", "killed by SIGKILL"), 0.0)
    assert one.handle(TimePassed(), 5.0) == [
        Launch("decode-0"),
        Launch("decode-1"),
        Launch("router"),
    ], "a router is never held back"
    assert one.handle(TimePassed(), 6.0) == []
    one.handle(Up(up("router", 9)), 6.5)
    one.handle(Up(up("decode-0", 9)), 6.5)
    assert one.handle(TimePassed(), 7.0) == [Launch("decode-2")]
    one.handle(ProcessEnded("decode-1", "x"), 7.5)
    assert one.handle(TimePassed(), 8.0) == [Launch("decode-3")]


def test_a_pool_grows_at_once_and_shrinks_one_by_one_from_its_end() -> None:
    """Guards a pool that is resized to another size, reuses a name that is still taken, or loses two at once."""
    one = pools(1, 2)
    one.handle(Resize("decode", 4, 9.0), 0.0)
    assert not one.is_steady and one.pool("decode") == [f"decode-{n}" for n in range(4)]
    assert one.handle(TimePassed(), 0.1) == [Launch("decode-2"), Launch("decode-3")]
    for number in (2, 3):
        (announce,) = one.handle(Up(up(f"decode-{number}", 40 + number)), 1.0)
    assert addresses(announce)[1] == ["h:1", "h:2", "h:42", "h:43"] and one.is_steady
    one.handle(Resize("decode", 1, 9.0), 2.0)
    for name in ("decode-3", "decode-2", "decode-1"):
        assert one.handle(TimePassed(), 2.0) == [AskToLeave(name, 9.0)]
        discard, announce = one.handle(ProcessEnded(name, "left", left=True), 3.0)
        assert discard == Discard(name) and name not in one
    assert addresses(announce) == (["h:0"], ["h:1"]) and one.is_steady
    one.handle(Resize("decode", 2, 9.0), 4.0)
    assert one.handle(TimePassed(), 4.0) == [Launch("decode-1")]


def test_who_does_not_run_leaves_at_once() -> None:
    """Guards a broken worker that cannot be taken away because it never comes up to be asked."""
    one = pools(1, 2)
    die_often(one, "decode-1", 0.0, POLICY.limit + 1)
    one.handle(LeaveWanted(("decode-1",), 9.0, False), 50.0)
    commands = one.handle(TimePassed(), 50.0)
    assert commands == [Discard("decode-1"), one.announcement()] and "decode-1" not in one
    one.handle(ProcessEnded("decode-0", "x"), 60.0)
    one.handle(Resize("decode", 2, 9.0), 60.0)
    assert one.handle(TimePassed(), 60.0) == [Launch("decode-1")]


def test_old_deaths_are_forgiven() -> None:
    """Guards against a cluster that ends after weeks because its few deaths were never forgotten."""
    one = supervisor()
    for number in range(20):
        now = number * 60.0
        assert names(one.handle(ProcessEnded("prefill-0", "x"), now)) == ["Discard", "Announce"]
        assert one.handle(TimePassed(), now + 3.0) == [Launch("prefill-0")]
        one.handle(Up(up("prefill-0", number)), now + 4.0)


def test_no_limit_means_none() -> None:
    strict = supervisor(RestartConfig(limit=0))
    assert strict.handle(ProcessEnded("decode-0", "x"), 0.0) == [EndCluster("decode-0: x")]
    assert strict.handle(ProcessEnded("router", "y"), 0.0) == [EndCluster("router: y")]


def looks(one: Supervisor, begin_s: float, end_s: float, answered: bool) -> list[Command]:
    """Looks at the router, four a second."""
    out: list[Command] = []
    for quarter in range(int(begin_s * 4), int(end_s * 4)):
        out += one.handle(RouterProbed("router", answered), quarter / 4)
        out += one.handle(TimePassed(), quarter / 4)
    return out


def test_a_router_that_owes_its_answer_for_too_long_is_killed_once() -> None:
    """Guards a cluster whose frozen router is noticed by nobody."""
    one = supervisor()
    limit_s = POLICY.router_hung_s
    assert looks(one, 0.0, 100.0, answered=True) == []
    assert looks(one, 100.0, 100.0 + limit_s, answered=False) == []
    assert looks(one, 100.0 + limit_s, 101.0 + limit_s, answered=False) == [
        KillProcess("router", "no answer for 30.0 s")
    ]
    assert one.handle(ProcessEnded("router", "killed by SIGKILL"), 140.0) == [Discard("router")]
    assert looks(one, 140.0, 141.0, answered=False) == [], "asked of one that is not there"
    assert one.handle(TimePassed(), 142.0) == [Launch("router")]
    assert names(one.handle(Up(up("router", 3)), 143.0)) == ["Announce"]
    assert looks(one, 143.0, 143.0 + limit_s, answered=False) == [], "blamed for its predecessor"


def test_an_answer_or_a_sleep_of_our_own_begins_the_wait_anew() -> None:
    """Guards a router that is slow, not hung, and one that is killed because its launcher was stopped."""
    one = supervisor()
    assert looks(one, 0.0, 29.0, answered=False) == []
    assert looks(one, 29.0, 30.0, answered=True) == []
    assert looks(one, 30.0, 59.0, answered=False) == []
    assert looks(one, 120.0, 149.0, answered=False) == [], "the time in which nobody looked counts"
    assert names(looks(one, 149.0, 151.0, answered=False)) == ["KillProcess"]


def test_the_router_is_told_which_life_answers() -> None:
    """Guards a frozen worker that a new router cannot give up, since it has never heard who that is."""
    one = supervisor()
    (announce,) = one.handle(ProcessEnded("prefill-0", "killed"), 10.0)[1:]
    assert isinstance(announce, Announce) and [p.incarnation for p in announce.decode] == [1]
    one.handle(TimePassed(), 11.0)
    (announce,) = one.handle(Up(up("prefill-0", 7, 21)), 12.0)
    assert isinstance(announce, Announce) and [p.incarnation for p in announce.prefill] == [21]


def test_a_router_that_is_up_again_is_told_all_that_it_missed() -> None:
    """Guards against words to a dead router, which ended the cluster, and a new one that knows of no worker or of a
    dead one."""
    one = supervisor()
    assert one.handle(ProcessEnded("router", "killed"), 10.0) == [Discard("router")]
    assert one.handle(ProcessEnded("prefill-0", "killed"), 10.5) == [Discard("prefill-0")]
    assert one.handle(TimePassed(), 11.0) == [Launch("router")]
    assert one.handle(TimePassed(), 11.5) == [Launch("prefill-0")]
    assert one.handle(Up(up("prefill-0", 7)), 12.0) == []
    (announce,) = one.handle(Up(up("router", 3)), 13.0)
    assert addresses(announce) == (["h:7"], ["h:2"])


def test_a_start_that_hangs_is_a_death() -> None:
    """Guards against a pool that waits for ever for a replacement that never comes up."""
    one = supervisor()
    one.handle(ProcessEnded("decode-0", "x"), 0.0)
    assert one.handle(TimePassed(), 1.0) == [Launch("decode-0")]
    assert one.handle(TimePassed(), 20.9) == []
    assert one.handle(TimePassed(), 21.0) == [Discard("decode-0")]
    assert one.state("decode-0") is SlotState.PAUSING


def test_late_and_repeated_news_change_nothing() -> None:
    one = supervisor()
    one.handle(ProcessEnded("decode-0", "x"), 0.0)
    assert one.handle(ProcessEnded("decode-0", "x"), 0.1) == []
    assert one.handle(Up(up("decode-0", 9)), 0.2) == []
    assert one.handle(ProcessEnded("decode-7", "x"), 0.3) == []


def test_workers_leave_one_at_a_time_and_are_replaced_without_blame() -> None:
    """Guards against a rolling restart that takes two workers at once, counts as deaths, or waits out a pause; and
    against a router that hangs up on a worker that is still finishing its requests."""
    one = supervisor(RestartConfig(limit=0))
    assert one.handle(LeaveWanted(("prefill-0", "decode-0"), 9.0, True), 0.0) == []
    assert not one.is_steady
    assert one.handle(TimePassed(), 1.0) == [AskToLeave("prefill-0", 9.0)]
    assert addresses(one.announcement()) == (["h:1"], ["h:2"]), "its streams must stay until it has left"
    assert one.handle(TimePassed(), 2.0) == []
    discard, announce = one.handle(ProcessEnded("prefill-0", "ended with status 0", left=True), 3.0)
    assert discard == Discard("prefill-0") and addresses(announce) == ([], ["h:2"])
    assert one.handle(TimePassed(), 3.0) == [Launch("prefill-0")], "the next one waits for the replacement"
    one.handle(Up(up("prefill-0", 7)), 4.0)
    assert one.handle(TimePassed(), 4.1) == [AskToLeave("decode-0", 9.0)]
    one.handle(ProcessEnded("decode-0", "ended with status 0", left=True), 5.0)
    one.handle(TimePassed(), 5.1)
    one.handle(Up(up("decode-0", 8)), 6.0)
    assert one.is_steady and repr(one) == (
        "Supervisor(prefill-0=up(0), decode-0=up(0), router=up(0))"
    )


def test_who_leaves_for_good_is_not_replaced() -> None:
    for left in (True, False):  # as asked, or killed on its way out
        one = pools(1, 2)
        one.handle(LeaveWanted(("decode-0", "nobody"), 9.0, False), 0.0)
        assert one.handle(TimePassed(), 0.0) == [AskToLeave("decode-0", 9.0)]
        discard, announce = one.handle(ProcessEnded("decode-0", "x", left=left), 1.0)
        assert discard == Discard("decode-0") and addresses(announce) == (["h:0"], ["h:2"]) and not down(announce)
        assert one.handle(TimePassed(), 99.0) == [] and "decode-0" not in one and one.is_steady


def test_no_pool_loses_its_last_worker_to_orders_that_come_together() -> None:
    """Guards a cluster against two drains of which each, when it came, left the other's worker; the second is refused,
    and its worker stays."""
    one, orders = pools(1, 2), [LeaveWanted((f"decode-{n}",), 9.0, False) for n in range(2)]
    one.handle(orders[0], 0.0)
    assert one.handle(TimePassed(), 0.0) == [AskToLeave("decode-0", 9.0)]
    one.handle(orders[1], 0.5)
    assert one.handle(TimePassed(), 1.0) == []
    one.handle(ProcessEnded("decode-0", "left", left=True), 2.0)
    (refuse,) = one.handle(TimePassed(), 2.1)
    assert isinstance(refuse, Refuse) and refuse.order is orders[1]
    assert refuse.why == "decode-1 is the last decode worker that is up: it stays"
    assert one.is_steady and one.state("decode-1") is SlotState.UP and one.pool("decode") == ["decode-1"]


@pytest.mark.parametrize("order", [LeaveWanted(("decode-0",), 9.0, False), Resize("decode", 1, 9.0)])
def test_who_is_up_stays_beside_one_that_keeps_dying(order: LeaveWanted | Resize) -> None:
    """Guards a pool that is made smaller by its only worker that serves; a smaller size takes the one that does not."""
    one = pools(1, 2)
    now, _ = die_often(one, "decode-1", 0.0, POLICY.limit + 1)
    one.handle(order, now)
    commands = one.handle(TimePassed(), now)
    assert one.state("decode-0") is SlotState.UP and one.is_steady
    if isinstance(order, Resize):
        assert commands == [Discard("decode-1"), one.announcement()]
    else:
        assert commands == [Refuse(order, "decode-0 is the last decode worker that is up: it stays")]


def test_a_smaller_size_leaves_the_worker_that_is_up_whatever_its_number() -> None:
    """Guards `scale` against taking the highest number while the lower one is down."""
    one = pools(1, 2)
    now, _ = die_often(one, "decode-0", 0.0, POLICY.limit + 1)
    one.handle(Resize("decode", 1, 9.0), now)
    assert one.handle(TimePassed(), now) == [Discard("decode-0"), one.announcement()]
    assert one.pool("decode") == ["decode-1"] and one.is_steady


def test_the_last_one_that_does_not_run_stays_in_its_pool_and_prefill_may_be_given_up() -> None:
    one = pools(1, 1)
    one.handle(ProcessEnded("decode-0", "x"), 0.0)
    order = LeaveWanted(("decode-0",), 9.0, False)
    one.handle(order, 0.1)
    assert one.handle(TimePassed(), 0.2) == [Refuse(order, "decode-0 is the last decode worker: it stays")]
    one.handle(TimePassed(), 1.0)
    one.handle(Up(up("decode-0", 5)), 2.0)
    one.handle(Resize("prefill", 0, 9.0), 3.0)
    assert one.handle(TimePassed(), 3.0) == [AskToLeave("prefill-0", 9.0)]


def test_a_worker_that_is_down_is_named_until_it_is_taken_away() -> None:
    """Guards the router's list, and the alert that goes by it, against a decode worker that will never be back."""
    one = pools(1, 2)
    now, _ = die_often(one, "decode-1", 0.0, POLICY.limit + 1)
    assert down(one.announcement()) == ["decode-1"]
    one.handle(LeaveWanted(("decode-1",), 9.0, False), now)
    discard, announce = one.handle(TimePassed(), now)
    assert discard == Discard("decode-1") and down(announce) == []


def test_a_worker_that_dies_or_hangs_while_it_leaves_is_a_death() -> None:
    """Guards against a roll that waits for ever for a worker that will not end, and one that hides crashes."""
    for event, now in ((ProcessEnded("decode-0", "SIGKILL"), 1.0), (TimePassed(), 9.0 + LEAVE_MARGIN_S)):
        one = supervisor()
        one.handle(LeaveWanted(("decode-0",), 9.0, True), 0.0)
        one.handle(TimePassed(), 0.0)
        assert names(one.handle(event, now)) == ["Discard", "Announce"]
        assert one.handle(TimePassed(), now + 0.5) == [], "a death costs a pause"
        assert one.handle(TimePassed(), now + 1.0) == [Launch("decode-0")]


def test_an_end_that_nobody_asked_for_is_a_death() -> None:
    """Guards against a worker that ends well for no reason, again and again, unseen."""
    one = supervisor(RestartConfig(limit=0))
    assert names(one.handle(ProcessEnded("decode-0", "ended with status 0", left=True), 0.0)) == ["EndCluster"]


def test_who_is_given_up_is_killed_once_and_then_has_died_like_anybody() -> None:
    """Guards against a silent worker that nobody ends, and against one that is killed again and again."""
    one = supervisor()
    accused = Accused("decode-0", Incarnation(1), "prefill-0 and the router cannot reach it")
    assert one.handle(accused, 1.0) == [KillProcess("decode-0", accused.why)]
    assert one.handle(accused, 1.1) == []
    discard, announce = one.handle(ProcessEnded("decode-0", "killed by SIGKILL"), 1.2)
    assert discard == Discard("decode-0") and addresses(announce) == (["h:1"], [])
    assert one.handle(accused, 1.3) == []
    strict = supervisor(RestartConfig(limit=0))
    strict.handle(accused, 1.0)
    assert strict.handle(ProcessEnded("decode-0", "killed by SIGKILL"), 1.2) == [
        EndCluster(f"decode-0: killed by SIGKILL ({accused.why})")
    ]


def test_no_newer_life_is_killed_for_an_older_one() -> None:
    """Guards a replacement that the router accuses late, of what its predecessor did."""
    one = supervisor()
    one.handle(ProcessEnded("decode-0", "x"), 0.0)
    old = Accused("decode-0", Incarnation(1), "silent")
    assert one.handle(old, 0.5) == [] and one.handle(TimePassed(), 1.0) == [Launch("decode-0")]
    assert one.handle(old, 1.5) == []
    one.handle(Up(up("decode-0", 3, life=2)), 2.0)
    assert one.handle(old, 2.1) == []
    assert one.handle(Accused("decode-0", Incarnation(2), "silent"), 2.2) == [KillProcess("decode-0", "silent")]
    assert one.handle(Accused("decode-7", Incarnation(2), "who?"), 2.3) == []


KINDS: tuple[Kind, ...] = ("prefill", "decode")


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_keeps_the_rules(seed: int) -> None:
    """Guards against two processes for one worker, and against more starts than the limit allows in a window; those
    after a worker that left as it was asked to are free."""
    rng = random.Random(seed)
    excused = set()
    one, now, living = supervisor(), 0.0, {"prefill-0", "decode-0"}
    starts: dict[str, list[float]] = {name: [now] for name in living}
    while now < 2000.0:
        now += rng.expovariate(0.5)
        name = rng.choice([slot.name for slot in one.view() if slot.kind != "router"])
        life = rng.randrange(3)
        event = rng.choice(
            [
                TimePassed(),
                ProcessEnded(name, "x", left=rng.random() < 0.3),
                Up(up(name, rng.randrange(9000), life)),
                LeaveWanted((name,), rng.uniform(0.0, 9.0), rng.random() < 0.7),
                Resize(rng.choice(("prefill", "decode")), rng.randrange(1, 4), 5.0),
                Accused(name, Incarnation(life), "silent"),
            ]
        )
        if isinstance(event, ProcessEnded) and event.left and one.state(name) is SlotState.LEAVING:
            excused.add(name)
        before = {kind: [s.name for s in one.view() if s.kind == kind and s.state is SlotState.UP] for kind in KINDS}
        for command in one.handle(event, now):
            one.check()
            if isinstance(command, EndCluster):
                return
            if isinstance(command, AskToLeave) and command.name not in one.pool(one.kind(command.name)):
                assert before[one.kind(command.name)] != [command.name], "it was the last one that was up"
            if isinstance(command, KillProcess):
                assert command.name in living
            elif isinstance(command, Discard):
                # One that waited for its next start, and is to be no more, has no process.
                assert command.name in living or command.name not in one
                living.discard(command.name)
                if command.name not in one:
                    starts.pop(command.name, None)
            elif isinstance(command, Launch):
                assert command.name not in living, "two processes for one worker"
                living.add(command.name)
                if command.name in excused:
                    excused.remove(command.name)
                    continue
                assert sum(s.state is SlotState.STARTING for s in one.view()) <= POLICY.at_once + 1
                starts.setdefault(command.name, []).append(now)
                recent = [at for at in starts[command.name] if at > now - POLICY.window_s]
                assert len(recent) <= POLICY.limit + 1


RESTARTS = RestartConfig(limit=2, first_pause_s=0.05, longest_pause_s=0.1)


@contextmanager
def watched(cluster: Cluster) -> Iterator[list[str]]:
    """Watch a started cluster from a thread; yields the list that holds why the watch ended, if it did."""
    stop, ended = threading.Event(), []

    def watch() -> None:
        try:
            cluster.watch(stop)
        except LaunchError as error:
            ended.append(str(error))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join(30)


def state_of(cluster: Cluster, name: str) -> SlotState:
    return {slot.name: slot.state for slot in cluster.slots()}[name]


def replaced(cluster: Cluster, name: str, old: int) -> Callable[[], bool]:
    return lambda: cluster.workers[name].pid != old


@pytest.fixture(scope="module")
def accused_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What an accusing router reads. Its path is in the environment that Ray hands on to actors."""
    file = tmp_path_factory.mktemp("accused") / "accused"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCUSED_FILE", str(file))
        yield file


@pytest.fixture(scope="module")
def standing_ray(accused_file: Path) -> Iterator[LentRay]:
    """Started once: a start takes five seconds, and is the subject of `test_launchers`."""
    with LentRay.started() as lent:
        yield lent


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    if request.param == "process":
        return make_launcher("process")
    lent: LentRay = request.getfixturevalue("standing_ray")
    return lent


SLOW_ON_RAY = pytest.mark.parametrize(
    "launcher", ["process", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])], indirect=True
)
"""For what a launcher has no part in but to start and end many actors, which takes Ray seconds each."""


@pytest.fixture
def accused(accused_file: Path) -> Path:
    accused_file.unlink(missing_ok=True)
    return accused_file


def test_a_killed_worker_is_replaced_until_it_dies_too_often(launcher: Launcher) -> None:
    """Guards against a dead worker that stays dead, one that is restarted for ever, and a process left behind."""
    before = set(descendants())
    config = msgspec.structs.replace(CONFIG, restart=RESTARTS, decode_workers=2)
    with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
        cluster.start()
        others = {n: up.pid for n, up in cluster.workers.items() if n != "decode-1"}
        with watched(cluster) as ended:
            for _ in range(RESTARTS.limit):
                pid = cluster.workers["decode-1"].pid
                os.kill(pid, signal.SIGKILL)
                assert eventually(replaced(cluster, "decode-1", pid), 30.0), ended
                assert gone(pid) and not gone(cluster.workers["decode-1"].pid)
            os.kill(cluster.workers["decode-1"].pid, signal.SIGKILL)
            assert eventually(lambda: state_of(cluster, "decode-1") is SlotState.FAILED, 10.0)
            assert {n: cluster.workers[n].pid for n in others} == others and not ended
            for _ in range(RESTARTS.limit):
                pid = cluster.workers["decode-0"].pid
                os.kill(pid, signal.SIGKILL)
                assert eventually(replaced(cluster, "decode-0", pid), 30.0), ended
            os.kill(cluster.workers["decode-0"].pid, signal.SIGKILL)
            assert eventually(lambda: bool(ended), 10.0), "nobody is left to decode"
            assert ended[0].startswith("decode-0: ")
            assert ended[0].endswith("(3 times in 300 s)")
    assert eventually(lambda: set(descendants()) <= before, 5.0), set(descendants()) - before


@SLOW_ON_RAY
def test_a_roll_renews_every_worker_and_a_drain_takes_one_away(launcher: Launcher) -> None:
    """Guards against a worker that is forgotten by a roll, one that comes back from a drain, and a caller that waits
    for ever. No death is allowed here, so none may be counted."""
    before = set(descendants())
    config = msgspec.structs.replace(CONFIG, decode_workers=2)
    with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
        cluster.start()
        pids = {name: up.pid for name, up in cluster.workers.items()}
        with watched(cluster) as ended:
            cluster.roll(timeout_s=90.0)
            assert not ended and cluster.workers.keys() == pids.keys()
            assert all(up.pid != pids[name] for name, up in cluster.workers.items())
            assert all(gone(pid) for pid in pids.values())
            cluster.drain("decode-1", timeout_s=30.0)
            assert cluster.workers.keys() == pids.keys() - {"decode-1"} and not ended
            with pytest.raises(LaunchError, match="there is no worker decode-1"):
                cluster.drain("decode-1")
        with pytest.raises(LaunchError, match="nobody watches the cluster any more"):
            cluster.roll()
    assert eventually(lambda: set(descendants()) <= before, 5.0), set(descendants()) - before


def test_a_worker_whose_engine_died_is_replaced() -> None:
    """Guards against a supervisor that sees only dead processes, not dead engines in living ones."""
    dying = {**FAKES, "prefill": "tests.cluster.fakes:DyingWorker"}
    config = msgspec.structs.replace(CONFIG, restart=RESTARTS)
    with Cluster(config, make_launcher("process"), dying, model_dir="x") as cluster:
        cluster.start()
        pid = cluster.workers["prefill-0"].pid
        with watched(cluster) as ended:
            assert eventually(replaced(cluster, "prefill-0", pid), 15.0), ended


@SLOW_ON_RAY
def test_a_stopped_worker_that_is_given_up_is_killed_and_replaced(
    launcher: Launcher, accused: Path
) -> None:
    """Guards the last step of the ladder against processes that obey nobody: a stopped one hears no request to end."""
    accusing = {**FAKES, "router": "tests.cluster.fakes:AccusingRouter"}
    config = msgspec.structs.replace(CONFIG, restart=RESTARTS)
    with Cluster(config, launcher, accusing, model_dir="x") as cluster:
        cluster.start()
        up = cluster.workers["decode-0"]
        with watched(cluster) as ended:
            os.kill(up.pid, signal.SIGSTOP)
            accused.write_text(f"decode-0:{up.incarnation + 1}")
            time.sleep(1.0)
            assert not gone(up.pid), "killed for another life"
            accused.write_text(f"decode-0:{up.incarnation}")
            assert eventually(replaced(cluster, "decode-0", up.pid), 30.0), ended
            assert gone(up.pid)
            second = cluster.workers["decode-0"].pid
            time.sleep(0.5)
            assert not ended and not gone(second) and cluster.workers["decode-0"].pid == second


def test_a_frozen_router_is_killed_and_replaced(launcher: Launcher) -> None:
    """Guards a cluster whose workers are all well and whose router is stopped: nobody else looks at it."""
    before = set(descendants())
    restart = msgspec.structs.replace(RESTARTS, router_hung_s=1.5)
    config = msgspec.structs.replace(CONFIG, restart=restart)
    with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
        address = cluster.start().grpc
        was = cluster.router
        with watched(cluster) as ended:
            time.sleep(2.0)
            assert cluster.router.pid == was.pid, "killed although it answers"
            os.kill(was.pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            assert eventually(lambda: gone(was.pid), 10.0), "stopped, and left"
            assert time.monotonic() - stopped_s > 1.4, "killed without being waited for"
            assert eventually(lambda: cluster.router.pid != was.pid, 30.0), ended
            assert cluster.router.address == address
            assert eventually(cluster._children["router"].ready, 5.0)
    assert eventually(lambda: set(descendants()) <= before, 5.0), set(descendants()) - before


@pytest.mark.parametrize("why", ["given up", "stopped"])
def test_who_waits_for_a_roll_is_told_when_the_watch_ends(why: str) -> None:
    """Guards a caller that waits for ever for workers that nobody will replace any more."""
    config = msgspec.structs.replace(CONFIG, leave_grace_s=60.0)
    clinging = {**FAKES, "decode": "tests.cluster.fakes:ClingingWorker"}
    with Cluster(config, make_launcher("process"), clinging, model_dir="x") as cluster:
        cluster.start()
        told: list[str] = []

        def drain() -> None:
            try:
                cluster.drain("decode-0", again=True)
            except LaunchError as error:
                told.append(str(error))

        waiting = threading.Thread(target=drain, daemon=True)
        with watched(cluster) as ended:
            waiting.start()
            time.sleep(0.5)
            assert waiting.is_alive() and not ended
            if why == "given up":
                os.kill(cluster.workers["prefill-0"].pid, signal.SIGKILL)
                assert eventually(lambda: bool(ended), 10.0)
        waiting.join(5.0)
        expected = "prefill-0: killed by SIGKILL" if ended else "nobody watches the cluster any more"
        assert told == [expected]
        with pytest.raises(LaunchError, match=expected):  # nor does a later one wait
            cluster.roll()


def test_a_killed_router_is_back_on_its_port_and_knows_the_workers(launcher: Launcher) -> None:
    """Guards against clients that look for the router where it was, and against workers kept alive for a router that
    does not know them; and the bound on its deaths."""
    before = set(descendants())
    config = msgspec.structs.replace(CONFIG, restart=RESTARTS)
    with Cluster(config, launcher, FAKES, model_dir="x") as cluster:
        address = cluster.start().grpc
        workers = {name: up.pid for name, up in cluster.workers.items()}
        with watched(cluster) as ended:
            for _ in range(RESTARTS.limit):
                was = cluster.router
                os.kill(was.pid, signal.SIGKILL)
                assert eventually(lambda was=was: cluster.router.pid != was.pid, 30.0), ended
                assert cluster.router.address == address and gone(was.pid)
                assert eventually(cluster._children["router"].ready, 5.0)
            os.kill(cluster.router.pid, signal.SIGKILL)
            assert eventually(lambda: bool(ended), 10.0)
            assert ended[0].startswith("router: ")
            assert ended[0].endswith("(3 times in 300 s)")
        assert {name: up.pid for name, up in cluster.workers.items()} == workers
    assert eventually(lambda: set(descendants()) <= before, 5.0), set(descendants()) - before
