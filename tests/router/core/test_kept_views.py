"""What is kept ready of workers, against the plain way: every view made anew from the last report and the dispatches
since, and every pair priced. Decisions must be the same to the last bit, lots included."""

from collections.abc import Callable, Sequence
from random import Random

import msgspec
import pytest

from engine.messages import Accepted, PeerAddress
from engine.types import RequestId
from router.core.call import Call, State
from router.core.placement import LOCAL
from router.core.policy import (
    ASSUMED_S_PER_TOKEN,
    MANY_PAIRS,
    SHORTLIST,
    Choice,
    DecodeView,
    Demand,
    LeastCost,
    PrefillView,
    cost,
    loading_s,
)
from router.core.registry import Registry, WorkerEntry
from router.core.worker_views import demand
from tests.router.core.parts import Parts, request_record
from tests.router.fake_cluster import load, worker_info

NAMES = ("d0", "d1", "d2", "d3", "p0", "p1", "p2")


class PlainLeastCost:
    """The same policy without a shortcut: every pair is priced and rounded, and all ties are kept as pairs."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def choose(
        self, wanted: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        readers, sides = list(range(len(prefills))), list(range(len(decodes)))
        if len(readers) * len(sides) > MANY_PAIRS:
            def reader_s(at: int) -> float:
                terms = cost(wanted, prefills[at], decodes[0])
                return terms.queue_s + terms.compute_s + terms.others_s + loading_s(prefills[at])

            def side_s(at: int) -> float:
                view = decodes[at]
                nobody = PrefillView("", 0, 0, 0.0, 0)
                near_s, far_s = (way or 1e-3 for way in view.unmeasured_s_per_block)
                way_s = min(view.least_s_per_block or near_s, near_s, far_s) * min(view.exposure)
                missing = max(wanted.prompt_blocks - view.cached_blocks, 0)
                return missing * way_s + (cost(wanted, nobody, view).pressure_s + view.load_s)

            readers, sides = self.shortlist(readers, reader_s), self.shortlist(sides, side_s)
        priced = []
        for at, decode in enumerate(decodes):
            if decode.local is not None:
                terms = cost(wanted, decode.local, decode)
                total_s = terms.queue_s + terms.compute_s + terms.others_s + terms.load_s + terms.pressure_s
                priced.append((round(total_s, 6), 2 * decode.outstanding, -1, at))
        for at in sides:
            for reader in readers:
                one, other = prefills[reader], decodes[at]
                terms = cost(wanted, one, other)
                own_s = terms.queue_s + terms.compute_s + terms.others_s + terms.load_s
                total_s = own_s + terms.move_s + terms.pressure_s
                priced.append((round(total_s, 6), one.outstanding + other.outstanding, reader, at))
        if not priced:
            return None
        least = min(priced)[:2]
        ties = sorted((reader, at) for total_s, work, reader, at in priced if (total_s, work) == least)
        reader, at = ties[0] if len(ties) == 1 else self.random.choice(ties)
        chosen = decodes[at].local if reader < 0 else prefills[reader]
        assert chosen is not None
        holds = chosen.cached_tokens or decodes[at].cached_blocks
        return Choice(chosen, decodes[at], cost(wanted, chosen, decodes[at]), "affinity" if holds else "load")

    def shortlist(self, places: list[int], price_s: Callable[[int], float]) -> list[int]:
        """The cheapest; where more of them tie than there is room for, the last are drawn."""
        prices_s = {place: price_s(place) for place in places}
        last_s = sorted(prices_s.values())[:SHORTLIST][-1]
        kept = [place for place in places if prices_s[place] < last_s]
        ties = [place for place in places if prices_s[place] == last_s]
        room = SHORTLIST - len(kept)
        return kept + (ties if len(ties) <= room else self.random.sample(ties, room))


def some_views(
    random: Random, prefills: int, decodes: int, *, idle: bool
) -> tuple[list[PrefillView], list[DecodeView]]:
    """Views with few different figures, so that many pairs tie; with `idle` nearly all do."""

    def some(*figures: float) -> float:
        return figures[0] if idle and random.random() < 0.95 else random.choice(figures)

    readers = []
    for n in range(prefills):
        cached, queue, work = int(some(0, 32, 64)), int(some(0, 10, 500)), int(some(0, 1, 3))
        delay, host = some(1.0, 1.25, 3.0), int(some(0, 1))
        view = PrefillView(f"p{n}", cached, queue, some(0.0, 0.01), work, some(0.0, 7.5), delay, host)
        readers.append(msgspec.structs.replace(view, load_s=some(0.0, 0.05, 2.0)))
    ways = [{}, {f"p{n}": 0.001 * (1 + n % 3) for n in range(0, prefills, 2)}]
    homes = []
    for n in range(decodes):
        way = ways[int(some(0, 1))]
        local = PrefillView(f"d{n}", 16, int(some(0, 40)), 0.01, int(some(0, 1))) if some(0, 1) else None
        least_s = min(way.values(), default=0.0)
        step_s, work = some(0.0, 0.05), int(some(0, 1, 5))
        view = DecodeView(f"d{n}", int(some(0, 2, 4)), int(some(0, 9)), 64, step_s, way, work, least_s, local)
        fitted = {"alone_s": some(0.0, 0.02), "s_per_row": some(0.0, 0.001), "rows": int(some(0, 7))}
        fitted |= {"unmeasured_s_per_block": (some(0.0, 0.002), some(0.0, 0.004)), "host": int(some(0, 1))}
        fitted |= {"load_s": some(0.0, 0.03)}
        homes.append(msgspec.structs.replace(view, exposure=(some(1.0, 0.25), some(1.0, 0.5)), **fitted))
    return readers, homes


@pytest.mark.parametrize("size", [(3, 4), (9, 30), (0, 5), (70, 70), (200, 40)])
@pytest.mark.parametrize("idle", [False, True])
def test_the_search_chooses_and_draws_as_if_all_pairs_were_priced(size: tuple[int, int], *, idle: bool) -> None:
    """Guards decisions that are on record: the same pair to the last bit, and the same lots for the next one."""
    random, ours, plain = Random(sum(size)), LeastCost(Random(5)), PlainLeastCost(Random(5))
    chosen = set()
    for _ in range(60 if sum(size) < 100 else 5):
        readers, homes = some_views(random, *size, idle=idle)
        wanted = Demand(100, 7, 10, 10)
        choice = ours.choose(wanted, readers, homes)
        assert choice == plain.choose(wanted, readers, homes)
        chosen.add(choice and (choice.prefill.name, choice.decode.name))
    assert ours._random.getstate() == plain.random.getstate()
    assert len(chosen) > 2


class WatchedPolicy:
    """Chooses as the router's, and keeps what it was given."""

    def __init__(self) -> None:
        self.policy = LeastCost(Random(3))
        self.given: list[tuple[list[PrefillView], list[DecodeView]]] = []

    def choose(
        self, wanted: Demand, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView]
    ) -> Choice | None:
        self.given.append((list(prefills), list(decodes)))
        return self.policy.choose(wanted, prefills, decodes)


