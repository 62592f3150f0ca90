"""What a prompt goes before on its prefill worker: the rule itself, beside a plain model, and beside the real line."""

from collections.abc import Callable
from random import Random
from statistics import fmean

import pytest

from benchmarks.routing.workers import Clockwork, ClusterShape, SimulatedPrefill
from benchmarks.routing.workloads import BLOCK
from engine.types import RequestId, RequestRecord
from prefill_worker.scheduler.order import Job
from router.core.overtaking import NOBODY, ReadingLine

CHUNK = 64
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def line(*tokens: int, chunk_tokens: int = CHUNK) -> ReadingLine:
    """A worker's line of cold prompts of such lengths."""
    made = ReadingLine(chunk_tokens)
    for number, length in enumerate(tokens):
        made.enter(RequestId(f"r{number}"), length, 0, f"r{number}".encode())
    return made


def test_who_is_much_shorter_does_not_wait_for_the_long_ones() -> None:
    """Guards a request whose prefix is held by a worker that reads something long: it was sent elsewhere, where its
    prefix was computed once more."""
    # Half a step of the long prompt's, and a step beside it, of which 8 tokens are its own.
    assert line(1000).overtaken(8, 1000, [], 0) == (1000 - 32 - 56, 1)
    assert line(1000, 500).overtaken(8, 1500, [], 0) == (1500 - 32 - 56, 2)
    # Who needs several steps has half of each.
    assert line(1000).overtaken(200, 1000, [], 0) == (1000 - 32 - (7 * 64 - 200), 1)


def test_short_ones_share_a_step() -> None:
    """Guards a crowd of short prompts behind a long one: half of a step holds several of them."""
    assert line(1000, 8, 10).overtaken(8, 1018, [], 0) == (1000 - 32 - (64 - 26), 1)
    assert line(1000, 9, 15).overtaken(8, 1024, [], 0) == (1000 - 32 - (64 - 32), 1), "what just fits"
    assert line(1000, 10, 15).overtaken(8, 1025, [], 0) == (1000 - 32 - (2 * 64 - 33), 1)
    assert line(1000, 100).overtaken(60, 1100, [], 0) == (1000 - 32 - (5 * 64 - 160), 1)
    assert line(240, *[8] * 24).overtaken(8, 432, [], 0) == NOBODY, "the long one has ended by then"


def test_half_as_long_is_much_shorter() -> None:
    assert line(400).overtaken(200, 400, [], 0) == (400 - 32 - (7 * 64 - 200), 1)
    assert line(399).overtaken(200, 399, [], 0) == NOBODY
    # Half of the long one's last 88 tokens would be all that is saved.
    assert line(88).overtaken(8, 88, [], 0) == NOBODY
    assert line(89).overtaken(8, 89, [], 0) == (1, 1)
    assert line(64).overtaken(32, 64, [], 0) == NOBODY
    assert line(65).overtaken(32, 65, [], 0) == (1, 1), "a step, all of whose half is its own"
    # Beside another short one it is no more, as they share the step.
    assert line(80, 8).overtaken(8, 88, [], 0) == NOBODY
    assert line(81, 8).overtaken(8, 89, [], 0) == (1, 1)
    assert line(16, 129).overtaken(8, 145, [], 0) == (145 - 88, 2), "the least that is much longer"


def test_nobody_goes_before_the_prompt_that_computes_its_beginning() -> None:
    """Guards a burst behind a cold prompt, of which each was taken to be next: what it is believed to find in the cache
    is still to be computed."""
    cold, other = [b"c0", b"c1", b"c2"], [b"o0"]
    made = ReadingLine(CHUNK)
    made.enter(A, 1000, 1, b"c1")
    assert made.overtaken(8, 1000, cold, 3) == NOBODY
    assert made.overtaken(8, 1000, cold, 2) == NOBODY
    assert made.overtaken(8, 1000, cold, 1) == (912, 1), "it needs no more than had been cached"
    assert made.overtaken(8, 1000, [b"c0", b"d1", b"d2"], 3) == (912, 1), "another ending of the same beginning"
    assert made.overtaken(8, 1000, other, 1) == (912, 1)
    made.enter(B, 5000, 0, b"")
    assert made.overtaken(8, 6000, cold, 3) == (5000 - 32 - (32 * 64 - 1008), 1), "it waits for that one's steps"


def test_what_is_computed_is_of_the_oldest() -> None:
    """Guards a prompt that is nearly read against being taken for a long one."""
    assert line(1000, 1000).overtaken(100, 1100, [], 0) == (1000 - 32 - (7 * 64 - 200), 1)
    assert line(1000, 300).overtaken(8, 200, [], 0) == (200 - 32 - 56, 1)
    assert line(1000, 1000).overtaken(8, 1000, [], 0) == (1000 - 32 - 56, 1), "all of the first"
    assert line(1000).overtaken(8, 999, [], 0) == (999 - 32 - 56, 1)
    assert line(1000).overtaken(8, 2000, [], 0) == (912, 1), "nobody goes before what others have sent"
    assert line().overtaken(8, 2000, [], 0) == NOBODY
    assert line(1000).overtaken(8, 0, [], 0) == NOBODY
    assert line(1000, chunk_tokens=0).overtaken(8, 1000, [], 0) == NOBODY, "it does not say what a step computes"


