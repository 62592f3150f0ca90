"""The ladder on real processes: who is silent, hangs, or cannot stop a copy is ended, and its requests go on."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from engine.types import Incarnation
from tests.chaos import faults
from tests.chaos.ground import Ground
from tests.chaos.hosts import FOLDER
from tests.chaos.rows import ANSWER_TOKENS, Ending
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, ask_and_catch_sending

pytestmark = pytest.mark.chaos

ESCALATE_S, HUNG_S, STUCK_S = 1.5, 5.0, 2.0
ROUTER_HUNG_S = 3.0
MARGIN_S = 4.0
"""Time for reports, ticks and polls on two busy cores, beside what the timers say."""
KEEPALIVE_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("hang")
    os.environ[FOLDER] = str(found)
    yield found
    del os.environ[FOLDER]


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference, folder: Path) -> Iterator[Ground]:
    hanging = {
        "decode": "tests.chaos.hanging:engine_hangs_decode",
        "prefill": "tests.chaos.hanging:engine_hangs_prefill",
    }
    found = Ground(
        model_dir,
        factories=hanging,
        escalate_s=ESCALATE_S,
        hung_s=HUNG_S,
        router_hung_s=ROUTER_HUNG_S,
    )
    with closing(found):
        reference.make(found)
        yield found


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_a_reader_frozen_for_ever_is_killed_and_its_blocks_come_back(
    ground: Ground, reference: Reference, mode: str
) -> None:
    """Guards blocks kept for a frozen reader: without an end to the ladder they are kept as long as it is stopped."""
    ask, serving = ask_and_catch_sending(ground, mode, f"frozen-{mode}")
    pid = ground.pid(serving.decode)
    faults.freeze(pid)
    frozen_s = time.monotonic()
    # Blocks that the next placement has taken up already count as active, though they are kept for the reader too.
    is_kept = False
    while not is_kept and faults.process_state(pid) == "T":
        load = ground.load(serving.prefill)
        is_kept = load is not None and bool(load.quarantined_blocks or load.silent)
        time.sleep(0.01)
    assert is_kept, "no block was kept for the reader"
    faults.killed_within(pid, KEEPALIVE_S + ESCALATE_S + MARGIN_S)
    assert time.monotonic() - frozen_s > ESCALATE_S, "killed without being waited for"
    ask.join(END_S)
    ground.probe(serving.prefill).wait_quiet(MARGIN_S)
    assert reference.judge(ask, "victim", mode) is Ending.EXACT, ask.error
    ground.replaced(serving.decode, pid)
    ground.settle(SETTLE_S)


def test_a_frozen_worker_that_nobody_reads_for_is_replaced_too(ground: Ground) -> None:
    """Guards a pool that is one worker short for ever: an idle worker that is stopped holds nothing of anybody's."""
    ground.settle(SETTLE_S)
    pid = ground.pid("prefill-1")
    faults.freeze(pid)
    faults.killed_within(pid, KEEPALIVE_S + HUNG_S + MARGIN_S)
    ground.replaced("prefill-1", pid)
    ground.settle(SETTLE_S)


