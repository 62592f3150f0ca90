"""Makes the views of workers that a policy compares: who is alive, who may have room, who holds what of a prompt.

A decode worker may read a prompt itself where no prefill worker could, and, if `router.local_prefill` says so, wherever
that is predicted to be the cheaper: the choice then names `LOCAL` as its prefill worker. The chosen decode worker is
offered the request over `router/dispatch.py`, where the way goes on.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from engine.messages import Fault, PeerAddress, ReadTold, WorkerInfo
from engine.plan import MUCH_SHORTER, saving_most
from engine.types import RequestRecord
from router.config import LocalPrefill
from router.core.call import Call
from router.core.policy import (
    ASSUMED_S_PER_TOKEN,
    Choice,
    DecodeView,
    Demand,
    PrefillView,
    RoutingPolicy,
    token_s,
)
from router.core.prefix_index import TIERS, PrefixIndex
from router.core.registry import Life, ModelKey, Registry, Room, WorkerEntry
from router.core.reuse import Reuse, spare_tokens
from router.core.sessions import Pin

FALLBACK = "fallback"
"""The reason of a choice without a prefill worker where there had been one."""

SESSION = "session"
"""The reason of a choice that goes on where its conversation was."""

NEGLIGIBLE = 1 / 8
"""A load that takes no longer than this part of computing is free. With a price, requests would crowd where what they
share is on the device, and what others have of it in host memory would grow old (docs/routing.md)."""

LOCAL = PeerAddress("", "")
"""Stands in the place of a prefill worker: the decode worker prefills by itself."""


def demand(record: RequestRecord, info: WorkerInfo, answer_tokens: float = 0.0) -> Demand:
    """Return what `record` needs on such a worker, if answers are so long on average."""
    return _demand(record, (info.block_size, info.growth_tokens), answer_tokens)


def _demand(record: RequestRecord, room: Room, answer_tokens: float = 0.0) -> Demand:
    prompt, (size, growth_tokens) = len(record.tokens), room
    end = record.prompt_tokens + record.max_tokens
    wanted = end if growth_tokens is None else min(end, prompt + growth_tokens)
    likely = min(answer_tokens, max(end - prompt, 0))
    return Demand(prompt, -(-prompt // size), -(-wanted // size), -(-end // size), likely)


class Placer:
    """Asks the policy about the workers as the registry and the index know them now; changes neither."""

    def __init__(
        self, policy: RoutingPolicy, registry: Registry, index: PrefixIndex, local_prefill: LocalPrefill
    ) -> None:
        self._policy = policy
        self._local_prefill = local_prefill == "auto"
        self._registry = registry
        self._fitted = registry.fitted
        self._index = index
        self._reuse = Reuse()

    def impossible(self, record: RequestRecord) -> Fault | None:
        """Return why no known worker could ever take `record`, however long it waited; None if one may."""
        whole = f"{record.prompt_tokens} prompt tokens and {record.max_tokens} output tokens"
        prompt = f"{record.prompt_tokens} tokens"
        for role, field, what in (("decode", "max_tokens", whole), ("prefill", "prompt", prompt)):
            workers = self._registry.role(role)
            if role == "prefill" and self._local_prefill:
                continue  # a decode worker reads it
            if workers and not any(_applies(w, record) for w in workers):
                return Fault("NOT_FOUND", f"adapter: no {role} worker has {record.adapter}", "adapter")
            if workers and not any(_holds(w, record) for w in workers):
                room = max(w.info.blocks * w.info.block_size for w in workers)
                most = f"the largest {role} worker's {room} tokens of KV memory"
                return Fault("OUT_OF_RANGE", f"{field}: {what} do not fit into {most}", field)
        return None

    def choose(self, call: Call, now: float) -> Choice | None:
        """The best pair for `call` now, or None if no decode worker may have room."""
        held = _Held(self._index, call)
        choice = self._best(call, held, now)
        if choice is not None and not call.is_counted:
            self._count(call, choice, held, now)
        return choice

    def _count(self, call: Call, choice: Choice, held: "_Held", now: float) -> None:
        """Count the work that `call` brings, and what it waits for those that hold its prefix: once, however often it
        is offered."""
        call.is_counted = True
        reader = self._registry.get(choice.prefill.name or choice.decode.name)
        if reader is None or call.source is not None:
            return  # nobody's work grows: its KV is where it was yielded
        key, views, view = reader.key, held.compared, choice.prefill
        if len(self._registry.keys) > 1:  # other workers' blocks may be of another size
            views = [v for v in views if (w := self._registry.get(v.name)) is not None and w.key == key]
        if view.name != reader.name:
            view = msgspec.structs.replace(view, name=reader.name)
        tokens = len(call.record.tokens)
        # What it keeps the worker busy for: its delay is waiting, and no work.
        work_s = max(tokens - view.cached_tokens, 1) * token_s(view) / view.delay
        self._reuse.arrivals.came(now, work_s, len(views), spare_tokens(tokens, views, view))
        chain, depths = call.chain(key), held.depths(key)
        self._reuse.missed.placed(chain, tokens, key[1], views, depths, view, now)
        self._reuse.evictions.asked(chain[max([depths.get(each.name, 0) for each in views], default=0) :])

    def evicted(self, worker: str, blocks: Sequence[bytes]) -> None:
        """Take in what a worker holds no more; of one that reads no prompts it says nothing."""
        entry = self._registry.get(worker) if blocks else None
        if entry is not None and (entry.info.role == "prefill" or self._local_prefill):
            held_blocks = self._index.held_blocks(worker) * len(self._registry.role(entry.info.role))
            self._reuse.evictions.evicted(blocks, held_blocks)

    def told(self, record: ReadTold, now: float) -> None:
        """Count work that another router brings to a worker: whoever is delayed there is delayed by all of it."""
        reader = self._registry.get(record.reader)
        if reader is not None:
            beside = [w for w in self._registry.takers(reader.info.role, now) if w.key == reader.key]
            s_per_token = self._fitted.reading(reader.name)[0] or ASSUMED_S_PER_TOKEN
            self._reuse.arrivals.came(now, max(record.uncached_tokens, 1) * s_per_token, len(beside))
            self._reuse.evictions.came()

    def _best(self, call: Call, held: "_Held", now: float) -> Choice | None:
        adapter = call.record.adapter
        decodes = [w for w in self._takers_for(call.record, now) if not w.refused]
        if adapter:
            decodes = [w for w in decodes if adapter in w.info.adapters]
        pin = None if call.source is not None else call.pin
        if pin is not None:
            choice = self._best_of(call, held, [w for w in decodes if w.life == pin.decode], pin, now)
            if choice is not None:
                return msgspec.structs.replace(choice, reason=SESSION)
        return self._best_of(call, held, decodes, None, now)

    def _takers_for(self, record: RequestRecord, now: float) -> list[WorkerEntry]:
        """The decode workers that take new requests; where none of them could ever hold `record`, those that could
        although they are ejected: else it would wait for a probe, and all others behind it."""
        takers = self._registry.takers("decode", now)
        if not self._registry.ejections or any(_holds(w, record) for w in takers):
            return takers
        return [w for w in self._registry.live("decode", now) if not w.leaving and _holds(w, record)]

    def _best_of(
        self, call: Call, held: "_Held", decodes: Sequence[WorkerEntry], pin: Pin | None, now: float
    ) -> Choice | None:
        """The best pair with one of `decodes`; with `pin`, its prompt is read where it was before, if it can be."""
        record = call.record
        source = None if call.source is None else self._registry.get(call.source[0])
        best: Choice | None = None
        # Decode workers with the same model and block size are compared at once, then the best of each kind.
        kinds = sorted({w.key for w in decodes})
        for key in kinds:
            alike = decodes if len(kinds) == 1 else [w for w in decodes if w.key == key]
            wanted = demand(record, alike[0].info, self._fitted.answer_tokens)
            roomy = self._roomy(record, alike, held)
            if not roomy:
                continue  # as for most of those that wait while the cluster is full
            # Its prompt is read by, in this order: 1. the decode worker that yielded it and has the KV of all of it;
            # 2. a prefill worker of the same model; 3. where there is none, or that is the cheaper, the decode worker.
            if source is not None and source.info.fingerprint == key[0]:
                views = [_whole_view(source.name, wanted)]
            else:
                readers = self._readers(record, key[0], (), now)
                if pin is not None:
                    before = [] if pin.prefill is None and self._local_prefill else readers
                    readers = [w for w in readers if w.life == pin.prefill] or before
                views = self._prefill_views(call, held, readers, wanted)
                if self._local_prefill or not views:
                    local = self._local_views(call, held, alike, readers, wanted)
                    roomy = [msgspec.structs.replace(v, local=local[v.name]) for v in roomy]
            choice = self._policy.choose(wanted, views, roomy)
            if choice is not None and choice.prefill.name == choice.decode.name:
                choice = self._by_itself(choice, has_readers=bool(views))
            if choice is not None and (best is None or self._rank(choice) < self._rank(best)):
                best = choice
                held.compared = [*views, *(v.local for v in roomy if v.local is not None)]
        return best

    def _roomy(self, record: RequestRecord, alike: Sequence[WorkerEntry], held: "_Held") -> list[DecodeView]:
        """The views of the decode workers of one kind that may have room. `held`: what each holds of the prompt."""
        roomy, demands, unmeasured_s = [], _Demands(record), self._fitted.unmeasured_step_s
        found, lower = held.depths(alike[0].key), held.lower(alike[0].key)
        for worker in alike:
            cached_blocks, view, loaded_blocks, load_s = found.get(worker.name, 0), worker.decode_view, 0, 0.0
            if worker.name in lower:
                cached_blocks, loaded_blocks, load_s = self._cached(worker, held)
            # As `_decode_view` would find: of many workers, nearly all are as they were.
            if (
                view is None
                or view.cached_blocks != cached_blocks
                or view.load_s != load_s
                or view.loaded_blocks != loaded_blocks
                or not (view.s_per_step or view.alone_s == unmeasured_s)
            ):
                view = self._decode_view(worker, cached_blocks, loaded_blocks, load_s)
            wanted, blocks, device_blocks = demands[worker.room], view.blocks, cached_blocks - loaded_blocks
            if wanted.blocks - device_blocks <= blocks - view.used_blocks and wanted.most_blocks <= blocks:  # it fits
                roomy.append(view)
        return roomy

    def _by_itself(self, choice: Choice, *, has_readers: bool) -> Choice:
        """The same choice in the words of the rest of the router: the decode worker has no prefill worker."""
        is_fallback = not has_readers and self._registry.has_met_any("prefill")
        reader = msgspec.structs.replace(choice.prefill, name=LOCAL.name)
        return msgspec.structs.replace(choice, prefill=reader, reason=FALLBACK if is_fallback else choice.reason)

    def _rank(self, choice: Choice) -> tuple[bool, float]:
        """Unless told otherwise, a prefill worker is always preferred to none."""
        return not self._local_prefill and choice.prefill.name == LOCAL.name, choice.cost.total_s

    def have_all_refused(self, now: float) -> bool:
        """Return True if nobody can be offered anything before the next report."""
        decodes = self._registry.live("decode", now)
        return bool(decodes) and all(w.refused for w in decodes)

    def cached_tokens(self, call: Call) -> int:
        """Return how much of the prompt of `call` some worker is believed to hold, of the kinds that are connected: one
        walk for each kind, however many workers there are."""
        deepest = [(key, max(self._index.depths(call.chain(key)).values(), default=0)) for key in self._registry.keys]
        return max((blocks * key[1] for key, blocks in deepest), default=0)

    def soonest(self, call: Call, now: float) -> "Soonest | None":
        """The least that `call` could take on any workers, had they room for it; None if there is no decode worker.
        What a worker has not measured itself takes no time there."""
        held = _Held(self._index, call)
        decodes = self._registry.takers("decode", now)
        if not decodes:
            return None
        ways_s: list[float] = []
        for key in {w.key for w in decodes}:
            alike = [w for w in decodes if w.key == key]
            wanted = demand(call.record, alike[0].info)
            readers = self._readers(call.record, key[0], (), now)
            read_s = min((self._least_read_s(w, held, wanted) for w in readers), default=None)
            for worker in alike:
                busy = worker.used_blocks / worker.info.blocks if worker.info.blocks else 0.0
                step_s = self._least_step_s(worker) * busy
                if read_s is not None:
                    missing = max(wanted.prompt_blocks - held.blocks(worker), 0)
                    move_s = missing * worker.least_s_per_block * self._fitted.least_exposure(worker.name)
                    ways_s.append(read_s + move_s + step_s)
                if self._local_prefill or read_s is None:
                    ways_s.append(self._least_read_s(worker, held, wanted) + step_s)
        return Soonest(min(ways_s), min(self._least_step_s(w) for w in decodes))

    def beside(self, call: Call, host: Call, now: float) -> Choice | None:
        """The place next to `host`, a request with the same prompt: `call` shares its blocks, and the worker that
        prefills them. None if the decode worker of `host` has no room for what is not shared."""
        record, home = call.record, self._registry.get(host.decode)
        assert home is not None
        if home.refused or home not in self._registry.takers("decode", now):
            return None
        wanted = demand(record, home.info, self._fitted.answer_tokens)
        shared = min(record.prompt_tokens, len(record.tokens) - 1) // home.info.block_size
        view = self._decode_view(home, shared)
        if not _fits(wanted, view):
            return None
        prefill = self._registry.get(host.prefill)
        reader = _whole_view(LOCAL.name if prefill is None else prefill.name, wanted)
        return self._policy.choose(wanted, [reader], [view])

    def has_room_elsewhere(self, call: Call, home: WorkerEntry, promised: int, now: float) -> bool:
        """Return True if another decode worker than `home`, where it runs, could take `call` beside `promised` more
        blocks."""
        held, demands = _Held(self._index, call), _Demands(call.record)
        return any(
            _fits(demands[worker.room], self._decode_view(worker, *self._cached(worker, held)), promised)
            for worker in self._registry.takers("decode", now)
            if worker.key == home.key and worker is not home and not worker.refused
        )

    def choose_prefill(self, call: Call, now: float) -> PrefillView | None:
        """The best live prefill worker for `call`, which runs, without those that failed it; None if there is none."""
        decode = self._registry.get(call.decode)
        assert decode is not None
        wanted = demand(call.record, decode.info, self._fitted.answer_tokens)
        held = _Held(self._index, call)
        readers = self._readers(call.record, decode.info.fingerprint, call.failed_prefills, now)
        views = self._prefill_views(call, held, readers, wanted)
        home = self._decode_view(decode, *self._cached(decode, held))
        choice = self._policy.choose(wanted, views, [home])
        return None if choice is None else choice.prefill

    def _readers(
        self, record: RequestRecord, fingerprint: str, failed: Collection[Life], now: float
    ) -> list[WorkerEntry]:
        """The prefill workers of a model that could read the prompt of `record`, without those that `failed`."""
        demands, adapter = _Demands(record), record.adapter
        return [
            w
            for w in self._registry.takers("prefill", now)
            if w.key[0] == fingerprint
            and (not adapter or adapter in w.info.adapters)
            and demands[w.room].prompt_blocks <= w.info.blocks
            and not (failed and w.life in failed)
        ]

    def _prefill_views(
        self, call: Call, held: "_Held", readers: Sequence[WorkerEntry], wanted: Demand
    ) -> list[PrefillView]:
        delaying: dict[str, float] = {}
        # Workers whose blocks are of one size hold the same beginnings.
        kinds = {w.key for w in readers}
        for key in kinds:
            delaying |= self._delaying(call, held, [w for w in readers if len(kinds) == 1 or w.key == key])
        found = {key: held.depths(key) for key in kinds}
        loading = self._loadings(held, readers, kinds)
        return [
            self._reader_view(call, w, found[w.key].get(w.name, 0), wanted, delaying[w.name], loading.get(w.name))
            for w in readers
        ]

    def _local_views(
        self,
        call: Call,
        held: "_Held",
        decodes: Sequence[WorkerEntry],
        readers: Sequence[WorkerEntry],
        wanted: Demand,
    ) -> dict[str, PrefillView]:
        """The decode workers of one kind as those that read the prompt themselves, beside prefill workers if any. Until
        one has computed a prompt, it is taken to be as quick as a prefill worker."""
        key = decodes[0].key
        found = held.depths(key)
        delaying = self._delaying(call, held, [*decodes, *(w for w in readers if w.key == key)])
        loading = self._loadings(held, decodes, (key,))
        return {
            w.name: self._reader_view(call, w, found.get(w.name, 0), wanted, delaying[w.name], loading.get(w.name))
            for w in decodes
        }

    def _delaying(self, call: Call, held: "_Held", alike: Sequence[WorkerEntry]) -> dict[str, float]:
        """How many tokens' time others would lose by each of these workers, whose blocks are of one size."""
        depths = held.depths(alike[0].key)
        found = {w.name: depths.get(w.name, 0) for w in alike}
        queues = {w.name: w.queue_tokens for w in alike}
        s_per_token = self._fitted.usual_s_per_token or ASSUMED_S_PER_TOKEN
        chain, size = call.chain(alike[0].key), alike[0].key[1]
        full = {w.name for w in alike if w.has_evicted} if self._reuse.evictions.share else ()
        return self._reuse.delaying_tokens(chain, found, size, queues, s_per_token, full)

    def _loading(self, worker: WorkerEntry, held: "_Held", way: str) -> tuple[int, float]:
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

    def _cached(self, worker: WorkerEntry, held: "_Held") -> tuple[int, int, float]:
        """Return how many blocks a decode worker need not be given, how many of them it loads, and their price."""
        computed_blocks, load_s = self._loading(worker, held, "pool")
        lower_blocks = sum(held.lower(worker.key).get(worker.name, ()))
        return held.blocks(worker) - computed_blocks, lower_blocks - computed_blocks, load_s

    def _loadings(
        self, held: "_Held", workers: Sequence[WorkerEntry], kinds: Collection[ModelKey]
    ) -> dict[str, tuple[int, float]]:
        """Return the same of those of `workers`, which are of these kinds, that hold anything in lower tiers."""
        lower = {name for key in kinds for name in held.lower(key)}
        return {w.name: self._loading(w, held, "here") for w in workers if w.name in lower} if lower else {}

    def _reader_view(
        self,
        call: Call,
        worker: WorkerEntry,
        blocks: int,
        wanted: Demand,
        delaying: float,
        loading: tuple[int, float] | None = None,
    ) -> PrefillView:
        """`loading`: what `_loading` says of it, if it holds anything in lower tiers."""
        name, queue_tokens = worker.name, worker.queue_tokens
        s_per_token, delay, host = self._fitted.reading(name)
        if call.left_behind is not None and call.left_behind[0] is worker.load:
            queue_tokens = max(queue_tokens - call.left_behind[1], 0)
        computed_blocks, load_s = loading or (0, 0.0)
        cached_tokens, most = (blocks - computed_blocks) * worker.room[0], wanted.prompt_tokens - 1
        if cached_tokens > most:
            cached_tokens = most
        passed_tokens, uncached_tokens = 0, wanted.prompt_tokens - cached_tokens
        if queue_tokens >= MUCH_SHORTER * uncached_tokens:  # or it goes before nobody, as most do
            chain = call.chain(worker.key) if blocks else ()
            passed_tokens, prompts = worker.reading.overtaken(uncached_tokens, queue_tokens, chain, blocks)
            delaying += prompts * uncached_tokens
        return PrefillView(
            name,
            cached_tokens,
            queue_tokens,
            s_per_token,
            len(worker.own),
            delaying,
            delay,
            host,
            passed_tokens,
            load_s,
        )

    def _least_read_s(self, worker: WorkerEntry, held: "_Held", wanted: Demand) -> float:
        """The least time after which a worker has read a prompt, by what it has measured itself."""
        blocks, queue_tokens = held.blocks(worker), worker.queue_tokens
        uncached = max(wanted.prompt_tokens - blocks * worker.room[0], 1)
        if queue_tokens >= MUCH_SHORTER * uncached:
            chain = held.call.chain(worker.key)
            queue_tokens -= worker.reading.overtaken(uncached, queue_tokens, chain, blocks)[0]
        return (queue_tokens + uncached) * self._fitted.least_s_per_token(worker.name)

    def _least_step_s(self, worker: WorkerEntry) -> float:
        """The least time of a decode worker's step with one more request, by what it has measured itself."""
        load = worker.load
        return 0.0 if load is None else self._fitted.least_step_s(worker.name, load.s_per_token, load.running_requests)

    def _decode_view(
        self, worker: WorkerEntry, cached_blocks: int, loaded_blocks: int = 0, load_s: float = 0.0
    ) -> DecodeView:
        """A view, which the worker keeps for the next request that it holds as much of: coefficients too are those of
        its last report, dispatch or end. One that has run no step has the steps of the others, of whose reports it
        is not told."""
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


