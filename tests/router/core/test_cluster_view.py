"""The view of the cluster alone: what a request adds to its two workers, and what they are believed to hold then.

Tried elsewhere too: through the core in test_core.py and test_recovery.py, after every event of test_core_machine.py,
against what workers really hold in the simulator (tests/sim).
"""

from array import array

import msgspec
import pytest

from engine.identity import SHORT_BYTES
from engine.messages import Accepted, Refused, RequestStats
from router.core.call import Call, State
from router.core.placement import LOCAL
from router.core.policy import Choice, PrefillView
from tests.router.core.parts import Parts, request_record


def cluster() -> Parts:
    """A decode worker, and two prefill workers; the second has larger blocks and is busy."""
    parts = Parts()
    parts.join("d0")
    parts.join("p0")
    parts.join("p1", block_size=20)
    parts.report("p1", waiting_tokens=1000)
    return parts


def accept(parts: Parts, call: Call, cached_tokens: int = 0) -> None:
    parts.view.accepted(call, Accepted(call.record.request, call.placement, cached_tokens))


def refuse(parts: Parts, call: Call, cached_tokens: int | None = None) -> None:
    parts.view.refused(call, Refused(call.record.request, call.placement, 4, cached_tokens))


def held(parts: Parts, *names: str) -> list[int]:
    """How many blocks each worker is believed to hold."""
    return [parts.index.held_blocks(name) for name in names]


def test_an_offer_loads_both_of_its_workers() -> None:
    """Guards a burst against one pair: 4 blocks there and 40 tokens here, less what is believed to be cached."""
    parts = cluster()
    call = parts.offer("a")
    decode, prefill = parts.registry.get("d0"), parts.registry.get("p0")
    assert decode is not None and prefill is not None
    assert (call.decode, call.decode_life, call.key) == ("d0", decode.life, ("f", 16))
    assert (call.prefill, call.prefill_life, call.prefill_key) == ("p0", prefill.life, ("f", 16))
    assert (decode.used_blocks, decode.queue_tokens, prefill.queue_tokens, prefill.used_blocks) == (4, 0, 40, 0)
    accept(parts, call)
    again = parts.offer("b")
    assert (again.believed_decode_blocks, again.believed_prefill_tokens) == (2, 32)
    assert (decode.used_blocks, prefill.queue_tokens) == (4 + 2, 40 + 8)
    parts.view.release(again)
    assert (decode.used_blocks, prefill.queue_tokens) == (4, 40)


def test_what_nobody_reads_is_in_no_line() -> None:
    """Guards eight samples of one prompt: seven of them were taken for prompts before which nobody goes."""
    parts = cluster()
    first = parts.offer("a")
    accept(parts, first)
    prefill = parts.registry.get("p0")
    assert prefill is not None and list(prefill.reading) == ["a"]
    for name in ("b", "c"):
        sample = parts.wait(name)
        beside = parts.placer.beside(sample, first, 0.0)
        assert beside is not None and beside.prefill.name == "p0"
        parts.view.offered(sample, beside, is_fork=True)
    assert list(prefill.reading) == ["a"]
    parts.view.offered(sample, beside)
    assert list(prefill.reading) == ["a", "c"]


def test_what_is_accepted_will_be_held() -> None:
    """Guards a burst of one cold prompt, which follows the first one before its worker has said yes; what decode
    workers are believed to hold, from their yes on alone; and what they contradict."""
    parts = cluster()
    call = parts.offer("a")
    assert held(parts, "d0", "p0") == [0, 2]
    refuse(parts, call)
    assert held(parts, "d0", "p0") == [0, 0], "nobody will compute it"
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None
    parts.view.offered(call, choice)
    accept(parts, call)
    assert held(parts, "d0", "p0") == [2, 2]
    longer = parts.offer("b", tokens=60)
    assert longer.believed_decode_blocks == 2
    parts.index.insert("d0", [*call.chain(call.key), b"lower"])
    accept(parts, longer, cached_tokens=16)
    assert parts.index.match("d0", [*call.chain(call.key), b"lower"]) == 2, "it has only one, hence nothing below it"
    assert parts.index.match("d0", longer.chain(longer.key)) == 3


