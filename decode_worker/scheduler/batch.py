"""The requests that a decode worker computes for, and what its next step holds. Pure.

A request that is ready runs when the batch has room; prompts are computed beside the others, in chunks whose size keeps
the step short enough for those (`decode_worker.scheduler.pace`). One without a
block for its next token has no row in the step; it has one again when somebody has made room.

Several tokens can come at once, where a constraint allows but one to follow another: their KV is computed by one row,
as a prompt's is, or by several where a step has no room for so many beside the others. A row may also have drafts:
guesses at the tokens to come, whose KV is computed beside its own (`decode_worker.scheduler.drafting`). What was
guessed wrong counts for nothing: `known` does not cover it, and the next row writes over it.

A step may be planned while the one before it is under way (`is_under_way`): each row goes on behind that one's, also
behind a token that is still to be drawn. A request that ends meanwhile has one row too many; what it draws is dropped,
and its blocks are held until that step has ended (`KVCacheManager.launched`). Nothing is planned behind a step where
some request needs the token first, or room that others would have to give (`goes_on`). Drafts need it first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from decode_worker.scheduler.alike import Alike
from decode_worker.scheduler.drafting import Drafting
from decode_worker.scheduler.handoffs import MAX_ATTEMPTS
from decode_worker.scheduler.holding import StepHold
from decode_worker.scheduler.pace import Pace
from decode_worker.scheduler.request import Request, RequestState
from decode_worker.scheduler.samples.beams import Beams
from engine.drafts import Drafter
from engine.kv.manager import KVCacheManager, Lease
from engine.plan import CompiledConstraint, finish_reason, is_compiled, row_of, share_budget
from engine.step import Candidates, DeadEnd, Drawn, Row, StepPlan, TokenView, accepted, run_of
from engine.types import Beam, DrawnToken, FinishReason, TokenLogprobs, id_of
from worker.config import DecodeConfig


@dataclass(slots=True)
class _Planned:
    """A step that was planned and has not ended."""

    requests: list[Request] = field(default_factory=list)
    """Those of its rows, in their order."""
    rows: dict[Request, Row] = field(default_factory=dict)
    """The row of each that is no search."""
    copying: list[Lease] = field(default_factory=list)
    """Leases whose copies it makes."""
    leases: list[Lease] = field(default_factory=list)
    """All that it reads or writes blocks of."""
    running_rows: int = 0
    prompt_tokens: int = 0
    """Counts those of prompts, and those of runs but for the first of each."""
    drafts: int = 0
    number: int = 0


class Batch:
    """Mutable state, all of it: the lines `ready`, `running` and `local`, the steps under way; the number of steps,
    what is counted until the shell has taken it, and what `alike`, `beams`, `pace` and `hold` own. Owner: the
    scheduler."""

    def __init__(
        self,
        config: DecodeConfig,
        kv: KVCacheManager,
        stop_ids: frozenset[int],
        compiled: CompiledConstraint | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.alike = Alike(kv)
        self.beams = Beams(kv, stop_ids)
        self.drafting = Drafting(drafter, config.engine.draft_tokens)
        self.pace = Pace(config.local_chunk_tokens, kv.block_size, config.mixed_step_s)
        self.hold = StepHold(config.itl_target_s)
        self.ready: list[Request] = []
        self.running: list[Request] = []
        self.local: list[Request] = []
        self.stop_ids = stop_ids
        self.generated_tokens = 0
        self.forced_tokens = 0
        """Those of them that came with the one before, without a step."""
        self.prefilled_tokens = 0
        """Prompt tokens computed here."""
        self.hit_tokens = 0
        """Prompt tokens of those computed here that were cached here."""
        self.recomputed_tokens = 0
        """Prompt tokens computed here because a worker that had computed them, or was to, is lost."""
        self._kv = kv
        self._compiled = compiled
        self._max_rows = config.max_batch
        self._under_way: deque[_Planned] = deque()
        self.running_rows = 0
        """Rows of the step that ended last that are not of prompts."""
        self.drawn_drafts = 0
        """Drafts of that step that were drawn."""
        self._prompt_tokens = self._drafts = 0
        self._steps = 0

    @property
    def is_under_way(self) -> bool:
        """True where a step was planned that has not ended."""
        return bool(self._under_way)

    def _row_before(self, request: Request) -> Row | None:
        """Return the request's row in the step under way, if it has one."""
        return self._under_way[-1].rows.get(request) if self._under_way else None

    def _known(self, request: Request) -> int:
        """Return how many of its tokens have KV when the step under way has ended."""
        row = self._row_before(request)
        return request.known if row is None else row.end

    def _draws(self, request: Request) -> bool:
        """Return True if the step under way draws a token of it that is not known yet."""
        row = self._row_before(request)
        return row is not None and row.draw and row.end >= len(request.tokens)

    def _length(self, request: Request) -> int:
        """Return how many tokens it has when the step under way has ended, but for what can only come behind them."""
        return len(request.tokens) + self._draws(request)

    def _ends(self, request: Request) -> bool:
        """Return True if the token that the step under way draws is its last by number."""
        return self._draws(request) and request.output_tokens + 1 >= request.record.max_tokens

    def add_ready(self, request: Request) -> None:
        """Let a request wait for a row: all of its KV but the newest token's is here."""
        if request.state is RequestState.LOCAL:
            self.local.remove(request)
            self.alike.left(request)
        request.move(RequestState.READY)
        self.ready.append(request)

    def add_local(self, request: Request) -> None:
        """Compute here what is missing of its KV; blocks for all of its tokens are in its lease."""
        self._kv.extend(request.lease, len(request.tokens))
        request.move(RequestState.LOCAL)
        request.prefill.is_local, request.prefill.local_from = True, request.known
        self.alike.joined(request, self.local)
        self.local.append(request)

    def remove(self, request: Request) -> None:
        """Give it no row any more; its search ends."""
        for line in (self.ready, self.running, self.local):
            if request in line:
                line.remove(request)
        self.alike.left(request)
        self.beams.drop(request)
        self.drafting.forget(request)

    def wants(self, request: Request) -> list[tuple[Lease, int]]:
        """Return the blocks that its next step needs beyond what is promised, by lease: one but for a search."""
        if request.record.beams is not None:
            return self.beams.wants(request)
        return [(request.lease, self._kv.shortage(request.lease, self._length(request)))]

    @property
    def shortage(self) -> int:
        """Blocks that those who run want now, and neither have nor are promised."""
        wants = [want for request in self.running for want in self.wants(request)]
        return sum(short for _, short in wants)

    def fill(self, now: float, departing: int = 0) -> None:
        """Let requests that are ready run, as far as a step has rows for them beside so many of requests that depart.
        One whose constraint is still being compiled is passed over."""
        rows = departing + sum([_rows(request) for request in self.running if not self._ends(request)])
        for request in [r for r in self.ready if is_compiled(r.record, self._compiled)]:
            rows += _rows(request)
            if rows > self._max_rows:
                break
            self.ready.remove(request)
            request.move(RequestState.RUNNING)
            request.clock.enter("decode_run", now)
            self.running.append(request)

    def waits(self, landing: bool, now: float) -> bool:
        """Return True if the next step is to wait for rows that land: only one of streams, with room for another, and
        beside no prompt, which goes on by steps. Behind one under way nothing is planned where the next may wait."""
        rows = len(self.running)
        landing = landing and not self.local and rows < self._max_rows and self.drafting.costs.is_measured
        landing = landing and not any([r.yielding or r.record.beams is not None for r in self.running])
        step_s = self.drafting.costs.of(rows + 1)
        if self.is_under_way:
            return landing and self.hold.may_wait(step_s)
        return self.hold.holds(self.running, landing, step_s, now)

    def goes_on(self) -> bool:
        """Return True if a step can be planned behind the one under way, and make room for it. A search goes on from
        what that one lists; a request that is to depart, or for whom others must give way, from what it has then."""
        if any([step.drafts for step in self._under_way]):
            return False  # how far its rows come is not known
        for request in self.running:
            if request.record.beams is not None or request.yielding:
                return False
            if not self._ends(request) and not all(self._kv.grow(*want) for want in self.wants(request)):
                return False
        able = [r for r in self.running if self._may_be_drafted(r)]
        rows = len(self.running)
        return not self.drafting.awaits(able, rows, self._room_for_drafts(rows))

    def _may_be_drafted(self, request: Request) -> bool:
        """Return True if it may have drafts in a step that is planned when all its tokens are known: a search draws
        nothing, and who departs names one token."""
        record = request.record
        left = record.max_tokens - request.output_tokens
        return left > 1 and record.beams is None and not request.yielding

    def _proposed(self, rows: int) -> dict[Request, list[int]]:
        """Return the drafts of the next step, of `rows`, and have room for them, as far as there is some that nobody
        needs. Beside prompts, whose tokens fill a step, there are none."""
        if self.drafting.drafter is None or self.is_under_way or self.local:
            return {}
        able: list[tuple[Request, int]] = []
        for request in self.running:
            length = len(request.tokens)
            if not self._may_be_drafted(request) or request.known != length - 1:
                continue
            most = min(self.drafting.most, request.record.max_tokens - request.output_tokens - 1)
            short = self._kv.shortage(request.lease, length + most)
            if short and short + len(self.running) <= self._kv.available:
                self._kv.grow(request.lease, short)
            able.append((request, min(most, self._kv.room_tokens(request.lease) - length)))
        return self.drafting.propose([pair for pair in able if pair[1] > 0], rows, self._room_for_drafts(rows))

    def _room_for_drafts(self, rows: int) -> int:
        """Return how many drafts a step of so many rows may have: as many logits as a full batch has, or one row with
        drafts beside it. For so many a step's memory was counted."""
        return min(self.pace.most_tokens, max(self._max_rows - rows, self.drafting.most))

    def plan(self, departing: Sequence[Request], now: float) -> StepPlan | None:
        """Return the next step: a row for every request that runs or departs, and chunks. None: nothing to compute."""
        assert len(self._under_way) < 2, "a step is planned behind the one under way, and no further"
        rows: list[Row] = []
        step = _Planned()
        copying_now = self._under_way[-1].copying if self._under_way else []
        # In the first step after a fork, before its parent writes on in the block that they share.
        step.copying += [r.lease for r in self.local if r.lease.copies and r.lease not in copying_now]
        copies = [pair for lease in step.copying for pair in lease.copies]
        # Beside one token each, a step has room for so many: of runs, then of prompts.
        spare = self.pace.most_tokens
        drafts = self._proposed(sum([_rows(request) for request in self.running]) + len(departing))
        for request in (*self.running, *departing):
            if self._ends(request) or any(short for _, short in self.wants(request)):
                continue
            if request.record.beams is not None:
                self.beams.prepare(request)
                copies += self.beams.copies(request)
                more = self.beams.rows(request)
                step.requests += [request] * len(more)
                step.leases += self.beams.leases(request)
                rows += more
            else:
                length, known = self._length(request), self._known(request)
                end = min(length, known + 1 + spare)
                guesses = drafts.get(request, [])[: spare - (end - known - 1)]
                self._kv.extend(request.lease, length + len(guesses))
                spare -= end - known - 1 + len(guesses)
                step.prompt_tokens += end - known - 1
                step.drafts += len(guesses)
                rows.append(self._row(step, request, end, guesses))
        step.running_rows = len(rows)
        if self.local:
            # As many as the batch has room for, and always one: for so many rows a step's memory was counted.
            able = (r for r in self.alike.computable(self.local) if is_compiled(r.record, self._compiled))
            incomplete = (r for r in able if self._known(r) < len(r.tokens))
            local = [*islice(incomplete, max(1, self._max_rows - len(rows)))]
            missing = [len(request.tokens) - self._known(request) for request in local]
            shares = share_budget(missing, min(spare, self.pace.tokens(len(rows))))
            for request, share in zip(local, shares, strict=True):
                if share:
                    if request.prefill.local_since is None:
                        request.prefill.local_since = now
                    rows.append(self._row(step, request, self._known(request) + share))
                    step.prompt_tokens += share
        if not rows:
            return None
        # Only prompts are scored, and they come last.
        is_scored = any([row.scored for row in rows[step.running_rows :]])
        step.leases += [lease for lease in step.copying if lease not in step.leases]
        self._kv.launched(step.leases)
        self._under_way.append(step)
        self._steps += 1
        step.number = self._steps
        return StepPlan(tuple(rows), tuple(copies), self._steps, is_scored)

    def _row(self, step: _Planned, request: Request, end: int, drafts: Sequence[int] = ()) -> Row:
        record, tokens, lease = request.record, request.tokens, request.lease
        follows = end > len(tokens)
        known = self._known(request)
        self._kv.reach(lease, known, end + len(drafts))
        own = known, end, lease.blocks, self.stop_ids
        row = row_of(record, tokens, *own, follows=follows, windows=lease.windows)
        if drafts:
            guessed = TokenView.of(tokens, *drafts)
            row = msgspec.structs.replace(row, tokens=guessed, end=end + len(drafts), drafts=len(drafts))
        step.requests.append(request)
        step.rows[request] = row
        step.leases.append(lease)
        return row

    def lasted(self, seconds: float) -> None:
        """Note how long the step took that ended last."""
        own_s = self.drafting.lasted(self.running_rows, self._drafts, seconds, bool(self._prompt_tokens))
        if not self._drafts:
            self.pace.measured(self.running_rows, self._prompt_tokens, own_s)

    @property
    def backlog_tokens(self) -> int:
        """Tokens of prompts that are still to be computed here."""
        return sum(map(self.alike.missing_tokens, self.local))

    @property
    def s_per_prompt_token(self) -> float:
        """The time that each of them is predicted to take, in seconds; 0.0 until measured."""
        return self.pace.s_per_token(len(self.running))

    def scored(self, plan: StepPlan, scores: Sequence[Sequence[TokenLogprobs]]) -> None:
        """Keep what the oldest step under way says of the tokens of prompts."""
        said = iter(scores)
        for row, request in zip(plan.rows, self._under_way[0].requests, strict=True):
            if row.scored:
                request.scores[row.start :] = next(said)

    def complete(self, plan: StepPlan, drawn: Sequence[Drawn]) -> list[tuple[Request, Drawn]]:
        """Count what the oldest step under way has computed. Return what follows each row that draws, with its request,
        but for those that have ended meanwhile, or had that token already."""
        step = self._under_way.popleft()
        assert step.number == plan.number, "steps end in their order"
        self.running_rows, self._prompt_tokens, self._drafts = step.running_rows, step.prompt_tokens, step.drafts
        self.drawn_drafts = 0
        for lease in step.copying:
            self._kv.copied(lease)
        self._kv.ended(step.leases)
        followed: list[tuple[Request, Drawn]] = []
        tokens = iter(drawn)
        for row, request in zip(plan.rows, step.requests, strict=True):
            token = next(tokens) if row.draw else None
            if request.state is RequestState.ENDING:
                continue
            if row.draw and row.end < len(request.tokens):
                token = None  # it came with the one before
            if not row.candidates:
                request.known = row.end - row.drafts + self._accepted(request, row, token)
                self._kv.slide(request.lease, request.known)
            if request.state is RequestState.LOCAL and request.is_recovering:
                self.recomputed_tokens += row.end - row.start
            elif request.state is RequestState.LOCAL:
                self.prefilled_tokens += row.end - row.start
            if token is not None:
                followed.append((request, token))
        return followed

    def _accepted(self, request: Request, row: Row, drawn: Drawn | None) -> int:
        """Return how many of the row's drafts were drawn: their KV is computed."""
        if request.state is not RequestState.RUNNING:
            return 0
        count = 0 if drawn is None or isinstance(drawn, DeadEnd | tuple) else accepted(row, run_of(drawn))
        self.drafting.stepped(request, row.drafts, count)
        self.drawn_drafts += count
        return count

    def append(
        self, request: Request, drawn: Sequence[DrawnToken]
    ) -> tuple[Sequence[DrawnToken], FinishReason | None]:
        """Add the request's next tokens up to one that is the last. Return those that were added, and why it is over,
        if it is. One whose blocks are still to come gets no more than there is room for beside a token of every attempt
        that may follow, and at least one: what could only come there is found again."""
        if not request.arrived:
            room = self._kv.room_tokens(request.lease) - len(request.tokens)
            drawn = drawn[: max(1, room - (MAX_ATTEMPTS - 1 - request.prefill.tries))]
        before, reason = len(request.tokens), None
        # What a step drew, its row's drafts included, is computed up to the last: what comes behind that was forced.
        by_step = max(1, request.known - before + 1) if request.state is RequestState.RUNNING else 1
        for token in map(id_of, drawn):
            request.tokens.append(token)
            reason = finish_reason(request.record, request.output_tokens, token, self.stop_ids)
            if reason is not None:
                break
        added = len(request.tokens) - before
        self.generated_tokens += added
        self.forced_tokens += max(0, added - by_step)
        return drawn[:added], reason

    def search(self, request: Request, candidates: Candidates) -> list[Beam] | None:
        """Go on with what may follow one hypothesis. Return the answers, where that ends the search."""
        self.generated_tokens += 1
        return self.beams.complete(request, candidates)

    def check(self, requests: Sequence[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        states = [request.state for request in requests]
        for state, line in (
            (RequestState.READY, self.ready),
            (RequestState.RUNNING, self.running),
            (RequestState.LOCAL, self.local),
        ):
            assert all([request.state is state for request in line])
            assert states.count(state) == len(line)
        self.alike.check(self.local)
        self.beams.check(requests)


def _rows(request: Request) -> int:
    """Return how many rows of a step it may take."""
    return 1 if request.record.beams is None else request.record.beams.width