class _Demands(dict[Room, Demand]):
    """What one request needs, by what it depends on: the same for most workers."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record

    def __missing__(self, room: Room) -> Demand:
        self[room] = needs = _demand(self._record, room)
        return needs


class Soonest(msgspec.Struct, frozen=True):
    """The least time to the first token of a request, and for each further one, in seconds."""

    first_token_s: float
    s_per_token: float


class _Held:
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


def _whole_view(name: str, wanted: Demand) -> PrefillView:
    """A worker that has the KV of the whole prompt; the last token is computed wherever it goes on."""
    return PrefillView(name, wanted.prompt_tokens - 1, 0, 0.0, 0)


def _fits(wanted: Demand, view: DecodeView, promised: int = 0) -> bool:
    size = view.blocks
    return wanted.blocks + promised - view.device_blocks <= size - view.used_blocks and wanted.most_blocks <= size


def _applies(worker: WorkerEntry, record: RequestRecord) -> bool:
    """Return True if the worker can compute under the record's adapter."""
    return not record.adapter or record.adapter in worker.info.adapters


def _holds(worker: WorkerEntry, record: RequestRecord) -> bool:
    """Return True if the empty pool could hold the prompt, history included (on a decode worker, the answer too)."""
    needs = demand(record, worker.info)
    return (needs.most_blocks if worker.info.role == "decode" else needs.prompt_blocks) <= worker.info.blocks
