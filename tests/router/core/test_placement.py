"""The placer alone: which workers a policy is asked about, and with which figures.

Tried elsewhere too: as placements in test_core.py, with samples in test_call_table.py, with workers of several block
sizes in tests/router/test_block_sizes.py, after losses in test_recovery.py, off leaving workers in
leaving/test_moves.py. What the policy makes of the figures: test_policy.py.
"""

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.identity import SHORT_BYTES
from engine.kv.manager import KVCacheManager
from engine.kv.tiers.commands import TierLoad
from engine.kv.tiers.disk_index import segment_bytes
from engine.kv.tiers.fetches import Fetches
from engine.kv.tiers.tiers import Tiers
from engine.messages import Handoff, ReadTold
from engine.types import BlockId, Incarnation, RequestId
from prefill_worker.scheduler.line import Line
from prefill_worker.scheduler.order import Job
from router.core.call import Call
from router.core.placement import LOCAL
from router.core.policy import ASSUMED_S_PER_TOKEN, Choice, DecodeView, Demand, PrefillView, cost
from router.core.worker_views import Held, demand, fits
from tests.router.core.parts import Parts, request_record
from tests.router.fake_cluster import worker_info
from worker.config import PrefillConfig


def waiting(**record: object) -> Call:
    return Call(request_record(**record), 1, None)  # type: ignore[arg-type]


def pair(choice: Choice | None) -> tuple[str, str] | None:
    return None if choice is None else (choice.prefill.name, choice.decode.name)


@pytest.mark.parametrize(("growth", "blocks"), [(None, 4), (0, 3), (8, 3), (9, 4), (1000, 4)])
def test_demand_in_blocks(growth: int | None, blocks: int) -> None:
    """Guards the rounding, and the room that a worker promises: never more than the whole answer needs."""
    info = msgspec.structs.replace(worker_info("d0", "decode"), growth_tokens=growth)
    assert demand(request_record(tokens=40, max_tokens=23), info) == Demand(40, 3, blocks, 4)


def test_what_fits_into_no_worker_is_impossible() -> None:
    """Guards against a request that would wait for ever, and names the field that its caller can change."""
    parts = Parts()
    assert parts.placer.impossible(request_record(), 0.0) is None, "no worker is known"
    parts.join("d0", blocks=3)
    fault = parts.placer.impossible(request_record(), 0.0)
    assert fault is not None and (fault.code, fault.field) == ("OUT_OF_RANGE", "max_tokens")
    assert "40 prompt tokens and 24 output tokens" in fault.message and "48 tokens of KV" in fault.message
    parts.join("d1", blocks=4)
    assert parts.placer.impossible(request_record(), 0.0) is None
    parts.join("p0", blocks=2)
    fault = parts.placer.impossible(request_record(), 0.0)
    assert fault is not None and (fault.code, fault.field) == ("OUT_OF_RANGE", "prompt")
    assert "40 tokens" in fault.message and "prefill worker's 32 tokens" in fault.message
    assert parts.placer.impossible(request_record(tokens=32, max_tokens=32), 0.0) is None, "it holds no answer"


def test_only_who_may_have_room_is_asked() -> None:
    """Guards against offers to a worker that said no, or whose report shows that it must."""
    parts = Parts()
    first, second = parts.join("d0"), parts.join("d1")
    parts.join("p0")
    first.refused = True
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d1")
    parts.report("d1", active=61)
    assert parts.placer.choose(waiting(), 0.0) is None
    parts.report("d1", active=60)
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d1")
    second.refused = True
    assert parts.placer.choose(waiting(), 0.0) is None


def test_blocks_that_are_believed_cached_need_no_room() -> None:
    parts = Parts()
    worker, call = parts.join("d0"), waiting()
    parts.report("d0", active=62)
    assert parts.placer.choose(call, 0.0) is None
    parts.index.insert("d0", call.chain(worker.key))
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and (choice.decode.cached_blocks, choice.reason) == (2, "affinity")


def test_prefill_workers_of_another_model_or_too_small_are_passed_by() -> None:
    """Guards a handoff that could only fail; without any prefill worker the decode worker reads the prompt."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0", model="g")
    parts.join("p1", blocks=2)
    assert pair(parts.placer.choose(waiting(), 0.0)) == (LOCAL.name, "d0")
    parts.join("p2", block_size=24)
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p2", "d0"), "the sizes of the blocks may differ"


def test_one_pool_is_priced_worker_by_worker() -> None:
    """Guards placement without prefill workers: queue, speed and cache are those of who reads the prompt."""
    parts = Parts()
    first, second = parts.join("d0"), parts.join("d1")
    parts.report("d0", waiting_tokens=200, s_per_prompt_token=0.01)
    parts.report("d1", waiting_tokens=0, s_per_prompt_token=0.01)
    call = waiting()
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and pair(choice) == (LOCAL.name, "d1") and choice.reason == "load"
    assert (choice.cost.queue_s, choice.cost.compute_s, choice.cost.move_s) == (0.0, pytest.approx(0.4), 0.0)
    parts.index.insert("d0", call.chain(first.key))
    parts.report("d0", waiting_tokens=10, s_per_prompt_token=0.01)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and pair(choice) == (LOCAL.name, "d0") and choice.reason == "affinity"
    assert choice.prefill.cached_tokens == 32
    # What has been sent and not yet been reported counts too.
    parts.registry.dispatched("d0", call.record.request, 500, 0)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.decode.name == second.name


def test_who_has_run_no_step_is_not_thought_to_decode_in_no_time() -> None:
    """Guards a next turn in a new cluster, also where the idle worker's view was made before anybody had run a step."""
    parts = Parts()
    first, _ = parts.join("d0"), parts.join("d1")
    for name in ("d0", "d1"):
        parts.report(name, s_per_prompt_token=0.001)
    call = waiting()
    assert parts.placer.choose(call, 0.0) is not None
    parts.index.insert("d0", call.chain(first.key))
    parts.report("d0", s_per_prompt_token=0.001, s_per_token=0.007)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and pair(choice) == (LOCAL.name, "d0") and choice.reason == "affinity"


