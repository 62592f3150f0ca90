"""A router core driven event by event, checked after every one."""

from random import Random

from engine.messages import Accepted, Ended, Fault, PeerAddress, RequestStats, RouterRecord
from engine.types import FinishReason, RequestId, RequestRecord
from router.config import RouterConfig
from router.core.core import Router
from router.core.events import Command, Connected, Event, Fail, Submit, TellWorker, WorkerSaid
from router.core.policy import LeastCost
from tests.router.fake_cluster import worker_info

A, B = RequestId("a"), RequestId("b")
STOP_ID = 99


class Bench:
    """A router with prefill workers `p0`… and decode workers `d0`…; `now` is its clock."""

    def __init__(
        self,
        decodes: int = 1,
        blocks: int = 64,
        prefills: int = 1,
        life: int = 0,
        **config: object,
    ) -> None:
        settings = RouterConfig(**config)  # type: ignore[arg-type]
        self.router = Router(settings, LeastCost(Random(0)), frozenset({STOP_ID}), life)
        self.now = 0.0
        for index in range(prefills):
            self.join(f"p{index}", "prefill", 1, blocks)
        for index in range(decodes):
            self.join(f"d{index}", "decode", 1, blocks)

    def join(self, name: str, role: str, life: int, blocks: int = 64) -> list[Command]:
        info = worker_info(name, role, life, blocks)
        return self.do(Connected(PeerAddress(name, f"{name}:1"), info))

    def do(self, event: Event) -> list[Command]:
        out = self.router.handle(event, self.now)
        for command in out:
            if isinstance(command, Fail) and command.cause is not None:
                raise command.cause
        self.router.check()
        return out

    def submit(
        self, request: RequestId = A, tokens: int = 40, max_tokens: int = 24, **more: object
    ) -> list[Command]:
        record = RequestRecord(
            request=request,
            tokens=list(range(tokens)),
            prompt_tokens=tokens,
            max_tokens=max_tokens,
            seed=1,
        )
        return self.do(Submit(record, **more))  # type: ignore[arg-type]

    def hear(self, record: object, worker: str = "d0") -> list[Command]:
        return self.do(WorkerSaid(worker, record))  # type: ignore[arg-type]

    def accept(
        self, request: RequestId = A, placement: int = 1, worker: str = "d0"
    ) -> list[Command]:
        return self.hear(Accepted(request, placement, 0), worker)


def is_told(command: Command, kind: type[RouterRecord]) -> bool:
    """Say whether a worker is sent a record of this kind."""
    return isinstance(command, TellWorker) and isinstance(command.record, kind)


def ended(
    request: RequestId = A,
    placement: int = 1,
    reason: FinishReason = FinishReason.STOP,
    fault: Fault | None = None,
    **stats: object,
) -> Ended:
    return Ended(
        request=request,
        placement=placement,
        reason=reason,
        stats=RequestStats(**stats),  # type: ignore[arg-type]
        fault=fault,
    )
