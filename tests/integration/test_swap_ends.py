"""Requests that end while they are swapped, in whatever state they and their copies are: nothing outlives them."""

import random
from collections import Counter

from decode_worker.scheduler.events import FromRouter, RouterLost
from decode_worker.scheduler.request import Request, RequestState
from engine.messages import Cancel, Finish
from engine.types import FinishReason, RequestId
from fakes.colocated import LINK, Colocated, ColocatedAnswer
from tests.integration.crowd import PATIENCE_TURNS, prompt_of, record_of, small_cluster, wanted

SEEDS = range(12)
TURNS = 250
MOST = 14
"""Requests."""


class Restless:
    """A worker whose copies end when they like, with clients that leave, above all those of swapped requests."""

    def __init__(self, seed: int, met: Counter[str]) -> None:
        self._rng, self._met = random.Random(seed), met
        pick = self._rng.choice
        self.cluster: Colocated = small_cluster(
            self._rng.randint(12, 16),
            pick((6, 64)),
            preemption=pick(("swap", "auto")),
            local_chunk_tokens=pick((1, 6, 64)),
            max_handoffs=pick((1, 2, 16)),
            max_batch=pick((2, 4, 32)),
        )
        self.answers: list[ColocatedAnswer] = []
        mover = self.cluster._tier_movers[1]
        assert mover is not None
        self.held: list[object] = []
        self._do = mover._do
        mover._do = self.held.append  # type: ignore[method-assign, assignment]

    def turn(self) -> None:
        rng = self._rng
        if len(self.answers) < MOST and rng.random() < 0.15:
            self._submit(f"r{len(self.answers)}")
        for _ in range(len(self.held)):
            if rng.random() < 0.25:
                self._do(self.held.pop(0))  # type: ignore[arg-type]
        if self.cluster.decode._requests and rng.random() < 0.12:
            self._end(self._one())
        if rng.random() < 0.01:
            self.cluster._engines[1].receive([RouterLost(LINK)])
        self.cluster.turn()

    def _submit(self, name: str) -> None:
        rng = self._rng
        number = len(self.answers)
        prompt = prompt_of(99, rng.choice((0, 9))) + prompt_of(number, rng.randint(1, 14))
        count = rng.choice((1, 1, 2, 3))
        for index in range(count):
            record = record_of(
                f"{name}.{index}",
                prompt,
                rng.randint(1, 24),
                sample_index=index,
                group=name if count > 1 else "",
                priority=rng.choice((0, 0, 1)),
            )
            head = RequestId(f"{name}.0") if index else None
            self.answers.append(self.cluster.submit(record, head))

    def _one(self) -> Request:
        requests = list(self.cluster.decode._requests.values())
        swapped = [r for r in requests if r.state is RequestState.LOADING or r.stash is not None]
        return self._rng.choice(swapped if swapped and self._rng.random() < 0.7 else requests)

    def _end(self, request: Request) -> None:
        stores = request.stash is not None and request.stash.stores
        self._met["storing" if stores else "stored" if request.stash else request.state] += 1
        name = request.record.request
        ends: Cancel | Finish = Cancel(name, 1, FinishReason.CANCELLED)
        if self._rng.random() < 0.3:
            ends = Finish(name, 1, min(1, request.output_tokens))
        self.cluster._engines[1].receive([FromRouter(LINK, ends)])

    def settle(self) -> None:
        """Everything that is left, to its end."""
        idle = 0
        while idle < 3 or any(answer.ended is None for answer in self.answers):
            while self.held:
                self._do(self.held.pop(0))  # type: ignore[arg-type]
            idle = 0 if self.cluster.turn() or self.held else idle + 1
            assert idle < PATIENCE_TURNS, f"frozen: {self.cluster.decode!r}"
        self.cluster.close()


def test_nothing_outlives_a_request_that_ends_while_it_is_swapped() -> None:
    """Guards leases, stashes, pins and loads: whoever ends, by client, stop string or router, before or after its
    copies have, or on the way back. Whoever does not end has its tokens."""
    met: Counter[str] = Counter()
    for seed in SEEDS:
        restless = Restless(seed, met)
        for _ in range(TURNS):
            restless.turn()
        restless.settle()
        decode = restless.cluster.decode
        tiers, stashes = decode.kv.tiers, decode.swapping.stashes
        assert tiers is not None and stashes is not None
        assert decode.kv.available == decode.kv.pool.total and decode.is_idle, seed
        assert not stashes.kept and not tiers.host._pins and not tiers.host._spoilt, seed
        for answer in restless.answers:
            tokens = wanted(answer.record)
            assert answer.ended is not None and answer.tokens == tokens[: len(answer.tokens)], seed
            if answer.ended.reason is FinishReason.LENGTH:
                assert answer.tokens == tokens, seed
    assert min(met["storing"], met["stored"], met[RequestState.LOADING]) >= 1, met
