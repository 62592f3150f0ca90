"""Decides what a process is said to have died of, from the reason that its launcher gives. Pure.

The reason is one line for a person, of any length and content; the cause is one of a few words, fit for a label:

    ledger    its auditor found a KV block with two owners or with none, or a cache that contradicts its pool
    audit     its auditor found another of its ledgers broken
    given_up  the router had given it up, or it was late to start or to leave, and it was ended for that
    start     it could not start
    signal    a signal ended it that nobody of ours had sent: a kill, a crash in native code, the kernel out of memory
    failed    it ended itself, with a reason
    exit      it ended without one
"""

import re

from telemetry.audit import BLOCK_LEDGERS
from telemetry.labels import DEATH_CAUSES

LATE = ("not started in", "did not end when it was to leave")
"""How the supervisor's own reasons begin."""
_AUDIT = re.compile(r"AuditError: the (\w+) ledger")
_SIGNAL = re.compile(r"killed by SIG|.*\bsignal \d+|.*\bSIG[A-Z]{2,}\b")
_EXIT = re.compile(r"ended\b")


def cause_of(why: str, *, was_up: bool, was_accused: bool) -> str:
    """Return the cause, one of DEATH_CAUSES. `was_accused`: the supervisor was about to end it for what the router had
    said of it."""
    cause = _cause(why, was_up, was_accused)
    assert cause in DEATH_CAUSES
    return cause


def _cause(why: str, was_up: bool, was_accused: bool) -> str:
    audit = _AUDIT.match(why)
    if audit is not None:
        return "ledger" if audit[1] in BLOCK_LEDGERS else "audit"
    if was_accused or why.startswith(LATE):
        return "given_up"
    if not was_up:
        return "start"
    if _SIGNAL.match(why):
        return "signal"
    return "exit" if not why or _EXIT.match(why) else "failed"
