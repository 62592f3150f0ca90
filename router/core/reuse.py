"""What it costs others when a worker computes again what another one holds, and when that is worth it. Pure.

A request goes where its first token is predicted soonest; but computing what lies elsewhere also delays all that come
behind it, of which its own prediction says nothing; and afterwards the next ones find it in one more place, of which
that says nothing either. So a part of a prompt, held by others and computed on one worker, counts besides its own time

    delayed · lost - missed, at the least -tokens of it; + displaced

- `delayed`: how many it delays: those that will come to this worker before it is idle again,
  λ · (its queue + half of the part) / (1 - busy) where λ of them come to a worker in a second. Since others are sent
  elsewhere when a queue grows, it is never taken to be busy for more than MOST_BUSY of the time; but in as much of its
  queue as every worker has nobody can be, and it is as busy as it is, up to ALL_BUSY, beyond which a mean says nothing.
- `lost`: what each of them loses. While no worker is idle, for as long as the shortest queue takes, that is all tokens
  of the part: who goes elsewhere is in somebody's way there. Later it is no more than going elsewhere costs,
  tokens · spare / (tokens + spare), where `spare` is for how many tokens' time the next best worker was worse, a mean
  of late. For some that is nothing, and a conversation has nowhere else to go: where spare times exceed t for a share
  (spare / (spare + t))² of the requests, this is the mean of what is the less.
- `displaced`: what others find no more, since room is made for the copy, on a worker that has evicted before: the
  share of evicted blocks that were asked for again before about as many were evicted as workers hold, times what so
  many tokens cost when they are computed again, for those who asked, tokens, and for those whom that delays,
  `delayed` · `lost` with a queue as long as they are now on average. Nothing where caches are so large that hardly
  anything comes back.
- `missed`: for how many tokens' time requests with the same beginning have waited of late for those that hold this
  part, while others would have been sooner had they held it too. A request that goes to a holder adds what it waits
  longer, if a copy that was begun when somebody first waited would be there by now: what comes together with the first
  has missed nothing, however long it waits. One that goes elsewhere settles the account: it makes the copy.

So a copy is made once the waits that it would have spared amount to what it costs: rent or buy, which is never worse
than twice what one does who knows the future. A conversation that one client goes on with stays where it is, since
hardly anybody waits for it; a prefix that everybody asks for is soon wherever there is work for it; and a burst behind
a cold prompt, which is over before a copy of it could be, waits for its first request.

All are of the latest requests: half of them is of the last HALF_LIFE a worker, or SHORTEST in all; of the latest
evictions half is of as many as half of what workers hold.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

from router.core.policy import ASSUMED_S_PER_TOKEN, PrefillView, token_s

HALF_LIFE, SHORTEST = 32, 256
MOST_BUSY, ALL_BUSY = 0.7, 0.95
FEWEST_BEGINNINGS, MOST_BEGINNINGS = 1 << 12, 1 << 16
"""How many beginnings are kept without asking whether they matter, and how many at most."""
LEAST_TOKENS = 1.0
"""Less than this changes no price."""
_LARGEST = 1e100
FEWEST_EVICTED, MOST_EVICTED = 1 << 8, 1 << 15
"""How many evicted blocks are remembered before older ones are forgotten, whatever workers hold."""


class Arrivals:
    """How often prompts come to a worker, how long each is computed, and what it would lose elsewhere, in means that
    fade. Time is an argument."""

    # Mutable state: how many came, when the latest did, and the means; that of what is lost elsewhere, and of how many.

    def __init__(self) -> None:
        self._count, self._last_s = 0, 0.0
        self._gap_s = self._work_s = 0.0
        self._compared, self._spare_tokens = 0, 0.0

    def came(self, now: float, work_s: float, workers: int, spare_tokens: float | None = None) -> None:
        """Count a prompt that comes to one of `workers`, and is computed in `work_s`. `spare_tokens` are those of
        `spare_tokens()`, if that is known."""
        least = 1.0 - 2.0 ** (-1.0 / half_life(workers))
        if spare_tokens is not None:
            self._compared += 1
            self._spare_tokens += max(least, 1.0 / self._compared) * (spare_tokens - self._spare_tokens)
        if self._count:
            share = max(least, 1.0 / self._count)
            self._gap_s += share * ((now - self._last_s) * workers - self._gap_s)
            self._work_s += share * (work_s - self._work_s)
        self._count, self._last_s = self._count + 1, now

    def delayed(self, queue_s: float, seconds: float, most_busy: float = MOST_BUSY) -> float:
        """Return how many requests that are still to come a worker keeps waiting by so many seconds of work more, where
        it has `queue_s` to do and is busy for `most_busy` of the time at most."""
        if not self._gap_s:
            return 0.0  # nothing is known
        busy = min(self._work_s / self._gap_s, most_busy)
        return (queue_s + seconds / 2.0) / self._gap_s / (1.0 - busy)

    def lost(self, tokens: int) -> float:
        """Return how many tokens' time each of them loses, if a worker has so many more to compute."""
        if not self._compared:
            return tokens  # nothing is known of other workers
        if not tokens:
            return 0.0  # also where nobody has had a token to spare
        return tokens * self._spare_tokens / (tokens + self._spare_tokens)


