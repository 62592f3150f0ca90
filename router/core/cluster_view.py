"""The router's view of its workers, which may be stale: updated as its own requests are placed, accepted and ended.

Every placement adds to the load of its two workers until a report counts it; every acceptance and every end corrects
what is believed to be cached.
"""

from collections.abc import Mapping

from engine import identity
from engine.identity import SHORT_BYTES
from engine.messages import Accepted, PeerAddress, ReadTold, Refused, RequestStats
from engine.types import RequestId
from router.core.call import Call, State
from router.core.placement import LOCAL
from router.core.policy import Choice, PrefillView, loading_s
from router.core.prefix_index import PrefixIndex
from router.core.registry import Registry, WorkerEntry
from router.core.worker_views import demand


class ClusterView:
    """The router core owns it."""

    # Mutable state: the connected workers with their load, and what each is believed to hold.

    def __init__(self, silent_s: float) -> None:
        self.registry = Registry(silent_s)
        self.index = PrefixIndex()

    def offered(self, call: Call, choice: Choice, *, is_fork: bool = False) -> PeerAddress:
        """Note the decode worker that `call` is offered to, and who prefills it, whose address this returns. `is_fork`:
        another sample's prompt is its own, so nobody reads it."""
        decode = self.registry.get(choice.decode.name)
        assert decode is not None
        call.decode, call.decode_life, call.key = decode.name, decode.life, decode.key
        # What it loads it has not when it accepts, and has to find room for.
        call.believed_decode_blocks = choice.decode.device_blocks
        call.predicted_s = _predicted_s(choice) if call.source is None and not call.emitted else None
        new_blocks = demand(call.record, decode.info).blocks - call.believed_decode_blocks
        # What nobody else reads, it reads itself.
        uncached = 0 if choice.prefill.name else len(call.record.tokens) - choice.prefill.cached_tokens
        self.registry.dispatched(decode.name, call.record.request, uncached, new_blocks)
        peer = self._use_prefill(call, choice.prefill, is_read=call.source is None and not is_fork)
        # Those that come before the answer go where their beginning is about to be computed.
        self._reads(call)
        return peer

    def _reads(self, call: Call) -> None:
        """Believe that the prefill worker of `call`, if it has one, will hold its prompt."""
        if call.prefill:
            self.index.insert(call.prefill, call.chain(call.prefill_key))

    def refused(self, call: Call, record: Refused) -> None:
        """Note that nobody will compute `call`: its prefill worker holds what it was believed to hold before, and its
        decode worker no more than it says."""
        if record.cached_tokens is not None:
            self._holds_no_more(call, record.cached_tokens)
        if call.prefill:
            believed_blocks = call.believed_prefill_tokens // call.prefill_key[1]
            self.index.correct(call.prefill, call.chain(call.prefill_key), believed_blocks)

    def _use_prefill(self, call: Call, choice: PrefillView, *, is_read: bool = True) -> PeerAddress:
        """Note who prefills `call`, and what is believed of it. `is_read`: there is something to prefill."""
        call.prefill, call.believed_prefill_tokens = choice.name, choice.cached_tokens
        call.is_prefilled = False
        prefill = self.registry.get(choice.name)
        if prefill is None:
            call.prefill_life = None
            return LOCAL
        call.prefill_life, call.prefill_key = prefill.life, prefill.key
        uncached = len(call.record.tokens) - choice.cached_tokens
        self.registry.dispatched(choice.name, call.record.request, uncached, 0)
        if is_read:
            chain, first = call.chain(prefill.key), choice.cached_tokens // prefill.key[1]
            block = chain[first] if first < len(chain) else b""
            self.registry.reads(choice.name, call.record.request, uncached, first, block)
        return prefill.peer

    def reading(self, call: Call) -> ReadTold:
        """Return what other routers should know of `call`, which is offered: who reads its prompt."""
        reader, key = (call.prefill, call.prefill_key) if call.prefill else (call.decode, call.key)
        chain, held = call.chain(key), call.believed_prefill_tokens // key[1]
        parent = chain[held - 1][:SHORT_BYTES] if held else b""
        blocks = b"".join(one[:SHORT_BYTES] for one in chain[held:])
        uncached = len(call.record.tokens) - call.believed_prefill_tokens
        return ReadTold(reader, call.placement == 1, uncached, parent, blocks)

    def told(self, record: ReadTold) -> None:
        """Note what another router has sent to a worker: it will hold it, and has to read it first."""
        self.index.learn(record.reader, record.parent, record.blocks)
        self.registry.told(record.reader, record.uncached_tokens)

    def replace_prefill(self, call: Call, choice: PrefillView | None) -> PeerAddress | None:
        """Note that another worker prefills `call`, which runs, or none does; return the address of the former."""
        self.registry.released(call.prefill, call.record.request)
        call.predicted_s = None
        if choice is None:
            call.prefill, call.prefill_life, call.believed_prefill_tokens = "", None, 0
            return None
        peer = self._use_prefill(call, choice)
        self.registry.accepted(call.prefill, call.record.request)
        self._reads(call)
        return peer

    def accepted(self, call: Call, record: Accepted) -> None:
        """Note that both workers are about to hold the blocks of `call`; the decode worker says how many it has."""
        self._holds_no_more(call, record.cached_tokens)
        self.index.insert(call.decode, call.chain(call.key))
        self._reads(call)

    def _holds_no_more(self, call: Call, cached_tokens: int) -> None:
        """Correct what the device of the decode worker of `call` is believed to hold of its prompt, if that was too
        much."""
        actual_blocks = cached_tokens // call.key[1]
        if actual_blocks < call.believed_decode_blocks:
            self.index.left_device(call.decode, call.chain(call.key), actual_blocks)

    def arrived(self, call: Call) -> None:
        """Note that the decode worker of `call` has its prompt, whatever it said of it while that was on the way."""
        self.index.insert(call.decode, call.chain(call.key))

    def adopted(self, call: Call, home: WorkerEntry, prefill: str) -> None:
        """Note that `home` holds `call` since before this router knew either; its prompt was prefilled by `prefill`."""
        call.decode, call.decode_life, call.key = home.name, home.life, home.key
        self.registry.dispatched(home.name, call.record.request, 0, 0)
        self.index.insert(home.name, call.chain(home.key))
        call.prefill, reader = prefill, self.registry.get(prefill)
        if reader is not None:
            call.prefill_life, call.prefill_key = reader.life, reader.key
            self.index.insert(prefill, call.chain(reader.key))

    def ended(self, call: Call, stats: RequestStats) -> None:
        """Note that both workers have committed their blocks: correct the trees, then extend them. What became of the
        placement's prediction is learnt from."""
        self.registry.fitted.ended(call.predicted_s, stats)
        chain, size = call.chain(call.key), call.key[1]
        if call.prefill and stats.prefill_cached_tokens < call.believed_prefill_tokens:
            theirs = call.chain(call.prefill_key)
            actual_blocks = stats.prefill_cached_tokens // call.prefill_key[1]
            self.index.correct(call.prefill, theirs, actual_blocks)
            self.index.insert(call.prefill, theirs)
        parent = chain[-1] if chain else identity.root(call.record.space, call.key[0])
        written = call.tokens[len(chain) * size : -1]
        self.index.insert(call.decode, chain + identity.chain(parent, written, size))

    def release(self, call: Call) -> None:
        """Note that no worker holds `call` any more, for all the router knows."""
        reader = self.registry.get(call.prefill)
        reading = None if reader is None else reader.own.get(call.record.request)
        call.left_behind = None
        if reading is not None and reading.counted and not reading.is_prefilled and reader is not None and reader.load:
            call.left_behind = reader.load, reading.tokens
        self.registry.released(call.prefill, call.record.request)
        self.registry.released(call.decode, call.record.request)

    def check(self, calls: Mapping[RequestId, Call]) -> None:
        """Raise AssertionError if what workers are believed to have to do is not what `calls` say."""
        for request, call in calls.items():
            if call.state is not State.WAITING:
                decode = self.registry.get(call.decode)
                assert decode is not None and request in decode.own, f"{request} is nowhere"
        for worker in self.registry:
            worker.check()
            for request in worker.own:
                assert worker.name in (calls[request].prefill, calls[request].decode), f"{request} is misfiled"


def _predicted_s(choice: Choice) -> tuple[float, float] | None:
    """Return `Call.predicted_s`; None where no prefill worker's speed was behind the price."""
    cost, prefill, decode = choice.cost, choice.prefill, choice.decode
    if not prefill.s_per_token:
        return None
    exposure = decode.exposure[prefill.host != decode.host]
    # As if it went before nobody: what some wait less by that, others wait longer, and together they fit.
    passed_s = prefill.passed_tokens * prefill.s_per_token + loading_s(prefill)
    return (cost.queue_s + cost.compute_s) / prefill.delay + passed_s, cost.move_s / exposure
