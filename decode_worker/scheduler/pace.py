"""How many prompt tokens a decode worker's next step takes, and how long a prompt will take that way. Pure.

A step lasts `rows_s + s_per_token · prompt tokens`: what the rows of running requests take, and what each token of the
prompts beside them adds. Both are of what was measured, the latest counting most, and the second by token: a step of a
few tokens says little of what many take. While requests run, a step is to last no longer than `bound_s`, so that
prompts that are computed here hold no stream up for longer than that; where the rows alone take as long, prompts go on
by one block a step. Where no request runs, nobody waits for the step: it is as large as it may be.

What goes through all blocks of many sequences at once would hold streams up too, and can be put off to the next turns
of the engine: an `Allowance` says how much of it one turn does.
"""

from engine.plan import TokenSpeed, mean


class Pace:
    """Mutable state: the mean of steps without prompts, and what prompt tokens add to others. Owner: the batch."""

    def __init__(self, most_tokens: int, least_tokens: int, bound_s: float) -> None:
        """A step takes from `least_tokens` to `most_tokens` prompt tokens, if there are so many."""
        self.most_tokens = most_tokens
        self._least_tokens = min(least_tokens, most_tokens)
        self._bound_s = bound_s
        self._rows_s = 0.0
        self._added = TokenSpeed()

    def __repr__(self) -> str:
        return f"Pace({self._rows_s * 1e3:.1f} ms + {self._added.s_per_token * 1e6:.0f} µs a prompt token)"

    def measured(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Take in that a step with `rows` of running requests and so many prompt tokens has lasted `seconds`."""
        if not prompt_tokens:
            self._rows_s = mean(self._rows_s, seconds)
            return
        if rows:
            # They took no longer than the whole step, whatever they took before.
            self._rows_s = min(self._rows_s, seconds)
            seconds -= self._rows_s
        self._added.measured(seconds, prompt_tokens)

    def tokens(self, rows: int) -> int:
        """Return how many prompt tokens the next step may take beside `rows` of running requests."""
        each_s, left_s = self._added.s_per_token, self._bound_s - self._rows_s
        if not rows or not each_s or left_s >= self.most_tokens * each_s:
            return self.most_tokens
        return max(int(left_s / each_s), self._least_tokens)

    def s_per_token(self, rows: int) -> float:
        """Return the time that a prompt token is predicted to take here while `rows` run, its part of what they take
        included; 0.0 until measured."""
        beside_s = self._rows_s / self.tokens(rows) if rows else 0.0
        return self._added.s_per_token and self._added.s_per_token + beside_s


class Allowance:
    """How many blocks one turn of the engine goes through for one kind of work that can be put off. Mutable state: what
    is left of them. Owner: who does that work."""

    def __init__(self, blocks: int) -> None:
        self._most = self._left = blocks

    def __repr__(self) -> str:
        return f"Allowance({self._left} of {self._most} blocks left)"

    def renew(self) -> None:
        """Begin a turn."""
        self._left = self._most

    def takes(self, blocks: int) -> bool:
        """Take so many, however many they are, if any are left in this turn: so one at least is done in each. False: it
        is put off."""
        if self._left <= 0:
            return False
        self._left -= blocks
        return True
