"""Launches steps: a torch-free plan in, tokens out. The only place where decisions meet tensors. What becomes of the
logits is said in `engine/sampling.py`.

On a GPU a step is queued and `Launched.wait` waits for it, so that the next one can be queued behind it. A row that
follows takes its token from what the step before has drawn, there. The CPU computes as it is told to."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from engine.backends.attention import AttentionBackend
from engine.batch import Followed, ForwardBatch
from engine.cores import Cores
from engine.logprobs import PromptScores, QueuedDraws, StepLogprobs, prompt_scores
from engine.sampling import needs_tokens
from engine.step import (
    DeadEnd,
    Drawn,
    LatestDraws,
    Row,
    StepPlan,
    TokenView,
    accepted,
    certain,
    draws_of,
    result_of,
)
from engine.storage.paged import KVTensors
from engine.types import TokenLogprobs

if TYPE_CHECKING:
    from engine.constraints.matchers import Mask, Matchers

class Launched(Protocol):
    """A step that was launched."""

    def wait(self) -> Sequence[Drawn]:
        """Return a token, or candidates, for each row with `draw`, in the order of the rows, when the step is over."""

    def scores(self) -> Sequence[Sequence[TokenLogprobs]]:
        """Return what each scored row asks of a prompt's tokens, in the order of the rows; after `wait`."""

    def idle_s(self, before: Any) -> float:
        """Return for how many seconds nothing was computed between `before`, launched by the same runner just before
        this one, and this one; both have been waited for."""


class Runner(Protocol):
    """Fulfilled by `ModelRunner` and by `fakes.model.FakeRunner`."""

    kv: KVTensors

    def launch(self, plan: StepPlan) -> Launched:
        """Carry out one step behind those launched before, one of which may not have ended: a row that `follows` goes
        on with what its request's row of the latest one draws. The plan is read before this returns."""


class Forwards(Protocol):
    """Fulfilled by `engine.model.llama.Llama`, which says what these do, and where ranks compute together by
    `engine.ranks.group.GroupModel`."""

    @property
    def device(self) -> torch.device: ...

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend, out: Tensor | None = None
    ) -> Tensor: ...

    def hidden(self, batch: ForwardBatch, kv: KVTensors, attention: AttentionBackend) -> Tensor: ...

    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor: ...


class StepGraphs(Protocol):
    """Steps that are recorded: `engine.backends.gpu.graphs.DecodeGraphs` and `...mixed_graphs.MixedGraphs`, which say
    what these do. What `load` returns is theirs."""

    def takes(self, rows: Sequence[Row]) -> bool: ...

    def load(self, rows: Sequence[Row], followed: Followed | None = None) -> Any: ...

    def replay(self, step: Any) -> Tensor: ...

    def sample(self, step: Any, logits: Tensor, draws: list[Row]) -> Tensor | QueuedDraws | Sequence[Drawn]: ...


class StepRanks(Protocol):
    """The other ranks of a model that have a pool and a runner each, as rank 0's runner sees them: fulfilled by
    `engine.ranks.device_group.DeviceGroup`. Raises RankError."""

    def tell(self, plan: StepPlan, followed: Followed | None) -> AbstractContextManager[None]:
        """Tell them to carry out a step, whose rows of one token come first, with what these follow; within what is
        returned, this rank does. They draw nothing."""

    def wait(self, ended: Callable[[], None]) -> None:
        """Wait for a step of all ranks by `ended`."""


class HostMark:
    """Stands for `torch.cuda.Event` where the device is the CPU, which has done what it was told."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def record(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, later: "HostMark") -> float:
        return (later._at_s - self._at_s) * 1e3


def _mark(device: torch.device) -> Any:
    """Return a point in the device's work, recorded now."""
    if device.type != "cuda":
        return HostMark()
    mark: Any = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


