"""Every record that crosses a process border between router, decode workers and prefill workers.

Typed structs, encoded as MessagePack by msgspec and carried as bytes on gRPC streams, once both ends have proven who
they are (`engine/handshake.py`): a frame is a list of records, checked against these types when it is decoded. Apart
from sockets, tensors and decisions; the public API is protobuf (`protos/`). Unknown fields are ignored and new ones get
defaults, so neighbours of different versions still talk.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

import msgspec

from engine.types import Beam, BlockId, DrawnToken, FinishReason, Incarnation, RequestId, RequestRecord, TokenLogprobs

PROTOCOL = 3
"""What a process says that it understands, in its `WorkerInfo` or `RouterHello`. A frame with a record of an unknown
kind ends its stream, so each kind that is added gets a number here, and is said to nobody below it."""
READS_TOLD = 2
"""The first at which `ReadTold` is understood."""
SESSIONS_TOLD = 3
"""The first at which `SessionTold` is."""


class Record(msgspec.Struct, frozen=True, tag=True):
    """Base of all records; the class name is the tag on the wire."""


class PlacementMessage(Record):
    """Base of what a router and a decode worker say of one placement of a request."""

    request: RequestId
    placement: int


# who a worker is, and how it fares


class MemoryUse(msgspec.Struct, frozen=True):
    """A worker's memory, in bytes. Weights are mapped: one copy for all workers of a host."""

    weights_bytes: int = 0
    workspace_bytes: int = 0  # of the largest step; 0 where it was not measured
    kv_bytes: int = 0
    draft_weights_bytes: int = 0  # of a draft model; 0 where there is none
    draft_kv_bytes: int = 0


class RankUse(msgspec.Struct, frozen=True):
    """One process of a tensor-parallel worker. Its weights are bytes of its part of the model."""

    pid: int
    weights_bytes: int
    sums: str = ""  # of a worker on GPUs: how its ranks add up, and why


class WorkerInfo(Record, kw_only=True):
    """A worker's description of itself, for those that connect."""

    name: str
    role: str  # "prefill" | "decode"
    incarnation: Incarnation
    address: str  # host:port of its gRPC server
    model: str
    fingerprint: str  # of the prepared model, a slash, the type of KV: peers must agree on it, a router on the first
    arithmetic: str = ""  # what the last bits of its results depend on; peers should agree on it
    block_size: int
    blocks: int
    host_blocks: int = 0  # of the tiers below: what they can hold
    disk_blocks: int = 0
    context_tokens: int
    adapters: list[str] = []  # digests of those that it can apply: a record with another one is not taken
    chunk_tokens: int = 0  # of prompts: what a step computes at most; 0: one that does not say
    growth_tokens: int | None = None  # room for an answer that is promised when a request is taken; None: all of it
    pid: int
    host: str
    metrics_address: str = ""
    memory: MemoryUse = MemoryUse()
    ranks: list[RankUse] = []  # the processes that compute the model together, rank 0 first; empty: this one alone
    protocol: int = 1  # the `PROTOCOL` of its release; 1: one that does not say


class Load(Record, kw_only=True):
    """A worker's state after a step; also its heartbeat: `step` proves that the engine runs."""

    step: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    reserved_blocks: int
    quarantined_blocks: int
    promised_blocks: int = 0  # free or cached, and kept for what has been accepted: no request is given them
    group_blocks: dict[str, int] = {}  # of those three, by layer group; empty where there is one
    waiting_requests: int = 0
    waiting_tokens: int = 0  # uncached prompt tokens not computed yet (decode: of prompts that it computes itself)
    running_requests: int = 0
    s_per_token: float = 0.0  # prefill: measured; decode: seconds per step
    s_per_prompt_token: float = 0.0  # decode: predicted, of prompts that it computes itself; 0.0 until measured
    s_per_block: dict[str, float] = {}  # decode: measured migration cost by prefill worker name
    s_per_loaded_block: dict[str, float] = {}  # measured, by lower tier ("host", "disk"); none before a first load
    s_per_spared_token: dict[str, float] = {}  # what a load is held against, where there are tiers: "here", "pool"
    evicted: list[bytes] = []  # identities (engine.identity) that left this worker's cache since the last report
    moved: dict[str, bytes] = {}  # by highest tier, short identities (`HeldRun`) of blocks that went there since then
    leaving: bool = False  # it takes nothing new, and ends when it holds nothing more
    silent: list[Incarnation] = []  # lost readers for whom blocks have been in quarantine for `escalate_s`

    @property
    def is_sound(self) -> bool:
        """True if these are figures that a worker can have: nothing can be compared with what is no number."""
        pool = self.free_blocks, self.cached_blocks, self.active_blocks, self.reserved_blocks, self.quarantined_blocks
        work = self.promised_blocks, self.waiting_requests, self.waiting_tokens, self.running_requests
        by_name = self.s_per_block, self.s_per_loaded_block, self.s_per_spared_token
        times_s = [self.s_per_token, self.s_per_prompt_token, *(s for times in by_name for s in times.values())]
        return min(*pool, *work) >= 0 and all(0.0 <= seconds < inf for seconds in times_s)