@pytest.mark.parametrize(("cached_tokens", "believed"), [(None, 2), (40, 2), (32, 2), (31, 1), (0, 0)])
def test_who_says_no_is_believed_to_hold_what_it_says_until_more_arrives(
    cached_tokens: int | None, believed: int
) -> None:
    """Guards a full pool against offers, with every report, of what it is taken to hold and is still being sent; and
    what shares that prompt, against waiting for an answer's end. One of an earlier release does not say what it has."""
    parts = cluster()
    first = parts.offer("a")
    accept(parts, first)
    refuse(parts, parts.offer("b"), cached_tokens)
    assert held(parts, "d0") == [believed]
    parts.view.arrived(first)
    assert held(parts, "d0") == [2]


@pytest.mark.parametrize("answer", ["refused", "accepted"])
def test_what_has_left_a_device_for_a_lower_tier_is_still_believed_there(answer: str) -> None:
    """Guards conversations in host memory: of a prompt that its decode worker no longer has on the device, and with it
    of all that goes on behind it, nothing was believed to be there any more."""
    parts = cluster()
    parts.index.add("d0", 64, host_blocks=64)
    longer = parts.wait("b", tokens=70)
    parts.index.insert("d0", longer.chain(("f", 16)))
    call = parts.offer("a")
    assert call.believed_decode_blocks == 2
    (refuse if answer == "refused" else accept)(parts, call, cached_tokens=16)
    here = {"refused": 1, "accepted": 2}[answer]
    assert parts.index.tiers(longer.chain(("f", 16)))["d0"] == {"device": here, "host": 4}
    parts.index.check()


def test_what_one_router_offers_the_others_believe_and_count_until_the_next_report() -> None:
    """Guards a burst of one cold prompt over several routers, each of which had it computed elsewhere; and queues that
    others' work makes longer, of which reports tell later."""
    here, there = cluster(), cluster()
    there.join("p2")
    there.report("p2", waiting_tokens=20)
    call = here.offer("a", tokens=56)
    told = here.view.reading(call)
    assert (told.reader, told.uncached_tokens, told.parent, len(told.blocks)) == ("p0", 56, b"", 3 * SHORT_BYTES)
    there.view.told(told)
    there.view.told(msgspec.structs.replace(told, reader="nobody"))
    assert held(there, "p0", "p1", "p2", "d0") == [3, 0, 0, 0]
    prefill = there.registry.get("p0")
    assert prefill is not None and prefill.queue_tokens == 56
    prefill.check()
    follows = there.offer("b", tokens=70)
    assert follows.prefill == "p0", "the second of a burst, at another router"
    more = there.view.reading(follows)
    assert (more.uncached_tokens, more.parent, len(more.blocks)) == (22, told.blocks[-SHORT_BYTES:], SHORT_BYTES)
    here.view.told(more)
    assert held(here, "p0") == [4]
    there.report("p0", waiting_tokens=5)
    assert prefill.queue_tokens == 5 + 22, "its report counts what others have sent"
    there.view.check(there.table.calls)


def test_who_reads_a_prompt_by_itself_is_told_of_too() -> None:
    """Guards a burst in one pool: the decode worker reads it."""
    parts = Parts()
    parts.join("d0")
    told = parts.view.reading(parts.offer("a"))
    assert (told.reader, told.uncached_tokens, len(told.blocks)) == ("d0", 40, 2 * SHORT_BYTES)


