"""Workers that can be broken from outside while they serve: the real ones, with an engine that also takes orders.

A test writes an order into the file `FOLDER/NAME.ORDER` and waits until it is gone (`given`), or keeps it standing
(`lasting`). The thread that owns the state carries orders out between two steps:

    leak      allocates a block that nobody will ever let go                          once
    share     puts a block that a request holds among the free ones, too              once
    books     makes a scheduler's own books wrong, not those of its blocks            once
    slow      every step takes as many seconds longer                                 while it is there
    forget    drops what is cached, and tells nobody                                  while it is there

A request whose prompt holds the token POISON kills, by a signal, every decode worker that has taken it; one with
POISON_AT_ONCE every one that it is offered to, before that can say a word. Incoming blocks are spoiled as
`tests.chaos.hosts` says.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import prefill_worker.role
from tests.chaos import hosts
from worker.worker import Worker

FOLDER = hosts.FOLDER
POISON = 40_123
"""A token of the demo model's vocabulary that no other prompt of a test holds."""
POISON_AT_ONCE = 40_321
HEARD_S = 0.2
"""How long after its acceptance a poisonous request kills: its router has heard of that by then."""


def given(folder: Path, name: str, order: str, limit_s: float = 20.0) -> None:
    """Give an order, and wait until it was carried out. Fails past `limit_s`."""
    file = folder / f"{name}.{order}"
    file.touch()
    deadline_s = time.monotonic() + limit_s
    while file.exists():
        assert time.monotonic() < deadline_s, f"{name} did not {order}"
        time.sleep(0.02)


@contextmanager
def lasting(folder: Path, names: Iterable[str], order: str, value: str = "") -> Iterator[None]:
    """Keep an order standing for these workers inside the block."""
    files = [folder / f"{name}.{order}" for name in names]
    try:
        for file in files:
            file.write_text(value)
        yield
    finally:
        for file in files:
            file.unlink()


class Saboteur:
    """Looks for orders before each step of one worker."""

    def __init__(self, worker: Worker[Any]) -> None:
        self._worker: Any = worker
        self._step: Callable[[], bool] = worker.step
        self._folder = Path(os.environ[FOLDER])
        admission = getattr(self._worker.scheduler, "admission", None)
        if admission is not None:
            self._place = admission.place
            admission.place = self._offered
        self._orders: dict[str, Callable[[], bool]] = {"leak": self._leak, "share": self._share, "books": self._books}

    def step(self) -> bool:
        for order, carry_out in self._orders.items():
            file = self._order(order)
            if file.exists() and carry_out():
                file.unlink()
        self._poison()
        if self._order("forget").exists():
            self._forget()
        began = self._worker._engine.steps
        worked = self._step()
        slow = self._order("slow")
        if self._worker._engine.steps > began and slow.exists():
            time.sleep(float(slow.read_text() or 0))
        return worked

    def _order(self, order: str) -> Path:
        return self._folder / f"{self._worker.name}.{order}"

    def _leak(self) -> bool:
        pool = self._worker.parts.kv.pool
        return bool(pool.free and pool.allocate(1))

    def _share(self) -> bool:
        kv = self._worker.parts.kv
        held = [lease.blocks[-1] for lease in kv.leases() if lease.blocks]
        kv.pool._free[:0] = held[:1]
        return bool(held)

    def _books(self) -> bool:
        self._worker.scheduler.endings.orphans._bytes += 1
        return True

    def _forget(self) -> None:
        kv = self._worker.parts.kv
        while kv.cache.idle:
            node = kv.cache.evict(kv.cache.shares.loser(b""))
            kv._identities.discard(node.identity)
            kv._free(node.block)

    def _offered(self, link: int, message: Any, *rest: Any) -> Any:
        if POISON_AT_ONCE in message.record.tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._place(link, message, *rest)

    def _poison(self) -> None:
        admission = getattr(self._worker.scheduler, "admission", None)
        for request in () if admission is None else admission.requests.values():
            if POISON in request.record.tokens and time.monotonic() - request.accepted > HEARD_S:
                os.kill(os.getpid(), signal.SIGKILL)


def _sabotaged(worker: Worker[Any]) -> Worker[Any]:
    broken: Any = worker
    broken.step = Saboteur(worker).step
    return worker


def open_prefill_worker(*arguments: Any) -> Worker[Any]:
    return _sabotaged(prefill_worker.role.open_prefill_worker(*arguments))


def open_decode_worker(*arguments: Any) -> Worker[Any]:
    return _sabotaged(hosts.spoiling_decode_worker(*arguments))


FACTORIES = {
    "prefill": f"{__name__}:open_prefill_worker",
    "decode": f"{__name__}:open_decode_worker",
    "router": "router.server:RouterServer",
}