# router -> decode worker


class PeerAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    address: str
    incarnation: Incarnation = Incarnation(0)
    """The life that answers there, where a supervisor tells a router; 0: not said. Between workers it never is."""
    pid: int = 0
    host: str = ""
    """Its process, as a supervisor knows it; 0 where the incarnation is 0."""


class RouterHello(Record):
    """First on every stream: which life of a router speaks. Answered by `OrphansTold`, after the orphans of earlier
    lives under its name."""

    incarnation: Incarnation
    name: str = "router"
    protocol: int = 1
    """The `PROTOCOL` of its release; 1: one that does not say."""
    heard: int = 0
    """The number of the last `HoldingTold` of this life of the worker that it has heard: of a telling that was cut,
    what follows it is told. 0, or a number of another telling: all."""


class Claim(Record):
    """Give me the requests of this `RequestRecord.resume_key`, whoever has them: their client has come to me. Of this
    owner's only (`engine.identity.owner`), where one is named. Answered by their `Orphan`s, then `ClaimTold`."""

    key: bytes
    namespace: bytes | None = None


class Place(Record, kw_only=True):
    """Run `record`; its prompt is prefilled by `prefill`. `losses` placements were lost before. The request `fork_of`
    has the same prompt: if it is here, its blocks are shared, and nothing is prefilled."""

    record: RequestRecord
    placement: int
    prefill: PeerAddress
    losses: int = 0
    fork_of: RequestId | None = None


class Cancel(PlacementMessage):
    """The client left (CANCELLED) or its time is over (DEADLINE)."""

    reason: FinishReason


class Finish(PlacementMessage):
    """The router found a stop string: the request ended well after `tokens_kept` output tokens."""

    tokens_kept: int


class UsePrefill(PlacementMessage):
    """The answer to `NeedPrefill`: another prefill worker, or None where none is left: prefill it yourself."""

    prefill: PeerAddress | None


class Yield(PlacementMessage):
    """Tells a leaving worker to stop computing this request as soon as all KV of its tokens but the newest's is there,
    and to keep its blocks for whoever goes on with it. Answered by `Yielded`, or by `Ended` where it had ended."""


class Release(PlacementMessage):
    """Let the KV of a yielded request go: nobody will ask for it again, and its blocks go as soon as nobody reads
    them."""


class LifeOfProcess(msgspec.Struct, frozen=True):
    """One worker's process: `pid` means it on `host` (`transfer.liveness.host_id`)."""

    name: str
    incarnation: Incarnation
    pid: int
    host: str


class ProcessesTold(Record):
    """To every worker, whenever it changes: all workers that there are, as those know who started them. Whoever is not
    among them is nobody to read blocks; and only by these pids is the death of a reader proven."""

    processes: list[LifeOfProcess]


TenantUse = tuple[int, int, float]
"""What a tenant uses at one router: tokens since that began, running samples, and what is left of its burst."""


TenantLine = tuple[float, bool, bool]
"""What a tenant was charged in one router's line in all of an epoch, in tokens / weight; whether requests of it wait
there, and whether its turn has come by what is known there."""