def test_a_frozen_router_is_replaced_and_its_clients_go_on(
    ground: Ground, reference: Reference
) -> None:
    """Guards clients that wait for ever for a router that is stopped, while all its workers are well."""
    ground.settle(SETTLE_S)
    workers = {name: ground.pid(name) for name in ground.names}
    ask = ground.ask(PROMPTS["victim"], "seeded", ANSWER_TOKENS, "frozen-router", resume=True)
    ask.wait_tokens(2)
    pid = ground.pid("router")
    faults.freeze(pid)
    frozen_s = time.monotonic()
    assert not ask.over and len(ask.tokens) < ANSWER_TOKENS, "over before the fault"
    faults.killed_within(pid, ROUTER_HUNG_S + MARGIN_S)
    assert time.monotonic() - frozen_s > ROUTER_HUNG_S - 0.5, "killed without being waited for"
    ask.join(END_S)
    assert reference.judge(ask, "victim", "seeded") is Ending.EXACT, ask.error
    ground.replaced("router", pid)
    assert {name: ground.pid(name) for name in ground.names} == workers, "an innocent was killed"
    ground.settle(SETTLE_S)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_frozen_when_the_router_dies_is_replaced(ground: Ground, role: str) -> None:
    """Guards a slot lost for ever: the router that knew which life is frozen is gone, the next one never meets it."""
    ground.settle(SETTLE_S)
    name = f"{role}-1"
    pid, router = ground.pid(name), ground.pid("router")
    faults.freeze(pid)
    faults.kill(router)
    ground.replaced("router", router)
    assert faults.process_state(pid) == "T", "killed before the new router could say so"
    faults.killed_within(pid, HUNG_S + 2 * MARGIN_S)
    ground.replaced(name, pid)
    ground.settle(SETTLE_S)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_that_hangs_is_replaced_and_its_requests_go_on(
    ground: Ground, reference: Reference, folder: Path, role: str
) -> None:
    """Guards requests that wait for their deadline where gRPC's threads answer for an engine that does nothing."""
    ground.settle(SETTLE_S)
    ask = ground.ask(PROMPTS["victim"], "seeded", ANSWER_TOKENS, f"hang-{role}")
    name = ground.busy(role)
    if role == "decode":
        ask.wait_tokens(3)
    pid = ground.pid(name)
    others = {other: ground.pid(other) for other in ground.names if other != name}
    (folder / "hang").touch()
    _wait_for(folder / "hung")
    hung_s = time.monotonic()
    assert (folder / "hung").read_text() == str(pid), "another worker hangs"
    (folder / "hung").unlink()
    with grpc.insecure_channel(ground.proxy(name).address) as channel:
        grpc.channel_ready_future(channel).result(2.0)
    time.sleep(1.0)
    assert not ask.over and faults.process_state(pid) not in ("", "Z", "T")
    faults.killed_within(pid, HUNG_S + MARGIN_S)
    assert time.monotonic() - hung_s > HUNG_S - 0.5, "killed without being waited for"
    ask.join(END_S)
    assert reference.judge(ask, "victim", "seeded") is Ending.EXACT, ask.error
    ground.replaced(name, pid)
    assert {other: ground.pid(other) for other in others} == others, "an innocent was killed"
    ground.settle(SETTLE_S)


def test_an_innocent_that_is_killed_costs_nothing(ground: Ground, reference: Reference) -> None:
    """Guards the price of a wrong accusation, which timers can always make: exact recovery, one restart."""
    ground.settle(SETTLE_S)
    ask = ground.ask(PROMPTS["victim"], "greedy", ANSWER_TOKENS, "innocent")
    name = ground.busy("decode")
    ask.wait_tokens(2)
    up = ground.cluster.workers[name]
    ground.accuse(name, Incarnation(up.incarnation ^ 1))
    time.sleep(0.5)
    assert ground.pid(name) == up.pid, "killed for another life"
    ground.accuse(name, up.incarnation)
    ground.replaced(name, up.pid)
    ask.join(END_S)
    assert reference.judge(ask, "victim", "greedy") is Ending.EXACT, ask.error
    ground.settle(SETTLE_S)


def test_a_transfer_thread_that_hangs_ends_its_own_worker(model_dir: Path, folder: Path) -> None:
    """Guards blocks that are being written by a thread nobody can stop: only the end of the process is a fence."""
    factories = {"decode": "tests.chaos.hanging:transfer_hangs"}
    ground = Ground(
        model_dir, factories=factories, decode=1, prefill=1, restarts=0, stuck_s=STUCK_S
    )
    try:
        (folder / "hang").touch()
        ask = ground.ask(PROMPTS["victim"], "greedy", 4, "stuck")
        _wait_for(folder / "hung")
        hung_s = time.monotonic()
        assert (folder / "hung").read_text() == str(ground.pid("decode-0"))
        (folder / "hung").unlink()
        while not ground.gave_up:
            assert time.monotonic() - hung_s < STUCK_S + MARGIN_S, "it goes on"
            time.sleep(0.02)
        assert time.monotonic() - hung_s > STUCK_S
        assert "the transfer thread is stuck in one call" in ground.gave_up
        ask.leave()
    finally:
        ground.close()


def _wait_for(file: Path) -> None:
    deadline_s = time.monotonic() + 10.0
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline_s, "nobody hangs"
        time.sleep(0.005)