class _Marked:
    """A step between two points of its device's work."""

    def __init__(self, began: Any, ended: Any, scores: Callable[[], Sequence[Sequence[TokenLogprobs]]] = list) -> None:
        self._began = began
        self._ended = ended
        self._synchronize: Callable[[], None] = ended.synchronize
        self.scores = scores

    def waited_by(self, ranks: StepRanks) -> None:
        """Let `ranks` wait, which know what to do when the device never ends."""
        self._synchronize = partial(ranks.wait, self._ended.synchronize)

    def idle_s(self, before: "_Marked") -> float:
        return max(0.0, float(before._ended.elapsed_time(self._began)) * 1e-3)


class Done(_Marked):
    """A step that has ended as it was launched."""

    def __init__(
        self,
        drawn: Sequence[Drawn],
        began: Any,
        ended: Any,
        scores: Callable[[], Sequence[Sequence[TokenLogprobs]]] = list,
    ) -> None:
        super().__init__(began, ended, scores)
        self._drawn = drawn

    def wait(self) -> Sequence[Drawn]:
        self._synchronize()
        return self._drawn


class Queued(_Marked):
    """A step that is queued on a device. `tokens` int64 `[draws]` will be there, and `logprobs`, where any are asked
    for; `places`: where the token of each row with `draw` is, in the order of the plan, the first of those with drafts.
    """

    def __init__(
        self,
        tokens: Tensor,
        places: list[int],
        began: Any,
        logprobs: StepLogprobs | None = None,
        scores: Callable[[], Sequence[Sequence[TokenLogprobs]]] = list,
        dead: Mapping[int, DeadEnd] | None = None,
        finished: Callable[[list[Drawn]], list[Drawn]] | None = None,
    ) -> None:
        """`dead`: draws whose token means nothing, by their place; `finished` makes results of rows of the draws, once
        they are known."""
        self.tokens = tokens
        self.places = places
        self._dead = dead or {}
        self._finished = finished
        self._drawn: list[Drawn] | None = None
        self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to_host()
        super().__init__(began, _mark(tokens.device), scores)

    def wait(self) -> Sequence[Drawn]:
        self._synchronize()
        if self._drawn is None:
            drawn = self._host.tolist()
            if self._logprobs is not None:
                drawn = self._logprobs.joined(drawn)
            if self._dead:
                drawn = [self._dead.get(at, token) for at, token in enumerate(drawn)]
            if self._finished is not None:
                drawn = self._finished(drawn)
            self._drawn = [drawn[at] for at in self.places]
        return self._drawn