class MissedWaits:
    """How long requests of late have waited for the holders of each beginning, in tokens' time."""

    # Mutable state: the tokens by the last block of the beginning, and since when somebody has waited for it; the
    # weight of the next request's, which grows instead of all earlier ones' shrinking, and how many beginnings are
    # kept until some are forgotten.

    def __init__(self) -> None:
        self._tokens: dict[bytes, tuple[float, float]] = {}
        self._weight = 1.0
        self._room = FEWEST_BEGINNINGS

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, beginning: bytes) -> float:
        """Return the tokens that were missed of a beginning, known by its last block."""
        known = self._tokens.get(beginning)
        return known[0] / self._weight if known else 0.0

    def placed(
        self,
        chain: Sequence[bytes],
        prompt_tokens: int,
        block_size: int,
        views: Sequence[PrefillView],
        held: Mapping[str, int],
        chosen: PrefillView,
        now: float,
    ) -> None:
        """Count a request that `chosen` reads, one of `views`. `held`: how many blocks of `chain` each has, if any."""
        self._fade(len(views))
        here, most = held.get(chosen.name, 0), max([held.get(view.name, 0) for view in views], default=0)
        if here == most and not chosen.queue_tokens:
            return  # nobody waits for those that hold it, if any do
        tail_tokens = max(prompt_tokens - most * block_size, 1)
        soonest_s: dict[int, float] = {}
        for view in views:
            # With `token_s` written out: every decision asks every prefill worker.
            depth, waits = held.get(view.name, 0), view.awaited_tokens
            seconds = (waits + tail_tokens) * ((view.s_per_token or ASSUMED_S_PER_TOKEN) * view.delay)
            if seconds < soonest_s.get(depth, float("inf")):
                soonest_s[depth] = seconds
        levels = sorted(soonest_s)
        # Had those that hold less held all of it: the soonest of them, by what they hold.
        otherwise_s = dict(zip(levels, accumulate((soonest_s[depth] for depth in levels), min), strict=True))
        holders_s, each_s = float("inf"), token_s(chosen)
        for deeper, depth in pairwise(reversed(levels)):
            holders_s, beginning = min(holders_s, soonest_s[deeper]), chain[deeper - 1]
            if here > depth and holders_s <= otherwise_s[depth]:
                continue  # it has not waited for those that hold this part
            tokens, since_s = self._tokens.get(beginning, (0.0, now))
            if here <= depth:
                self._tokens[beginning] = 0.0, since_s
            elif now - since_s >= (deeper - depth) * block_size * each_s:
                self._tokens[beginning] = tokens + self._weight * (holders_s - otherwise_s[depth]) / each_s, since_s
            else:
                self._tokens[beginning] = tokens, since_s

    def _fade(self, workers: int) -> None:
        self._weight *= 2.0 ** (1.0 / half_life(workers))
        if self._weight > _LARGEST:
            self._tokens = {key: (tokens / self._weight, since_s) for key, (tokens, since_s) in self._tokens.items()}
            self._weight = 1.0
        if len(self._tokens) > self._room:
            self._forget(self._weight * LEAST_TOKENS)

    def _forget(self, least: float) -> None:
        """Forget the beginnings of which less than `least` was missed, and the least of what is then still too much."""
        known = [entry for entry in self._tokens.items() if entry[1][0] >= least]
        if len(known) > MOST_BEGINNINGS // 2:
            known = sorted(known, key=lambda entry: entry[1][0], reverse=True)[: MOST_BEGINNINGS // 2]
        self._tokens = dict(known)
        self._room = max(FEWEST_BEGINNINGS, 2 * len(known))


class Evictions:
    """Which share of the blocks that are evicted is asked for again soon. It sees all evictions, and of several
    routers' requests its own: those of the others are taken to ask for as much."""

    # Mutable state: the blocks evicted of late, in two generations; evictions, those that were asked for again, and
    # requests, its own and all, in sums that fade.

    def __init__(self) -> None:
        self._young, self._old = set[bytes](), set[bytes]()
        self._evicted = self._again = 0.0
        self._own = self._all = 0.0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def share(self) -> float:
        if not self._own:
            return 0.0  # nothing is known
        return min(self._again * self._all / self._own / max(self._evicted, float(FEWEST_EVICTED)), 1.0)

    def came(self) -> None:
        """Count a request of another router."""
        self._all += 1.0

    def evicted(self, blocks: Sequence[bytes], held_blocks: int) -> None:
        """Take in that a worker holds these no more, where all workers hold so many."""
        generation = min(max(held_blocks // 2, FEWEST_EVICTED), MOST_EVICTED)
        fade = 0.5 ** (len(blocks) / generation)
        self._evicted, self._again = self._evicted * fade + len(blocks), self._again * fade
        self._own, self._all = self._own * fade, self._all * fade
        self._young.update(blocks)
        if len(self._young) >= generation:
            self._young, self._old = set(), self._young

    def asked(self, missing: Sequence[bytes]) -> None:
        """Count a request of this router's, and of what no worker holds of it the leading part that was evicted."""
        self._own, self._all = self._own + 1.0, self._all + 1.0
        for block in missing:
            if block in self._young:
                self._young.discard(block)
            elif block in self._old:
                self._old.discard(block)
            else:
                break
            self._again += 1.0


class Reuse:
    """What a copy of what another worker holds is worth. Owner: the router core."""

    # Mutable state: its three parts.

    def __init__(self) -> None:
        self.missed, self.arrivals, self.evictions = MissedWaits(), Arrivals(), Evictions()

    def delaying_tokens(
        self,
        chain: Sequence[bytes],
        held: Mapping[str, int],
        block_size: int,
        queues: Mapping[str, int],
        s_per_token: float,
        full: Collection[str] = (),
    ) -> dict[str, float]:
        """Return how many tokens' time others would lose by each worker, if it computed again what some other one
        holds; less than 0 where they gain.

        `held`: how many blocks of `chain` each has. `queues`: how many tokens it has to compute. `s_per_token`: that of
        their pool. `full`: those that evict others for what they compute.
        """
        levels = sorted(set(held.values()), reverse=True)
        if len(levels) < 2:
            return dict.fromkeys(held, 0.0)
        # From the deepest holder up: between two levels, the same workers hold every block. Of each such part: where it
        # begins, its tokens, its price on an idle worker, and what each token queued adds to that.
        parts: list[tuple[int, int, float, float]] = []
        least_tokens = min(queues.values())
        for deeper, depth in pairwise(levels):
            tokens = (deeper - depth) * block_size
            lost, each = self.arrivals.lost(tokens), self.arrivals.delayed(s_per_token, 0.0)
            together = self.arrivals.delayed(s_per_token, 0.0, ALL_BUSY)
            idle = self.arrivals.delayed(0.0, tokens * s_per_token) * lost - self.missed.of(chain[deeper - 1])
            parts.append((depth, tokens, idle + (together * tokens - each * lost) * least_tokens, each * lost))
        displaced = dict.fromkeys(levels, 0.0)
        if full and (share := self.evictions.share):
            usual_s = sum(queues.values()) / len(queues) * s_per_token
            for depth in levels:
                tokens = (levels[0] - depth) * block_size
                delayed = self.arrivals.delayed(usual_s, tokens * s_per_token) * self.arrivals.lost(tokens)
                displaced[depth] = share * (tokens + delayed)
        others: dict[str, float] = {}
        known: dict[tuple[int, int], float] = {}  # where there are many workers, most are alike
        for name, blocks in held.items():
            alike = blocks, queues[name]
            total = known.get(alike)
            if total is None:
                total = 0.0
                for depth, tokens, idle, each in parts:
                    if depth < blocks:
                        break
                    price = idle + each * alike[1]
                    total += price if price > -tokens else -tokens
                known[alike] = total
            others[name] = total + displaced[blocks] if name in full else total
        return others


def half_life(workers: int) -> float:
    """Return after how many requests one counts half."""
    return float(max(SHORTEST, HALF_LIFE * workers))


def spare_tokens(prompt_tokens: int, views: Sequence[PrefillView], chosen: PrefillView) -> float | None:
    """Return for how many tokens' time more `chosen`, one of `views`, could be busy before a prompt had better be read
    by another one; None if there is none. What others lose by that counts."""

    # As `token_s` and a sum would have it, written out: every decision asks every prefill worker.
    here, own_s = chosen.name, 0.0
    next_s: float | None = None
    for view in (*views, chosen):
        uncached = prompt_tokens - view.cached_tokens
        own_tokens = view.awaited_tokens + (uncached if uncached > 1 else 1)
        own_s = (own_tokens + view.delaying_tokens) * ((view.s_per_token or ASSUMED_S_PER_TOKEN) * view.delay)
        if (next_s is None or own_s < next_s) and view.name != here:
            next_s = own_s
    return None if next_s is None else max(next_s - own_s, 0.0) / token_s(chosen)
