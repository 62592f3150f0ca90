"""Finds the pair of workers that gets a request: asks the policy about those that are alive and may have room.

How each looks to the request is said by `router/core/worker_views.py`. A decode worker may read a prompt itself where
no prefill worker could, and, if `router.local_prefill` says so, wherever that is predicted to be the cheaper: the
choice then names `LOCAL` as its prefill worker. The chosen decode worker is offered the request over
`router/dispatch.py`, where the way goes on.
"""

from collections.abc import Collection, Sequence

import msgspec

from engine.messages import Fault, PeerAddress, ReadTold, WorkerInfo
from engine.plan import MUCH_SHORTER
from engine.types import RequestRecord
from router.config import LocalPrefill
from router.core.call import Call
from router.core.policy import ASSUMED_S_PER_TOKEN, Choice, Demand, PrefillView, RoutingPolicy, token_s
from router.core.prefix_index import PrefixIndex
from router.core.registry import Life, Registry, WorkerEntry
from router.core.reuse import Reuse, spare_tokens
from router.core.sessions import Pin
from router.core.worker_views import Demands, Held, WorkerViews, demand, fits

FALLBACK = "fallback"
"""The reason of a choice without a prefill worker where there had been one."""

SESSION = "session"
"""The reason of a choice that goes on where its conversation was."""

LOCAL = PeerAddress("", "")
"""Stands in the place of a prefill worker: the decode worker prefills by itself."""