class TenantsTold(Record):
    """From a router to its siblings, by way of a worker, which says from whom it has it: what tenants with limits use
    there, and how its line stands. `number` counts up with each; two ways may be used. `epoch` counts up whenever the
    line's sums begin anew."""

    number: int
    uses: dict[str, TenantUse]
    router: str = ""
    incarnation: Incarnation = Incarnation(0)
    lines: dict[str, TenantLine] = {}
    epoch: int = 0


class ReadTold(Record):
    """From a router to its siblings, by way of the decode worker that it offers a request to, which passes it on as it
    is: `reader` is about to read a prompt, of which so many tokens are taken to be uncached there. `blocks` are those
    of them, packed as in `HeldRun`, and `parent` the one before. `is_new`: the request has not been offered before."""

    reader: str
    is_new: bool
    uncached_tokens: int
    parent: bytes
    blocks: bytes


class SessionTold(Record):
    """From a router to its siblings, by way of the decode worker that has taken a conversation's request, which passes
    it on as it is: the next turns go there. `session` names the conversation (`router.core.sessions`), `turn` says
    which of two words of it is the later one, and `prefill` is the life that reads its prompt: empty, where the decode
    worker does. `age_s`: the time since then, where a router that has begun meanwhile is told."""

    session: bytes
    turn: int
    prefill: str = ""
    prefill_incarnation: Incarnation = Incarnation(0)
    age_s: float = 0.0


DecodeOrder = RouterHello | Claim | Place | Cancel | Finish | UsePrefill | Yield | Release
"""What a router says to a decode worker's scheduler."""
RouterRecord = ProcessesTold | TenantsTold | ReadTold | SessionTold | DecodeOrder


# decode worker -> router


class Fault(msgspec.Struct, frozen=True):
    """The reason why a request failed: `code` is the name of a gRPC status code, `field` the request field at fault, if
    any."""

    code: str
    message: str
    field: str = ""


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a request, on the decode worker's clock. Seconds; the stages are those of docs/architecture.md."""

    stages: dict[str, float] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    migrated_blocks: int = 0
    migrated_bytes: int = 0
    migration_s: float = 0.0  # copying and verifying, summed over chunks; most of it hides behind the prefill
    transport: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""


class Accepted(PlacementMessage):
    cached_tokens: int


class Refused(PlacementMessage):
    """No room now. The router keeps the request in its line and offers it again when a report shows room."""

    blocks_needed: int
    cached_tokens: int | None = None
    """Those of the prompt that are here, as in `Accepted`; None: not said."""


class NeedPrefill(PlacementMessage):
    """The prefill worker `failed` is lost to this request; the decode worker keeps what has landed and goes on with
    another. Answered by `UsePrefill`. `was_full`: it had no room in its line or pool, which is no fault of its."""

    failed: str
    was_full: bool = False


class Tokens(PlacementMessage, omit_defaults=True):
    """Output tokens `index ..` of a request (0 is the first token after the prompt)."""

    index: int
    ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """Those of each of the tokens, where they are asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """With the first output token: those of the prompt's tokens from the second on, where they are asked for."""


class Yielded(PlacementMessage, kw_only=True):
    """The worker computes this request no more, and has said all of its tokens. Whoever goes on with it asks this
    worker for its KV, as it would ask a prefill worker; `stats` is what the request cost here."""

    stats: RequestStats


class Ended(PlacementMessage, kw_only=True):
    reason: FinishReason
    stats: RequestStats
    fault: Fault | None = None
    beams: list[Beam] = []
    """The answers of a beam search, best first, as many as were asked for."""


class Orphan(Record, kw_only=True):
    """A request of a router that is gone: it is yours now. More `Tokens` follow behind `tokens`, all of its output so
    far; or `Ended`, at once."""

    record: RequestRecord
    placement: int
    prefill: str
    """The prefill worker that serves it; empty where the decode worker prefills by itself."""
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []
    """Those of each of the tokens, where they are asked for."""
    age_s: float
    """Time since this placement was accepted."""
    remaining_s: float | None = None
    """Time to its deadline."""
    losses: int = 0


class Taken(PlacementMessage):
    """Another router goes on with this request: it is yours no more, and nothing more is said of it here."""


class ClaimTold(Record):
    """There is no more of what was claimed, for now."""

    key: bytes


