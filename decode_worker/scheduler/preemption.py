"""Who gives way when the pool is exhausted, and how it comes back. Pure.

    READY, RUNNING, LOCAL, FORKING --the pool is exhausted--> PREEMPTED: no blocks; what it had is evictable cache
    PREEMPTED --room--> handoff: its tokens so far are a new prompt for its prefill worker
                    --> LOCAL: little is missing, or there is no prefill worker
                    --> FORKING: a sample of the same prompt is being fetched: wait for it, and share
                    --> LOADING: its blocks were copied to host memory, and are copied back

All requests of a worker stand in one order: higher priority first, then older first, samples of one prompt together.
Room is made for each in that order and taken from the end, the samples of another prompt as a group. So the first of
all never gives way to anybody: it can go on whatever the others do, it ends, and another is the first. The last
blocks of a request are evicted first: what it had before them is found again, unless others need that as well.

Only blocks that no copy of ours can touch are taken: a request in a handoff, or one whose prefill worker is being
replaced, is passed over. Whom only such requests stand behind waits for them, without a row in the step and with its
blocks. They never want more blocks than they were taken with, so they land or end, and the wait is not circular.
New requests are refused as long as anybody stands in the line of the preempted, except above its priority.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from decode_worker.scheduler.request import Request, RequestState
from engine.types import RequestRecord

YIELDING = frozenset({RequestState.READY, RequestState.RUNNING, RequestState.LOCAL, RequestState.FORKING})
"""States in which nothing but a step of ours writes to a request's blocks."""
WAYS = ("pool", "here", "shared", "swap")
"""How the KV of a preempted request comes back: computed on the prefill pool, computed here, from a sample of its
prompt that is fetched at the same time, from a lower tier."""


@dataclass(slots=True)
class Resumed:
    """A preempted request decodes again, `seconds` after it was preempted; the KV of `lost_tokens` was gone."""

    way: str
    lost_tokens: int
    seconds: float


def order(request: Request) -> tuple[int, int, int]:
    """The smaller, the longer it keeps its blocks."""
    return -request.record.priority, request.era, request.number


class Preemption:
    """Mutable state, all of it: the line of the preempted, and what is counted. Owner: the scheduler."""

    def __init__(self) -> None:
        self.line: list[Request] = []
        self.preempted: Counter[str] = Counter()
        """By the state in which they were."""
        self.ways: Counter[str] = Counter()
        """By how they came back."""
        self.resumed: list[Resumed] = []

    def bars(self, record: RequestRecord) -> bool:
        """Whether somebody waits whose turn comes before that of a new request."""
        return any(request.record.priority >= record.priority for request in self.line)

    def victims(
        self,
        wants: Request,
        requests: Iterable[Request],
        waiting: Callable[[Request], Sequence[Request]],
    ) -> list[Request]:
        """Who gives way to `wants`: requests to be preempted together, perhaps `wants` itself; nobody where it is
        better to wait. `waiting`: the forks that wait for a request's prompt."""
        here = sorted((r for r in requests if r.state is not RequestState.PREEMPTED), key=order)
        behind = here[here.index(wants) + 1 :]
        last = next((r for r in reversed(behind) if r.state in YIELDING), None)
        if last is None:
            return [] if behind or len(here) == 1 else [wants, *waiting(wants)]
        group = last.record.group
        chosen = [last]
        if group and group != wants.record.group:
            chosen = [r for r in here if r.record.group == group and r.state in YIELDING]
        forks = [fork for request in chosen for fork in waiting(request)]
        return chosen + [fork for fork in forks if fork not in chosen]

    def add(self, request: Request, now: float) -> None:
        """It has given its blocks away."""
        self.preempted[request.state.value] += 1
        if request.clock.stage == "prefill":
            request.close_prefill(now)
        request.clock.enter("decode_queue", now)
        request.move(RequestState.PREEMPTED)
        request.arrived, request.first = False, None
        request.known = request.have_blocks = 0
        if request.preempted_at is None:
            request.preempted_at = now
        self.line.append(request)
        self.line.sort(key=order)

    def remove(self, request: Request) -> None:
        """It is over, or comes back."""
        if request in self.line:
            self.line.remove(request)

    def back(self, request: Request, now: float) -> None:
        """All of its KV is here."""
        if request.preempted_at is not None:
            seconds = now - request.preempted_at
            self.ways[request.way] += 1
            self.resumed.append(Resumed(request.way, request.lost_tokens, seconds))
            request.preempted_at = None

    def check(self, requests: Sequence[Request]) -> None:
        """Recompute the invariants: `requests` are all that there are."""
        preempted = [r for r in requests if r.state is RequestState.PREEMPTED]
        assert self.line == sorted(preempted, key=order)
        assert all(not r.lease.blocks and not r.lease.promised for r in self.line)
