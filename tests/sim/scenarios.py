"""Scripted runs whose stories are checked in under `transcripts/`: one fault each, small enough to read."""

from dataclasses import replace

import msgspec

from engine.types import BeamParams, RequestId, RequestRecord, SamplingParams
from tests.sim.faults import Fault
from tests.sim.plan import Ask, Going, Plan
from tests.sim.schedule import RECOVERS, samples
from worker.config import DecodeConfig, PrefillConfig

STEM = list(range(10, 22))


def _ask(name: str, *tokens: int, at_s: float = 0.0, max_tokens: int = 4) -> Ask:
    prompt = [*STEM, *tokens] if tokens else [7, 8, 9]
    record = RequestRecord(
        request=RequestId(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        seed=1,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    return Ask(record, at_s)


def _resumable(name: str, *tokens: int, max_tokens: int) -> Ask:
    ask = _ask(name, *tokens, max_tokens=max_tokens)
    return replace(ask, record=msgspec.structs.replace(ask.record, context=b"resumable"))


def _samples(count: int, **more: int) -> list[Ask]:
    whole = _ask("a", 1, 2, **more)  # type: ignore[arg-type]
    return [
        replace(whole, record=record)
        for record in samples(whole.record, count)
    ]


def _search(name: str, *tokens: int, width: int, **more: int) -> Ask:
    ask = _ask(name, *tokens, **more)  # type: ignore[arg-type]
    beams = BeamParams(width=width, answers=width)
    return replace(ask, record=msgspec.structs.replace(ask.record, beams=beams))


def _plan(*asks: Ask, faults: tuple[Fault, ...] = (), **more: object) -> Plan:
    plan = Plan(
        seed=1,
        asks=list(asks) or [_ask("a", 1, 2)],
        faults=list(faults),
        workers={"prefill": 2, "decode": 2},
        prefill=PrefillConfig(chunk_tokens=4),
        strict=RECOVERS,
    )
    return replace(plan, **more)  # type: ignore[arg-type]


def _swapped(seed: int) -> Plan:
    """A request that is swapped; by the seed stores and loads fail, or not."""
    return _plan(
        _ask("a", 1, max_tokens=24),
        _ask("b", *range(1, 5), max_tokens=20, at_s=0.001),
        seed=seed,
        workers={"prefill": 1, "decode": 1},
        blocks={"prefill": 10, "decode": 11},
        decode_tier_blocks=12,
        decode=DecodeConfig(growth_tokens=4, local_chunk_tokens=2, preemption="swap"),
    )


def _one(kind: str, on: str, count: int = 1, delay_s: float = 0.0, lasts_s: float = 0.1) -> Plan:
    return _plan(faults=(Fault(kind, on, count=count, delay_s=delay_s, lasts_s=lasts_s),))


SCENARIOS: dict[str, tuple[str, Plan]] = {
    "undisturbed": ("One request, one handoff in four chunks.", _plan()),
    "next_turn_moves_less": (
        "The second request shares three blocks with the first: only what is new travels.",
        _plan(_ask("a", 1, 2), _ask("b", 1, 2, 3, 4, 5, at_s=0.05)),
    ),
    "samples_fork_one_lease": (
        "Three samples of one answer: one handoff, and forks of it that begin when it has landed.",
        _plan(*_samples(3)),
    ),
    "samples_whose_worker_dies": (
        "Each sample goes on behind its own tokens; the prompt is fetched once, and shared again.",
        _plan(*_samples(3, max_tokens=8), faults=(Fault("crash decode", "Landed", 4, delay_s=0.004),)),
    ),
    "samples_whose_parent_leaves": (
        "The first sample is cancelled in its handoff: the second takes its place, and the third shares with that one.",
        _plan(*(replace(ask, cancel_s=None if at else 0.006) for at, ask in enumerate(_samples(3)))),
    ),
    "search_whose_worker_dies": (
        "Nothing of a search was said, so it begins again from its prompt elsewhere, and finds the same answers.",
        _plan(
            _search("a", 1, 2, width=3, max_tokens=8),
            blocks={"prefill": 14, "decode": 20},
            faults=(Fault("crash decode", "Landed", 4, delay_s=0.006),),
        ),
    ),
    "search_that_gives_way": (
        "A search and a chat outgrow the pool: the search, the younger, gives its blocks away and begins again.",
        _plan(
            _ask("a", 1, max_tokens=24),
            _search("b", width=3, max_tokens=12, at_s=0.001),
            workers={"prefill": 1, "decode": 1},
            blocks={"prefill": 10, "decode": 12},
            decode=DecodeConfig(growth_tokens=4, local_chunk_tokens=2),
        ),
    ),
    "first_token_is_all": (
        "An answer of one token ends while its blocks still land.",
        _plan(_ask("a", 1, max_tokens=1)),
    ),
    "waits_for_room": (
        "Two workers, each with room for one: the third request waits for a report that shows room.",
        _plan(
            *(_ask(name, at, max_tokens=6) for at, name in enumerate("abc", 1)),
            blocks={"prefill": 8, "decode": 5},
        ),
    ),
    "pool_exhausted": (
        "Taken with little room to grow, two requests outgrow the pool: the younger gives its blocks away, what it has "
        "said becomes part of its prompt, and only what was evicted meanwhile is computed and moved again.",
        _plan(
            _ask("a", 1, max_tokens=24),
            _ask("b", max_tokens=24, at_s=0.001),
            workers={"prefill": 1, "decode": 1},
            blocks={"prefill": 10, "decode": 10},
            decode=DecodeConfig(growth_tokens=4, local_chunk_tokens=2),
        ),
    ),
    "pool_exhausted_and_swapped": (
        "The same with host memory below the pool: the younger's blocks are copied there, then taken, and copied back.",
        _swapped(seed=1),
    ),
    "swapped_and_not_whole": (
        "What is copied back is not what was copied out: found by its digest, and computed again.",
        _swapped(seed=2),
    ),
    "swap_fails": (
        "The copies cannot be made: the blocks are taken all the same, and what is gone is computed again.",
        _swapped(seed=15),
    ),
    "refused_and_offered_again": (
        "A worker with one open handoff says no to a second; the router offers it again.",
        _plan(
            _ask("a", 1),
            _ask("b", 2),
            workers={"prefill": 1, "decode": 1},
            decode=DecodeConfig(max_handoffs=1),
        ),
    ),
    "prefill_dies_before_it_offers": (
        "A prefill worker dies with the prompt in hand.",
        _one("crash prefill", "StartPrefill", delay_s=0.001),
    ),
    "prefill_dies_between_chunks": (
        "It dies after its second offer.",
        _one("crash prefill", "Offer", 2),
    ),
    "prefill_dies_after_the_first_token": (
        "It dies when all is said.",
        _one("crash prefill", "FirstToken", delay_s=0.0002),
    ),
    "decode_dies_while_it_copies": (
        "The reader dies: the prefill worker lets its blocks go on proof of death.",
        _one("crash decode", "copy", 2),
    ),
    "decode_dies_while_it_decodes": (
        "The answer is under way.",
        _one("crash decode", "Landed", 4, delay_s=0.001),
    ),
    "stream_cut_in_the_handoff": (
        "Both live, the stream between them breaks.",
        _one("cut handoff", "copy", 2),
    ),
    "corrupted_block": (
        "A bit flips in a copy: the attempt fails, the answer does not.",
        _one("corrupt", "StartPrefill"),
    ),
    "misdirected_blocks": (
        "Two blocks of an offer change places, bytes intact: the digest is bound to the identity.",
        _plan(
            _ask("a", 1, 2),
            faults=(Fault("misdirect", "StartPrefill"),),
            prefill=PrefillConfig(chunk_tokens=16),
        ),
    ),
    "failed_copy": ("A receive cannot be posted: a second try.", _one("recv_fails", "StartPrefill")),
    "failed_send": (
        "A send cannot be posted: the prefill worker gives up.",
        _one("send_fails", "StartPrefill"),
    ),
    "duplicate_offer": ("A record comes twice.", _one("duplicate", "Offer", 2, delay_s=0.001)),
    "offers_out_of_order": (
        "An offer of one request is overtaken by another's.",
        _plan(
            _ask("a", 1, 2),
            _ask("b"),
            faults=(Fault("reorder", "Offer", count=1),),
            workers={"prefill": 1, "decode": 1},
        ),
    ),
    "zombie_decode_worker": (
        "Stopped for three seconds, then resumed: nothing that it says of its old work is believed.",
        _one("freeze decode", "copy", 2, lasts_s=3.0),
    ),
    "reader_frozen_for_ever": (
        "Stopped and not resumed: accused by the worker that keeps blocks for it, condemned by the router, and killed.",
        _plan(
            faults=(Fault("freeze decode", "copy", count=2, lasts_s=8.0),),
            escalate_s=1.0,
            announced=True,
        ),
    ),
    "frozen_when_the_router_dies": (
        "The next router never meets this life, but is told of it, and takes it for silent as its accuser does.",
        _plan(
            _resumable("a", 1, 2, max_tokens=16),
            faults=(
                Fault("freeze decode", "copy", count=2, lasts_s=9.0),
                Fault("crash router", "copy", count=2, delay_s=0.001, lasts_s=0.01),
            ),
            escalate_s=1.0,
            announced=True,
        ),
    ),
    "data_connection_cut": (
        "Over tcp the connection that carries blocks breaks: what has landed is kept, another worker sends the rest.",
        _plan(faults=(Fault("cut data", "copy", 2, delay_s=0.0001),), transport="tcp"),
    ),
    "data_connection_silent": (
        "It swallows all, while the control stream lives: given up after half a second without a byte that was due.",
        _plan(
            faults=(Fault("silence data", "copy", 2, lasts_s=1.0),),
            transport="tcp",
            stall_s=0.5,
        ),
    ),
    "partition_in_the_handoff": (
        "Nothing gets through for 300 ms.",
        _one("partition handoff", "copy", 1, lasts_s=0.3),
    ),
    "client_leaves_in_the_handoff": (
        "A cancel stops the copies before the blocks are let go.",
        _plan(replace(_ask("a", 1, 2), cancel_s=0.012)),
    ),
    "deadline_in_the_handoff": (
        "The time is over.",
        _plan(replace(_ask("a", 1, 2), deadline_s=0.013)),
    ),
    "stop_string": (
        "The router finds a stop string after two tokens.",
        _plan(replace(_ask("a", 1, 2, max_tokens=8), stop_after=2)),
    ),
    "decode_worker_leaves": (
        "Asked to leave while it decodes: the request is yielded, and goes on from the KV that it left behind.",
        _plan(_ask("a", 1, 2, max_tokens=24), goings=[Going("decode", 0.03)]),
    ),
    "decode_worker_leaves_when_nobody_else_has_room": (
        "The only decode worker is asked to leave: it finishes what it has, then ends. New work waits for the next.",
        _plan(
            _ask("a", 1, 2, max_tokens=24),
            _ask("b", 3, at_s=0.025),
            workers={"prefill": 2, "decode": 1},
            goings=[Going("decode", 0.02)],
        ),
    ),
    "source_of_a_move_dies": (
        "The worker that has yielded a request dies as its KV is asked for: a prefill worker computes it instead.",
        _plan(
            _ask("a", 1, 2, max_tokens=24),
            faults=(Fault("crash prefill", "move"),),
            goings=[Going("decode", 0.03)],
        ),
    ),
    "target_of_a_move_dies": (
        "The worker that was to go on dies: the request's KV waits for another, and is fetched by it.",
        _plan(
            _ask("a", 1, 2, max_tokens=24),
            faults=(Fault("crash decode", "move", lasts_s=0.4),),
            workers={"prefill": 2, "decode": 3},
            goings=[Going("decode", 0.03)],
        ),
    ),
    "prefill_worker_leaves": (
        "It finishes the prompt that it has begun, and gives up the one that waits, which goes elsewhere.",
        _plan(
            *(_ask(name, *range(at, at + 8)) for at, name in ((1, "a"), (11, "b"), (21, "c"), (31, "d"))),
            workers={"prefill": 2, "decode": 1},
            blocks={"prefill": 8, "decode": 30},
            goings=[Going("prefill", 0.006)],
        ),
    ),
    "router_dies": (
        "Every worker ends what it did for it.",
        _one("crash router", "copy", 2),
    ),
    "router_dies_and_its_client_resumes": (
        "The decode worker runs on; the next router adopts the request, and its client lacks and repeats nothing.",
        _plan(
            _resumable("a", 1, 2, max_tokens=16),
            faults=(Fault("crash router", "Landed", count=4, delay_s=0.001, lasts_s=0.001),),
        ),
    ),
    "two_workers_report_one_request": (
        "Frozen, so that the request goes on elsewhere, and back when that router is dead: the higher placement goes "
        "on, the other is cancelled, and until then the client is not told anything.",
        _plan(
            _resumable("a", 1, 2, max_tokens=16),
            faults=(
                Fault("freeze decode", "Landed", count=4, delay_s=0.001, lasts_s=2.1),
                Fault("crash router", "FirstToken", count=2, delay_s=0.004, lasts_s=0.001),
            ),
        ),
    ),
}