def counted(worker: WorkerEntry) -> tuple[int, int]:
    """Queued tokens and used blocks, the plain way."""
    report, beyond = worker.load, [one for one in worker.own.values() if not one.counted]
    tokens = report.waiting_tokens if report else 0
    blocks = report.active_blocks + report.reserved_blocks + report.promised_blocks if report else 0
    return tokens + sum(one.tokens for one in beyond), blocks - worker.freed_blocks + sum(one.blocks for one in beyond)


def takers(registry: Registry, role: str) -> list[WorkerEntry]:
    return [w for w in registry if w.info.role == role and not (w.load and w.load.leaving)]


def plain_views(parts: Parts, call: Call) -> list[tuple[list[PrefillView], list[DecodeView]]]:
    """The views of all kinds of decode workers for which the policy should be asked, in order."""
    expected = []
    decodes = [w for w in takers(parts.registry, "decode") if not w.refused]
    for key in sorted({w.key for w in decodes}):
        wanted, homes = demand(call.record, next(w.info for w in decodes if w.key == key)), []
        for w in decodes:
            needs, held = demand(call.record, w.info), parts.index.match(w.name, call.chain(w.key))
            used = counted(w)[1]
            if w.key == key and needs.blocks - held <= w.info.blocks - used and needs.most_blocks <= w.info.blocks:
                step_s, ways = (w.load.s_per_token, w.load.s_per_block) if w.load else (0.0, {})
                least_s = min(ways.values(), default=0.0)
                view = DecodeView(w.name, held, used, w.info.blocks, step_s, ways, len(w.own), least_s)
                homes.append(msgspec.structs.replace(view, rows=w.load.running_requests if w.load else 0))
        readers = []
        for w in takers(parts.registry, "prefill"):
            if w.info.fingerprint == key[0] and demand(call.record, w.info).prompt_blocks <= w.info.blocks:
                readers.append(plain_reader(parts, call, w, wanted))
        if homes:
            expected.append((readers, homes))
    return expected


def plain_reader(parts: Parts, call: Call, worker: WorkerEntry, wanted: Demand) -> PrefillView:
    alike = [w for w in takers(parts.registry, "prefill") if w.key == worker.key]
    alike = [w for w in alike if demand(call.record, w.info).prompt_blocks <= w.info.blocks]
    held = {w.name: parts.index.match(w.name, call.chain(w.key)) for w in alike}
    queues = {w.name: counted(w)[0] for w in alike}
    chain, size = call.chain(worker.key), worker.info.block_size
    fitted, name = parts.registry.fitted, worker.name
    pool_s = fitted.usual_s_per_token or ASSUMED_S_PER_TOKEN
    others = parts.placer._reuse.delaying_tokens(chain, held, size, queues, pool_s)[name]
    cached = min(held[name] * size, wanted.prompt_tokens - 1)
    s_per_token, delay, _ = fitted.reading(name)
    own = counted(worker)[0], s_per_token, len(worker.own)
    return PrefillView(name, cached, *own, others, delay, fitted.host(name))