def test_who_has_been_read_is_in_nobodys_way() -> None:
    made = line(1000)
    made.enter(A, 600, 0, b"")
    made.leave(RequestId("r0"))
    made.leave(C)
    assert made.overtaken(8, 600, [], 0) == (600 - 88, 1)
    made.enter(A, 300, 0, b"")
    assert made.overtaken(8, 300, [], 0) == (300 - 88, 1), "sent again, it counts once"
    made.leave(A)
    assert made.overtaken(8, 300, [], 0) == NOBODY


class PlainLine:
    """The same in plain words: all is looked up when it is asked for."""

    def __init__(self) -> None:
        self.prompts: list[tuple[RequestId, int, int, bytes]] = []

    def enter(self, request: RequestId, tokens: int, first: int, block: bytes) -> None:
        self.leave(request)
        self.prompts.append((request, tokens, first, block))

    def leave(self, request: RequestId) -> None:
        self.prompts = [one for one in self.prompts if one[0] != request]

    def overtaken(self, tokens: int, queue_tokens: int, chain: list[bytes], held: int) -> tuple[int, int]:
        computed = max(sum(one[1] for one in self.prompts) - queue_tokens, 0)
        longs: list[int] = []
        shorts: list[int] = []
        for _, length, first, block in self.prompts:
            done = min(computed, length)
            computed -= done
            is_its_own = block in chain[:held] and chain.index(block) == first
            (longs if length - done >= 2 * tokens and not is_its_own else shorts).append(length - done)
        short = sum(shorts) + tokens
        steps = (short + CHUNK // 2 - 1) // (CHUNK // 2)
        passed = min(sum(longs), queue_tokens) - CHUNK // 2 - (steps * CHUNK - short)
        return (passed, len(longs)) if passed > 0 else (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_a_plain_line_says(seed: int) -> None:
    random, made, plain = Random(seed), ReadingLine(CHUNK), PlainLine()
    chain = [f"{n}".encode() for n in range(6)]
    told = 0
    for _ in range(400):
        request = RequestId(f"{random.randrange(6)}")
        if random.random() < 0.6:
            first = random.randrange(6)
            block = random.choice([chain[first], b"x", b""])
            entry = request, random.choice([1, 8, 70, 300, 1000]), first, block
            made.enter(*entry)
            plain.enter(*entry)
        else:
            made.leave(request)
            plain.leave(request)
        made.check()
        tokens, held = random.choice([1, 8, 60, 64, 100, 300]), random.randrange(7)
        queue = max(sum(one[1] for one in plain.prompts) + random.choice([0, 0, -5, -400, 90]), 0)
        found = made.overtaken(tokens, queue, chain, held)
        assert found == plain.overtaken(tokens, queue, chain, held)
        told += found != NOBODY
    assert told > 40, "nothing was compared"


class LiveLine:
    """A real line in simulated time, and what is told of it before each prompt."""

    def __init__(self) -> None:
        self.time, self.shape = Clockwork(), ClusterShape()
        self.reading = ReadingLine(self.shape.chunk_tokens)
        self.worker = SimulatedPrefill("p", self.shape, 1.0, self.time, lambda record: None)
        self.late_steps: list[float] = []
        self.fifo_steps: list[float] = []

    def send(self, name: str, tokens: list[int], cached: int) -> None:
        """Send a prompt now, of which so many tokens are cached; note how many steps later than predicted it ends."""
        chunk, own, request = self.shape.chunk_tokens, len(tokens) - cached, RequestId(name)
        step_s = self.shape.speeds.prefill_step_s + chunk * self.shape.speeds.prefill_token_s
        queue, began_s = self.worker.line.backlog_tokens, self.time.now
        passed = self.reading.overtaken(own, queue, [], 0)[0]
        self.reading.enter(request, own, 0, name.encode())

        def finished(job: Job) -> None:
            assert job.cached_tokens == cached
            self.reading.leave(request)
            self.worker.release(job)
            steps = (self.time.now - began_s) / step_s
            self.late_steps.append(steps - (queue - passed + own) / chunk)
            self.fifo_steps.append(steps - (queue + own) / chunk)

        record = RequestRecord(request=request, tokens=tokens, prompt_tokens=len(tokens), max_tokens=1, seed=0)
        self.worker.start(record, finished)

    def run(self, until: Callable[[], bool]) -> None:
        self.time.run(until)


@pytest.mark.parametrize("crowd", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_real_line_does_as_it_is_told(crowd: int, seed: int) -> None:
    """Guards the prediction against a line that would order its prompts otherwise."""
    live, random = LiveLine(), Random(seed)
    held = [[1000 * (n + 1) + t for t in range(20 * BLOCK)] for n in range(crowd)]
    for n, prefix in enumerate(held):
        live.send(f"held{n}", prefix, 0)
    live.run(lambda: len(live.late_steps) == crowd)
    live.late_steps.clear()
    live.fifo_steps.clear()
    live.time.after(1.0, lambda: live.send("long", [500_000 + t for t in range(3000)], 0))
    at_s = 1.0
    for n, prefix in enumerate(held):
        at_s += random.uniform(0.01, 0.5)
        prompt = [*prefix, *(900_000 + 100 * n + t for t in range(random.randrange(4, 40)))]
        live.time.after(at_s, lambda n=n, prompt=prompt: live.send(f"short{n}", prompt, 20 * BLOCK))  # type: ignore[misc]
    live.run(lambda: len(live.late_steps) == crowd + 1)
    *shorts, _ = live.late_steps
    # Who comes later and is shorter goes before the others: what one waits longer for that, another waits less.
    assert abs(fmean(shorts)) <= 1.0
    assert fmean(live.fifo_steps[:-1]) < -5.0, "by the whole queue they would have come much later"
