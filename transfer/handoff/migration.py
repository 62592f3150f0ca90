"""The states and legal moves of both sides of a handoff: `transfer.handoff.sender` and `transfer.handoff.receiver` obey
these tables.

Both sides are pure: records and events in, commands out. The receiver (decode worker) `expect`s blocks and asks for
them; the sender (prefill worker) `open`s the handoff and offers finished blocks chunk by chunk. Each chunk goes

    sender:   offer -> PostSend .. Posted -> Emit(Offer) .. Sent
    receiver: Offer -> PostRecv .. Received -> Emit(Landed)

and the two questions that matter are each decided in one place:

- *May the sender reuse its source blocks?* `KVSender._settle`: none of its own sends is outstanding and nobody can
  read them: each chunk offered is `Landed` and no more will come, or the receiver said `Stop`, or its process is proven
  dead. Where the sender itself pushes the bytes (tcp) a lost peer needs no proof, since its own sends have ended.
- *May the receiver free its target blocks?* `KVReceiver._fence`: `stop` was called and each receive of its own has
  ended. Only then does it say `Stop`, and after that it never reads for this handoff again.

No timer appears here: time can make nobody stop reading. Messages that are duplicate, late or of an unknown handoff
change nothing and are counted in `dropped`. A wrong local call raises `HandoffError`.
"""

from enum import Enum


class HandoffError(Exception):
    """This process drove a handoff wrongly: a bug of the caller."""


class S(Enum):
    """States of the sending side; a settled handoff is forgotten."""

    OPEN = "open"
    CLOSED = "closed"  # no further offers
    STOPPED = "stopped"  # the receiver reads no more, and never will
    LOST = "lost"  # no channel to the receiver, but it may still live and read


SENDER_TABLE: dict[tuple[S, str], S] = {
    (S.OPEN, "offer"): S.OPEN,
    (S.OPEN, "close"): S.CLOSED,
    (S.OPEN, "stop"): S.STOPPED,
    (S.OPEN, "lost"): S.LOST,
    (S.OPEN, "dead"): S.STOPPED,
    (S.CLOSED, "stop"): S.STOPPED,
    (S.CLOSED, "lost"): S.LOST,
    (S.CLOSED, "dead"): S.STOPPED,
    (S.STOPPED, "close"): S.STOPPED,
    (S.STOPPED, "lost"): S.STOPPED,
    (S.STOPPED, "dead"): S.STOPPED,
    (S.LOST, "close"): S.LOST,
    (S.LOST, "stop"): S.STOPPED,
    (S.LOST, "lost"): S.LOST,
    (S.LOST, "dead"): S.STOPPED,
}


class R(Enum):
    """States of the receiving side; an arrived or fenced handoff is forgotten."""

    OPEN = "open"
    BROKEN = "broken"  # the scheduler has been told and will stop it
    STOPPING = "stopping"  # own receives are still ending


RECEIVER_TABLE: dict[tuple[R, str], R] = {
    (R.OPEN, "break"): R.BROKEN,
    (R.OPEN, "stop"): R.STOPPING,
    (R.BROKEN, "stop"): R.STOPPING,
}
