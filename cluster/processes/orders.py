"""What callers in other threads ask of the thread that watches a cluster, and how they hear that it is done."""

import queue
from concurrent.futures import Future

from cluster.processes.events import LeaveWanted, Resize
from cluster.processes.spec import LaunchError

Order = LeaveWanted | Resize


class Orders:
    """Mutable state: the orders not yet taken, and those taken whose callers still wait. `give` may be called from any
    thread, everything else by the one that watches."""

    def __init__(self) -> None:
        self._given: queue.SimpleQueue[tuple[Order, Future[None]]] = queue.SimpleQueue()
        self._awaited: list[Future[None]] = []
        self._closed = ""

    def give(self, order: Order, what: str, timeout_s: float | None) -> None:
        """Block until it is carried out. Raises LaunchError if that takes over `timeout_s`, or nobody watches any more;
        `what` names the order."""
        done: Future[None] = Future()
        self._given.put((order, done))
        if self._closed:
            self._refuse()
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            raise LaunchError(f"{what}: not done in {timeout_s:g} s") from error

    def take(self) -> list[Order]:
        taken = []
        while not self._given.empty():
            order, done = self._given.get()
            taken.append(order)
            self._awaited.append(done)
        return taken

    def carried_out(self) -> None:
        """Everything that was taken."""
        while self._awaited:
            self._awaited.pop().set_result(None)

    def open(self) -> None:
        self._closed = ""

    def close(self, why: str) -> None:
        """Nobody watches from now on, for this reason: say so to those who wait, and to those who come."""
        self._closed = why
        self._refuse()
        while self._awaited:
            self._awaited.pop().set_exception(LaunchError(why))

    def _refuse(self) -> None:
        while True:
            try:
                _, done = self._given.get_nowait()
            except queue.Empty:
                return
            done.set_exception(LaunchError(self._closed))
