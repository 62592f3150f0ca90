"""A run as a story: one line per record that arrives, fault that strikes, and end that a client sees."""

from collections.abc import Sequence

from engine.identity import SHORT_BYTES
from engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Finish,
    FirstToken,
    Handoff,
    Hello,
    HoldingTold,
    Landed,
    Load,
    NeedPrefill,
    Offer,
    Orphan,
    OrphansTold,
    Place,
    PrefillFailed,
    ProcessesTold,
    Record,
    Refused,
    Release,
    RouterHello,
    StartPrefill,
    Stop,
    Tokens,
    UsePrefill,
    WorkerInfo,
    Yield,
    Yielded,
    decode_from_prefill_frame,
    decode_router_frame,
    decode_to_prefill_frame,
    decode_worker_frame,
)
from tests.sim.client import Client, Searcher
from tests.sim.clock import Violation
from tests.sim.network import Stream
from tests.sim.world import World


def tell(world: World) -> list[str]:
    """Run a world to its end and return its story. A broken promise is its last line, and `world.failure`."""
    lines: list[str] = []

    def say(who: str, what: str) -> None:
        lines.append(f"{world.clock.now * 1e3:9.2f} ms  {who}: {what}")

    def heard(stream: Stream, lane: int, data: bytes) -> None:
        ends = (stream.client.name, stream.server.name)
        sender, receiver = ends if lane == 0 else ends[::-1]
        for record in records_of(stream, lane, data):
            text = describe(record)
            if text:
                say(f"{sender} > {receiver}", text)

    def told(stream: Stream, lane: int, why: str) -> None:
        me, other = (stream.server, stream.client) if lane == 0 else (stream.client, stream.server)
        say(me.name, f"hears that its stream with {other.name} is over: {why}")

    world.say = say
    world.wire.trace = heard
    world.wire.on_told = told
    try:
        world.run()
        for client in world.clients:
            lines.append(f"  {client.name}: {client.outcome}, {_got(client)}")
        lines += _pools(world)
    except Violation as violation:
        world.failure = str(violation)
        say("BROKEN", world.failure)
    return lines


def _got(client: Client) -> str:
    if isinstance(client, Searcher):
        return f"answers {[beam.ids for beam in client.answers]}"
    return f"tokens {client.tokens_}"


def _pools(world: World) -> list[str]:
    lines = []
    for process in world.live.values():
        if process.role == "router":
            continue
        counts = world.memories[process.pid].pool.counts()
        held = {state: n for state, n in counts.items() if n and state not in ("free", "cached")}
        if held:
            lines.append(f"  {process.name} still holds {held}")
    return lines or ["  at rest: every pool is free + cached"]


def records_of(stream: Stream, lane: int, data: bytes) -> Sequence[Record]:
    """The records of a frame, whatever stream it travels on."""
    if stream.is_handoff:
        return (decode_to_prefill_frame if lane == 0 else decode_from_prefill_frame)(data)
    return (decode_router_frame if lane == 0 else decode_worker_frame)(data)


def describe(record: Record) -> str:
    """One record in words; nothing for heartbeats, and for the list of all workers, which goes to everybody."""
    match record:
        case Load() | OrphansTold() | ProcessesTold():
            return ""
        case HoldingTold():
            return f"holds {sum(len(run.blocks) // SHORT_BYTES for run in record.runs)} cached blocks"
        case WorkerInfo() | RouterHello():
            return "hello"
        case Orphan():
            return (
                f"orphan {record.record.request}/{record.placement}: {record.record.prompt_tokens} prompt tokens, "
                f"output {record.tokens}"
            )
        case Hello():
            kept = [_name(handoff) for handoff in record.unfinished]
            return "hello" + (f", still reading {', '.join(kept)}" if kept else "")
        case Place():
            tokens, prompt = len(record.record.tokens), record.record.prompt_tokens
            history = f" and {tokens - prompt} emitted" if tokens > prompt else ""
            fork = f", fork of {record.fork_of}" if record.fork_of is not None else ""
            beams = record.record.beams
            search = f", a search {beams.width} wide" if beams is not None else ""
            return (
                f"place {record.record.request}/{record.placement}: {prompt} prompt tokens{history}, "
                f"prefill on {record.prefill.name}{fork}{search}"
            )
        case StartPrefill():
            return f"start {_name(record.handoff)}: {len(record.record.tokens)} tokens, have {record.have_tokens}"
        case Offer():
            blocks = [block.index for block in record.blocks]
            return f"offer {_name(record.handoff)} chunk {record.seq}: blocks {blocks}"
        case FirstToken():
            return f"first token of {_name(record.handoff)}: {record.token}, {record.chunks} chunks in all"
        case Landed(handoff, seq):
            return f"landed {_name(handoff)} chunk {seq}"
        case Stop(handoff):
            return f"stop {_name(handoff)}"
        case PrefillFailed(handoff, fault):
            return f"failed {_name(handoff)}: {fault.code}"
        case Accepted(request, placement):
            return f"accepted {request}/{placement}"
        case Refused(request, placement):
            return f"refused {request}/{placement}"
        case Tokens(request, placement, index, ids):
            return f"tokens {request}/{placement} from {index}: {ids}"
        case Ended():
            fault = f" ({record.fault.code})" if record.fault else ""
            found = f", answers {[beam.ids for beam in record.beams]}" if record.beams else ""
            return f"ended {record.request}/{record.placement}: {record.reason.value}{fault}{found}"
        case Cancel(request, placement, reason):
            return f"cancel {request}/{placement}: {reason.value}"
        case Finish(request, placement, kept):
            return f"finish {request}/{placement}: {kept} tokens kept"
        case Yield(request, placement):
            return f"yield {request}/{placement}"
        case Yielded():
            return f"yielded {record.request}/{record.placement}, {record.stats.output_tokens} tokens"
        case Release(request, placement):
            return f"release {request}/{placement}"
        case NeedPrefill(request, placement, failed):
            return f"{request}/{placement} needs another prefill worker than {failed}"
        case UsePrefill(request, placement, prefill):
            return f"{request}/{placement}: use {prefill.name if prefill else 'none, prefill it yourself'}"
    return type(record).__name__


def _name(handoff: Handoff) -> str:
    return f"{handoff.request}/{handoff.placement}.{handoff.attempt}"
