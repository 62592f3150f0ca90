"""The events that the router core is told, and the commands that it answers with."""

from collections.abc import Sequence

import msgspec

from engine.messages import (
    DecodeRecord,
    Fault,
    Orphan,
    PeerAddress,
    RequestStats,
    RouterRecord,
    WorkerInfo,
)
from engine.types import Beam, FinishReason, Incarnation, RequestId, RequestRecord, TokenLogprobs
from router.core.escalation import Verdict
from router.core.sessions import Session


class Submit(msgspec.Struct, frozen=True):
    """A validated request arrived. `deadline_s` is on the router's clock, `weight` is that of `tenant`, and `session`
    the conversation that its client has named. `least_tokens`: how many tokens its answer has at the least, where the
    caller has named the deadline, and what cannot meet it is refused; None where the deadline is the router's own."""

    record: RequestRecord
    deadline_s: float | None = None
    weight: float = 1.0
    tenant: str = ""
    session: Session | None = None
    least_tokens: int | None = None


class WorkersNamed(msgspec.Struct, frozen=True):
    """All decode workers were named, connected or not; and, where they are known, the lives of all workers."""

    decode: tuple[str, ...]
    lives: tuple[tuple[str, Incarnation], ...] = ()


class Connected(msgspec.Struct, frozen=True):
    """A worker is connected."""

    peer: PeerAddress
    info: WorkerInfo


class WorkerSaid(msgspec.Struct, frozen=True):
    """A connected worker sent a record; who it is has been said by `Connected`."""

    worker: str
    record: DecodeRecord


class Lost(msgspec.Struct, frozen=True):
    """The stream to a worker broke; `for_good` if the worker was taken away."""

    worker: str
    for_good: bool = False


class ClientLeft(msgspec.Struct, frozen=True):
    """The client cancelled or disconnected."""

    request: RequestId


class ClaimWanted(msgspec.Struct, frozen=True):
    """A client has come with a token that this router does not know: ask the decode workers for the requests of this
    key, of one namespace where one is named (`engine.messages.Claim`)."""

    key: bytes
    namespace: bytes | None = None


class Owned(msgspec.Struct, frozen=True):
    """An adopted request is this tenant's, of this weight, and goes on with the conversation that its client has
    named."""

    request: RequestId
    tenant: str
    weight: float
    session: Session | None = None


class StopFound(msgspec.Struct, frozen=True):
    """The text of the first `tokens_kept` output tokens contains a stop string."""

    request: RequestId
    tokens_kept: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = Submit | WorkersNamed | Connected | WorkerSaid | Lost | ClientLeft | ClaimWanted | Owned | StopFound | Tick


class TellWorker(msgspec.Struct, frozen=True):
    """Send a record to a decode worker. `reason` says why a `Place` went there."""

    worker: str
    record: RouterRecord
    reason: str = ""


class Begin(msgspec.Struct, frozen=True):
    """A worker accepted the request, for the first time, or again after `DecodeLost` or `Moved`: output may follow."""

    request: RequestId


class Adopt(msgspec.Struct, frozen=True):
    """A request of another router, which is gone or has given it over, goes on here behind the output that its orphan
    holds; its client will come back for all of that. Said again where a higher placement of it turns up."""

    orphan: Orphan


class GivenOver(msgspec.Struct, frozen=True):
    """A request goes on at another router, to which its client has come. What is said of its end here is for whoever
    reads it here still."""

    record: RequestRecord


class DecodeLost(msgspec.Struct, frozen=True):
    """The decode worker of a request was lost; the request goes on behind `emitted_tokens` as soon as one takes it."""

    request: RequestId
    worker: str
    emitted_tokens: int


class Moved(msgspec.Struct, frozen=True):
    """A leaving decode worker has yielded a request, which goes on as soon as another one takes it. `stages` are the
    seconds that it spent there."""

    request: RequestId
    worker: str
    stages: dict[str, float]


class Poisonous(msgspec.Struct, frozen=True):
    """A request is refused for good: these workers were lost while they held it, and in this way."""

    request: RequestId
    deaths: str


class Deliver(msgspec.Struct, frozen=True):
    """The next output tokens of a request."""

    request: RequestId
    ids: list[int]
    logprobs: Sequence[TokenLogprobs] = ()
    """Those of each of them, where they are asked for."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """With the first of all: those of the prompt's tokens from the second on, where they are asked for."""


class Complete(msgspec.Struct, frozen=True):
    """A request ended well. `expected_tokens` is what the router believed to be cached."""

    request: RequestId
    reason: FinishReason
    stats: RequestStats
    expected_tokens: int
    beams: tuple[Beam, ...] = ()


class Fail(msgspec.Struct, frozen=True):
    """A request ended badly; `outcome` is its label in the metrics. `refusal`: why it was not let in, "full" or
    "deadline"; empty for any other end. `cause`: what the router's own code raised, where that is why."""

    request: RequestId
    fault: Fault
    outcome: FinishReason
    retry_after_s: float | None = None
    refusal: str = ""
    cause: Exception | None = None


class Ignored(msgspec.Struct, frozen=True):
    """A worker's record was not acted on: "stale", "early", "duplicate", "gap" or "overrun"."""

    kind: str
    tokens: int


class Ejected(msgspec.Struct, frozen=True):
    """A worker has failed too often: it gets no request for so many seconds, and then one to try it."""

    worker: str
    why: str
    backoff_s: float


class Readmitted(msgspec.Struct, frozen=True):
    """A worker that was ejected has ended a request well: it is taken as any other."""

    worker: str


class Condemn(msgspec.Struct, frozen=True):
    """A life of a worker is given up: end the stream to it, if there is one. The supervisor hears of it too."""

    verdict: Verdict


Ending = Complete | Fail
"""The end of a request for its client: one of them, once."""
Judgement = Ejected | Readmitted | Condemn
"""What is decided about a worker."""
Told = Adopt | GivenOver | DecodeLost | Moved | Poisonous | Deliver
"""What becomes of a request while it lasts."""
Command = TellWorker | Begin | Told | Ending | Ignored | Judgement
