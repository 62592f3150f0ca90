"""A prefill worker and a decode worker, each in a process as `headrace up` starts them, and the router's end of their
streams."""

import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cluster.processes.process_launcher import ProcessLauncher
from cluster.processes.spec import FACTORIES, Child, ChildSpec, Kind, LaunchError, Sealed
from engine.handshake import SECRET_BYTES, Keyring, Party
from engine.messages import (
    Ended,
    LifeOfProcess,
    Load,
    NeedPrefill,
    PeerAddress,
    Place,
    ProcessesTold,
    Record,
    Refused,
    RequestStats,
    Tokens,
    WorkerInfo,
    decode_worker_frame,
    encode,
)
from engine.types import FinishReason, Incarnation, RequestId, RequestRecord, SamplingParams
from worker.config import DecodeConfig, PrefillConfig
from worker.rpc import RpcLoop, Send
from worker.streams import ATTACH

START_S = 120.0
ANSWER_S = 60.0
QUIET_S = 5.0
STOP_S = 3.0
DEATH_S = 1.0
LOOK_S = 0.2
"""How often it is checked that a worker lives."""


@dataclass(slots=True)
class Answer:
    """The answer to one prompt; `heard_s` of each token, since the request was sent."""

    prompt: list[int]
    began_s: float
    tokens: list[int] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)


class _Stream:
    """Reads frames of one worker, whose records go into the one queue; the queue hears None at the end."""

    def __init__(self, put: Callable[[Record | None], None]) -> None:
        self._put = put

    unread_bytes = 0

    def proven(self, peer: Party) -> None:
        """Take whoever has the secret: there are two, and nobody else."""

    def frame(self, data: bytes) -> None:
        for record in decode_worker_frame(data):
            self._put(record)

    def closed(self, why: str) -> None:
        self._put(None)