def test_another_prefill_worker() -> None:
    """Guards the load of the one that is left, and the identities of the next one, whose blocks have another size."""
    parts = cluster()
    call = parts.run("a")
    first, second = parts.registry.get("p0"), parts.registry.get("p1")
    assert first is not None and second is not None
    assert parts.view.replace_prefill(call, PrefillView("p1", 10, 0, 0.0, 0)) == second.peer
    assert (first.queue_tokens, second.queue_tokens) == (0, 1000 + 30)
    assert (call.prefill, call.prefill_life, call.believed_prefill_tokens) == ("p1", second.life, 10)
    assert parts.index.match("p1", call.chain(("f", 20))) == 2
    parts.report("p1")
    assert second.queue_tokens == 0, "the request runs: the next report has counted it"
    assert parts.view.replace_prefill(call, None) is None
    assert (call.prefill, call.prefill_life, call.believed_prefill_tokens) == ("", None, 0) and not second.own


def test_a_request_without_a_prefill_worker() -> None:
    parts = Parts()
    parts.join("d0")
    call = parts.wait("a")
    choice = parts.placer.choose(call, 0.0)
    assert choice is not None
    assert parts.view.offered(call, choice) == LOCAL
    assert (call.prefill, call.prefill_life) == ("", None)
    decode = parts.registry.get("d0")
    assert decode is not None and decode.queue_tokens == len(call.record.tokens), "it has the prompt to read"


@pytest.mark.parametrize(("prefill", "size"), [("p0", 16), ("p1", 20)])
def test_an_adopted_request_is_held_by_both(prefill: str, size: int) -> None:
    """Guards the trees after a restart: each worker's blocks by its own size."""
    parts = cluster()
    home, reader = parts.registry.get("d0"), parts.registry.get(prefill)
    assert home is not None and reader is not None
    call = parts.table.open(request_record("a"), None, State.RUNNING)
    parts.view.adopted(call, home, prefill)
    assert (call.decode, call.decode_life, call.key) == ("d0", home.life, home.key)
    assert (call.prefill, call.prefill_life) == (prefill, reader.life)
    assert (home.queue_tokens, home.used_blocks) == (0, 0), "its own reports count it"
    assert parts.index.match("d0", call.chain(("f", 16))) == 2
    assert parts.index.match(prefill, call.chain(("f", size))) == 2
    parts.table.check()


def test_an_end_extends_and_corrects() -> None:
    """Guards affinity of a chat's next turn: the answer is held too, but for its last token, which nobody wrote."""
    parts = cluster()
    call = parts.run("a", *range(200, 225))
    accept(parts, call)
    call.believed_prefill_tokens = 32
    parts.index.insert("p0", [*call.chain(call.key), b"below"])
    parts.view.ended(call, RequestStats(prefill_cached_tokens=16))
    assert held(parts, "d0") == [4], "64 of 40 + 25 tokens were written"
    turn = parts.wait("next", tokens=40)
    turn.emitted += call.emitted
    turn.rewrite()
    assert parts.index.match("d0", turn.chain(call.key)) == 4, "under the names that the next turn asks for"
    assert parts.index.match("p0", [*call.chain(call.key), b"below"]) == 2, "what was not there has no children"
    del call.emitted[-1:]
    parts.index.add("d0", 64)
    parts.view.ended(call, RequestStats(prefill_cached_tokens=32))
    assert held(parts, "d0") == [3], "the last token is written by the step after it"


def test_who_had_what_was_believed_keeps_what_is_below_it() -> None:
    """Guards the conversations of others, which go on behind the part that this request has found."""
    parts = cluster()
    call = parts.run("a")
    parts.index.insert("p0", [*call.chain(call.key), b"below"])
    call.believed_prefill_tokens = 16
    parts.view.ended(call, RequestStats(prefill_cached_tokens=16))
    assert parts.index.match("p0", [*call.chain(call.key), b"below"]) == 3


