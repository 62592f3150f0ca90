"""Shares the line among tenants by what their requests really cost, and says whose is next. Pure.

A tenant's account counts tokens / weight: those of its prompts that no worker had cached, and OUTPUT_WEIGHT for each
token of its answers (Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A prompt is charged by
estimate when it is offered, and the charge is put right by what its worker reports; answers are charged as they come.
The tenant that has had the least is next. A tenant that comes back begins where those that wait are: by asking for
nothing, nothing is saved up.

Tenants within QUANTUM of the least one are as good as equal: of their next requests, the one with the longest cached
beginning goes first (S. Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025), so that a prefix is used
while it is there. Two bounds keep this from starving anybody:

- the least tenant's next request is passed by at most MOST_PASSED hotter ones, until it is served;
- whoever is served before the least tenant has had at most QUANTUM more than it.

With several routers each has a line of its own, and tells the others what it has charged and who waits there
(`router/core/other_lines.py`). Accounts include what the others have charged; who waits elsewhere counts as one that
waits here, but for its requests, which are not here: while one of them has had less than all that wait here, by more
than QUANTUM, nobody here is next, so that the room that there is goes to it. What the others charge while their words
are on their way is what the shares are wrong by. A router that could serve nobody says that nobody waits there.

Of one tenant's requests the highest priority goes first, then the oldest; but every OLDEST_EVERY-th turn is its oldest
request's, so that one with k older ones is served within OLDEST_EVERY · (k + 1) of its tenant's turns.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from math import ceil

from access.siblings import MOST_NAMED
from engine.messages import TenantLine, TenantsTold
from engine.types import RequestId
from router.core.other_lines import OtherLines

OUTPUT_WEIGHT = 2.0
"""What a token of an answer costs beside one of a prompt."""
QUANTUM = 1024.0
"""Tokens / weight by which two tenants may differ and be as good as equal."""
MOST_PASSED = 8
LOOKED_AT = 8
"""Tenants whose next requests are compared, at most."""
OLDEST_EVERY = 8
MAX_TENANTS = 4096
"""Tenants remembered that wait nowhere and have no request here; beyond it those go that owe nothing, then all."""
TOLD_AGAIN_EVERY = 20
"""Every so many words all that were charged here are to be named again, also if nothing has changed: one may be lost.
"""


@dataclass(slots=True, eq=False)
class _Account:
    """`line` holds what waits, in the order of its keys, and `arrived` the same by turn, the oldest first; `requests`
    counts all that may still be charged."""

    weight: float
    spent: float = 0.0
    charged: float = 0.0
    """The part of it that was charged here, since all began anew."""
    told: float = 0.0
    """What the other routers have been told of that."""
    is_due_again: bool = False
    """It is to be told, also if nothing has changed."""
    line: "list[_Entry]" = field(default_factory=list)
    arrived: "list[_Entry]" = field(default_factory=list)
    requests: int = 0
    turns: int = 0
    """Requests served since its oldest one was."""
    passed: int = 0
    """Requests of others that went first although it had had the least, since it was served."""

    @property
    def next(self) -> "_Entry":
        return self.oldest if self.turns >= OLDEST_EVERY - 1 else self.line[0]

    @property
    def oldest(self) -> "_Entry":
        return self.arrived[0]

    @property
    def is_untold(self) -> bool:
        return self.is_due_again or max(self.charged, 0.0) != self.told

    def charge(self, amount: float) -> None:
        """Charge tokens / weight."""
        self.spent += amount
        self.charged += amount


@dataclass(slots=True, eq=False)
class _Entry:
    """One request, from its arrival to its end. `charged`: tokens of its prompt; None before it is offered."""

    request: RequestId
    account: _Account
    key: tuple[int, int]
    weight: float
    charged: float | None = None
    epoch: int = 0
    has_begun: bool = False
    is_aside: bool = False


class FairShare:
    """The router core owns it. It knows requests by name, and each from `enter`, or `go_on`, to `left`."""

    # Mutable state: the tenants' accounts, the one that was told of longest ago first, those of them that wait, who
    # waits elsewhere, and who was last said to wait here, and whether its turn had come; the requests, those of them
    # that are put aside, where the tenant stood that was served last, and how often all began anew; how many words were
    # told, and how often what they sum up began anew, which it does too where accounts are forgotten.

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, _Account] = {}
        self._others = OtherLines()
        self._told: dict[str, bool] = {}
        self._entries: dict[RequestId, _Entry] = {}
        self._tenants: dict[RequestId, str] = {}
        self._aside: dict[RequestId, _Entry] = {}
        self._level = 0.0
        self._epoch = 0
        self._words = 0
        self._sums_epoch = 0

    def __repr__(self) -> str:
        return f"FairShare(at {self._level:g}, {len(self._accounts)} tenants, {len(self)} waiting)"

    def __len__(self) -> int:
        """How many requests stand in the lines."""
        return sum(len(account.line) for account in self._waiting.values())

    def __contains__(self, request: RequestId) -> bool:
        """Return True if the request stands in a line."""
        entry = self._entries.get(request)
        return entry is not None and entry.charged is None and not entry.is_aside

    def is_aside(self, request: RequestId) -> bool:
        return request in self._aside

    def enter(self, request: RequestId, tenant: str, weight: float, priority: int, turn: int) -> None:
        """A request waits from now on. Its turn is behind all earlier ones'."""
        self._forget_tenants()
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(weight, self._least())
        account.weight = weight
        entry = self._entries[request] = _Entry(request, account, (-priority, turn), weight)
        self._tenants[request] = tenant
        account.requests += 1
        self._line_up(entry)

    @property
    def has_charged(self) -> bool:
        """True once a tenant was charged here, since all began anew."""
        return any(account.charged > 0.0 for account in self._accounts.values())

    def is_first_of_its_line(self, request: RequestId) -> bool:
        """Return True if the request stands in a line, and is its tenant's next."""
        return request in self and self._entries[request].account.next.request == request

    def put_aside(self, request: RequestId) -> None:
        """No worker could hold the request as things are. It stands in no line, and its tenant is
        charged nothing."""
        entry = self._entries[request]
        self._take_out(entry)
        entry.is_aside = True
        self._aside[request] = entry

    def bring_back(self, request: RequestId) -> bool:
        """The request has its turn in the line again that it had before it was put aside; False if it was not."""
        entry = self._aside.pop(request, None)
        if entry is None:
            return False
        entry.is_aside = False
        self._line_up(entry)
        return True

    def go_on(self, request: RequestId, tenant: str, weight: float) -> None:
        """A request that another router had goes on here. It pays for what it writes from now on; for its prompt it
        has paid there."""
        self._forget_tenants()
        account = self._accounts.setdefault(tenant, _Account(weight, self._level))
        account.requests += 1
        # No charge of its prompt is ever of this epoch.
        self._entries[request] = _Entry(request, account, (0, 0), weight, 0.0, -1, True)
        self._tenants[request] = tenant

    def next(self, cached_tokens: Callable[[RequestId], int]) -> RequestId | None:
        """Return the request whose turn it is, None if none waits, or it is the turn of one that waits elsewhere.
        `cached_tokens` tells how much of a prompt some worker holds."""
        first = self._first()
        if first is None:
            return None
        least = self._least()
        if first.spent - least > QUANTUM:
            return None
        if len(self._waiting) > 1 and first.passed < MOST_PASSED:
            near = (account for account in self._waiting.values() if account.spent - least <= QUANTUM)
            equal = nsmallest(LOOKED_AT, near, key=_rank)
            if len(equal) > 1:
                return max((account.next.request for account in equal), key=cached_tokens)
        return first.next.request

    def serve(self, request: RequestId, tokens: int) -> None:
        """The request is offered to a worker, which is predicted to compute so many tokens of its prompt."""
        entry, first = self._entries[request], self._first()
        account = entry.account
        assert first is not None
        if first is not account:
            first.passed += 1
        account.turns = 0 if account.oldest is entry else account.turns + 1
        account.passed = 0
        self._level = account.spent
        self._take_out(entry)
        entry.charged, entry.epoch = float(max(1, tokens)), self._epoch
        account.charge(entry.charged / entry.weight)

    def began(self, request: RequestId, tokens: int | None = None) -> None:
        """A worker has the request: it pays for its prompt, of which `tokens` are really computed, where that is
        known."""
        entry = self._entries.get(request)
        if entry is None or entry.charged is None:
            return
        entry.has_begun = True
        if tokens is not None:
            self._charge(entry, float(max(1, tokens)))

    def wrote(self, request: RequestId, tokens: int) -> None:
        """So many tokens of its answer have come."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.account.charge(OUTPUT_WEIGHT * tokens / entry.weight)

    def left(self, request: RequestId) -> None:
        """The request is over. What no worker has begun is given back."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return
        if entry.is_aside:
            del self._aside[request]
        elif entry.charged is None:
            self._take_out(entry)
        elif not entry.has_begun:
            self._charge(entry, 0.0)
        entry.account.requests -= 1
        del self._tenants[request]

    def begin_anew(self) -> None:
        """Nobody waits: what was used up to now counts no more."""
        self._epoch += 1
        self._sums_epoch += 1
        self._level = 0.0
        self._accounts = {tenant: account for tenant, account in self._accounts.items() if account.requests}
        for account in self._accounts.values():
            account.spent = account.charged = account.told = 0.0
            account.is_due_again = False

    @property
    def is_waited_for_elsewhere(self) -> bool:
        """True while requests wait at other routers."""
        return bool(self._others.waiting)

    def news(self, *, can_serve: bool = True) -> tuple[int, dict[str, TenantLine]]:
        """Return what other routers are to be told: the epoch of the sums, and what tenants were charged here in it, if
        that has changed, who waits, and whose turn has come. While this router `can_serve` nobody, nobody waits. Empty
        while nobody waits anywhere, as all begin anew then.

        At most MOST_NAMED are named: first whose turn has come or gone, then whoever was not named for longest."""
        waiting = self._waiting if can_serve else {}
        if not (waiting or self._told or self._others.waiting):
            return self._sums_epoch, {}
        least, told, accounts = self._least(), self._told, self._accounts
        if self._words % TOLD_AGAIN_EVERY == 0:
            for account in accounts.values():
                account.is_due_again = account.charged > 0.0
        self._words += 1
        is_due = {tenant: account.spent - least <= QUANTUM for tenant, account in waiting.items()}
        # In the accounts' order, in which those named last stand last.
        first = [tenant for tenant in accounts if told.get(tenant) is not is_due.get(tenant)]
        first += [tenant for tenant in told if tenant not in accounts]
        named = dict.fromkeys(first[:MOST_NAMED])
        if len(named) < MOST_NAMED:
            more = (
                tenant
                for tenant, account in accounts.items()
                if (account.is_untold or tenant in is_due) and tenant not in named
            )
            named |= dict.fromkeys(islice(more, MOST_NAMED - len(named)))
        return self._sums_epoch, {tenant: self._tell(tenant, is_due.get(tenant)) for tenant in named}

    def _tell(self, tenant: str, is_due: bool | None) -> TenantLine:
        """Return what is told of a tenant, and note that it is; None where it does not wait."""
        if is_due is None:
            self._told.pop(tenant, None)
        else:
            self._told[tenant] = is_due
        account, charged = self._accounts.pop(tenant, None), 0.0
        if account is not None:
            self._accounts[tenant] = account
            # Told, it is never below 0; what is given back once more, after sums began anew, is left out.
            charged = account.told = max(account.charged, 0.0)
            account.is_due_again = False
        return charged, is_due is not None, is_due is True

    def knows(self, told: TenantsTold) -> bool:
        """Return True if this life of another router has been heard before."""
        return self._others.knows(told)

    def heard(self, told: TenantsTold, now: float) -> bool:
        """Take in what another router has charged, and who waits there; False if that was known."""
        waiting = self._others.waiting
        was_idle = not (waiting or self._waiting or self._aside)
        come = {tenant for tenant, (_, waits, _) in told.lines.items() if waits and tenant not in waiting}
        # Where those begin that come anew: looked for among all, so only where somebody does.
        least = self._least() if come else 0.0
        charges = self._others.heard(told, now)
        if charges is None:
            return False
        waiting = self._others.waiting
        if was_idle and waiting:
            self.begin_anew()
            least = self._level
        self._forget_tenants()
        for tenant, charged in charges.items():
            account = self._accounts.get(tenant)
            if account is None:
                account = self._accounts[tenant] = _Account(1.0, self._level)
            if tenant in come and tenant in waiting and not account.line:
                account.spent = max(account.spent, least)
            account.spent += charged
        return bool(charges)

    def tick(self, now: float) -> None:
        """Forget what other routers say no more."""
        self._others.tick(now)

    def last_of_the_longest(self) -> RequestId:
        """Return whose turn would come last of the tenant that has the most waiting for its weight, aside or not: where
        there is no room for all it goes. Somebody waits."""
        last: dict[_Account, list[_Entry]] = {account: account.line[-1:] for account in self._waiting.values()}
        waiting = {account: len(account.line) for account in last}
        for entry in self._aside.values():
            last.setdefault(entry.account, []).append(entry)
            waiting[entry.account] = waiting.get(entry.account, 0) + 1
        longest = max(waiting, key=lambda account: waiting[account] / account.weight)
        return max(last[longest], key=_key).request

    def ahead(self, tenant: str, weight: float, priority: int) -> int:
        """Return about how many requests would be served before a new one of this tenant."""
        own = self._waiting.get(tenant)
        before = bisect_left(own.line, (-priority + 1, 0), key=_key) if own is not None else 0
        others = (account for name, account in self._waiting.items() if name != tenant)
        return before + sum(_at_most(len(a.line), (before + 1) * a.weight / weight) for a in others)

    def check(self, waiting: Iterable[RequestId]) -> None:
        """Raise AssertionError if what waits is neither in the lines nor aside, or twice."""
        lined = [entry.request for account in self._waiting.values() for entry in account.line] + list(self._aside)
        assert sorted(lined) == sorted(waiting), "the lines hold others than those that wait"
        for tenant, account in self._waiting.items():
            assert account.line == sorted(account.line, key=_key) and self._accounts[tenant] is account
            assert account.arrived == sorted(account.line, key=_turn)
        assert sum(account.requests for account in self._accounts.values()) == len(self._entries)

    def _first(self) -> _Account | None:
        """Return the account of the tenant that has had the least, of those that wait."""
        return min(self._waiting.values(), key=_rank, default=None)

    def _least(self) -> float:
        """Return where a tenant begins that waited nowhere: with the one that has had the least, of those that wait
        here, or whose turn has come at other routers."""
        known = [self._accounts[tenant] for tenant in self._others.due if tenant in self._accounts]
        return min((account.spent for account in (*self._waiting.values(), *known)), default=self._level)

    def _charge(self, entry: _Entry, tokens: float) -> None:
        """Charge the prompt anew. What was charged before all began anew is forgotten already."""
        assert entry.charged is not None
        if entry.epoch == self._epoch:
            entry.account.charge((tokens - entry.charged) / entry.weight)
        entry.charged = tokens

    def _line_up(self, entry: _Entry) -> None:
        account, tenant = entry.account, self._tenants[entry.request]
        if not account.line:
            if tenant not in self._others.waiting:
                account.spent = max(account.spent, self._least())
            self._waiting[tenant] = account
        insort(account.line, entry, key=_key)
        insort(account.arrived, entry, key=_turn)

    def _take_out(self, entry: _Entry) -> None:
        line = entry.account.line
        del line[bisect_left(line, entry.key, key=_key)]
        arrived = entry.account.arrived
        del arrived[bisect_left(arrived, _turn(entry), key=_turn)]
        if not line:
            del self._waiting[self._tenants[entry.request]]

    def _forget_tenants(self) -> None:
        if len(self._accounts) <= MAX_TENANTS:
            return
        known, elsewhere = self._accounts, self._others.waiting
        needed = {tenant: a for tenant, a in known.items() if a.requests or tenant in elsewhere}
        kept = needed | {tenant: a for tenant, a in known.items() if a.spent > self._level}
        if len(kept) > MAX_TENANTS:
            kept = needed
        if len(kept) < len(known):
            self._accounts = kept
            self._sums_epoch += 1
            for account in kept.values():
                account.charged, account.told = account.charged - account.told, 0.0


def _at_most(waiting: int, turns: float) -> int:
    return min(waiting, ceil(turns))


def _key(entry: _Entry) -> tuple[int, int]:
    return entry.key


def _turn(entry: _Entry) -> int:
    return entry.key[1]


def _rank(account: _Account) -> tuple[float, int]:
    """Who has had the least; of equals, who came first."""
    return account.spent, account.next.key[1]
