"""Faults that are no single strike: spoiled bytes, full pools, whole pools of workers lost. Over the tcp transport."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.ground import MODES, Ask, Ground, tokens
from tests.chaos.hosts import FOLDER
from tests.chaos.rows import ANSWER_TOKENS, COLLATERAL, EITHER, PROMPT_TOKENS, TCP_ROWS, Ending
from tests.chaos.strike import END_S, PROMPTS, SETTLE_S, Reference, run_row

pytestmark = pytest.mark.chaos

POOL_LOST = EITHER
"""How a request may end that comes while every worker of one role is being replaced."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spoil")


@pytest.fixture(scope="module")
def ground(model_dir: Path, reference: Reference, folder: Path) -> Iterator[Ground]:
    os.environ[FOLDER] = str(folder)
    factories = {"decode": "tests.chaos.hosts:spoiling_decode_worker"}
    found = Ground(model_dir, transport="tcp", blocks=40, factories=factories)
    try:
        reference.make(found)
        yield found
    finally:
        found.close()
        del os.environ[FOLDER]


@pytest.fixture(autouse=True)
def unspoilt(renewed: None, folder: Path) -> Iterator[None]:
    yield
    (folder / "spoil").write_text("0")


@pytest.mark.parametrize("number", range(len(TCP_ROWS)), ids=[str(row) for row in TCP_ROWS])
def test_row_over_tcp(ground: Ground, reference: Reference, number: int) -> None:
    """Guards the same as over shared memory, where nobody reads the other's pool and sends end by themselves."""
    run_row(ground, reference, TCP_ROWS[number], number)


def victim(ground: Ground, tenant: str, mode: str = "greedy") -> Ask:
    return ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, tenant)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_spoiled_block_is_fetched_again(
    ground: Ground, reference: Reference, folder: Path, mode: str
) -> None:
    """Guards against a bit lost on the way that becomes a wrong token with status OK."""
    before = _spoiled(folder)
    (folder / "spoil").write_text("1")
    ask = victim(ground, f"spoiled-{mode}", mode)
    ask.join(END_S)
    assert reference.judge(ask, "victim", mode) is Ending.EXACT, ask.error
    assert _spoiled(folder) == before + 1, "no block was spoiled"
    ground.settle(SETTLE_S)


def test_bytes_that_never_arrive_whole_are_given_up_and_computed(
    ground: Ground, reference: Reference, folder: Path
) -> None:
    """Guards against trying for ever where every copy is spoiled: the decode worker computes the prompt by itself."""
    before = _spoiled(folder)
    (folder / "spoil").write_text("1000")
    ask = victim(ground, "always spoiled")
    ask.join(END_S)
    assert reference.judge(ask, "victim", "greedy") is Ending.EXACT
    assert _spoiled(folder) >= before + 2, "one attempt was enough to give up"
    (folder / "spoil").write_text("0")
    ground.settle(SETTLE_S)


def _spoiled(folder: Path) -> int:
    file = folder / "spoiled"
    return file.stat().st_size if file.exists() else 0


def test_a_full_pool_and_a_death_lose_nobody_in_silence(
    ground: Ground, reference: Reference
) -> None:
    """Guards against requests that wait in line for ever when the worker they wait for dies, and a pool that stays
    full. Two fit on a decode worker at a time, eight are asked."""
    asks = [
        ground.ask(PROMPTS["victim"], mode, ANSWER_TOKENS, f"full-{number}-{mode}")
        for number in range(4)
        for mode in MODES
    ]
    name = ground.busy("decode")
    deadline_s = time.monotonic() + 10.0
    while not any(ask.tokens for ask in asks) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    load = ground.load(name)
    assert load is not None
    held = load.active_blocks + load.reserved_blocks
    assert held >= PROMPT_TOKENS // 16, f"the pool of {name} was not in use: {load}"
    pid = ground.pid(name)
    faults.kill(pid)
    for ask in asks:
        ask.join(2 * END_S)
    modes = list(MODES) * 4
    endings = [reference.judge(a, "victim", mode) for a, mode in zip(asks, modes, strict=True)]
    assert set(endings) <= set(COLLATERAL) and endings.count(Ending.EXACT) >= 4, endings
    ended = [ask.finished.stats.stages for ask in asks if ask.finished]
    waits = [stages["route"] + stages["reserve"] for stages in ended]
    # Those that fit are taken in hundredths of a second; how long the others wait depends on the machine.
    assert max(waits) > 0.3, f"nobody had to wait for room: {waits}"
    ground.replaced(name, pid)
    ground.settle(SETTLE_S)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_whole_pool_lost_is_back_in_seconds(
    ground: Ground, reference: Reference, role: str
) -> None:
    """Guards against a cluster that is up and answers nobody ever again, and against silence meanwhile."""
    ground.settle(SETTLE_S)
    pids = {name: ground.pid(name) for name in ground.of(role)}
    for pid in pids.values():
        faults.kill(pid)
    during = victim(ground, f"no {role}")
    during.join(2 * END_S)
    assert reference.judge(during, "victim", "greedy") in POOL_LOST
    for name, pid in pids.items():
        ground.replaced(name, pid)
    ground.settle(SETTLE_S)
    after = victim(ground, f"{role} again")
    after.join(END_S)
    assert reference.judge(after, "victim", "greedy") is Ending.EXACT, after.error


def test_a_replacement_that_dies_at_once_is_replaced_too(
    ground: Ground, reference: Reference
) -> None:
    """Guards against a supervisor that repairs a slot only once."""
    for _ in range(2):
        pid = ground.pid("decode-0")
        faults.kill(pid)
        ground.replaced("decode-0", pid)
    ground.settle(SETTLE_S)
    ask = victim(ground, "twice")
    ask.join(END_S)
    assert reference.judge(ask, "victim", "greedy") is Ending.EXACT, ask.error


def test_a_deadline_holds_while_the_prefill_pool_is_frozen(ground: Ground) -> None:
    """Guards against a request that waits for a frozen peer past its caller's deadline, and keeps its blocks."""
    ground.settle(SETTLE_S)
    with faults.frozen(*(ground.pid(name) for name in ground.of("prefill"))):
        ask = ground.ask(tokens(PROMPT_TOKENS, 3), "greedy", 4, "late", timeout_s=1.0)
        name = ground.busy("decode")
        ask.join(5.0)
        assert ask.error is not None and ask.error.code == "DEADLINE_EXCEEDED"
        assert 0.9 < ask.ended_s - ask.began_s < 1.5
        ground.probe(name).wait_quiet(1.0)
    ground.settle(SETTLE_S)


def test_a_client_that_leaves_during_a_fault_leaves_nothing(ground: Ground) -> None:
    """Guards against blocks held for a client that left while their sender was being killed."""
    ground.settle(SETTLE_S)
    ask = ground.ask(tokens(PROMPT_TOKENS, 4), "greedy", 200 - ANSWER_TOKENS, "gone")
    name = ground.busy("prefill")
    ask.wait_tokens(1)
    ask.leave()
    pid = ground.pid(name)
    faults.kill(pid)
    ask.join(END_S)
    assert ask.finished is None and ask.error is None
    ground.replaced(name, pid)
    ground.settle(SETTLE_S)