class OrphansTold(Record):
    """There are no more orphans for now."""


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """Cached blocks that follow each other in a sequence, by the first `engine.identity.SHORT_BYTES` of each identity,
    packed. `parent` is the block before them; empty where they begin the sequence."""

    parent: bytes
    blocks: bytes


class HoldingTold(Record):
    """To a router that has attached: some of what the worker holds in all its tiers, parents first and about in the
    order of use, the latest first. Whatever comes and goes meanwhile is told as always."""

    runs: list[HeldRun]
    number: int = 0
    """Grows from one to the next, and for one router never comes twice; 0: of a worker that does not say."""


class CachedTold(Record):
    """To every router, where several are attached: what has been cached here since the last one, for whichever router's
    requests. Used just now, parents first."""

    runs: list[HeldRun]


DecodeRecord = (
    WorkerInfo
    | Accepted
    | Refused
    | NeedPrefill
    | Tokens
    | Yielded
    | Ended
    | Orphan
    | OrphansTold
    | Taken
    | ClaimTold
    | Load
    | HoldingTold
    | CachedTold
    | TenantsTold
    | ReadTold
    | SessionTold
)


# decode worker <-> the worker that has, or computes, the KV of a prompt: the handoff. A prefill worker, or a leaving
# decode worker with the requests that it has yielded, which then speaks as a prefill worker does.


class Handoff(msgspec.Struct, frozen=True, order=True):
    """The name every handoff message carries. The router mints request and placement, the decode worker `attempt`."""

    request: RequestId
    placement: int
    attempt: int
    decode: Incarnation
    prefill: Incarnation


class HandoffMessage(Record):
    """Base of what the two sides say of one handoff."""

    handoff: Handoff


class RankEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The same of one tensor-parallel rank with a pool of its own, which holds `kv_heads` of the model's from
    `first_head` on. `details` by rank of the peer; ranks beyond the last have the last one's."""

    first_head: int
    kv_heads: int
    details: list[dict[str, Any]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The way by which a peer reaches a worker's KV memory. `details` belongs to the transport named here and to nobody
    else. `ranks`: the tensor-parallel ranks that have a pool, of which the first is described by `details` too; empty
    where there is one pool, and the peer has one."""

    transport: str
    details: dict[str, Any] = {}
    ranks: list[RankEndpoint] = []


class Hello(Record, kw_only=True):
    """First record in either direction: who speaks, how its memory is laid out and how it can be reached. The decode
    worker names every way there is, the prefill worker answers with the one it chose."""

    info: WorkerInfo
    layout: dict[str, Any]
    endpoints: list[Endpoint]
    renewal: bytes = b""
    """Prefill worker: names the stream that it answers on. Decode worker: the last one that it was given here. A second
    stream of a life is refused while the first one lasts, unless it brings the renewal of that."""
    unfinished: list[Handoff] = []
    """Decode worker: the handoffs that it still reads for. Whatever else is kept for it may be let go."""
    protocol: int = 1
    digest: str = "xxh3-64"
    digest_share: float = 1.0
    """The share of blocks that shall have a digest, 0 to 1; the larger of both hellos holds."""
    wire: str = "as_stored"
    """The form in which blocks shall travel, where both say the same."""


class StartPrefill(HandoffMessage, kw_only=True):
    """Prefill `record`; of its prompt, the prefill worker's blocks `[have_tokens // block_size, ..)` are wanted: of a
    layer group with a window only those of its tail (`engine.kv.groups.migrated`)."""

    record: RequestRecord
    have_tokens: int


class Landed(HandoffMessage):
    """Chunk `seq` has been copied and verified: its source blocks will not be read again for this handoff."""

    seq: int


class Stop(HandoffMessage):
    """The receiver wants no more, and no read of its own is outstanding: every source block may be unpinned."""


DecodeToPrefill = Hello | StartPrefill | Landed | Stop


class BlockOffer(msgspec.Struct, frozen=True):
    """One finished block: `index` is its position in the sequence, in blocks of the sender (with several layer groups
    its place, `engine.kv.groups.place`), `generation` the source block's at the time."""

    source: BlockId
    generation: int
    index: int
    tokens: int  # valid tokens in it
    digest: int
    more: list[int] = []
    """Where a block lies in, or goes to, several pools: the digests of its further parts (`transfer.ranks.group`)."""


class Offer(HandoffMessage):
    """Blocks of one chunk, ready to be read (shm) or on their way (tcp)."""

    seq: int
    blocks: list[BlockOffer]


class FirstToken(HandoffMessage, kw_only=True):
    """Prefill is done. `chunks` offers were or will be made in all; the durations are on the prefill worker's clock."""

    token: int
    logprobs: TokenLogprobs | None = None
    """The token's, where they are asked for."""
    more: list[DrawnToken] = []
    """Tokens that could only come behind it."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Those of the prompt's tokens from the second on, where they are asked for."""
    chunks: int
    queue_s: float
    run_s: float
    cached_tokens: int

    @property
    def drawn(self) -> tuple[DrawnToken, ...]:
        return (self.token if self.logprobs is None else self.logprobs, *self.more)


class PrefillFailed(HandoffMessage):
    """The prefill worker gave up; it will offer nothing more for this handoff."""

    fault: Fault


PrefillToDecode = Hello | Offer | FirstToken | PrefillFailed


# frames

_encoder = msgspec.msgpack.Encoder()


FRAME_BYTES = 1 << 20
"""Frames of several records are no larger: who hears them can hear others in between."""


def encode(records: Sequence[Record]) -> bytes:
    """One frame: a list of records as bytes."""
    return _encoder.encode(records)


def frames(records: Sequence[Record]) -> list[bytes]:
    """As few frames as hold these records, each but for single records within FRAME_BYTES."""
    data = encode(records)
    if len(data) <= FRAME_BYTES or len(records) < 2:
        return [data]
    half = len(records) // 2
    return frames(records[:half]) + frames(records[half:])


def is_joinable(frame: bytes) -> bool:
    """Return True for one of MessagePack's three heads of a list: what stands in for msgspec writes other bytes."""
    return frame[0] & 0xF0 == 0x90 or frame[0] in (0xDC, 0xDD)


def joined(data: Sequence[bytes]) -> bytes:
    """One frame of the records of several, which are not read for it. Raises ValueError for what is no list."""
    if len(data) == 1:
        return data[0]
    heads = [_head(frame) for frame in data]
    count = sum(records for records, _ in heads)
    head = bytes([0x90 | count]) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return b"".join([head, *(frame[begin:] for frame, (_, begin) in zip(data, heads, strict=True))])


def _head(frame: bytes) -> tuple[int, int]:
    """Return how many records a frame lists, and where the first begins."""
    if not is_joinable(frame):
        raise ValueError("not a list of records")
    kind = frame[0]
    if kind < 0xDC:
        return kind & 0x0F, 1
    begin = 3 if kind == 0xDC else 5
    return int.from_bytes(frame[1:begin], "big"), begin


_Read = TypeVar("_Read")


def guarded(decode: Callable[[bytes], _Read]) -> Callable[[bytes], _Read]:
    """The same decoder of msgspec's, which raises nothing but `msgspec.MsgspecError` whatever the bytes are: by itself
    it also raises UnicodeDecodeError where text is not UTF-8, and RecursionError where values are nested too deeply."""

    def read(data: bytes) -> _Read:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error

    return read


def _no_extension(code: int, _: memoryview) -> None:
    """What a transport tells of its endpoint may be any plain value, which can be sent on as it came; this is none."""
    raise msgspec.ValidationError(f"a value of MessagePack's extension type {code}, of which there are none here")


decode_router_frame = guarded(msgspec.msgpack.Decoder(list[RouterRecord], ext_hook=_no_extension).decode)
decode_worker_frame = guarded(msgspec.msgpack.Decoder(list[DecodeRecord], ext_hook=_no_extension).decode)
decode_to_prefill_frame = guarded(msgspec.msgpack.Decoder(list[DecodeToPrefill], ext_hook=_no_extension).decode)
decode_from_prefill_frame = guarded(msgspec.msgpack.Decoder(list[PrefillToDecode], ext_hook=_no_extension).decode)
"""Each raises `msgspec.ValidationError` or `msgspec.DecodeError` on a frame that is not of its types."""
