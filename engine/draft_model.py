"""A smaller model with the same tokenizer, which says what sequences go on with.

It has a KV pool of its own, and in it what it has read of each sequence: those tokens that the sequence still begins
with when it is asked for the next time. So what was guessed wrong is read over, and what a request has become in the
meantime (forced tokens, steps without drafts) is read behind it. A sequence that is new here is read from its first
token on, whoever has it served before: no more than `READ_TOKENS` of all sequences together in one call, which is what
other rows of the step wait for beside the drafts themselves. Each depth is one pass over all sequences, and the
likeliest token is proposed: at temperatures above 0 the served model may draw another one.

Where the pool has no room for a sequence, those give way that were not asked for in this call, the longest unasked for
first, and are read anew. Where they hold too little, it gives up what it holds itself, so that others can go on; and
until one of them is forgotten or not asked for, nothing is begun that would not leave as much room as it takes: or
else what has given way would be read again and again.

Source: speculative decoding (Leviathan et al. 2211.17192), but for how drafts are accepted (`engine.step.accepted`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.drafts import DraftWanted, Proposed
from engine.step import Row, StepPlan
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams, id_of

if TYPE_CHECKING:
    from engine.runner import Runner

READ_TOKENS = 64
"""Most tokens of sequences that are behind in one call, as a decode worker's own chunk of a prompt has
(`decode.local_chunk_tokens`)."""
NEAR_TOKENS = 4
"""A sequence that is no further behind is read together with its first draft: four rows cost little more than one."""


@dataclass(slots=True)
class _Sequence:
    """What is known of one request. Blocks cover at least `read` tokens."""

    tokens: list[int] = field(default_factory=list)
    """Its own as far as `sure`, then the drafts of the last time."""
    sure: int = 0
    read: int = 0
    """So many of them have KV."""
    blocks: list[BlockId] = field(default_factory=list)
    asked_at: int = 0
    is_readable: bool = True
    """False: it has tokens that the draft model has not."""

    def agrees(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens with KV are those of the sequence, but for its last, which draws."""
        count, most = min(self.sure, self.read, len(tokens) - 1), min(self.read, len(tokens) - 1)
        while count < most and self.tokens[count] == tokens[count]:
            count += 1
        return count