class ModelRunner:
    """A model over paged KV. Mixed rows (decode and prefill chunks) run as one batch, decoding ones first. Steps that
    any of `graphs` takes are replayed.

    Mutable state: the latest step.
    """

    def __init__(
        self,
        model: Forwards,
        kv: KVTensors,
        attention: AttentionBackend,
        graphs: StepGraphs | None = None,
        cores: Cores | None = None,
        matchers: "Matchers | None" = None,
        mixed: StepGraphs | None = None,
        ranks: StepRanks | None = None,
    ) -> None:
        """`matchers` say what rows with a constraint may draw; a scheduler plans none where there are none. `ranks`:
        others that are to carry out every step too, each with a runner of its own, whose steps are `follow`ed."""
        self.kv = kv
        self._ranks = ranks
        self.matchers = matchers
        self._model = model
        self._attention = attention
        self._graphs = [some for some in (graphs, mixed) if some is not None]
        self._latest = LatestDraws()
        self._at_work: Callable[[], AbstractContextManager[None]] = nullcontext if cores is None else cores.at_work
        # Kernels are launched on the current device, and a thread's first one is number 0.
        self._on_device: Callable[[], AbstractContextManager[None]] = (
            partial(torch.cuda.device, model.device) if model.device.type == "cuda" else nullcontext
        )

    def run(self, plan: StepPlan) -> Sequence[Drawn]:
        """Carry out one step, and wait for it."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Queued | Done:
        with self._at_work(), self._on_device(), torch.inference_mode():
            return self._launch(plan)

    def follow(self, plan: StepPlan, followed: Followed | None = None) -> None:
        """Carry out another rank's step, which draws nothing here, and wait for nothing: its rows of one token come
        first, and what they follow is with them."""
        with self._at_work(), self._on_device(), torch.inference_mode():
            self.kv.copy(list(plan.copies))
            if plan.rows:
                self._compute(plan.rows, followed, plan.is_scored, _mark(self._model.device))

    def _launch(self, plan: StepPlan) -> Queued | Done:
        device = self._model.device
        began = _mark(device)
        if not plan.rows:
            with self._told(plan, None):
                self.kv.copy(list(plan.copies))
            return Done([], began, _mark(device))
        order = sorted(range(len(plan.rows)), key=lambda at: plan.rows[at].end - plan.rows[at].start > 1)
        drawing = [at for at in order if plan.rows[at].draw]
        rows = [plan.rows[at] for at in order]
        followed = self._followed(rows)
        if followed is None:
            rows = [self._latest.resolved(row) for row in rows]
        wanted = [one for row in rows if row.draw for one in draws_of(row)]
        masks = self._begin_masks(wanted)
        with self._told(StepPlan(tuple(rows), plan.copies, is_scored=plan.is_scored), followed):
            self.kv.copy(list(plan.copies))
            logits, sample, prompts = self._compute(rows, followed, plan.is_scored, began)
        scores: Callable[[], Sequence[Sequence[TokenLogprobs]]] = list
        if prompts is not None:
            scores = partial(_in_order, prompts.to_host(), [at for at in order if plan.rows[at].scored])
        # The device computes; what a penalty or a grammar needs of the step before is there, or is before that ends.
        draws = [self._latest.resolved(row) if needs_tokens(row) else row for row in wanted]
        dead, masked = self._mask(draws, masks)
        drawn = sample(logits, draws)
        finished = self._finishes([plan.rows[at] for at in drawing], draws, masked)
        firsts = [*accumulate([1 + plan.rows[at].drafts for at in drawing], initial=0)]
        places = [firsts[at] for at in sorted(range(len(drawing)), key=drawing.__getitem__)]
        launched: Queued | Done
        if isinstance(drawn, Tensor | QueuedDraws):
            tokens, logprobs = (drawn, None) if isinstance(drawn, Tensor) else drawn
            launched = Queued(tokens, places, began, logprobs, scores, dead, finished)
        else:
            told = [dead.get(at, token) for at, token in enumerate(drawn)]
            told = told if finished is None else finished(told)
            launched = Done([told[at] for at in places], began, _mark(device), scores)
        if self._ranks is not None:
            launched.waited_by(self._ranks)
        self._latest = LatestDraws(plan.rows, launched)
        return launched

    def _told(self, plan: StepPlan, followed: Followed | None) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.tell(plan, followed)

    def _compute(
        self, rows: Sequence[Row], followed: Followed | None, is_scored: bool, began: Any
    ) -> tuple[Tensor, Callable[[Tensor, list[Row]], Any], PromptScores | None]:
        """Queue a step, rows of one token first. Return the logits of rows that draw, what draws from them, and what is
        said of prompts' tokens. All ranks choose alike how: what they send each other is a part of it."""
        if is_scored:
            batch = self._batch(rows, followed)
            self._begins(began)
            hidden = self._model.hidden(batch, self.kv, self._attention)
            logits = self._model.logits(hidden[batch.logit_rows])
            return logits, self._attention.sample, prompt_scores(self._model.logits, hidden, rows)
        if (graphs := next((some for some in self._graphs if some.takes(rows)), None)) is not None:
            loaded = graphs.load(rows, followed)
            self._begins(began)
            return graphs.replay(loaded), partial(graphs.sample, loaded), None
        batch = self._batch(rows, followed)
        self._begins(began)
        return self._model.forward(batch, self.kv, self._attention), self._attention.sample, None

    def _begin_masks(self, draws: list[Row]) -> "Future[list[Mask]] | None":
        """Begin to compute what rows with a constraint may draw, where all their tokens are known, and nobody else has
        to wait for those of the step before: what comes behind them is the business of the same matchers."""
        constrained = [row for row in draws if _wants_mask(row)]
        if not constrained or any(row.follows and needs_tokens(row) for row in draws):
            return None
        return self._matchers.begin(constrained)

    def _mask(
        self, draws: list[Row], begun: "Future[list[Mask]] | None"
    ) -> tuple[dict[int, DeadEnd], list[int]]:
        """Write into `draws` what those with a constraint may draw. Return those that can draw nothing, by place, and
        the places of the others."""
        places = [at for at, row in enumerate(draws) if _wants_mask(row)]
        if not places:
            return {}, []
        masks = self._matchers.masks([draws[at] for at in places]) if begun is None else begun.result()
        dead = {}
        for at, mask in zip(places, masks, strict=True):
            if isinstance(mask, DeadEnd):
                dead[at] = mask
            else:
                draws[at] = msgspec.structs.replace(draws[at], allowed=mask)
        return dead, [at for at in places if at not in dead]

    def _finishes(
        self, rows: list[Row], draws: list[Row], masked: list[int]
    ) -> Callable[[list[Drawn]], list[Drawn]] | None:
        """Return what puts the result of each of `rows` in the place of its first draw: its drafts as far as they were
        drawn, the draw behind them, and what can only come behind that where it is one of `masked`, the draws with
        masks. None where each draw is a result."""
        if not masked and len(draws) == len(rows):
            return None
        # A scheduler's list may be longer by then.
        held = {at: msgspec.structs.replace(draws[at], tokens=TokenView.of(draws[at].tokens)) for at in masked}

        def finished(drawn: list[Drawn]) -> list[Drawn]:
            first, spans = 0, list[tuple[int, int]]()
            for row in rows:
                spans.append((first, first + accepted(row, drawn[first : first + row.drafts + 1])))
                first += row.drafts + 1
            ends = [last for _, last in spans if last in held]
            continued = self._matchers.continued([held[at] for at in ends], [drawn[at] for at in ends]) if ends else []
            for at, more in zip(ends, continued, strict=True):
                drawn[at] = more
            for first, last in spans:
                before = [certain(held[at], drawn[at]) if at in held else drawn[at] for at in range(first, last)]
                drawn[first] = result_of(before, drawn[last])
            return drawn

        return finished

    @property
    def _matchers(self) -> "Matchers":
        assert self.matchers is not None, "schedulers refuse constraints where there are no matchers"
        return self.matchers

    def _followed(self, rows: list[Row]) -> Followed | None:
        """Return where on the device the tokens lie that rows follow; None where they are known."""
        latest = self._latest.step
        if not isinstance(latest, Queued) or not any([row.follows for row in rows]):
            return None
        ones = [row for row in rows if row.end - row.start == 1]
        places = [latest.places[self._latest.number(row)] if row.follows else -1 for row in ones]
        return Followed(latest.tokens, places)

    def _batch(self, rows: Sequence[Row], followed: Followed | None) -> ForwardBatch:
        multiple = self._attention.row_multiple
        batch = ForwardBatch.build(rows, self.kv.layout.block_size, self._model.device, multiple, followed)
        self._attention.begin(batch, self.kv)
        return batch

    def _begins(self, began: Any) -> None:
        """What was prepared so far, the CPU has done: a GPU that had nothing else to do has waited for it."""
        if self._model.device.type == "cuda":
            began.record()


def _wants_mask(row: Row) -> bool:
    """True unless all is allowed, or what follows is known already."""
    return row.record.constraint is not None and not row.allowed


def _in_order(scores: PromptScores, places: list[int]) -> list[list[TokenLogprobs]]:
    """Return what was said in the order of `places`."""
    return [said for _, said in sorted(zip(places, scores.told(), strict=True), key=lambda pair: pair[0])]


class Opened(NamedTuple):
    """A pool and the runner over it. `workspace_bytes`: what steps take beside weights and pool, where it is known."""

    kv: KVTensors
    runner: ModelRunner
    workspace_bytes: int = 0