def test_a_sample_beside_its_host_adds_one_token_to_the_queue() -> None:
    """Guards one pool against queues of prompts that nobody computes: its sample shares the host's."""
    parts = Parts()
    parts.join("d0")
    host, call = parts.run("a"), waiting(name="b")
    choice = parts.placer.beside(call, host, 0.0)
    assert choice is not None and pair(choice) == (LOCAL.name, "d0") and choice.prefill.cached_tokens == 39


def test_what_a_decode_worker_reads_is_not_impossible() -> None:
    parts = Parts(local_prefill="auto")
    parts.join("d0")
    parts.join("p0", blocks=2)
    assert parts.placer.impossible(request_record(), 0.0) is None
    assert pair(parts.placer.choose(waiting(), 0.0)) == (LOCAL.name, "d0")


def test_beside_prefill_workers_decode_workers_read_only_if_told_to() -> None:
    """Guards streams of decode workers against prompts that a prefill worker is there for."""
    for local_prefill, expected in (("never", "p0"), ("auto", LOCAL.name)):
        parts = Parts(local_prefill=local_prefill)
        home = parts.join("d0")
        parts.join("p0")
        parts.report("p0", s_per_token=0.01)
        call = waiting()
        parts.index.insert("d0", call.chain(home.key))
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None and choice.prefill.name == expected
        # Until it has computed a prompt, it is taken to be as quick as the prefill worker.
        assert choice.prefill.s_per_token == 0.01
        parts.report("d0", s_per_prompt_token=1.0)
        assert pair(parts.placer.choose(call, 0.0)) == ("p0", "d0")


def test_waits_are_counted_once_however_often_a_request_is_offered() -> None:
    """Guards what is missed of beginnings against requests that are offered again and again, since nobody has room; and
    a choice that is compared with workers that hold it, but cannot read it."""
    parts = Parts()
    worker, call = parts.join("d0"), waiting()
    parts.join("p0")
    parts.join("p1")
    chain = call.chain(worker.key)
    parts.index.insert("d0", chain)
    parts.index.insert("p0", chain[:1])
    parts.report("p0", waiting_tokens=10, s_per_token=0.01)
    parts.report("p1", s_per_token=0.01)
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d0")
    assert parts.placer._reuse.missed.of(chain[0]) == 0.0, "a copy could not be there yet"
    assert pair(parts.placer.choose(call, 1.0)) == ("p0", "d0")
    for _ in range(3):
        assert parts.placer.choose(call, 1.0) is not None
    assert parts.placer._reuse.missed.of(chain[0]) == pytest.approx(10.0, rel=0.01)
    assert len(parts.placer._reuse.missed) == 1


def test_a_kind_with_a_prefill_worker_comes_first() -> None:
    """Guards decode workers against prompts that others would read for them, however cheap it looks."""
    parts = Parts()
    parts.join("d0", model="g")
    parts.join("d1", model="f")
    parts.join("p0", model="f")
    parts.report("p0", waiting_tokens=100_000)
    parts.report("d1", active=50, s_per_token=5.0)
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d1")


def test_a_prefill_worker_cannot_have_the_last_token_cached() -> None:
    """Guards the prediction: one token is always computed, for the logits of the next."""
    parts = Parts()
    parts.join("d0")
    worker, call = parts.join("p0"), waiting(tokens=32)
    parts.index.insert("p0", call.chain(worker.key))
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.prefill.cached_tokens == 31


def test_who_yielded_a_request_serves_its_kv() -> None:
    """Guards a move against computing its prompt again; a source that is gone is replaced."""
    parts = Parts()
    source = parts.join("d0")
    parts.join("d1")
    parts.join("p0")
    parts.report("d0", leaving=True)
    call = waiting()
    call.source = source.life
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and pair(choice) == ("d0", "d1") and choice.prefill.cached_tokens == 39
    parts.registry.leave("d0", 0.0)
    assert pair(parts.placer.choose(call, 0.0)) == ("p0", "d1")


def test_the_place_beside_another_sample() -> None:
    """Guards sharing: the whole blocks of the prompt are there, and who prefills them does so for both."""
    parts = Parts()
    home = parts.join("d0")
    parts.join("p0")
    host, call = parts.run("a"), waiting(name="b")
    choice = parts.placer.beside(call, host, 0.0)
    assert choice is not None and pair(choice) == ("p0", "d0")
    assert (choice.decode.cached_blocks, choice.prefill.cached_tokens) == (2, 39)
    parts.report("d0", active=58)  # and 4 blocks of the first one
    assert parts.placer.beside(call, host, 0.0) is not None
    parts.report("d0", active=59)
    assert parts.placer.beside(call, host, 0.0) is None, "no room for what is not shared"
    parts.report("d0")
    parts.registry.leave("p0", 0.0)
    assert pair(parts.placer.beside(call, host, 0.0)) == (LOCAL.name, "d0")
    home.refused = True
    assert parts.placer.beside(call, host, 0.0) is None
    parts.report("d0", leaving=True)
    assert parts.placer.beside(call, host, 0.0) is None


