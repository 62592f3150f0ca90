"""Which tokens may come next in the answers of a worker that have a constraint.

A matcher stands behind a request's output tokens. It is found again by the request, goes on with those that are new,
and is made anew, by replaying all of them, where it is not: after a preemption, on another worker, behind a prompt that
another process has computed. So what is allowed is a function of the record and the tokens, and of nothing else.

Where the grammar leaves but one way to go on, the only token allowed is the one in which the tokenizer would have
written it, though pieces of it would do as well: so no answer depends on how often a worker looked. The library says
which bytes must come, writes them with the tokenizer, and leaves out the tokens at the end that bytes after them could
change. Such tokens need no step of the model: `continued` tells them together with the token behind which they come,
one after the other, each as it would be the only one allowed there. So an answer is the same with them and without,
and wherever a run of them is cut.

Constraints are compiled in threads of their own, and masks computed in another while the device runs the step.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from engine.constraints.grammar import compile_constraint, shown
from engine.model.config import ModelError
from engine.step import DeadEnd, Drawn, DrawnRun, History, Row, TokenView, forced_token, is_single, only
from engine.types import Constraint, FieldError, RequestId, id_of

log = logging.getLogger(__name__)

MAX_GRAMMARS = 32
"""Compiled constraints that are kept for the next request."""
MAX_GRAMMAR_BYTES = 1024 * 1024
"""The text of them, which what they are compiled to grows with."""
AWAITED_S, MAX_AWAITED = 5.0, 8
"""A compiled constraint whose answer has not begun is kept for so long after it was last asked for, beyond these bounds
but not beyond so many times as much."""
SPARE_MATCHERS = 32
"""Matchers that are kept beside those of the latest step."""

MAX_RUN_TOKENS = 64
"""Tokens that come at once; where more are forced, the others come with the next one."""

MAX_MASK_THREADS = 8
"""A quarter of the host's cores, but no more: the rest compute, or belong to other workers."""

Mask = bytes | DeadEnd
"""A bit per token, in 32-bit words, set where it is allowed; or why there can be none."""


class _Kept:
    """A constraint that is compiled, or is being compiled, and when an answer that waits for it last asked."""

    __slots__ = ("awaited_s", "grammar")

    def __init__(self, grammar: Future[LLMatcher]) -> None:
        self.grammar = grammar
        self.awaited_s = float("-inf")


class _Standing:
    """A matcher, and the output tokens behind which it stands."""

    __slots__ = ("_ends", "_history", "constraint", "matcher", "tokens")

    def __init__(self, constraint: Constraint, matcher: LLMatcher, ends: Sequence[int]) -> None:
        """`ends`: the tokens that may end an answer."""
        self.constraint = constraint
        self.matcher = matcher
        self.tokens: list[int] = []
        self._history = History()
        self._ends = ends

    def begins(self, row_tokens: Sequence[int], prompt_tokens: int) -> bool:
        """Return True where it stands behind the first tokens of the output in `row_tokens`. Of a list that goes on,
        only those are compared that were not sure when `advance` saw it; of another list all."""
        first = max(prompt_tokens, self._history.known(row_tokens)) - prompt_tokens
        behind = self.tokens[first:]
        return behind == list(row_tokens[prompt_tokens + first : prompt_tokens + first + len(behind)])

    def advance(self, row_tokens: Sequence[int], prompt_tokens: int) -> bool:
        """Stand behind the whole output in `row_tokens`, which `begins` was asked about. False where the new tokens are
        not allowed."""
        new = list(row_tokens[prompt_tokens + len(self.tokens) :])
        if new and not self.matcher.consume_tokens(new):
            return False
        self.tokens += new
        self._history.see(row_tokens)
        return True

    def forced(self) -> int | None:
        """Return the token that must come next, if it is known to be the only one without a mask."""
        matcher = self.matcher
        if matcher.is_stopped():
            return self._ends[0] if len(self._ends) == 1 and not matcher.is_error() else None
        tokens = matcher.compute_ff_tokens()
        return tokens[0] if tokens and not matcher.is_error() else None

    def ahead(self, new: list[int]) -> "_Standing | None":
        """Return one that stands behind `new` tokens more, which are all that it has, and leave this one where it is;
        None where they are not allowed."""
        standing = _Standing(self.constraint, self.matcher.deep_copy(), self._ends)
        standing.tokens = new
        return standing if standing.matcher.consume_tokens(new) else None

    def go_on(self, most: int) -> list[int]:
        """Stand behind up to `most` tokens more, each of which must come; return them. One that ends the answer is the
        last."""
        run: list[int] = []
        while len(run) < most and (token := self.forced()) is not None:
            # An end is not the grammar's, and what has become too costly is found by whoever asks for the mask.
            if token not in self._ends and not self.matcher.consume_token(token):
                break
            run.append(token)
            if token in self._ends:
                break
            self.tokens.append(token)
        return run


