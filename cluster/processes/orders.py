"""Passes orders from other threads to the thread that watches a cluster, and tells the callers when they are done."""

import queue
from concurrent.futures import Future

from cluster.processes.events import LeaveWanted, Resize
from cluster.processes.spec import LaunchError, OrderLateError

Order = LeaveWanted | Resize


class Orders:
    """The queue of orders. Mutable state: the orders not yet taken, and those taken whose callers still wait. `give`
    may be called from any thread, everything else by the one that watches."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Order, Future[None]]] = queue.SimpleQueue()
        self._awaited: list[tuple[Order, Future[None]]] = []
        self._closed = ""

    def give(self, order: Order, what: str, timeout_s: float | None) -> None:
        """Block until the order is carried out. Raises OrderLateError if that takes over `timeout_s`, and LaunchError
        if it is refused, or nobody watches any more; `what` names the order in messages."""
        done: Future[None] = Future()
        self._given.put((order, done))
        if self._closed:
            self._refuse()
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            raise OrderLateError(f"{what}: not done in {timeout_s:g} s") from error

    def take(self) -> list[Order]:
        taken = []
        while not self._given.empty():
            order, done = self._given.get()
            taken.append(order)
            self._awaited.append((order, done))
        return taken

    def carried_out(self) -> None:
        """Tell every waiting caller that its order is done."""
        while self._awaited:
            self._awaited.pop()[1].set_result(None)

    def refuse(self, order: Order, why: str) -> None:
        """Tell the caller that this order will not be carried out."""
        for entry in self._awaited:
            if entry[0] is order:
                self._awaited.remove(entry)
                entry[1].set_exception(LaunchError(why))
                return

    def open(self) -> None:
        self._closed = ""

    def close(self, why: str) -> None:
        """Fail all waiting and later callers with this reason: nobody watches the cluster from now on."""
        self._closed = why
        self._refuse()
        while self._awaited:
            self._awaited.pop()[1].set_exception(LaunchError(why))

    def _refuse(self) -> None:
        while True:
            try:
                _, done = self._given.get_nowait()
            except queue.Empty:
                return
            done.set_exception(LaunchError(self._closed))
