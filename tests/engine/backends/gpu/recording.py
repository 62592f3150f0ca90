"""A device that records and replays like CUDA graphs, for tests without one.

While work is recorded, every tensor operator and every kernel launch is noted with the very addresses and numbers it
was called with. A replay runs them again: into the same memory, with the same numbers. So it freezes what a graph
freezes: a Python list that was read, a size, an address. Memory that the work asked for belongs to the recording, and
is NaN in a replay until it is written; all other memory is somebody else's to keep, and a replay that finds it given
back fails.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import GridExecutor

from engine.backends.gpu.graphs import Recording

_EMPTY = ("aten.empty", "aten.new_empty")


class FakeRecorder:
    """Fulfils `engine.backends.gpu.graphs.Recorder`. `recorded` and `replayed` count."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._note: Callable[..., None] | None = None

    def note(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call what is no operator and no kernel, but work on the stream all the same; amid a recording, note it."""
        (self._note or _call)(call, *arguments)

    def record(self, work: Callable[[], Tensor]) -> Recording:
        log: list[Callable[[], None]] = []
        memory = _Memory()
        with _Operators(log, memory) as operators, _launches(log, operators, memory):

            def note(call: Callable[..., None], *arguments: Any) -> None:
                noted = memory.seen(arguments)
                log.append(lambda: call(*noted))
                call(*arguments)

            self._note = operators.hushed(note)
            result = work()
            self._note = None
        self.recorded += 1
        assert len(log) > 20, "nothing was seen of the work"

        def replay() -> None:
            self.replayed += 1
            memory.check()
            for again in log:
                again()

        return Recording(replay, result)


def _call(call: Callable[..., None], *arguments: Any) -> None:
    call(*arguments)


class _Memory:
    """Which memory is the recording's own, and which is borrowed."""

    def __init__(self) -> None:
        self._own: dict[int, Tensor] = {}
        self._borrowed: dict[int, StorageWeakRef] = {}

    def made(self, results: Any, arguments: Any) -> None:
        """Results that lie in none of the arguments' memory."""
        known = {_address(leaf) for leaf in tree_leaves(arguments) if _is_plain(leaf)}
        for leaf in tree_leaves(results):
            if _is_plain(leaf) and _address(leaf) not in known:
                self._own[_address(leaf)] = leaf

    def seen(self, tree: Any) -> Any:
        """`tree` with tensors that keep no borrowed memory alive."""
        return tree_map_only(Tensor, self._seen, tree)

    def check(self) -> None:
        lost = [hex(address) for address, storage in self._borrowed.items() if storage.expired()]
        assert not lost, f"a recording reads memory that was given back: {lost}"

    def _seen(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor) or _address(tensor) in self._own:
            return tensor
        address, storage = _address(tensor), tensor.untyped_storage()
        self._borrowed.setdefault(address, StorageWeakRef(storage))
        raw = (ctypes.c_char * storage.nbytes()).from_address(address)
        words = torch.frombuffer(raw, dtype=tensor.dtype)
        return words.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_plain(leaf: object) -> bool:
    """A tensor that lies somewhere: not one of the host's numbers, which a graph takes by their value, nor weights that
    were packed for a CPU, which do not say where they are."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and not leaf.is_mkldnn and leaf.untyped_storage().nbytes() > 0


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Operators(TorchDispatchMode):
    def __init__(self, log: list[Callable[[], None]], memory: _Memory) -> None:
        super().__init__()
        self._log = log
        self._memory = memory
        self.quiet = False

    def hushed(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return what calls it, with operators of its own that are not the work's."""

        def quietly(*args: Any, **kwargs: Any) -> None:
            self.quiet = True
            try:
                call(*args, **kwargs)
            finally:
                self.quiet = False

        return quietly

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if not self.quiet:
            self._memory.made(result, (args, kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                noted = self._memory.seen((args, kwargs, result))
            self._log.append(lambda: _again(operator, *noted))
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
def _launches(
    log: list[Callable[[], None]], operators: _Operators, memory: _Memory
) -> Iterator[None]:
    """Kernel launches of the interpreter, whose own operators are not the work's."""
    plain = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        noted = memory.seen((args, kwargs))
        log.append(lambda: plain(self, *noted[0], **noted[1]))
        plain(self, *args, **kwargs)

    GridExecutor.__call__ = operators.hushed(launch)
    try:
        yield
    finally:
        GridExecutor.__call__ = plain
