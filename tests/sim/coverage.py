"""The rare states that a batch of schedules must have been in, or it has proven little."""

from collections import Counter

from tests.sim.faults import KINDS

STATES = (
    "Refused",
    "Stop",
    "PrefillFailed",
    "UNAVAILABLE",
    "blocks quarantined",
    "boundary block copied",
    "bytes to scrap",
    "cache evicted",
    "given up, and killed",
    "given up, and never met by its router",
    "life announced",
    "life withdrawn",
    "client: CANCELLED",
    "client: DEADLINE_EXCEEDED",
    "client: complete (length)",
    "client: complete (stop)",
    "converted",
    "copy on write",
    "data connection cut",
    "data connection cut, its reader not told",
    "data connection lost",
    "data connection stalled",
    "digest mismatch",
    "killed while copying",
    "only a part is migrated",
    "parent gone before fork",
    "preempted: forking",
    "preempted: local",
    "preempted: ready",
    "preempted: running",
    "prompt waits for blocks",
    "receive cancelled",
    "receive cancelled mid-copy",
    "receiver dropped offer: duplicate",
    "receiver dropped offer: unknown handoff",
    "resumed after preemption: here",
    "resumed after preemption: pool",
    "resumed after preemption: shared",
    "resumed with history",
    "sample forked",
    "router dropped: overrun",
    "second placement",
    "second try of a handoff",
    "sender dropped landed: duplicate",
    "sender dropped stop: unknown handoff",
    "send withdrawn",
    "stop string found",
    "zombie: frozen beyond keepalive",
    "loaded from host memory",
    "leave completed",
    "leave cut short by its grace",
    "leaving prefill worker gave up what waited",
    "request moved",
    "served by a decode worker",
    "source of a move died",
    "target of a move died",
)
RECOVERY_STATES = (
    "NeedPrefill",
    "client resumed",
    "interrupted, and placed again",
    "orphan adopted",
    "orphan expired",
    "orphan: a higher placement",
    "orphan: had ended",
    "orphan: reported by two workers",
    "prefilled by the decode worker",
    "refused as poisonous",
    "router dropped: stale",
)
"""Only where recovery is expected (`strict`)."""


def missing(notes: Counter[str], effective: Counter[str], strict: bool) -> list[str]:
    """States never reached and kinds of fault that never took effect."""
    wanted = STATES + (RECOVERY_STATES if strict else ())
    return [s for s in wanted if not notes[s]] + [k for k in KINDS if not effective[k]]