def test_room_elsewhere_for_what_could_move() -> None:
    """Guards a leaving worker's requests: asked to yield only where another of its kind can take them."""
    parts = Parts()
    home, call = parts.join("d0"), waiting()
    parts.join("d1", model="g")
    parts.join("d2", block_size=24)
    assert not parts.placer.has_room_elsewhere(call, home, 0, 0.0), "none of its kind"
    other = parts.join("d3")
    assert parts.placer.has_room_elsewhere(call, home, 60, 0.0)
    assert not parts.placer.has_room_elsewhere(call, home, 61, 0.0)
    other.refused = True
    assert not parts.placer.has_room_elsewhere(call, home, 0, 0.0)


def test_another_prefill_worker_for_a_request_that_runs() -> None:
    """Guards against the worker that has just failed it; another life under its name is fine."""
    parts = Parts()
    parts.join("d0")
    failed = parts.join("p0")
    parts.join("p1", model="g")
    call = parts.run("a")
    chosen = parts.placer.choose_prefill(call, 0.0)
    assert chosen is not None and chosen.name == "p0"
    call.failed_prefills[failed.life] = False
    assert parts.placer.choose_prefill(call, 0.0) is None
    parts.join("p0", life=2)
    chosen = parts.placer.choose_prefill(call, 0.0)
    assert chosen is not None and chosen.name == "p0"


def test_what_is_shared_takes_no_time_to_read_and_the_answer_takes_its_steps() -> None:
    """Guards the price of the place beside another sample: nothing waits, one token is computed, and the answer is as
    long as answers are."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    host, call = parts.run("a"), waiting(name="b", max_tokens=500)
    parts.report("d0", active=4, s_per_token=0.02)
    parts.report("p0", waiting_tokens=700, s_per_token=0.01)
    fitted = parts.registry.fitted
    for answer_tokens in (fitted.answer_tokens, 7.0):
        fitted.answer_tokens = answer_tokens
        choice = parts.placer.beside(call, host, 0.0)
        assert choice is not None
        assert (choice.prefill.queue_tokens, choice.prefill.outstanding, choice.prefill.s_per_token) == (0, 0, 0.0)
        wanted = demand(call.record, parts.registry.role("decode")[0].info, answer_tokens)
        assert choice.cost == cost(wanted, choice.prefill, choice.decode)
        assert (choice.cost.queue_s, choice.cost.compute_s) == (0.0, ASSUMED_S_PER_TOKEN)


def test_no_prompt_is_read_without_its_adapter() -> None:
    """Guards wrong answers: a prefill worker without the adapter would compute the base model's KV."""
    parts = Parts()
    for name, adapters in (("d0", ["x"]), ("p0", []), ("p1", ["x"])):
        worker = parts.join(name)
        worker.info = msgspec.structs.replace(worker.info, adapters=adapters)
    parts.report("p1", waiting_tokens=100_000, s_per_token=1.0)
    assert pair(parts.placer.choose(waiting(adapter="x"), 0.0)) == ("p1", "d0")
    parts.registry.leave("p1", 0.0)
    assert pair(parts.placer.choose(waiting(adapter="x"), 0.0)) == (LOCAL.name, "d0")
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d0")


@pytest.mark.parametrize("cached", [0, 1, 2])
def test_the_soonest_first_token_is_behind_the_blocks_that_must_move(cached: int) -> None:
    """Guards the bound that requests are told by: 40 tokens are three blocks, of which some are there."""
    parts = Parts()
    worker, call = parts.join("d0"), waiting()
    parts.join("p0")
    parts.report("p0", s_per_token=0.01)
    parts.report("d0", s_per_block={"p0": 0.25})
    parts.index.insert("d0", call.chain(worker.key)[:cached])
    soonest = parts.placer.soonest(call, 0.0)
    assert soonest is not None and soonest.first_token_s == pytest.approx(40 * 0.01 + (3 - cached) * 0.25)


@pytest.mark.parametrize(("size", "compared"), [(16, {"d0", "d1", "p0"}), (32, {"d0", "d1"})])
def test_what_others_would_lose_is_asked_of_all_that_hold_alike(
    monkeypatch: pytest.MonkeyPatch, size: int, compared: set[str]
) -> None:
    """Guards a decode worker that reads a prompt which a prefill worker holds: both are compared, if their blocks are
    of one size, and nobody else is."""
    parts = Parts(local_prefill="auto")
    for name in ("d0", "d1"):
        parts.join(name)
    parts.join("p0", block_size=size)
    asked: list[set[str]] = []

    def delaying(chain: list[bytes], held: dict[str, int], *more: object) -> dict[str, float]:
        asked.append(set(held))
        return dict.fromkeys(held, 0.0)

    monkeypatch.setattr(parts.placer._reuse, "delaying_tokens", delaying)
    assert parts.placer.choose(waiting(), 0.0) is not None
    assert asked == [{"p0"}, compared]


def test_a_prefill_worker_with_just_enough_blocks_reads() -> None:
    """Guards the largest prompt that fits: 40 tokens are three blocks."""
    for blocks, expected in ((2, LOCAL.name), (3, "p0")):
        parts = Parts()
        parts.join("d0")
        parts.join("p0", blocks=blocks)
        assert pair(parts.placer.choose(waiting(), 0.0)) == (expected, "d0")


def test_an_answer_that_is_all_there_takes_no_more_steps() -> None:
    info = worker_info("d0", "decode")
    for history, likely in ((0, 5.0), (20, 4.0), (23, 1.0), (24, 0.0)):
        record = msgspec.structs.replace(request_record(tokens=40, max_tokens=24), tokens=list(range(40 + history)))
        assert demand(record, info, 5.0).answer_tokens == likely