class Placer:
    """Asks the policy about the workers as the registry and the index know them now; changes neither."""

    def __init__(
        self,
        policy: RoutingPolicy,
        registry: Registry,
        index: PrefixIndex,
        local_prefill: LocalPrefill,
        return_s: float = 0.0,
    ) -> None:
        """`return_s`: how long a lost worker may take to come back before nobody counts on it."""
        self._policy = policy
        self._local_prefill = local_prefill == "auto"
        self._return_s = return_s
        self._registry = registry
        self._fitted = registry.fitted
        self._index = index
        self._reuse = Reuse()
        self._views = WorkerViews(registry.fitted, self._reuse)

    def impossible(self, record: RequestRecord, now: float) -> Fault | None:
        """Return why no known worker could ever take `record`, however long it waited; None if one may. One that was
        lost may come back."""
        whole = f"{record.prompt_tokens} prompt tokens and {record.max_tokens} output tokens"
        prompt = f"{record.prompt_tokens} tokens"
        for role, field, what in (("decode", "max_tokens", whole), ("prefill", "prompt", prompt)):
            connected = [worker.info for worker in self._registry.role(role)]
            if not connected or (role == "prefill" and self._local_prefill):
                continue  # a decode worker reads it
            known = connected + self._registry.lost_since(role, now - self._return_s)
            able = [info for info in known if _applies(info, record)]
            if not able:
                return Fault("NOT_FOUND", f"adapter: no {role} worker has {record.adapter}", "adapter")
            if not any(_holds(info, record) for info in able):
                room = max(info.blocks * info.block_size for info in able)
                most = f"the largest {role} worker's {room} tokens of KV memory"
                return Fault("OUT_OF_RANGE", f"{field}: {what} do not fit into {most}", field)
        return None

    def takes_nobody_for(self, record: RequestRecord, now: float) -> bool:
        """Return True if those decode workers that take new requests could not hold `record`, had they nothing else:
        it waits for one that leaves, is silent, or is lost."""
        takers = self._takers_for(record, now)
        return bool(self._registry.takers("decode", now)) and not any(_may_take(w.info, record) for w in takers)

    def choose(self, call: Call, now: float) -> Choice | None:
        """The best pair for `call` now, or None if no decode worker may have room."""
        held = Held(self._index, call)
        choice = self._best(call, held, now)
        if choice is not None and not call.is_counted:
            self._count(call, choice, held, now)
        return choice

    def _count(self, call: Call, choice: Choice, held: Held, now: float) -> None:
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

    def _best(self, call: Call, held: Held, now: float) -> Choice | None:
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
        if not self._registry.ejections or any(_may_take(w.info, record) for w in takers):
            return takers
        return [w for w in self._registry.live("decode", now) if not w.leaving and _may_take(w.info, record)]

    def _best_of(
        self, call: Call, held: Held, decodes: Sequence[WorkerEntry], pin: Pin | None, now: float
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
            roomy = self._views.roomy(held, alike)
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
                views = self._views.of_readers(held, readers, wanted)
                if self._local_prefill or not views:
                    local = self._views.of_themselves(held, alike, readers, wanted)
                    roomy = [msgspec.structs.replace(v, local=local[v.name]) for v in roomy]
            choice = self._policy.choose(wanted, views, roomy)
            if choice is not None and choice.prefill.name == choice.decode.name:
                choice = self._by_itself(choice, has_readers=bool(views))
            if choice is not None and (best is None or self._rank(choice) < self._rank(best)):
                best = choice
                held.compared = [*views, *(v.local for v in roomy if v.local is not None)]
        return best

    def _by_itself(self, choice: Choice, *, has_readers: bool) -> Choice:
        """The same choice in the words of the rest of the router: the decode worker has no prefill worker."""
        is_fallback = not has_readers and self._registry.has_met_any("prefill")
        reader = msgspec.structs.replace(choice.prefill, name=LOCAL.name)
        return msgspec.structs.replace(choice, prefill=reader, reason=FALLBACK if is_fallback else choice.reason)

    def _rank(self, choice: Choice) -> tuple[bool, float]:
        """Unless told otherwise, a prefill worker is always preferred to none."""
        return not self._local_prefill and choice.prefill.name == LOCAL.name, choice.cost.total_s

    def may_have_room(self, name: str, call: Call) -> bool:
        """Return False if a worker has no room for `call` as a decode worker."""
        worker = self._registry.get(name)
        if worker is None or worker.info.role != "decode":
            return False
        wanted = demand(call.record, worker.info)
        if wanted.blocks - wanted.prompt_blocks > worker.info.blocks - worker.used_blocks:
            return False  # also where all of its prompt is cached
        return bool(self._views.roomy(Held(self._index, call), [worker]))

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
        held = Held(self._index, call)
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
        view = self._views.with_cached(home, shared)
        if not fits(wanted, view):
            return None
        prefill = self._registry.get(host.prefill)
        reader = _whole_view(LOCAL.name if prefill is None else prefill.name, wanted)
        return self._policy.choose(wanted, [reader], [view])

    def has_room_elsewhere(self, call: Call, home: WorkerEntry, promised: int, now: float) -> bool:
        """Return True if another decode worker than `home`, where it runs, could take `call` beside `promised` more
        blocks."""
        held, demands = Held(self._index, call), Demands(call.record)
        return any(
            fits(demands[worker.room], self._views.of_decode(worker, held), promised)
            for worker in self._registry.takers("decode", now)
            if worker.key == home.key and worker is not home and not worker.refused
            if promised <= worker.info.blocks - worker.used_blocks  # before its prompt is looked for in the index
            if _applies(worker.info, call.record)
        )

    def choose_prefill(self, call: Call, now: float) -> PrefillView | None:
        """The best live prefill worker for `call`, which runs, without those that failed it; None if there is none."""
        decode = self._registry.get(call.decode)
        assert decode is not None
        wanted = demand(call.record, decode.info, self._fitted.answer_tokens)
        held = Held(self._index, call)
        readers = self._readers(call.record, decode.info.fingerprint, call.failed_prefills, now)
        views = self._views.of_readers(held, readers, wanted)
        home = self._views.of_decode(decode, held)
        choice = self._policy.choose(wanted, views, [home])
        return None if choice is None else choice.prefill

    def _readers(
        self, record: RequestRecord, fingerprint: str, failed: Collection[Life], now: float
    ) -> list[WorkerEntry]:
        """The prefill workers of a model that could read the prompt of `record`, without those that `failed`."""
        demands, adapter = Demands(record), record.adapter
        readers, room, prompt_blocks = [], None, 0
        for worker in self._registry.takers("prefill", now):
            if worker.room != room:
                room, prompt_blocks = worker.room, demands[worker.room].prompt_blocks
            if (
                worker.key[0] == fingerprint
                and prompt_blocks <= worker.info.blocks
                and not (adapter and adapter not in worker.info.adapters)
                and not (failed and worker.life in failed)
            ):
                readers.append(worker)
        return readers

    def _least_read_s(self, worker: WorkerEntry, held: Held, wanted: Demand) -> float:
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

class Soonest(msgspec.Struct, frozen=True):
    """The least time to the first token of a request, and for each further one, in seconds."""

    first_token_s: float
    s_per_token: float


def _whole_view(name: str, wanted: Demand) -> PrefillView:
    """A worker that has the KV of the whole prompt; the last token is computed wherever it goes on."""
    return PrefillView(name, wanted.prompt_tokens - 1, 0, 0.0, 0)


def _applies(worker: WorkerInfo, record: RequestRecord) -> bool:
    """Return True if the worker can compute under the record's adapter."""
    return not record.adapter or record.adapter in worker.adapters


def _holds(worker: WorkerInfo, record: RequestRecord) -> bool:
    """Return True if the empty pool could hold the prompt, history included (on a decode worker, the answer too)."""
    needs = demand(record, worker)
    return (needs.most_blocks if worker.role == "decode" else needs.prompt_blocks) <= worker.blocks


def _may_take(worker: WorkerInfo, record: RequestRecord) -> bool:
    return _applies(worker, record) and _holds(worker, record)