def test_what_became_of_a_prediction_is_part_of_the_next_price() -> None:
    """Guards coefficients that nobody fits: prompts take three times as long on p0 as its own speed says, and half of
    what blocks take is hidden. What was predicted is without the factors of then, so they do not feed on themselves."""
    parts = cluster()
    parts.report("p0", s_per_token=0.01)
    parts.report("p1", s_per_token=0.01, waiting_tokens=10_000)
    parts.report("d0", s_per_block={"p0": 0.002, "p1": 0.002})

    def priced(name: str) -> tuple[Call, Choice]:
        call = parts.wait(name, namespace=name.encode())
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None and choice.prefill.name == "p0", "p1 has a line"
        parts.view.offered(call, choice)
        return call, choice

    call, first = priced("r0")
    assert call.predicted_s == pytest.approx((40 * 0.01, 3 * 0.002))
    stages = {"prefill_queue": 0.2, "prefill_run": 1.0, "migrate": 0.003}
    told = RequestStats(prefill_worker="p0", decode_worker="d0", output_tokens=9, stages=stages)
    for number in range(100):
        parts.view.ended(call, told)
        parts.view.release(call)
        call, last = priced(f"r{number + 1}")
        assert call.predicted_s == pytest.approx((40 * 0.01, 3 * 0.002))
    assert last.cost.compute_s == pytest.approx(3 * first.cost.compute_s)
    assert last.cost.move_s == pytest.approx(first.cost.move_s / 2)
    call.predicted_s = (1.0, 1.0)
    parts.view.replace_prefill(call, None)
    assert call.predicted_s is None, "it goes otherwise than it was priced"


def test_the_check_finds_what_is_misfiled() -> None:
    parts = cluster()
    call = parts.run("a")
    parts.view.check(parts.table.calls)
    parts.registry.dispatched("p1", call.record.request, 0, 0)
    with pytest.raises(AssertionError, match="misfiled"):
        parts.view.check(parts.table.calls)
    parts.registry.released("p1", call.record.request)
    parts.registry.released("d0", call.record.request)
    with pytest.raises(AssertionError, match="nowhere"):
        parts.view.check(parts.table.calls)


def test_what_came_meanwhile_is_believed_where_a_worker_has_what_it_was_believed_to_have() -> None:
    """Guards affinity of a chat: its longer turns on the same workers are not forgotten for a shorter one."""
    parts = cluster()
    call = parts.offer("a")
    chain = [*call.chain(call.key), b"below"]
    parts.index.insert("d0", chain)
    accept(parts, call, cached_tokens=0)
    assert parts.index.match("d0", chain) == 3
    call.believed_prefill_tokens = 32
    parts.index.insert("p0", chain)
    parts.view.ended(call, RequestStats(prefill_cached_tokens=32))
    assert parts.index.match("p0", chain) == 3
    parts.view.ended(call, RequestStats(prefill_cached_tokens=31))
    assert parts.index.match("p0", chain) == 2, "a token less: its second block was not there, hence nothing below it"


def test_nothing_is_predicted_of_a_prompt_that_is_an_answer_so_far() -> None:
    """Guards coefficients against requests that are placed again: what they report is of both placements."""
    parts = cluster()
    assert parts.offer("b").predicted_s is None, "nobody has measured anything"
    parts.report("p0", s_per_token=0.01)
    call = parts.wait("a")
    for emitted, source, known in (([], None, True), ([7], None, False), ([], ("d1", 1), False)):
        call.emitted, call.source = array("I", emitted), source
        choice = parts.placer.choose(call, 0.0)
        assert choice is not None
        parts.view.offered(call, choice)
        assert (call.predicted_s is not None) == known
        parts.view.release(call)


def test_what_is_left_behind_is_what_a_report_has_counted() -> None:
    """Guards a prefill worker's price: a prompt that nobody wants any more is taken off the line that it stands in, and
    off no line that was told before it came."""
    parts = cluster()
    parts.report("p0", waiting_tokens=7)
    early = parts.offer("a")
    parts.view.release(early)
    assert early.prefill == "p0" and early.left_behind is None
    late = parts.offer("b")
    parts.registry.accepted("p0", late.record.request)
    parts.report("p0", waiting_tokens=47)
    worker = parts.registry.get("p0")
    assert worker is not None and late.prefill == "p0"
    parts.view.release(late)
    assert late.left_behind == (worker.load, 40 - late.believed_prefill_tokens)
