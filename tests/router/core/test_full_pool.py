"""A router core before a real decode scheduler whose pool is full: a request is offered where it can be kept."""

from collections import Counter, deque

import msgspec

from engine.messages import Accepted, Load, PeerAddress, Refused
from engine.types import RequestId, RequestRecord
from router.core.events import Command, Complete, Connected, Submit, TellWorker, WorkerSaid
from tests.decode_worker.scheduler.leaving.test_departures import Bench as Worker
from tests.router.bench import Bench
from tests.router.fake_cluster import worker_info

BLOCKS, GROWTH_TOKENS = 14, 20


class Full:
    """Requests at one decode worker, which reads prompts itself and reports after every step. Mutable: what it has
    answered to offers, and how many requests have ended."""

    def __init__(self) -> None:
        self.router = Bench(decodes=0, prefills=0)
        self.worker = Worker(BLOCKS, growth_tokens=GROWTH_TOKENS)
        info = msgspec.structs.replace(worker_info("d0", "decode", 1, BLOCKS, 4, "m"), growth_tokens=GROWTH_TOKENS)
        self.router.do(Connected(PeerAddress("d0", "d0:1"), info))
        self.answers: Counter[type] = Counter()
        self.completed = self._steps = self._heard = 0

    def come(self, name: str, prompt: list[int]) -> None:
        record = RequestRecord(request=RequestId(name), tokens=prompt, prompt_tokens=len(prompt), max_tokens=20, seed=0)
        self._carry(self.router.do(Submit(record)))

    def step(self) -> None:
        self.worker.step()
        self._carry([])
        self._steps += 1
        kv = self.worker.scheduler.kv
        counts = {f"{state}_blocks": count for state, count in kv.pool.counts().items()}
        load = Load(step=self._steps, promised_blocks=kv.promised, evicted=kv.take_evicted(), **counts)
        self._carry(self.router.do(WorkerSaid("d0", load)))

    def _carry(self, commands: list[Command]) -> None:
        """Carry messages both ways until there are none."""
        waiting = deque(commands)
        while waiting or self._heard < len(self.worker.told):
            if waiting:
                command = waiting.popleft()
                self.completed += isinstance(command, Complete)
                if isinstance(command, TellWorker):
                    self.worker.router(command.record)
            else:
                record = self.worker.told[self._heard]
                self._heard += 1
                self.answers[type(record)] += isinstance(record, Accepted | Refused)
                waiting += self.router.hear(record)


def test_nothing_is_offered_out_of_what_is_promised() -> None:
    """Guards the router's line against a worker that shows room with every report and says no to every offer: of five
    requests that each need 7 of its 14 blocks, two of them at first and five for their growth, two run at one time."""
    full = Full()
    for number in range(5):
        full.come(f"r{number}", [100 * number + at for at in range(8)])
    for _ in range(90):
        full.step()
    assert full.completed == 5
    assert (full.answers[Accepted], full.answers[Refused]) == (5, 0)
