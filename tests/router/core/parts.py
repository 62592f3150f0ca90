"""The parts of the router core wired as the core wires them, and requests to give to them one by one."""

from random import Random

import msgspec

from engine.messages import PeerAddress
from engine.types import RequestId, RequestRecord
from router.config import RouterConfig
from router.core.call import Call, State
from router.core.call_table import CallTable
from router.core.cluster_view import ClusterView
from router.core.events import Command
from router.core.leaving.adoption import Adoptions
from router.core.losses import Losses
from router.core.placement import Placer
from router.core.policy import LeastCost
from router.core.registry import WorkerEntry
from router.core.sessions import Session, Sessions
from router.core.waiting_queue import WaitingQueue
from tests.router.fake_cluster import load, worker_info

STOP_ID = 99


def request_record(name: str = "a", tokens: int = 40, max_tokens: int = 24, **more: object) -> RequestRecord:
    record = RequestRecord(
        request=RequestId(name), tokens=list(range(tokens)), prompt_tokens=tokens, max_tokens=max_tokens, seed=1
    )
    return msgspec.structs.replace(record, **more)


class Parts:
    """No worker is connected yet; `out` collects the commands."""

    def __init__(self, **config: object) -> None:
        settings = RouterConfig(**config)  # type: ignore[arg-type]
        self.view = ClusterView(settings.worker_silent_s)
        self.registry, self.index = self.view.registry, self.view.index
        self.table = CallTable(self.view)
        self.placer = Placer(LeastCost(Random(0)), self.registry, self.index, settings.local_prefill)
        self.adoptions = Adoptions(settings.settle_s, self.table, self.view, 0)
        self.sessions = Sessions(settings.session_s)
        self.queue = WaitingQueue(self.table, self.view, self.placer, self.adoptions, self.sessions)
        self.losses = Losses(settings, self.table, self.queue, self.registry, frozenset({STOP_ID}))
        self.out: list[Command] = []

    def join(
        self,
        name: str,
        life: int = 1,
        blocks: int = 64,
        block_size: int = 16,
        model: str = "f",
        chunk_tokens: int = 0,
    ) -> WorkerEntry:
        """Connect a worker; one whose name begins with a p prefills."""
        info = worker_info(name, "prefill" if name[0] == "p" else "decode", life, blocks, block_size, model)
        info = msgspec.structs.replace(info, chunk_tokens=chunk_tokens)
        self.registry.join(PeerAddress(name, f"{name}:1"), info, 0.0)
        self.index.add(name, blocks)
        worker = self.registry.get(name)
        assert worker is not None
        return worker

    def report(self, name: str, now: float = 0.0, **more: object) -> None:
        self.registry.report(name, load(**more), now)  # type: ignore[arg-type]

    def wait(
        self,
        name: str = "a",
        deadline_s: float | None = None,
        tenant: str = "",
        session: Session | None = None,
        **record: object,
    ) -> Call:
        """A request that waits in the queue, which is not advanced."""
        call = self.table.open(request_record(name, **record), deadline_s)  # type: ignore[arg-type]
        self.queue.enter(call, tenant, 1.0, session)
        return call

    def offer(self, name: str = "a", **record: object) -> Call:
        """A request that is offered to a worker."""
        call = self.wait(name, **record)  # type: ignore[arg-type]
        self.queue.advance(0.0, self.out)
        assert call.state is State.OFFERED
        return call

    def run(self, name: str = "a", *emitted: int, **record: object) -> Call:
        """A request that a decode worker has accepted, with tokens that its client has."""
        call = self.offer(name, **record)
        self.table.move(call, State.RUNNING)
        call.emitted.extend(emitted)
        return call

    def take(self) -> list[Command]:
        """The commands since the last time."""
        out, self.out = self.out, []
        return out
