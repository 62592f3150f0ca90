"""A device that records and replays like CUDA graphs, for tests without one.

While work is recorded, every tensor operator and every kernel launch is noted with the very tensors and numbers it was
called with. A replay runs them again: into the same memory, with the same numbers. So it freezes what a graph freezes:
a Python list that was read, a size, an address. Memory that the work asked for and did not write is NaN in a replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from engine.graphs import Recording

_EMPTY = ("aten.empty", "aten.new_empty")


class FakeRecorder:
    """Fulfils `engine.graphs.Recorder`. `recorded` and `replayed` count."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], Tensor]) -> Recording:
        log: list[Callable[[], None]] = []
        with _Operators(log) as operators, _launches(log, operators):
            result = work()
        self.recorded += 1
        assert len(log) > 20, "nothing was seen of the work"

        def replay() -> None:
            self.replayed += 1
            for again in log:
                again()

        return Recording(replay, result)


class _Operators(TorchDispatchMode):
    def __init__(self, log: list[Callable[[], None]]) -> None:
        super().__init__()
        self._log = log
        self.quiet = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if not self.quiet:
            self._log.append(lambda: _again(operator, args, kwargs, result))
        return result


def _again(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    if str(operator).startswith(_EMPTY):
        if result.is_floating_point():
            result.fill_(float("nan"))
        return
    for old, new in zip(tree_leaves(result), tree_leaves(operator(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


@contextmanager
def _launches(log: list[Callable[[], None]], operators: _Operators) -> Iterator[None]:
    """Kernel launches of the interpreter, whose own operators are not the work's."""
    plain = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        log.append(lambda: plain(self, *args, **kwargs))
        operators.quiet = True
        try:
            plain(self, *args, **kwargs)
        finally:
            operators.quiet = False

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = plain
