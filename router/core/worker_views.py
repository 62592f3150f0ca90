"""How workers look to one request: what each holds of its prompt, what it has to do, and what its steps take.

What a worker reports is kept by `router/core/registry.py`, what it is believed to hold by
`router/core/prefix_index.py`, what its times come to by `router/core/fitting.py`, and what others lose by
`router/core/reuse.py`; here it becomes what a policy compares (`PrefillView`, `DecodeView`).
"""

from collections.abc import Collection, Mapping, Sequence

from engine.messages import WorkerInfo
from engine.plan import MUCH_SHORTER, saving_most
from engine.types import RequestRecord
from router.core.call import Call
from router.core.fitting import Coefficients
from router.core.policy import ASSUMED_S_PER_TOKEN, DecodeView, Demand, PrefillView
from router.core.prefix_index import TIERS, PrefixIndex
from router.core.registry import ModelKey, Room, WorkerEntry
from router.core.reuse import Reuse

NEGLIGIBLE = 1 / 8
"""A load that takes no longer than this part of computing is free. With a price, requests would crowd where what they
share is on the device, and what others have of it in host memory would grow old (docs/routing.md)."""


def demand(record: RequestRecord, info: WorkerInfo, answer_tokens: float = 0.0) -> Demand:
    """Return what `record` needs on such a worker, if answers are so long on average."""
    return _demand(record, (info.block_size, info.growth_tokens), answer_tokens)


