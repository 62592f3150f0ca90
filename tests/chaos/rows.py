"""The table of faults: what is done, when, to whom, and how the request that it hits must end.

A row is one line. `EXACT`: all tokens of the fault-free run, in order, once. `UNAVAILABLE`: a clear word, and what came
before it is the beginning of the fault-free answer. Whatever the row, tokens that differ, silence, and blocks that do
not come back fail it. `expect` is what is demanded, not what is hoped for: a row whose fault is survived one day fails
until its line says so.
"""

from dataclasses import dataclass
from enum import StrEnum

PROMPT_TOKENS = 200
ANSWER_TOKENS = 12
FROZEN_S = 5.0
PAUSED_S = 0.9
"""A stop shorter than the second of silence after which a peer is asked whether it lives."""


class Ending(StrEnum):
    EXACT = "exact"
    UNAVAILABLE = "unavailable"


class Moment(StrEnum):
    ASKED = "asked"
    """Placed and reserved, not one block sent: the prefill workers are stopped until the fault has struck."""
    SENDING = "sending"
    """Chunks have been offered and more are being computed."""
    TOKEN = "token"
    """The client has `token` tokens."""


class Fault(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    """Stopped for `FROZEN_S`, then resumed: a zombie that believes itself current."""
    PAUSE = "pause"
    """Stopped for `PAUSED_S`, then resumed, before anybody can have noticed."""
    STOP = "stop"
    """Stopped until somebody ends it."""
    CUT = "cut"
    """Every control stream of the worker is cut; both ends live on."""
    STUTTER = "stutter"
    """Slow: stopped most of the time, never long enough to be given up."""


@dataclass(frozen=True, slots=True)
class Row:
    moment: Moment
    fault: Fault
    targets: tuple[str, ...]
    expect: tuple[Ending, ...]
    token: int = 0
    rank: int = 0
    """Which process of the worker is struck, where it has several."""

    def __str__(self) -> str:
        when = f"{self.moment}{self.token or ''}"
        rank = f"-rank{self.rank}" if self.rank else ""
        return f"{self.fault}-{'+'.join(self.targets)}{rank}-{when}"


PREFILL, DECODE, BOTH = ("prefill",), ("decode",), ("prefill", "decode")
EXACT, UNAVAILABLE = (Ending.EXACT,), (Ending.UNAVAILABLE,)
EITHER = (*EXACT, *UNAVAILABLE)
"""Two workers are lost while they hold it: it may be refused as poisonous."""

COLLATERAL = EXACT
"""How a request may end that happens to share a worker with the one that is hit."""

ROWS = (
    Row(Moment.ASKED, Fault.KILL, PREFILL, EXACT),
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.KILL, PREFILL, EXACT, token=2),
    Row(Moment.ASKED, Fault.KILL, DECODE, EXACT),
    Row(Moment.SENDING, Fault.KILL, DECODE, EXACT),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=1),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=6),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=ANSWER_TOKENS - 2),
    Row(Moment.ASKED, Fault.KILL, BOTH, EITHER),
    Row(Moment.SENDING, Fault.KILL, BOTH, EITHER),
    Row(Moment.TOKEN, Fault.KILL, BOTH, EITHER, token=4),
    Row(Moment.SENDING, Fault.FREEZE, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.FREEZE, PREFILL, EXACT, token=2),
    Row(Moment.SENDING, Fault.FREEZE, DECODE, EXACT),
    Row(Moment.TOKEN, Fault.FREEZE, DECODE, EXACT, token=4),
    Row(Moment.SENDING, Fault.CUT, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.CUT, PREFILL, EXACT, token=2),
    Row(Moment.SENDING, Fault.CUT, DECODE, EXACT),
    Row(Moment.TOKEN, Fault.CUT, DECODE, EXACT, token=4),
    Row(Moment.SENDING, Fault.STUTTER, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.STUTTER, DECODE, EXACT, token=2),
)

TCP_ROWS = (
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT),
    Row(Moment.SENDING, Fault.KILL, DECODE, EXACT),
    Row(Moment.SENDING, Fault.FREEZE, PREFILL, EXACT),
    Row(Moment.SENDING, Fault.CUT, PREFILL, EXACT),
)

RAY_ROWS = (
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=4),
    Row(Moment.TOKEN, Fault.KILL, PREFILL, EXACT, token=2),
    Row(Moment.SENDING, Fault.PAUSE, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.PAUSE, DECODE, EXACT, token=2),
    Row(Moment.SENDING, Fault.FREEZE, PREFILL, EXACT),
    Row(Moment.SENDING, Fault.FREEZE, DECODE, EXACT),
    Row(Moment.TOKEN, Fault.FREEZE, DECODE, EXACT, token=4),
    Row(Moment.SENDING, Fault.STOP, PREFILL, EXACT),
    Row(Moment.SENDING, Fault.STOP, DECODE, EXACT),
    Row(Moment.TOKEN, Fault.STOP, DECODE, EXACT, token=4),
)

RANK_ROWS = (
    Row(Moment.ASKED, Fault.KILL, PREFILL, EXACT, rank=1),
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT, rank=2),
    Row(Moment.TOKEN, Fault.KILL, PREFILL, EXACT, token=1, rank=1),
    Row(Moment.ASKED, Fault.KILL, DECODE, EXACT, rank=2),
    Row(Moment.SENDING, Fault.KILL, DECODE, EXACT, rank=1),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=1, rank=1),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=6, rank=2),
    Row(Moment.SENDING, Fault.FREEZE, PREFILL, EXACT, rank=1),
    Row(Moment.TOKEN, Fault.FREEZE, DECODE, EXACT, token=4, rank=2),
    Row(Moment.SENDING, Fault.STOP, PREFILL, EXACT, rank=2),
    Row(Moment.TOKEN, Fault.STOP, DECODE, EXACT, token=4, rank=1),
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=4),
)
"""Workers of three ranks. A rank that is frozen is a delay, one that stays stopped is its worker's end."""

RANK_POOL_ROWS = (
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT, rank=2),
    Row(Moment.SENDING, Fault.KILL, DECODE, EXACT, rank=1),
    Row(Moment.TOKEN, Fault.KILL, DECODE, EXACT, token=1, rank=2),
    Row(Moment.SENDING, Fault.FREEZE, PREFILL, EXACT, rank=1),
    Row(Moment.SENDING, Fault.FREEZE, DECODE, EXACT, rank=2),
    Row(Moment.SENDING, Fault.STOP, PREFILL, EXACT, rank=2),
    Row(Moment.SENDING, Fault.STOP, DECODE, EXACT, rank=1),
    Row(Moment.SENDING, Fault.KILL, PREFILL, EXACT),
)
"""The same with a pool and a mover for each rank, where what is on its way may be a part of a chunk."""