class ModelDrafter:
    """Drafts of a model, whose runner nobody else uses. Mutable state: the free blocks, whether somebody has found too
    few of them, and what was read of each request. Owner: the engine's thread."""

    takes_time = True

    def __init__(
        self, runner: "Runner", blocks: int, vocab: int, context_tokens: int, clock: Callable[[], float]
    ) -> None:
        """`blocks`: of the runner's pool; `vocab`: the tokens that both models know; `context_tokens`: the longest
        sequence that it reads; `clock`: in seconds."""
        self._runner = runner
        self._block_size = runner.kv.layout.block_size
        self._blocks = blocks
        self._free = [BlockId(at) for at in reversed(range(blocks))]
        self._vocab = vocab
        self._context_tokens = context_tokens
        self._clock = clock
        self._of: dict[RequestId, _Sequence] = {}
        self._calls = 0
        self._is_full = False

    def unread(self, asked: DraftWanted) -> int | None:
        own, length = self._of.get(asked.record.request), len(asked.tokens)
        longest = min(self._context_tokens, self._blocks * self._block_size)
        if length + asked.most > longest or (own is not None and not own.is_readable):
            return None
        return length if own is None else length - own.agrees(asked.tokens)

    def propose(self, asked: Sequence[DraftWanted]) -> Proposed:
        """Return nothing for those that are still behind, and for those without room."""
        self._calls += 1
        for one in asked:
            self._of.setdefault(one.record.request, _Sequence()).asked_at = self._calls
        able: dict[int, _Sequence] = {}
        for at, one in enumerate(asked):
            if self.unread(one) is None:
                continue
            own = self._of[one.record.request]
            self._follow(own, one.tokens)
            if own.is_readable and self._reserve(own, len(one.tokens) + one.most - 1):
                able[at] = own
        read_tokens, read_s = self._catch_up([*able.values()])
        drafts: list[list[int]] = [[] for _ in asked]
        going = [at for at, own in able.items() if len(own.tokens) - own.read <= NEAR_TOKENS and asked[at].most > 0]
        forwards: list[tuple[int, float]] = []
        while going:
            began_s = self._clock()
            drawn = self._run([_row(able[at], len(able[at].tokens), draw=True) for at in going])
            forwards.append((len(going), self._clock() - began_s))
            for at, token in zip(going, drawn, strict=True):
                own = able[at]
                own.read = len(own.tokens)
                if token < self._vocab:
                    drafts[at].append(token)
                    own.tokens.append(token)
            going = [at for at in going if able[at].read < len(able[at].tokens) and len(drafts[at]) < asked[at].most]
        return Proposed(drafts, read_tokens, read_s, tuple(forwards))

    def forget(self, request: RequestId) -> None:
        own = self._of.pop(request, None)
        if own is not None and own.blocks:
            self._give_up(own)
            self._is_full = False

    def check(self) -> None:
        """Recompute the invariants."""
        held = [block for own in self._of.values() for block in own.blocks]
        assert sorted([*held, *self._free]) == [*range(self._blocks)], "a block has two owners, or none"
        for own in self._of.values():
            assert max(own.sure, own.read) <= len(own.tokens)
            assert own.read <= len(own.blocks) * self._block_size

    def _follow(self, own: _Sequence, tokens: Sequence[int]) -> None:
        """Take in what the sequence has become."""
        own.read = own.agrees(tokens)
        kept = max(min(own.sure, len(tokens)), own.read)
        more = tokens[kept:]
        own.tokens[kept:] = more
        own.sure = len(tokens)
        own.is_readable = own.is_readable and (not more or max(more) < self._vocab)

    def _reserve(self, own: _Sequence, tokens: int) -> bool:
        """Give it blocks for so many tokens. False: there is no room, and it has none."""
        missing = -(-tokens // self._block_size) - len(own.blocks)
        begins_late = self._is_full and not own.blocks
        if begins_late or missing > len(self._free):
            idle = [one for one in self._of.values() if one.asked_at < self._calls and one.blocks]
            if begins_late and not idle and len(self._free) < min(2 * missing, self._blocks):
                return False
            if missing > len(self._free) + sum([len(one.blocks) for one in idle]):
                # If each kept its part of a full pool, none would ever have the next block.
                self._give_up(own)
                self._is_full = True
                return False
            for one in sorted(idle, key=lambda one: one.asked_at):
                if missing <= len(self._free):
                    break
                self._give_up(one)
        own.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def _give_up(self, own: _Sequence) -> None:
        self._free += own.blocks
        own.blocks, own.read = [], 0

    def _catch_up(self, sequences: list[_Sequence]) -> tuple[int, float]:
        """Read what those that are behind have before their last token, who lacks the least first. Return how many
        tokens, and for how long."""
        left, rows = READ_TOKENS, list[Row]()
        for own in sorted(sequences, key=lambda own: len(own.tokens) - own.read):
            missing = len(own.tokens) - own.read
            if missing > NEAR_TOKENS and left:
                count = min(missing - 1, left)
                left -= count
                rows.append(_row(own, own.read + count, draw=False))
                own.read += count
        if not rows:
            return 0, 0.0
        began_s = self._clock()
        self._run(rows)
        return READ_TOKENS - left, self._clock() - began_s

    def _run(self, rows: list[Row]) -> list[int]:
        drawn = self._runner.launch(StepPlan(tuple(rows))).wait()
        return [id_of(token) for token in drawn if isinstance(token, int)]


_GREEDY = RequestRecord(
    request=RequestId("draft"),
    tokens=[],
    prompt_tokens=0,
    max_tokens=1,
    seed=0,
    sampling=SamplingParams(temperature=0.0),
)


def _row(own: _Sequence, end: int, draw: bool) -> Row:
    return Row(_GREEDY.request, _GREEDY, own.tokens, own.read, end, own.blocks, draw)
