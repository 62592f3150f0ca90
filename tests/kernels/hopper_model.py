"""Runs the source of a Gluon kernel on the CPU: Triton's interpreter knows no Gluon.

Every jitted function of a module is run as the Python that it is, with a small model of the machine in place of
Gluon's own names: each part of a program is a thread; barriers count arrivals and bytes by phases, and whoever waits
for one that nobody completes fails after a while; a bulk copy takes place when it is asked for, which is the earliest
that hardware may do it; an asynchronous product reads its operands when it is waited for, which is the latest. So a
stage that is given back too early is overwritten, and one that is read too early is not there. Layouts mean nothing.
"""

import threading
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr

WAIT_S = 20.0
_program = threading.local()


class Pointer:
    """A place in a flat tensor; adding moves it."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.at + offset)


class Shared:
    """Shared memory, and every view of it."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.dtype = values, list(values.shape), values.dtype

    def index(self, at: int) -> "Shared":
        return Shared(self.values[at])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.values[start : start + length])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.values.permute(order))

    def load(self, layout: object) -> Tensor:
        return self.values.clone()

    def store(self, values: Tensor) -> None:
        self.values.copy_(values)


class Barrier:
    """Phases, each over when everybody arrived and all bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes_left = self.phase = 0

    def start(self, count: int) -> None:
        self.count = self.left = count

    def tell(self, arrivals: int, copied: int) -> None:
        with self.changed:
            self.left -= arrivals
            self.bytes_left += copied
            assert self.left >= 0, "more arrivals than a phase has"
            if self.left == 0 and self.bytes_left == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            over = self.changed.wait_for(lambda: self.phase & 1 != parity, WAIT_S)
        assert over, "nobody completes this phase"


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: int) -> Barrier:
        return self.all[at]


class Boxes:
    """What a tensor descriptor is to a kernel."""

    def __init__(self, base: Tensor, box: list[int]) -> None:
        self.base, self.block_shape, self.dtype, self.layout = base, box, base.dtype, None


class Product:
    """A product under way: computed when it is waited for."""

    def __init__(self, left: Any, right: Shared, acc: Tensor, *, use_acc: bool) -> None:
        self.left, self.right, self.acc, self.use_acc = left, right, acc, use_acc
        _program.under_way.append(self)

    def done(self) -> Tensor:
        left = self.left.values if isinstance(self.left, Shared) else self.left
        found = left.float() @ self.right.values.float()
        return found + self.acc if self.use_acc else found


def _wait_products(under_way: int, deps: list[Product]) -> Tensor:
    """Those asked for first are done first; what is waited for must be among the done ones."""
    queue = _program.under_way
    finished = [queue.pop(0) for _ in range(len(queue) - under_way)]
    (wanted,) = deps
    assert wanted in finished, "taken before it was waited for"
    return wanted.done()


def _load(at: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Any:
    places = torch.as_tensor(at.at)
    if mask is None:
        found = at.memory[places]
    else:
        mask = mask.expand(places.shape)
        found = torch.where(mask, at.memory[torch.where(mask, places, 0)], other).to(at.memory.dtype)
    return found


def _store(at: Pointer, values: Tensor, mask: Tensor) -> None:
    mask = mask.expand(at.at.shape)
    at.memory[at.at[mask]] = values[mask].to(at.memory.dtype)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, Tensor):
        yes = torch.as_tensor(yes)
        return torch.where(condition, yes, torch.as_tensor(no).to(yes.dtype) if yes.is_floating_point() else no)
    return yes if condition else no


def _pair(chosen: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: chosen(torch.as_tensor(a), torch.as_tensor(b))


def _allocate(dtype: Any, shape: list[int], layout: object) -> Any:
    if dtype == torch.int64:
        return Barriers(shape[0]) if len(shape) == 2 else Barrier()
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    """Run the parts beside each other. Raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(part: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _program.under_way = []
        try:
            part(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


def _copy(boxes: Boxes, at: list[int], ready: Barrier, target: Shared) -> None:
    rows, columns = boxes.block_shape
    box = boxes.base[at[0] : at[0] + rows, at[1] : at[1] + columns]
    target.values.copy_(box)
    ready.tell(0, -box.numel() * box.element_size())


def _nothing(*_: Any, **__: Any) -> Any:
    return None


_LANGUAGE: dict[str, Any] = {
    "constexpr": None, "float32": torch.float32, "int64": torch.int64, "static_range": range,
    "load": _load, "store": _store, "where": _where, "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize, "NVMMADistributedLayout": _nothing, "SliceLayout": _nothing,
    "DotOperandLayout": _nothing, "BlockedLayout": _nothing, "convert_layout": lambda values, layout: values,
    "arange": lambda start, end, layout: torch.arange(start, end),
    "zeros": lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    "full": lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
    "max": lambda values, axis: values.amax(axis), "sum": lambda values, axis: values.sum(axis),
    "exp2": torch.exp2, "log2": torch.log2, "exp": torch.exp, "log": torch.log,
    "maximum": _pair(torch.maximum), "minimum": _pair(torch.minimum),
}  # fmt: skip

HOPPER: dict[str, Any] = {
    "fence_async_shared": _nothing,
    "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
    "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=True: Product(a, b, acc, use_acc=use_acc),
    "warpgroup_mma_wait": _wait_products,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=_nothing,
        init=lambda barrier, count: barrier.start(count),
        expect=lambda barrier, amount: barrier.tell(1, amount),
        arrive=lambda barrier, count: barrier.tell(count, 0),
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
}


def run(
    kernel: GluonJITFunction[Any], module: ModuleType, grid: tuple[int, int], *given: Any, **constants: Any
) -> None:
    """Run `kernel` of `module`, one program after the other. Tensors are given as `Pointer`, descriptors as `Boxes`.
    Raises AssertionError for a program that breaks the machine's rules or comes to a halt."""
    names: dict[str, Any] = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, GluonJITFunction):
            names[name] = FunctionType(value.fn.__code__, names, name)
        elif isinstance(value, constexpr):
            names[name] = value.value
    names |= HOPPER
    entry = FunctionType(kernel.fn.__code__, names, kernel.fn.__name__)
    for program in ((x, y) for x in range(grid[0]) for y in range(grid[1])):
        names["gl"] = SimpleNamespace(**_LANGUAGE, program_id=program.__getitem__)
        entry(*given, **constants)
