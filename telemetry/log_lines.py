"""What keeps a log readable when others write into it: names and words of peers, and of clients, stand in its lines.

A line is one line: control characters are written as escapes, so that no name can forge an entry, move a terminal's
cursor or hide what follows. Entries of one kind (one place in the code) come at a bounded rate: a peer that repeats
itself, or sends junk without end, costs a counter. Entries about a request (`extra={"request": ..}`) are let through,
as each request has few.
"""

import logging
import re
import threading

BURST = 50
"""Entries of one kind that may come at once."""
REFILL_S = 2.0
"""One more of a kind may come each so many seconds."""
LONGEST = 16_384
"""Characters of one message; what is longer was written by a peer."""

# C0, DEL and C1; the two other line ends; the marks that turn the direction of text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def on_one_line(text: str, longest: int = LONGEST) -> str:
    """Return `text` with everything escaped that is not to be printed, and cut where it is too long."""
    if len(text) > longest:
        text = f"{text[:longest]}.. ({len(text)} characters)"
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def traceback_lines(text: str) -> str:
    """Return a traceback on lines of its own, none of which can be taken for an entry."""
    lines = (on_one_line(line) for line in text[: 2 * LONGEST].split("\n"))
    return "".join(f"\n    | {line}" for line in lines)


class KindLimit(logging.Filter):
    """Lets BURST entries of a kind through at once, then one each REFILL_S, which says how many were left out."""

    # Mutable state, under the lock: of each kind, how many may still come, as of when, and how many did not.

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "request", ""):
            return True
        kind, now = (record.pathname, record.lineno), record.created
        with self._lock:
            room, since_s, left_out = self._kinds.get(kind, (float(BURST), now, 0))
            room = min(float(BURST), room + max(0.0, now - since_s) / REFILL_S)
            if room < 1.0:
                self._kinds[kind] = (room, now, left_out + 1)
                return False
            self._kinds[kind] = (room - 1.0, now, 0)
        if left_out:
            record.msg = f"{record.getMessage()} (before it, {left_out} more of its kind were left out)"
            record.args = None
        return True