class Matchers:
    """One for each worker. `is_compiled`, `begin` and `continued` belong to the engine thread. Matchers belong to the
    thread for masks while it computes any, else to the engine thread. The compiled constraints are under a lock."""

    # Mutable state: the vocabulary, once it is loaded; compiled constraints, and those under way; matchers by request.

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        vocab: int,
        compiling: Executor | None = None,
        masking: Executor | None = None,
        jumps: bool = True,
    ) -> None:
        """`load` makes the vocabulary, when the first constraint comes; `compiling` and `masking` run one thing at a
        time, in threads unless given; `jumps`: tokens that must come are told without a step."""
        self.wake: Callable[[], None] = lambda: None
        """Called, perhaps from another thread, when a constraint has been compiled."""
        self._load = load
        self._vocab = vocab
        self._jumps = jumps
        self._compiling = compiling or ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = masking or ThreadPoolExecutor(1, thread_name_prefix="masks")
        threads = min(MAX_MASK_THREADS, (os.cpu_count() or 1) // 4)
        self._executor = LLExecutor(num_threads=threads) if threads > 1 else None
        self._lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[Constraint, _Kept] = OrderedDict()
        self._standing: OrderedDict[RequestId, _Standing] = OrderedDict()

    def __repr__(self) -> str:
        return f"Matchers({len(self._grammars)} grammars, {len(self._standing)} matchers)"

    def close(self) -> None:
        for pool in (self._compiling, self._masking):
            pool.shutdown(wait=False, cancel_futures=True)

    def is_compiled(self, constraint: Constraint) -> bool:
        """Return False while it is being compiled, which this begins if need be."""
        kept = self._grammar(constraint)
        kept.awaited_s = time.monotonic()
        return kept.grammar.done()

    def begin(self, rows: Sequence[Row]) -> "Future[list[Mask]]":
        """Compute what may follow each of `rows`, which have constraints, while the caller does something else. Rows of
        one request stand together, each behind more tokens; all but the first are guesses."""
        return self._masking.submit(self._masks, rows, [TokenView.of(row.tokens) for row in rows])

    def masks(self, rows: Sequence[Row]) -> list[Mask]:
        """The same, waited for."""
        return self.begin(rows).result()

    def continued(self, rows: Sequence[Row], drawn: Sequence[Drawn]) -> list[Drawn]:
        """Return what was drawn for `rows`, with the tokens that can only come behind it. To be called when their masks
        are known, and before any others begin to be computed."""
        return [self._continued(row, one) for row, one in zip(rows, drawn, strict=True)]

    def _continued(self, row: Row, drawn: Drawn) -> Drawn:
        if not row.allowed or isinstance(drawn, DeadEnd | DrawnRun | tuple):
            return drawn
        record, token = row.record, id_of(drawn)
        first = forced_token(token, record) if is_single(row.allowed) else drawn
        tokens = TokenView.of(row.tokens, token)
        # What comes behind its last token is nobody's.
        most = min(MAX_RUN_TOKENS, record.max_tokens + record.prompt_tokens - len(tokens)) if self._jumps else 0
        if most <= 0 or self._vocabulary is None or token in self._vocabulary.eos_tokens:
            return first
        try:
            run = self._stand(row, tokens).go_on(most)
        except FieldError:
            return first  # the next mask says why
        return DrawnRun((first, *[forced_token(one, record) for one in run])) if run else first

    def _masks(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[Mask]:
        """`tokens`: of each row as they were when this began."""
        made: list[Mask | LLMatcher] = []
        latest: tuple[RequestId, _Standing | None, int] | None = None
        for row, own in zip(rows, tokens, strict=True):
            if latest is not None and latest[0] == row.request:
                # Where the guesses before it are not allowed, nobody asks what it draws.
                before = latest[1]
                standing = None if before is None else before.ahead(list(own[latest[2] :]))
                made.append(only(0) if standing is None else self._say(standing))
            else:
                try:
                    standing = self._stand(row, own)
                    made.append(self._say(standing))
                except FieldError as error:
                    standing = None
                    made.append(DeadEnd(str(error)))
                except ModelError as error:
                    standing = None
                    made.append(DeadEnd(str(error), "INTERNAL"))
            latest = row.request, standing, len(own)
        hard = [at for at, one in enumerate(made) if isinstance(one, LLMatcher)]
        matchers = [one for one in made if isinstance(one, LLMatcher)]
        for at, mask in zip(hard, self._computed(matchers), strict=True):
            made[at] = mask
        while len(self._standing) > len(rows) + SPARE_MATCHERS:
            self._standing.popitem(last=False)
        return [one for one in made if not isinstance(one, LLMatcher)]

    @staticmethod
    def _say(standing: _Standing) -> Mask | LLMatcher:
        """Return the mask where it is known without looking at every token, else the matcher that is to say it."""
        forced = standing.forced()
        return standing.matcher if forced is None else only(forced)

    def _computed(self, matchers: list[LLMatcher]) -> list[Mask]:
        """Return what each allows, computed side by side where this host has cores to spare."""
        words = (self._vocab + 31) // 32
        masks = np.zeros((len(matchers), words), np.uint32)
        if len(matchers) > 1 and self._executor is not None:
            pairs = list(zip(matchers, range(len(matchers)), strict=True))
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * words, len(matchers))
        else:
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * words)
        return [_told(matcher, mask) for matcher, mask in zip(matchers, masks, strict=True)]

    def _stand(self, row: Row, tokens: Sequence[int]) -> _Standing:
        """Return the matcher of a row's request, behind the output in `tokens`. Raises FieldError where it cannot stand
        there."""
        name, constraint, prompt_tokens = row.request, row.record.constraint, row.record.prompt_tokens
        assert constraint is not None
        standing = self._standing.get(name)
        if standing is None or standing.constraint != constraint or not standing.begins(tokens, prompt_tokens):
            standing = self._new(constraint)
            self._standing[name] = standing
        self._standing.move_to_end(name)
        if not standing.advance(tokens, prompt_tokens):
            del self._standing[name]
            raise FieldError("constraint", f"the answer so far does not keep it: {shown(standing.matcher.get_error())}")
        return standing

    def _new(self, constraint: Constraint) -> _Standing:
        kept = self._grammar(constraint)
        matcher = kept.grammar.result().deep_copy()
        kept.awaited_s = float("-inf")
        assert self._vocabulary is not None
        return _Standing(constraint, matcher, self._vocabulary.eos_tokens)

    def _grammar(self, constraint: Constraint) -> _Kept:
        with self._lock:
            found = self._grammars.get(constraint)
            if found is None:
                found = self._grammars[constraint] = _Kept(self._compiling.submit(self._compile, constraint))
                found.grammar.add_done_callback(lambda _: self.wake())
                self._evict()
            self._grammars.move_to_end(constraint)
            return found

    def _evict(self) -> None:
        """Forget the oldest that nobody waits for. Those that are waited for are asked for in turns: of more than there
        is room for, each would be forgotten before its turn, and compiled again and again."""
        held_bytes = sum(len(constraint.text) for constraint in self._grammars)
        unwanted_s = time.monotonic() - AWAITED_S
        for constraint, kept in list(self._grammars.items())[:-1]:
            excess = max(len(self._grammars) / MAX_GRAMMARS, held_bytes / MAX_GRAMMAR_BYTES)
            if excess <= 1:
                break
            if kept.grammar.done() and (kept.awaited_s < unwanted_s or excess > MAX_AWAITED):
                held_bytes -= len(constraint.text)
                del self._grammars[constraint]

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._load()
            log.info("constraints: the vocabulary is loaded")
        return compile_constraint(constraint, self._vocabulary)


def _told(matcher: LLMatcher, mask: np.ndarray) -> Mask:
    if matcher.is_error():
        return DeadEnd(f"constraint: {shown(matcher.get_error())}")
    return mask.tobytes() if mask.any() else DeadEnd("constraint: no token can follow")
