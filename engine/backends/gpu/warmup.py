"""Steps that launch every kernel as serving may launch it, before a GPU worker says that it is ready.

Triton compiles a kernel for the types of its arguments, its constants, and which addresses are multiples of 16 bytes;
which kernels a step launches depends on its kinds of rows. So there is a step for each combination, and the largest one
is among them: what it takes is allocated, and known. Contexts are short, since their lengths change neither code nor
memory; tokens and what they attend to mean nothing, and all of it goes to the first two blocks of a pool that holds
nothing yet. What is drawn is drawn with every option: a greedy token launches no kernel of ours.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from engine.backends.workspace import blank_row
from engine.config import StepLimits
from engine.plan import MAX_LOGPROBS
from engine.runner import Runner
from engine.step import Row, StepPlan, only
from engine.types import BlockId
from kernels.coded_linear import FEW_ROWS, SOME_ROWS, SPLIT_ROWS

log = logging.getLogger(__name__)


class Reach(NamedTuple):
    """The sizes that steps may have. `share_tokens`: what rows must have in common for it to be read once; 0: never.
    `groups`: the pool's layer groups."""

    limits: StepLimits
    context_tokens: int
    block_size: int
    blocks: int
    share_tokens: int = 0
    groups: int = 1

    def row(self, tokens: int, end: int) -> Row:
        return blank_row(tokens, end, self.block_size, self.groups)


def copied_block(reach: Reach) -> StepPlan | None:
    """The copy of copy-on-write."""
    return StepPlan((), ((BlockId(0), BlockId(1)),)) if reach.blocks > 1 else None


def largest_step(reach: Reach) -> StepPlan:
    """A full batch beside a whole chunk, which belongs to as many prompts as may share it. Every row asks for log
    probabilities, and the longest prompt for its own: what they take is known too."""
    limits = reach.limits
    batch = [reach.row(1, 2)] * limits.batch
    spare = limits.chunk_tokens - limits.prompts
    each = 2 if spare >= limits.prompts else 1
    first = min(limits.chunk_tokens - each * (limits.prompts - 1), reach.context_tokens)
    chunks = [_asking(reach.row(first, first))] + [reach.row(each, each)] * (limits.prompts - 1)
    rows = [_asking(row, prompt=False) for row in batch] + chunks
    return StepPlan(tuple(rows), is_scored=first > 1)


def _asking(row: Row, *, prompt: bool = True) -> Row:
    record = msgspec.structs.replace(row.record, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    return msgspec.structs.replace(row, record=record, scored=row.end - row.start - 1 if prompt else 0)


def single_tokens(reach: Reach) -> StepPlan:
    """Rows of one token, also of prompts that were cached but for their last; with a mask."""
    return StepPlan((msgspec.structs.replace(reach.row(1, 2), allowed=only(1)),))


def some_tokens(reach: Reach) -> StepPlan | None:
    """A short chunk: products with quantized weights have tiles for few rows, for some, for more and for many."""
    return _short_chunk(reach, FEW_ROWS, SPLIT_ROWS)


def more_tokens(reach: Reach) -> StepPlan | None:
    """A chunk that the next height is for."""
    return _short_chunk(reach, SPLIT_ROWS, SOME_ROWS)


def _short_chunk(reach: Reach, more_than: int, most: int) -> StepPlan | None:
    count = min(most, reach.limits.chunk_tokens, reach.context_tokens)
    return StepPlan((reach.row(count, count),)) if count > more_than else None


def shared_prefix(reach: Reach) -> StepPlan | None:
    """Rows of one token that read the same blocks."""
    end = -(-reach.share_tokens // reach.block_size) * reach.block_size + 1
    if not reach.share_tokens or end > reach.context_tokens:
        return None
    return StepPlan((reach.row(1, end), reach.row(1, end)))


STEPS: tuple[Callable[[Reach], StepPlan | None], ...] = (
    largest_step,
    single_tokens,
    some_tokens,
    more_tokens,
    shared_prefix,
    copied_block,
)


def warm_up(runner: Runner, reach: Reach, steps: Sequence[Callable[[Reach], StepPlan | None]] = STEPS) -> None:
    """Run them; waits for the device. Writes to the first two blocks of the runner's pool."""
    for make in steps:
        plan = make(reach)
        if plan is not None:
            began_s = time.monotonic()
            runner.launch(plan).wait()
            log.debug("%s: %.1f s", make.__name__, time.monotonic() - began_s)