@pytest.mark.parametrize(("size", "views"), [(16, ["d0", "p0"]), (32, ["p0"])])
def test_who_reads_is_compared_with_all_that_were_asked_and_are_of_its_kind(
    monkeypatch: pytest.MonkeyPatch, size: int, views: list[str]
) -> None:
    """Guards what is missed of beginnings: a decode worker that could have read is one of those, and a worker whose
    blocks are of another size holds other beginnings."""
    parts = Parts(local_prefill="auto")
    parts.join("d0", block_size=size)
    parts.join("p0")
    parts.report("p0", s_per_token=0.001)
    parts.report("d0", s_per_prompt_token=1.0)
    asked: list[list[str]] = []

    def placed(chain: list[bytes], tokens: int, size: int, seen: list[PrefillView], *more: object) -> None:
        asked.append(sorted(view.name for view in seen))

    monkeypatch.setattr(parts.placer._reuse.missed, "placed", placed)
    assert pair(parts.placer.choose(waiting(), 0.0)) == ("p0", "d0")
    assert asked == [views]


def test_what_nobody_holds_is_not_cached() -> None:
    """Guards turns by what is cached: nothing, of a prompt that is new, and where there is no worker."""
    parts, call = Parts(), waiting()
    assert parts.placer.cached_tokens(call) == 0
    worker = parts.join("d0")
    assert parts.placer.cached_tokens(call) == 0
    parts.index.insert("d0", call.chain(worker.key))
    assert parts.placer.cached_tokens(call) == 32


@pytest.mark.parametrize(("local_prefill", "expected_s"), [("auto", 40 * 0.01), ("never", 40 * 0.5)])
def test_a_decode_worker_that_may_read_may_be_the_soonest(local_prefill: str, expected_s: float) -> None:
    """Guards a deadline that is met by a decode worker alone, beside a prefill worker that is slow."""
    parts = Parts(local_prefill=local_prefill)
    parts.join("d0")
    parts.join("p0")
    parts.report("d0", s_per_prompt_token=0.01)
    parts.report("p0", s_per_token=0.5)
    soonest = parts.placer.soonest(waiting(), 0.0)
    assert soonest is not None and soonest.first_token_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("each_s", "cached_tokens", "cached_blocks", "load_s"),
    [
        ({}, 47, 3, 0.0),
        ({"host": 0.02, "disk": 0.02}, 47, 3, 0.0),
        ({"host": 0.021}, 47, 3, 0.021),
        ({"host": 0.04, "disk": 0.1}, 47, 3, 0.04 + 0.1),
        ({"host": 0.04, "disk": 0.2}, 32, 2, 0.04),
        ({"host": 0.2, "disk": 0.2}, 16, 1, 0.0),
        ({"host": 0.2, "disk": 0.03}, 47, 3, 0.2 + 0.03),
    ],
)
def test_what_lies_in_lower_tiers_is_loaded_where_that_is_sooner_than_computing(
    each_s: dict[str, float], cached_tokens: int, cached_blocks: int, load_s: float
) -> None:
    """Guards the price of a block on disk, and of one that a worker will compute, or have sent, although it holds it;
    what has never been loaded, or takes next to nothing, has no price. A decode worker loads, too, before the rest is
    asked for, and has room to find for what it loads: that is believed of it neither way."""
    parts, call = Parts(), waiting(tokens=48)
    chain = call.chain(parts.join("d0").key)
    parts.join("p0")
    for name in ("d0", "p0"):
        parts.index.add(name, 1, 1, 1)
        parts.index.insert(name, chain)
        parts.report(name, s_per_token=0.01, s_per_loaded_block=each_s)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None
    assert (choice.prefill.cached_tokens, choice.prefill.load_s) == (cached_tokens, pytest.approx(load_s))
    assert (choice.decode.cached_blocks, choice.decode.load_s) == (cached_blocks, pytest.approx(load_s))
    assert (choice.decode.loaded_blocks, choice.decode.device_blocks) == (cached_blocks - 1, 1)
    assert choice.cost.load_s == pytest.approx(2 * load_s)
    parts.index.moved("d0", {"disk": chain[1][:SHORT_BYTES]})
    choice, disk_s = parts.placer.choose(call, 0.0), each_s.get("disk", 0.0)
    assert choice is not None, "what has gone further down since is another load"
    assert choice.decode.load_s == pytest.approx(2 * disk_s if 0.02 < disk_s < 16 * 0.01 else 0.0)


def worker_loads(call: Call, held: tuple[int, int, int], s: tuple[float, float], speed: float) -> tuple[int, Line]:
    """Return how many blocks a real line loads of a prompt of which it has so many on the device, in host memory and on
    disk, where a block of these takes `s` and it computes `speed` tokens a second."""
    (device, host, disk), tokens = held, call.record.tokens
    tiers = Tiers(8, 1024, 4 * segment_bytes(4, 1024))
    kv = KVCacheManager(64, 16, "f", tiers)
    lease = kv.acquire(b"", tokens[: device * 16], match_limit=0, room_tokens=device * 16)
    assert lease is not None
    kv.commit(lease, tokens[: device * 16])
    kv.release(lease)
    chain = call.chain(("f", 16))
    for ident in chain[device : device + host]:
        tiers.demote(ident, BlockId(0))
    if disk:
        tiers.adopt([(1, segment_bytes(disk, 1024), chain[device + host :])])
    tiers.take_commands()
    tiers.cost.measured(1, s[0], 1, s[1])
    line = Line(PrefillConfig(), kv, Fetches(kv, tiers), 4096)
    line.order.ran(int(speed), 1.0)
    handoff = Handoff(call.record.request, 1, 1, Incarnation(1), Incarnation(2))
    line.enter(Job(handoff, call.record, arrived=0.0, deadline=inf))
    line.admit(0.0)
    return sum(len(one.targets) for one in tiers.take_commands() if isinstance(one, TierLoad)), line