class WorkerPair:
    """Both workers, up and connected to. Every method raises RuntimeError, with the reason, where a worker has died or
    does not answer."""

    def __init__(self, children: Sequence[Child], rpc: RpcLoop) -> None:
        self._children = children
        self._heard: queue.SimpleQueue[tuple[str, Record | None]] = queue.SimpleQueue()
        self._placed = 0
        self._say: Send | None = None
        self._list: Send | None = None
        self.infos: dict[str, WorkerInfo] = {}
        self.loads: dict[str, Load] = {}
        prefill, decode = (self._address(child) for child in children)
        self._prefill = PeerAddress(children[0].spec.name, prefill)
        rpc.connect(prefill, ATTACH["prefill"], self._to_prefill)
        rpc.connect(decode, ATTACH["decode"], self._to_decode)
        for _ in self._records(lambda: len(self.loads) == 2, "a worker has not said how it is"):
            pass
        lives = [LifeOfProcess(i.name, i.incarnation, i.pid, i.host) for i in self.infos.values()]
        assert self._list is not None
        self._list(encode([ProcessesTold(lives)]))

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
        """Return greedy answers of `max_tokens` tokens each, to all of the prompts at once."""
        answers: dict[RequestId, Answer] = {}
        assert self._say is not None
        for prompt in prompts:
            self._placed += 1
            asked = RequestRecord(
                request=RequestId(f"gpu-{self._placed}"),
                tokens=prompt,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                seed=0,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
            answers[asked.request] = Answer(prompt, time.monotonic())
            self._say(encode([Place(record=asked, placement=1, prefill=self._prefill)]))
        under_way = set(answers)
        for record in self._records(lambda: not under_way, "answers are missing"):
            match record:
                case Tokens(request, _, index, ids):
                    answer = answers[request]
                    if index != len(answer.tokens):
                        raise RuntimeError(f"token {index} of {request} after {len(answer.tokens)}")
                    answer.tokens += ids
                    answer.heard_s += [time.monotonic() - answer.began_s] * len(ids)
                case Ended(request=request, reason=FinishReason.LENGTH, stats=stats):
                    answers[request].stats = stats
                    under_way.remove(request)
                case Ended() | Refused() | NeedPrefill():
                    self._fail(f"a request was not served: {record}")
        return list(answers.values())

    def wait_quiet(self) -> dict[str, Load]:
        """Return each worker's report once nobody holds a block of it. Raises RuntimeError too if blocks stay held."""

        def is_quiet() -> bool:
            return all(
                load.free_blocks + load.cached_blocks == self.infos[role].blocks
                for role, load in self.loads.items()
            )

        for _ in self._records(is_quiet, "blocks are still held", QUIET_S):
            pass
        return self.loads

    def _address(self, child: Child) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            try:
                ready = child.started_within(LOOK_S)
            except LaunchError as error:
                raise RuntimeError(str(error)) from error
            if ready is not None:
                return ready.address
            self._look()
        raise RuntimeError(f"{child.spec.name} is not up after {START_S:g} s")

    def _look(self) -> None:
        for child in self._children:
            reason = child.failure()
            if reason is not None:
                raise RuntimeError(f"the process of {child.spec.name} has died: {reason}")

    def _fail(self, why: str) -> NoReturn:
        """Raise RuntimeError, with the death of a worker, if that is seen in a moment, as a better reason than `why`.
        """
        for _ in range(round(DEATH_S / LOOK_S)):
            self._look()
            time.sleep(LOOK_S)
        raise RuntimeError(why)

    def _records(
        self, done: Callable[[], bool], why: str, limit_s: float = ANSWER_S
    ) -> Iterator[Record]:
        """Yield what is said, until `done`; reports are kept up to date. Raises RuntimeError(`why`) after `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{why} after {limit_s:g} s: {self.loads}")
            self._look()
            try:
                role, record = self._heard.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            match record:
                case None:
                    self._fail(f"the stream of the {role} worker has ended")
                case WorkerInfo():
                    self.infos[role] = record
                case Load():
                    self.loads[role] = record
                case _:
                    yield record

    def _to_prefill(self, send: Send) -> _Stream:
        self._list = send
        return _Stream(lambda record: self._heard.put(("prefill", record)))

    def _to_decode(self, send: Send) -> _Stream:
        self._say = send
        return _Stream(lambda record: self._heard.put(("decode", record)))


@contextmanager
def running(prefill: PrefillConfig, decode: DecodeConfig, log: Path) -> Iterator[WorkerPair]:
    """Run both processes inside this block; then both are stopped, whatever happened. What they say goes to `log`.
    Raises RuntimeError where one does not start, and cluster's LaunchError where one outlives its stop."""
    secret = os.urandom(SECRET_BYTES)
    front = Party("router", "front", Incarnation(1))
    launcher, rpc = ProcessLauncher(), RpcLoop("front", front, Keyring((secret,)))
    children: list[Child] = []
    configs: dict[Kind, PrefillConfig | DecodeConfig] = {"prefill": prefill, "decode": decode}
    rpc.start("127.0.0.1", 0, {})
    try:
        with _errors_to(log):
            for kind, config in configs.items():
                children.append(launcher.launch(_spec(kind, config, secret)))
        yield WorkerPair(children, rpc)
    finally:
        rpc.stop()
        for child in children:
            child.stop(STOP_S)
        launcher.close()


@contextmanager
def _errors_to(log: Path) -> Iterator[None]:
    """Make a file the standard error of processes that are started meanwhile."""
    before = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _spec(kind: Kind, config: PrefillConfig | DecodeConfig, secret: bytes) -> ChildSpec:
    plain: Any = msgspec.to_builtins(config)
    return ChildSpec(
        kind=kind,
        name=f"{kind}-0",
        factory=FACTORIES[kind],
        config=plain,
        model_dir=config.engine.model_dir,
        threads=config.engine.threads,
        log_level="info",
        secrets=Sealed.of((secret,)),
    )
