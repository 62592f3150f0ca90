"""Makes the views of workers that a policy compares: who is alive, who may have room, who holds what of a prompt.

Where no prefill worker is left that could read a prompt, its decode worker reads it alone: the choice then names
`LOCAL` as its prefill worker. The chosen decode worker is offered the request over `router/dispatch.py`, where the way
goes on.
"""

from collections.abc import Callable, Container

import msgspec

from engine.messages import Fault, PeerAddress, WorkerInfo
from engine.types import RequestRecord
from router.core.policy import Choice, DecodeView, Demand, PrefillView, RoutingPolicy
from router.core.prefix_index import PrefixIndex
from router.core.registry import Life, ModelKey, Registry, WorkerEntry

ChainOf = Callable[[ModelKey], list[bytes]]

LOCAL = PeerAddress("", "")
"""In the place of a prefill worker: the decode worker prefills by itself."""
_LOCAL_VIEW = PrefillView(LOCAL.name, 0, 0, 0.0, 0)


def demand(record: RequestRecord, info: WorkerInfo) -> Demand:
    """What `record` needs on such a worker."""
    prompt, size = len(record.tokens), info.block_size
    end = record.prompt_tokens + record.max_tokens
    room = end if info.growth_tokens is None else min(end, prompt + info.growth_tokens)
    return Demand(prompt, -(-prompt // size), -(-room // size), -(-end // size))


class Placer:
    """Asks the policy with the registry's and the index's present beliefs; changes neither."""

    def __init__(self, policy: RoutingPolicy, registry: Registry, index: PrefixIndex) -> None:
        self._policy = policy
        self._registry = registry
        self._index = index

    def impossible(self, record: RequestRecord) -> Fault | None:
        """Why no known worker could ever take `record`, however long it waited; None if one may."""
        decodes = self._registry.role("decode")
        prefills = self._registry.role("prefill")
        if decodes and not any(demand(record, w.info).most_blocks <= w.info.blocks for w in decodes):
            room = max(w.info.blocks * w.info.block_size for w in decodes)
            message = (
                f"max_tokens: {record.prompt_tokens} prompt tokens and {record.max_tokens} output "
                f"tokens do not fit into the largest decode worker's {room} tokens of KV memory"
            )
            return Fault("OUT_OF_RANGE", message, "max_tokens")
        if prefills and not any(_holds(w, record) for w in prefills):
            room = max(w.info.blocks * w.info.block_size for w in prefills)
            message = (
                f"prompt: {record.prompt_tokens} tokens do not fit into the largest prefill "
                f"worker's {room} tokens of KV memory"
            )
            return Fault("OUT_OF_RANGE", message, "prompt")
        return None

    def choose(
        self, record: RequestRecord, chain_of: ChainOf, now: float, source: WorkerEntry | None = None
    ) -> tuple[Choice, Demand, ModelKey] | None:
        """The best pair now, or None if nobody may have room. `source`: a decode worker that has the KV of all of
        `record` and takes the place of any prefill worker."""
        decodes = [w for w in self._registry.takers("decode", now) if not w.refused]
        if not decodes:
            return None
        prefills = [w for w in self._registry.takers("prefill", now) if _holds(w, record)]
        best: tuple[Choice, Demand, ModelKey] | None = None
        for key in sorted({w.key for w in decodes}):
            alike = [w for w in decodes if w.key == key]
            wanted = demand(record, alike[0].info)
            chain = chain_of(key)
            views = [
                self._prefill_view(w, chain_of(w.key), wanted)
                for w in prefills
                if w.info.fingerprint == key[0]
            ]
            if source is not None and source.info.fingerprint == key[0]:
                views = [PrefillView(source.name, wanted.prompt_tokens - 1, 0, 0.0, 0)]
            choice = self._policy.choose(
                wanted,
                views or [_LOCAL_VIEW],
                [
                    view
                    for w in alike
                    for view in [self._decode_view(w, chain)]
                    if _fits(demand(record, w.info), view)
                ],
            )
            if choice is not None and (best is None or _rank(choice) < _rank(best[0])):
                best = (choice, wanted, key)
        return best

    def beside(
        self, record: RequestRecord, home: WorkerEntry, prefill: str, now: float
    ) -> tuple[Choice, Demand, ModelKey] | None:
        """The place next to a request with the same prompt, which shares its blocks, prefilled by `prefill`; None if
        its worker has no room for what is not shared."""
        if home.refused or home not in self._registry.takers("decode", now):
            return None
        wanted = demand(record, home.info)
        shared = min(record.prompt_tokens, len(record.tokens) - 1) // home.info.block_size
        view = msgspec.structs.replace(self._decode_view(home, []), cached_blocks=shared)
        if not _fits(wanted, view):
            return None
        reads = _LOCAL_VIEW
        if self._registry.get(prefill) is not None:
            reads = PrefillView(prefill, wanted.prompt_tokens - 1, 0, 0.0, 0)
        choice = self._policy.choose(wanted, [reads], [view])
        return None if choice is None else (choice, wanted, home.key)

    def has_room_elsewhere(
        self, record: RequestRecord, chain_of: ChainOf, home: WorkerEntry, promised: int, now: float
    ) -> bool:
        """Whether another decode worker than `home` could take what runs there, beside `promised` more blocks."""
        chain = chain_of(home.key)
        return any(
            _fits(demand(record, worker.info), self._decode_view(worker, chain), promised)
            for worker in self._registry.takers("decode", now)
            if worker.key == home.key and worker is not home and not worker.refused
        )

    def choose_prefill(
        self,
        record: RequestRecord,
        chain_of: ChainOf,
        decode: WorkerEntry,
        failed: Container[Life],
        now: float,
    ) -> PrefillView | None:
        """The best prefill worker for a request that `decode` holds, none of `failed`; None if no other is live."""
        wanted = demand(record, decode.info)
        views = [
            self._prefill_view(w, chain_of(w.key), wanted)
            for w in self._registry.takers("prefill", now)
            if w.info.fingerprint == decode.info.fingerprint
            and w.life not in failed
            and _holds(w, record)
        ]
        decodes = [self._decode_view(decode, chain_of(decode.key))]
        choice = self._policy.choose(wanted, views, decodes)
        return None if choice is None else choice.prefill

    def _prefill_view(self, worker: WorkerEntry, chain: list[bytes], wanted: Demand) -> PrefillView:
        cached = self._index.match(worker.name, chain) * worker.info.block_size
        return PrefillView(
            worker.name,
            min(cached, wanted.prompt_tokens - 1),
            worker.queue_tokens,
            worker.load.s_per_token if worker.load else 0.0,
            len(worker.own),
        )

    def _decode_view(self, worker: WorkerEntry, chain: list[bytes]) -> DecodeView:
        load = worker.load
        return DecodeView(
            worker.name,
            self._index.match(worker.name, chain),
            worker.used_blocks,
            worker.info.blocks,
            load.s_per_token if load else 0.0,
            load.s_per_block if load else {},
            len(worker.own),
        )


def _fits(wanted: Demand, view: DecodeView, promised: int = 0) -> bool:
    missing = wanted.blocks + promised - view.cached_blocks
    return missing <= view.blocks - view.used_blocks and wanted.most_blocks <= view.blocks


def _holds(worker: WorkerEntry, record: RequestRecord) -> bool:
    """Whether the whole prompt, history included, fits into the worker's pool."""
    return demand(record, worker.info).prompt_blocks <= worker.info.blocks


def _rank(choice: Choice) -> tuple[bool, float]:
    """A prefill worker is always preferred to none."""
    return choice.prefill.name == LOCAL.name, choice.cost.total_s
