"""A grammar that costs nothing to keep: what may come next is a function of a constraint's text and the output so far.

In half of all places there is but one token, so that answers have runs; in some an answer may end, and in some it must;
and some constraints lead to places behind which nothing may follow.
A constraint takes its time to be compiled in each process anew.
"""

from collections.abc import Callable, Sequence

from engine.types import Constraint, RequestRecord
from tests.sim.clock import Process

END = 60
MAX_RUN_TOKENS = 5
LONGEST = 14
"""Tokens behind which an answer must end."""
COMPILED_S = (0.0, 0.0005, 0.004, 0.02)
NOTHING_FOLLOWS = "nothing can follow"
"""What a dead end says."""
_MASK = (1 << 61) - 1


def allowed(constraint: Constraint, output: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that may follow; none where the answer is over, does not keep the constraint, or has come to a
    dead end."""
    state = sum(constraint.text.encode()) * 0x9E3779B97F4A7C1 & _MASK
    has_dead_ends = len(constraint.text) % 4 == 1
    for at, token in enumerate(output):
        if token not in _choices(state, at, has_dead_ends):
            return ()
        state = ((state ^ token + 1) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & _MASK
    return () if output and output[-1] == END else _choices(state, len(output), has_dead_ends)


def is_dead_end(constraint: Constraint, output: Sequence[int]) -> bool:
    """Return True for an answer that keeps the constraint, is not over, and cannot go on."""
    return accepts(constraint, output) and output[-1:] != [END] and not allowed(constraint, output)


def _choices(state: int, at: int, has_dead_ends: bool) -> tuple[int, ...]:
    bits = state >> 20
    if has_dead_ends and at and bits // 7 % 6 == 0:
        return ()
    if at >= LONGEST:
        return (END,)
    if bits % 4 < 2:
        return (bits // 4 % END,)
    some = (bits // 4 % 20, 20 + bits // 80 % 20, 40 + bits // 1600 % 20)
    return some if bits % 4 == 2 else (*some, END)


def accepts(constraint: Constraint, output: Sequence[int]) -> bool:
    """Return True for an answer that keeps the constraint, to its end or as far as it goes."""
    return all(token in allowed(constraint, output[:at]) for at, token in enumerate(output))


def run(record: RequestRecord, output: list[int]) -> list[int]:
    """Return the tokens that must come behind `output`, as many as are told at once."""
    assert record.constraint is not None
    forced: list[int] = []
    while len(forced) < min(MAX_RUN_TOKENS, record.max_tokens - len(output)):
        choices = allowed(record.constraint, [*output, *forced])
        if len(choices) != 1:
            break
        forced += choices
    return forced


class SlowCompiler:
    """What `engine.constraints.matchers.Matchers` is to a worker's shell. Mutable state: what is compiled, or is
    being compiled."""

    def __init__(self, process: Process) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._process = process
        self._compiled: dict[Constraint, bool] = {}

    def is_compiled(self, constraint: Constraint) -> bool:
        if constraint not in self._compiled:
            self._compiled[constraint] = False
            self._process.later(COMPILED_S[len(constraint.text) % len(COMPILED_S)], lambda: self._done(constraint))
        return self._compiled[constraint]

    def _done(self, constraint: Constraint) -> None:
        self._compiled[constraint] = True
        self.wake()

    def close(self) -> None:
        """Do nothing: a process of the simulator ends with all that it has."""
