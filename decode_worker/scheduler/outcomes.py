"""What the parts of a decode worker's scheduler say of a request, for the scheduler to act on."""

import msgspec

from decode_worker.scheduler.events import ConnectPeer, Tell
from decode_worker.scheduler.request import Request
from engine.messages import Fault
from engine.types import Beam, FinishReason
from transfer.handoff.commands import Command


class Landed(msgspec.Struct, frozen=True):
    """Every block of the request's prompt is here and verified."""

    request: Request


class Unserved(msgspec.Struct, frozen=True):
    """The request's prefill worker will not do; nothing of it is under way any more."""

    request: Request


class Hopeless(msgspec.Struct, frozen=True):
    """No prefill worker will do; `Freed` follows."""

    request: Request
    fault: Fault


class Freed(msgspec.Struct, frozen=True):
    """After `Handoffs.abandon`: nothing of ours writes to the request's blocks any more."""

    request: Request


class Lifted(msgspec.Struct, frozen=True):
    """A load out of a tier has ended: `blocks` are here after `seconds`, all that were found or not."""

    request: Request
    blocks: int
    seconds: float
    is_whole: bool


class Over(msgspec.Struct, frozen=True):
    """Nobody wants it any more."""

    request: Request


class Drawn(msgspec.Struct, frozen=True):
    """Its next token is known."""

    request: Request
    token: int


class Finished(msgspec.Struct, frozen=True):
    """It has its answer: `kept` output tokens of it, where that is not all, or the best hypotheses of a search."""

    request: Request
    reason: FinishReason
    kept: int | None = None
    beams: tuple[Beam, ...] = ()


Outcome = Landed | Unserved | Hopeless | Freed | Lifted | Over | Drawn | Finished
Result = Command | ConnectPeer | Tell | Outcome