@given(
    st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.sampled_from([64, 128, 512, 2048]),
    st.sampled_from([0.0, 1 / 64, 1 / 400]),
)
def test_the_router_counts_the_blocks_that_the_worker_loads(
    held: tuple[int, int, int], prices: tuple[int, int], speed: int, s_per_token: float
) -> None:
    """Guards two sums that part: a worker whose last steps were small computes less a second than its time of a token
    says, and a worker like all others is priced as they are."""
    call, parts = waiting(tokens=sum(held) * 16 + 1), Parts()
    loaded, line = worker_loads(call, held, (prices[0] / 512, prices[1] / 512), speed)
    chain = call.chain(parts.join("p0").key)
    parts.join("d0")
    parts.index.add("p0", *held)
    parts.index.insert("p0", chain)
    tiers = line._kv.tiers
    assert tiers is not None and chain == [*chain[: held[0]], *(one for one in chain if one in tiers)]
    s_per_block, spared = {"host": prices[0] / 512, "disk": prices[1] / 512}, line.s_per_spared_token
    parts.report("p0", s_per_token=s_per_token, s_per_loaded_block=s_per_block, s_per_spared_token=spared)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.prefill.cached_tokens == (held[0] + loaded) * 16


@pytest.mark.parametrize(("spared", "here", "pool"), [((0.01, 0.001), 3, 1), ((0.001, 0.01), 1, 3)])
def test_a_load_is_held_against_what_it_spares(spared: tuple[float, float], here: int, pool: int) -> None:
    """Guards a decode worker that loads what a busy prefill pool would give it later, and would compute it itself."""
    parts, call = Parts(), waiting(tokens=49)
    chain = call.chain(parts.join("d0").key)
    parts.index.add("d0", 1, 1, 1)
    parts.index.insert("d0", chain)
    each_s = {"host": 0.1, "disk": 0.1}
    spared_s = dict(zip(("here", "pool"), spared, strict=True))
    parts.report("d0", s_per_prompt_token=0.004, s_per_loaded_block=each_s, s_per_spared_token=spared_s)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.prefill.cached_tokens == here * 16
    assert choice.decode.cached_blocks == pool


@pytest.mark.parametrize(("active", "is_roomy"), [(60, True), (61, False)])
def test_what_a_decode_worker_loads_takes_room(active: int, is_roomy: bool) -> None:
    """Guards requests that are offered where there is no room for them: of five blocks one lies on the device, and two
    below it, which are loaded into others of the pool; they are counted until its next report."""
    parts, call = Parts(), waiting(tokens=48)
    chain = call.chain(parts.join("d0").key)
    parts.join("p0")
    parts.index.add("d0", 1, 1, 1)
    parts.index.insert("d0", chain)
    parts.report("p0", s_per_token=0.01)
    parts.report("d0", active=active, s_per_loaded_block={"host": 0.04, "disk": 0.1})
    choice, worker = parts.placer.choose(call, 0.0), parts.registry.get("d0")
    assert (choice is not None) is is_roomy and worker is not None
    home = parts.join("d1")
    assert parts.placer.has_room_elsewhere(call, home, 0, 0.0) is is_roomy
    if choice is not None:
        assert choice.decode.loaded_blocks == 2
        parts.view.offered(call, choice)
        assert (call.believed_decode_blocks, worker.used_blocks) == (1, 64)


def test_what_went_below_since_takes_room_though_it_costs_nothing() -> None:
    """Guards a view that is kept: nothing but where its blocks lie has changed."""
    parts, call = Parts(), waiting(tokens=48)
    chain = call.chain(parts.join("d0").key)
    parts.join("p0")
    parts.index.add("d0", 3, 3)
    parts.index.insert("d0", chain)
    for loaded_blocks in (0, 1):
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None and choice.decode.load_s == 0.0
        assert (choice.decode.cached_blocks, choice.decode.loaded_blocks) == (3, loaded_blocks)
        parts.index.moved("d0", {"host": chain[2][:SHORT_BYTES]})


