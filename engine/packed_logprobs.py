"""Log probabilities that are kept for a client, a router or a worker that may come, packed: twelve bytes a value, where
a `TokenLogprobs` with twenty alternatives takes two to three thousand."""

from array import array
from collections.abc import Iterable

from engine.types import TokenLogprobs


class PackedLogprobs:
    # Mutable state: ids and log probabilities of all, each token before its alternatives, and where each token begins.

    def __init__(self) -> None:
        self._ids = array("I")
        self._values = array("d")
        self._begins = array("Q", [0])

    def __len__(self) -> int:
        """Return of how many tokens they are."""
        return len(self._begins) - 1

    @property
    def values(self) -> int:
        return len(self._values)

    def extend(self, given: Iterable[TokenLogprobs]) -> None:
        for one in given:
            self._ids.append(one.token)
            self._values.append(one.logprob)
            for token, value in one.top:
                self._ids.append(token)
                self._values.append(value)
            self._begins.append(len(self._ids))

    def part(self, first: int, end: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Return those of the tokens `first .. end - 1`, exactly as they were given; nothing of what was not. None: to
        the last."""
        end = len(self) if end is None else min(end, len(self))
        return tuple([self._one(self._begins[at], self._begins[at + 1]) for at in range(first, end)])

    def _one(self, begin: int, end: int) -> TokenLogprobs:
        ids, values = self._ids[begin:end], self._values[begin:end]
        return TokenLogprobs(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))