def as_fitted(view: DecodeView, mine: DecodeView) -> DecodeView:
    """Return `view` with what is fitted, of which a kept one has what was known when its worker last changed."""
    names = ("local", "alone_s", "s_per_row", "host", "unmeasured_s_per_block", "exposure")
    return msgspec.structs.replace(view, **{name: getattr(mine, name) for name in names})


def some_event(parts: Parts, random: Random, running: list[Call], number: int) -> None:
    """Let a worker report, leave, come back or refuse, or a request be placed, accepted or ended."""
    name = random.choice(NAMES)
    match random.choice(("report", "report", "join", "leave", "refuse", "place", "place", "accept", "end")):
        case "report":
            ways = {"p0": 0.002, "p1": 0.001} if random.random() < 0.5 else {}
            figures = {"waiting_tokens": random.randrange(90), "waiting_requests": random.randrange(9)}
            figures |= {"running_requests": random.randrange(4), "reserved": random.randrange(3)}
            figures["promised_blocks"] = random.randrange(3)
            reserved = figures.pop("reserved")
            report = load(number, random.randrange(40), s_per_block=ways, leaving=random.random() < 0.1, **figures)
            report = msgspec.structs.replace(report, reserved_blocks=reserved, s_per_token=random.choice([0.0, 0.01]))
            parts.registry.report(name, report, 0.0)
        case "join":
            role = "prefill" if name[0] == "p" else "decode"
            size = 24 if name in ("d3", "p2") else 16
            info = worker_info(name, role, 1, 64, size, "g" if name == "d2" else "f")
            info = msgspec.structs.replace(info, growth_tokens=random.choice([None, 8]))
            if parts.registry.get(name) is None:
                parts.registry.join(PeerAddress(name, ""), info, 0.0)
                parts.index.add(name, 64)
        case "leave":
            if random.random() < 0.3:
                parts.registry.leave(name, 0.0)
        case "refuse":
            if (worker := parts.registry.get(name)) is not None:
                worker.refused = True
        case "place":
            prompt = list(range(random.choice([16, 40, 90])))
            call = parts.table.open(request_record(f"r{number}", len(prompt)), None)
            choice = parts.placer.choose(call, 0.0)
            if choice is not None:
                call.move(State.OFFERED)
                parts.view.offered(call, choice)
                running.append(call)
        case "accept":
            for call in running[-2:]:
                for worker_name in (call.decode, call.prefill):
                    parts.registry.accepted(worker_name, call.record.request)
                if parts.registry.get(call.decode) is not None:
                    parts.view.accepted(call, Accepted(call.record.request, 1, 0))
        case "end":
            if running:
                parts.view.release(running.pop(random.randrange(len(running))))


@pytest.mark.parametrize("seed", range(4))
def test_views_are_those_that_would_be_made_anew(seed: int) -> None:
    """Guards what is kept per worker against an event after which it would have to be another one."""
    parts, random, policy = Parts(), Random(seed), WatchedPolicy()
    parts.placer._policy = policy
    running: list[Call] = []
    seen = kept = 0
    for number in range(250):
        some_event(parts, random, running, number)
        for worker in parts.registry:
            worker.check()
        call = Call(request_record("asked", random.choice([16, 40, 90])), 1, None)
        call.is_counted = True
        before = {w.name: w.decode_view for w in parts.registry}
        policy.given.clear()
        expected = plain_views(parts, call)
        choice = parts.placer.choose(call, 0.0)
        given = [(readers, homes) for readers, homes in policy.given]
        assert [homes for _, homes in given] == [
            [as_fitted(view, mine) for view, mine in zip(homes, made, strict=True)]
            for (_, homes), (_, made) in zip(expected, given, strict=True)
        ]
        assert [readers for readers, _ in given] == [readers for readers, _ in expected]
        assert (choice is None) == (not expected)
        seen += bool(choice and choice.prefill.name != LOCAL.name)
        kept += sum(view is before[view.name] for _, homes in given for view in homes)
    assert seen > 50 and kept > 50, "nothing was compared"


def test_a_dispatch_that_is_placed_again_counts_once() -> None:
    parts = Parts()
    worker = parts.join("d0")
    parts.registry.dispatched("d0", RequestId("a"), 30, 4)
    parts.registry.dispatched("d0", RequestId("a"), 10, 2)
    assert (worker.queue_tokens, worker.used_blocks) == (10, 2)
    worker.check()