@pytest.mark.parametrize(("each_s", "cached_blocks"), [(0.1, 3), (0.5, 1)])
def test_who_reads_on_is_chosen_by_what_the_decode_worker_will_have(
    each_s: float, cached_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the price of a transfer to a worker that has blocks which it will not load: they are sent."""
    parts, asked = Parts(), list[DecodeView]()
    parts.join("d0")
    parts.join("p0")
    call = parts.run(tokens=48)
    parts.index.add("d0", 1, 2)
    parts.index.insert("d0", call.chain(call.key))
    parts.report("p0", s_per_token=0.01)
    parts.report("d0", s_per_loaded_block={"host": each_s})

    def chosen(wanted: Demand, views: list[PrefillView], homes: list[DecodeView]) -> None:
        asked.extend(homes)

    monkeypatch.setattr(parts.placer._policy, "choose", chosen)
    assert parts.placer.choose_prefill(call, 0.0) is None
    assert [(home.cached_blocks, home.loaded_blocks) for home in asked] == [(cached_blocks, cached_blocks - 1)]


def test_a_prompt_that_was_left_behind_is_no_line_and_no_less_than_none() -> None:
    """Guards the price of a worker that has read most of a prompt which nobody wants any more."""
    parts, call = Parts(), waiting()
    parts.join("d0")
    worker = parts.join("p0")
    for queued, expected in ((100, 60), (40, 0), (10, 0)):
        parts.report("p0", waiting_tokens=queued)
        assert worker.load is not None
        call.left_behind = worker.load, 40
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None and choice.prefill.queue_tokens == expected


def test_the_work_that_comes_is_that_of_what_is_not_cached() -> None:
    """Guards the price of a second copy, which is made of how busy workers are."""
    parts = Parts()
    worker = parts.join("d0")
    parts.join("p0")
    parts.report("p0", s_per_token=0.01)
    for number, expected_s in ((0, 0.0), (1, 40 * 0.01)):
        parts.placer.choose(waiting(name=f"r{number}"), float(number))
        assert parts.placer._reuse.arrivals._work_s == pytest.approx(expected_s)
    call = waiting(name="r2")
    parts.index.insert("p0", call.chain(worker.key))
    parts.placer.choose(call, 2.0)
    assert parts.placer._reuse.arrivals._work_s == pytest.approx((40 + 8) / 2 * 0.01)


def test_what_the_next_best_worker_would_have_taken_is_counted() -> None:
    """Guards the price of a second copy where all are equally near: nobody loses by it then. Where a prompt's beginning
    is held by one, the others would take as much longer."""
    parts = Parts()
    worker = parts.join("d0")
    parts.join("p0")
    parts.report("p0", s_per_token=0.01)
    arrivals = parts.placer._reuse.arrivals
    parts.placer.choose(waiting(name="alone"), 0.0)
    assert arrivals.lost(32) == 32, "there is no other"
    parts.join("p1")
    parts.report("p1", s_per_token=0.01)
    parts.placer.choose(waiting(name="r1"), 1.0)
    assert arrivals.lost(32) == arrivals.lost(0) == 0.0, "nobody has had a token to spare"
    assert arrivals._gap_s == pytest.approx(2.0), "one a second for two"
    call = waiting(name="r2")
    parts.index.insert("p0", call.chain(worker.key))
    choice = parts.placer.choose(call, 2.0)
    # The other one would have computed two blocks more, and delayed others by none.
    assert choice is not None and choice.prefill.name == "p0"
    assert arrivals.lost(32) == pytest.approx(32 * 16 / (32 + 16))


def test_the_work_that_other_routers_bring_delays_too() -> None:
    """Guards the price of a second copy where there are several routers: each knew a part of who is delayed by it, made
    copies that none of them would have made alone, and four found 0.97 of one router's hits."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    parts.report("p0", s_per_token=0.01)
    arrivals = parts.placer._reuse.arrivals
    for number in range(3):
        parts.placer.told(ReadTold("p0", True, 25, b"", b""), float(number))
    parts.placer.told(ReadTold("nobody", True, 1000, b"", b""), 3.0)
    assert (arrivals._gap_s, arrivals._work_s) == (pytest.approx(1.0), pytest.approx(25 * 0.01))


def test_nobody_has_refused_where_nobody_is() -> None:
    """Guards the line of a cluster whose decode workers are still to come: it is looked at, and says why it waits."""
    parts = Parts()
    parts.join("p0")
    assert not parts.placer.have_all_refused(0.0)
    workers = [parts.join("d0"), parts.join("d1")]
    workers[0].refused = True
    assert not parts.placer.have_all_refused(0.0)
    workers[1].refused = True
    assert parts.placer.have_all_refused(0.0)


def test_who_reads_by_itself_since_that_is_sooner_is_no_fallback() -> None:
    """Guards the operator's figure of requests that had no prefill worker: here is one, and it is slow."""
    parts = Parts(local_prefill="auto")
    parts.join("d0")
    parts.join("p0")
    parts.report("d0", s_per_prompt_token=0.001, s_per_token=0.007)
    parts.report("p0", s_per_token=9.0)
    choice = parts.placer.choose(waiting(), 0.0)
    assert choice is not None and pair(choice) == (LOCAL.name, "d0") and choice.reason == "load"


@pytest.mark.parametrize(("tokens", "shared"), [(48, 2), (49, 3)])
def test_a_sample_shares_the_whole_blocks_before_its_prompts_last_token(tokens: int, shared: int) -> None:
    """Guards the room of a sample beside its host: the last token is computed again, in a block of its own."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    host, call = parts.run("a", tokens=tokens), waiting(name="b", tokens=tokens)
    choice = parts.placer.beside(call, host, 0.0)
    assert choice is not None and choice.decode.cached_blocks == shared


def test_a_request_that_moves_is_no_work_that_comes() -> None:
    """Guards the price of a second copy: the KV of a yielded request is where it was, and nobody is delayed by it."""
    parts = Parts()
    source = parts.join("d0")
    parts.join("d1")
    parts.join("p0")
    parts.report("d0", leaving=True)
    parts.report("p0", s_per_token=0.01)
    for number in range(3):
        call = waiting(name=f"r{number}")
        call.source = source.life
        assert pair(parts.placer.choose(call, float(number))) == ("d0", "d1")
    assert parts.placer._reuse.arrivals._work_s == 0.0 and not len(parts.placer._reuse.missed)
    call.source = None
    for number in (3, 4):
        call.is_counted = False
        assert parts.placer.choose(call, float(number)) is not None
    assert parts.placer._reuse.arrivals._work_s > 0.0, "as that of any other does"


def test_the_soonest_steps_are_those_of_the_quickest() -> None:
    """Guards a deadline that the quicker of two workers would meet."""
    parts = Parts()
    for name, s_per_token in (("d0", 0.5), ("d1", 0.25), ("d2", 1.0)):
        parts.join(name)
        parts.report(name, s_per_token=s_per_token)
    soonest = parts.placer.soonest(waiting(), 0.0)
    assert soonest is not None
    least = [parts.placer._least_step_s(worker) for worker in parts.registry.role("decode")]
    assert soonest.s_per_token == min(least) < max(least)


@pytest.mark.parametrize(("tokens", "expected"), [(32, 1), (33, 1), (40, 8)])
def test_of_a_prompt_that_is_cached_to_its_end_one_token_is_read(tokens: int, expected: int) -> None:
    """Guards a deadline against a first token that takes no time at all."""
    parts = Parts()
    parts.join("d0")
    worker, call = parts.join("p0"), waiting(tokens=tokens)
    parts.report("p0", s_per_token=0.5)
    parts.index.insert("p0", call.chain(worker.key))
    soonest = parts.placer.soonest(call, 0.0)
    assert soonest is not None and soonest.first_token_s == expected * 0.5


def test_what_fits_into_none_of_several_is_told_the_largest() -> None:
    """Guards a caller who cuts a prompt down to what the smallest worker has, though another one would take more."""
    parts = Parts()
    for name, blocks in (("d0", 3), ("d1", 2), ("p0", 1), ("p1", 2)):
        parts.join(name, blocks=blocks)
    fault = parts.placer.impossible(request_record(), 0.0)
    assert fault is not None and "the largest decode worker's 48 tokens" in fault.message
    fault = parts.placer.impossible(request_record(tokens=40, max_tokens=1), 0.0)
    assert fault is not None and "the largest prefill worker's 32 tokens" in fault.message


def test_what_others_would_lose_is_at_the_pools_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the price of a copy on a worker of which nothing is measured, and on one of which something is."""
    parts, speeds = Parts(), list[float]()
    for name in ("d0", "p0", "p1"):
        parts.join(name)
    tell = parts.placer._reuse.delaying_tokens

    def asked(chain, held, block_size, queues, s_per_token, full):  # type: ignore[no-untyped-def]
        speeds.append(s_per_token)
        return tell(chain, held, block_size, queues, s_per_token, full)

    monkeypatch.setattr(parts.placer._reuse, "delaying_tokens", asked)
    parts.placer.choose(waiting(), 0.0)
    parts.report("p0", s_per_token=0.25)
    parts.placer.choose(waiting(name="b"), 1.0)
    assert speeds == [ASSUMED_S_PER_TOKEN, 0.25]


@pytest.mark.parametrize(
    ("blocks", "most", "cached", "used", "promised", "expected"),
    [
        (4, 10, 0, 6, 0, True),  # all that is left
        (5, 10, 0, 6, 0, False),
        (5, 10, 1, 6, 0, True),  # what is cached is there
        (4, 10, 1, 6, 1, True),  # what others were promised is not
        (4, 10, 0, 6, 1, False),
        (4, 10, 1, 6, 2, False),
        (4, 11, 0, 0, 0, False),  # its answer could never end
        (0, 0, 0, 10, 0, True),
        (0, 0, 0, 11, 0, False),
    ],
)
def test_a_request_fits_to_the_block(
    blocks: int, most: int, cached: int, used: int, promised: int, expected: bool
) -> None:
    """Guards each border of the room on a worker of ten blocks: one too many is refused there, one too few is left
    unused."""
    view = DecodeView("d0", cached, used, 10, 0.05, {}, 0)
    assert fits(Demand(0, 0, blocks, most), view, promised) is expected


def test_prefill_workers_of_two_block_sizes_are_asked_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what others would lose: counted in blocks of one size, it says nothing of a worker whose blocks are of
    another."""
    parts, asked = Parts(), list[tuple[int, set[str]]]()
    for name, size in (("d0", 16), ("p0", 16), ("p1", 32), ("p2", 16)):
        parts.join(name, block_size=size)

    def delaying(chain: list[bytes], held: dict[str, int], size: int, *more: object) -> dict[str, float]:
        asked.append((size, set(held)))
        return dict.fromkeys(held, 0.0)

    monkeypatch.setattr(parts.placer._reuse, "delaying_tokens", delaying)
    assert parts.placer.choose(waiting(), 0.0) is not None
    assert sorted(asked) == [(16, {"p0", "p2"}), (32, {"p1"})]


def test_a_decode_worker_that_reads_itself_is_compared_with_the_others() -> None:
    """Guards the price of copies where decode workers read: one that was compared with itself, under its other name,
    would have nothing to spare."""
    parts = Parts()
    for name in ("d0", "d1"):
        parts.join(name)
        parts.report(name, s_per_prompt_token=0.01, s_per_token=0.01)
    parts.report("d1", s_per_prompt_token=0.01, s_per_token=0.01, waiting_tokens=100)
    assert pair(parts.placer.choose(waiting(), 0.0)) == (LOCAL.name, "d0")
    assert parts.placer._reuse.arrivals._spare_tokens == pytest.approx(100)


def busy_holder(chunk_tokens: int) -> tuple[Parts, Call, list[float]]:
    """p0 holds the first 304 of the 320 tokens of a prompt and has begun to read 800 others; p1 is idle. And what
    requests pay for their first token at least."""
    parts = Parts()
    parts.join("d0", blocks=1000)
    reader = parts.join("p0", blocks=1000, chunk_tokens=chunk_tokens)
    parts.report("p0", s_per_token=0.01)
    long = parts.run("long", tokens=800)
    assert long.prefill == "p0"
    parts.registry.accepted("p0", long.record.request)
    parts.join("p1", blocks=1000, chunk_tokens=chunk_tokens)
    for name in ("p0", "p1"):
        parts.report(name, s_per_token=0.01, waiting_tokens=800 if name == "p0" else 0)
    record = msgspec.structs.replace(request_record("b", tokens=320), tokens=[1000 + n for n in range(320)])
    call = Call(record, 1, None)
    parts.index.insert("p0", call.chain(reader.key)[:19])
    soonest = parts.placer.soonest(call, 0.0)
    assert soonest is not None
    return parts, call, [soonest.first_token_s]


def test_a_prompt_goes_to_its_holder_though_that_reads_a_long_one() -> None:
    """Guards the hits that are lost where load is low: the holder reads something, an idle worker seemed to be sooner,
    and the prefix was computed once more. Yet the holder takes first who is much shorter."""
    parts, call, _ = busy_holder(chunk_tokens=64)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.prefill.name == "p0"
    # Half a step, and one beside the long prompt, of which its own 16 tokens are the rest.
    assert choice.prefill.awaited_tokens == 32 + 48
    assert choice.cost.queue_s == pytest.approx(0.80)
    assert choice.prefill.delaying_tokens == pytest.approx(16), "the long one is later by so much"
    # Who does not say how much a step computes is waited for to the end.
    parts, call, _ = busy_holder(chunk_tokens=0)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None and choice.prefill.name == "p1"


def test_what_is_being_computed_is_waited_for() -> None:
    """Guards a burst behind a cold prompt: its beginning is not there before the first has been read."""
    parts, _, _ = busy_holder(chunk_tokens=64)
    again = waiting(name="c", tokens=810)
    choice = parts.placer.choose(again, 0.0)
    assert choice is not None
    parts.registry.leave("p1", 0.0)
    choice = parts.placer.choose(again, 0.0)
    assert choice is not None and choice.prefill.cached_tokens == 800
    assert (choice.prefill.queue_tokens, choice.prefill.passed_tokens) == (800, 0)


def test_who_goes_before_others_is_not_told_that_it_comes_too_late() -> None:
    """Guards a deadline that a prompt meets, since it does not wait for all that is queued."""
    assert busy_holder(chunk_tokens=0)[2] == [pytest.approx(3.2)], "the idle one would be sooner"
    assert busy_holder(chunk_tokens=64)[2] == [pytest.approx(0.80 + 0.16)]


def test_a_prompt_that_has_been_read_is_in_nobodys_way() -> None:
    """Guards what is believed of a line against requests that have left it: read, or lost."""
    for has_left in (True, False):
        parts, call, _ = busy_holder(chunk_tokens=64)
        long = parts.table.calls[RequestId("long")]
        if has_left:
            parts.registry.prefilled("p0", long.record.request)
        else:
            parts.view.release(long)
        for worker in parts.registry:
            worker.check()
        parts.report("p0", s_per_token=0.01, waiting_tokens=800)
        parts.registry.leave("p1", 0.0)
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None and choice.prefill.passed_tokens == 0, "of what is queued there, nothing is known"


def test_predictions_are_learnt_from_as_if_nobody_went_before_others() -> None:
    """Guards a worker's factor: the short ones are as soon as predicted, and the long ones before which they went
    would make it seem slower, the more so the more is sent to it."""
    parts, call, _ = busy_holder(chunk_tokens=64)
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None
    parts.table.calls[call.record.request] = call
    parts.view.offered(call, choice)
    assert call.predicted_s is not None and call.predicted_s[0] == pytest.approx((800 + 16) * 0.01)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_copy_costs_what_makes_room_for_it(is_full: bool) -> None:
    """Guards small caches, where a second copy costs another beginning its place, and a worker that has just joined,
    where it costs nothing."""
    parts = Parts()
    parts.join("d0")
    holder, other = parts.join("p0"), parts.join("p1")
    parts.report("p1", evicted=[b"some"] if is_full else [])
    parts.report("p1")
    call = waiting(tokens=20 * 16)
    parts.index.insert("p0", call.chain(holder.key)[:16])
    parts.index.insert("p1", call.chain(holder.key)[:6])
    before = parts.placer._views._delaying(Held(parts.index, call), [holder, other])
    evictions = parts.placer._reuse.evictions
    evictions.evicted([b"%d" % n for n in range(1024)], 4096)
    evictions.asked([b"%d" % n for n in range(256)])
    after = parts.placer._views._delaying(Held(parts.index, call), [holder, other])
    assert after["p0"] == before["p0"]
    assert after["p1"] - before["p1"] == pytest.approx(0.25 * 10 * 16 if is_full else 0.0)


@pytest.mark.parametrize(
    ("worker", "local_prefill", "counts"),
    [("p0", "off", True), ("d0", "off", False), ("d0", "auto", True), ("nobody", "off", False)],
)
def test_what_comes_back_after_its_eviction_is_counted(worker: str, local_prefill: str, counts: bool) -> None:
    parts = Parts(local_prefill=local_prefill)
    parts.join("d0")
    reader = parts.join("p0")
    call = waiting(tokens=20 * 16)
    chain = call.chain(reader.key)
    parts.index.insert("p0", chain[:4])
    parts.placer.evicted(worker, chain[4:12])
    assert parts.placer.choose(call, 0.0) is not None
    assert parts.placer._reuse.evictions._again == (8 if counts else 0)
    assert parts.placer.choose(call, 0.0) is not None
    assert parts.placer._reuse.evictions._own == 1, "a request that is offered twice asks once"