def _demand(record: RequestRecord, room: Room, answer_tokens: float = 0.0) -> Demand:
    prompt, (size, growth_tokens) = len(record.tokens), room
    end = record.prompt_tokens + record.max_tokens
    wanted = end if growth_tokens is None else min(end, prompt + growth_tokens)
    likely = min(answer_tokens, max(end - prompt, 0))
    return Demand(prompt, -(-prompt // size), -(-wanted // size), -(-end // size), likely)


class Demands(dict[Room, Demand]):
    """What one request needs, by what it depends on: the same for most workers."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def __missing__(self, room: Room) -> Demand:
        self[room] = needs = _demand(self._record, room)
        return needs


def fits(wanted: Demand, view: DecodeView, promised: int = 0) -> bool:
    """Return True if a decode worker may have room for a request beside `promised` more blocks."""
    size = view.blocks
    return wanted.blocks + promised - view.device_blocks <= size - view.used_blocks and wanted.most_blocks <= size


class Held:
    """Who holds how much of one request: one walk of the index for each kind of worker."""

    def __init__(self, index: PrefixIndex, call: Call) -> None:
        self._index = index
        self.call = call
        self._depths: dict[ModelKey, dict[str, int]] = {}
        self._lower: dict[ModelKey, dict[str, tuple[int, int]]] = {}
        self.compared: Sequence[PrefillView] = ()
        """Those among which the worker that reads it was chosen."""

    def depths(self, key: ModelKey) -> Mapping[str, int]:
        """Return how many leading blocks the workers of one kind hold; those that hold none are left out."""
        depths = self._depths.get(key)
        if depths is None:
            depths = self._depths[key] = self._index.depths(self.call.chain(key))
        return depths

    def lower(self, key: ModelKey) -> Mapping[str, tuple[int, int]]:
        """Return how many of those blocks are in which lower tier; workers that have none there are left out."""
        lower = self._lower.get(key)
        if lower is None:
            lower = self._lower[key] = self._index.lower(self.call.chain(key))
        return lower

    def blocks(self, worker: WorkerEntry) -> int:
        """Return how many leading blocks, of the worker's size, it holds."""
        return self.depths(worker.key).get(worker.name, 0)


class WorkerViews:
    """Makes the views of workers, and keeps those of decode workers that are as they were."""

    def __init__(self, fitted: Coefficients, reuse: Reuse) -> None:
        self._fitted = fitted
        self._reuse = reuse

    def roomy(self, held: Held, alike: Sequence[WorkerEntry]) -> list[DecodeView]:
        """The views of the decode workers of one kind that may have room."""
        roomy, demands, unmeasured_s = [], Demands(held.call.record), self._fitted.unmeasured_step_s
        found, lower = held.depths(alike[0].key), held.lower(alike[0].key)
        room: Room | None = None
        wanted_blocks = most_blocks = 0
        for worker in alike:
            name, view = worker.name, worker.decode_view
            cached_blocks, loaded_blocks, load_s = found.get(name, 0), 0, 0.0
            if lower and name in lower:
                cached_blocks, loaded_blocks, load_s = self._cached(worker, held)
            # As `with_cached` would find: of many workers, nearly all are as they were.
            if (
                view is None
                or view.cached_blocks != cached_blocks
                or view.loaded_blocks != loaded_blocks
                or view.load_s != load_s
                or not (view.s_per_step or view.alone_s == unmeasured_s)
            ):
                view = self.with_cached(worker, cached_blocks, loaded_blocks, load_s)
            if worker.room != room:
                room = worker.room
                wanted_blocks, most_blocks = demands[room].blocks, demands[room].most_blocks
            blocks = view.blocks
            if wanted_blocks - cached_blocks + loaded_blocks <= blocks - view.used_blocks and most_blocks <= blocks:
                roomy.append(view)  # it fits
        return roomy

    def of_readers(self, held: Held, readers: Sequence[WorkerEntry], wanted: Demand) -> list[PrefillView]:
        """The views of prefill workers."""
        delaying: dict[str, float] = {}
        # Workers whose blocks are of one size hold the same beginnings.
        kinds = {w.key for w in readers}
        for key in kinds:
            delaying |= self._delaying(held, [w for w in readers if len(kinds) == 1 or w.key == key])
        return self._reader_views(held, readers, wanted, delaying, self._loadings(held, readers, kinds))

    def of_themselves(
        self,
        held: Held,
        decodes: Sequence[WorkerEntry],
        readers: Sequence[WorkerEntry],
        wanted: Demand,
    ) -> dict[str, PrefillView]:
        """The decode workers of one kind as those that read the prompt themselves, beside prefill workers if any. Until
        one has computed a prompt, it is taken to be as quick as a prefill worker."""
        key = decodes[0].key
        delaying = self._delaying(held, [*decodes, *(w for w in readers if w.key == key)])
        views = self._reader_views(held, decodes, wanted, delaying, self._loadings(held, decodes, (key,)))
        return {view.name: view for view in views}

    def _delaying(self, held: Held, alike: Sequence[WorkerEntry]) -> dict[str, float]:
        """How many tokens' time others would lose by each of these workers, whose blocks are of one size."""
        depths = held.depths(alike[0].key)
        found = {w.name: depths.get(w.name, 0) for w in alike}
        queues = {w.name: w.queue_tokens for w in alike}
        s_per_token = self._fitted.usual_s_per_token or ASSUMED_S_PER_TOKEN
        chain, size = held.call.chain(alike[0].key), alike[0].key[1]
        full = {w.name for w in alike if w.has_evicted} if self._reuse.evictions.share else ()
        return self._reuse.delaying_tokens(chain, found, size, queues, s_per_token, full)

    def _loading(self, worker: WorkerEntry, held: Held, way: str) -> tuple[int, float]:
        """Return how many of the blocks that a worker holds in lower tiers it will not load, and the price of those
        that come back, in seconds. `way`: who gives it what is not loaded, itself ("here") or the "pool"."""
        lower, load = held.lower(worker.key).get(worker.name), worker.load
        if lower is None or load is None:
            return 0, 0.0
        size, s_per_token = worker.room[0], self._fitted.reading(worker.name)[0] or ASSUMED_S_PER_TOKEN
        each_s = [load.s_per_loaded_block.get(tier, 0.0) for tier in TIERS[1:]]
        spared_s = size * (load.s_per_spared_token.get(way) or s_per_token)
        left = loaded = saving_most(zip(lower, each_s, strict=True), spared_s)
        load_s = 0.0
        for blocks, block_s in zip(lower, each_s, strict=True):
            if block_s > NEGLIGIBLE * size * s_per_token:
                load_s += min(blocks, left) * block_s
            left -= min(blocks, left)
        return sum(lower) - loaded, load_s

    def _cached(self, worker: WorkerEntry, held: Held) -> tuple[int, int, float]:
        """Return how many blocks a decode worker need not be given, how many of them it loads, and their price."""
        computed_blocks, load_s = self._loading(worker, held, "pool")
        lower_blocks = sum(held.lower(worker.key).get(worker.name, ()))
        return held.blocks(worker) - computed_blocks, lower_blocks - computed_blocks, load_s

    def _loadings(
        self, held: Held, workers: Sequence[WorkerEntry], kinds: Collection[ModelKey]
    ) -> dict[str, tuple[int, float]]:
        """Return the same of those of `workers`, which are of these kinds, that hold anything in lower tiers."""
        lower = {name for key in kinds for name in held.lower(key)}
        return {w.name: self._loading(w, held, "here") for w in workers if w.name in lower} if lower else {}

    def _reader_views(
        self,
        held: Held,
        workers: Sequence[WorkerEntry],
        wanted: Demand,
        delaying: Mapping[str, float],
        loading: Mapping[str, tuple[int, float]],
    ) -> list[PrefillView]:
        """`delaying` and `loading`: what `_delaying` says of each, and `_loadings` of some."""
        call, prompt_tokens, most = held.call, wanted.prompt_tokens, wanted.prompt_tokens - 1
        reading, behind = self._fitted.reading, call.left_behind
        key: ModelKey | None = None
        found: Mapping[str, int] = {}
        views = []
        for worker in workers:
            name, queue_tokens = worker.name, worker.queue_tokens
            if worker.key != key:
                key, found = worker.key, held.depths(worker.key)
            blocks = cached_blocks = found.get(name, 0)
            s_per_token, delay, host = reading(name)
            if behind is not None and behind[0] is worker.load:
                queue_tokens = max(queue_tokens - behind[1], 0)
            load_s = 0.0
            if loading and name in loading:
                computed_blocks, load_s = loading[name]
                cached_blocks -= computed_blocks
            cached_tokens = 0
            if cached_blocks:
                cached_tokens = cached_blocks * worker.room[0]
                if cached_tokens > most:
                    cached_tokens = most
            others_tokens, passed_tokens, uncached_tokens = delaying[name], 0, prompt_tokens - cached_tokens
            if queue_tokens >= MUCH_SHORTER * uncached_tokens:  # or it goes before nobody, as most do
                chain = call.chain(worker.key) if blocks else ()
                passed_tokens, prompts = worker.reading.overtaken(uncached_tokens, queue_tokens, chain, blocks)
                others_tokens += prompts * uncached_tokens
            views.append(
                PrefillView(
                    name,
                    cached_tokens,
                    queue_tokens,
                    s_per_token,
                    len(worker.own),
                    others_tokens,
                    delay,
                    host,
                    passed_tokens,
                    load_s,
                )
            )
        return views

    def of_decode(self, worker: WorkerEntry, held: Held) -> DecodeView:
        """The view of a decode worker that holds what `held` says."""
        return self.with_cached(worker, *self._cached(worker, held))

    def with_cached(
        self, worker: WorkerEntry, cached_blocks: int, loaded_blocks: int = 0, load_s: float = 0.0
    ) -> DecodeView:
        """The view of a decode worker with so many cached blocks, kept for the next request that it holds as much of:
        coefficients too are those of its last report, dispatch or end. One that has run no step has the steps of the
        others, of whose reports it is not told."""
        view = worker.decode_view
        load, fitted, name = worker.load, self._fitted, worker.name
        if (
            view is not None
            and view.cached_blocks == cached_blocks
            and view.load_s == load_s
            and view.loaded_blocks == loaded_blocks
            and (view.s_per_step or view.alone_s == fitted.step(name, 0.0)[0])
        ):
            return view
        step_s = load.s_per_token if load else 0.0
        alone_s, s_per_row = fitted.step(name, step_s)
        view = worker.decode_view = DecodeView(
            name,
            cached_blocks,
            worker.used_blocks,
            worker.info.blocks,
            step_s,
            load.s_per_block if load else {},
            len(worker.own),
            worker.least_s_per_block,
            rows=load.running_requests if load else 0,
            alone_s=alone_s,
            s_per_row=s_per_row,
            host=fitted.host(name),
            unmeasured_s_per_block=fitted.s_per_block(name),
            exposure=fitted.exposure(name),
            load_s=load_s,
            loaded_blocks=loaded_blocks,
        )
        return view
