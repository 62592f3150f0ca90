"""A drafter that knows the answers of the shadow model, and errs at times that are a function of the tokens."""

from collections.abc import Sequence

from engine.plan import banned_tokens
from engine.types import RequestRecord
from tests.sim import grammar
from tests.sim.shadow import STOP_IDS, VOCAB, draw, mix, root


class Scripted:
    """Right to the end, wrong from some place on, or shorter than asked: each in about a third of all places."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        record, past = self._record, root(self._record)
        for token in tokens:
            past = mix(past, token)
        kind, at = (past >> 9) % 3, (past >> 17) % 3
        proposed: list[int] = []
        for number in range(most - (kind == 2)):
            output = [*tokens[record.prompt_tokens :], *proposed]
            choices = () if record.constraint is None else grammar.allowed(record.constraint, output)
            key = record.seed, record.sample_index, len(tokens) + number
            token = draw(past, key, banned_tokens(record, len(output), STOP_IDS), choices)
            if kind == 1 and number == at:
                token = (token + 1) % VOCAB
            proposed.append(token)
            past = mix(past, token)
        return proposed
