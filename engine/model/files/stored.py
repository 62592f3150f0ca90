"""A tensor of somebody else's file, read by rows: nothing but the rows asked for is unpacked or widened."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from engine.model.codes import Codes, FloatArray, Form

FORMS: tuple[str, ...] = get_args(Form)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """`kind`: the type that its numbers are kept in (float32, float16, bfloat16; float32 too for what must be widened),
    or the form of its codes. `read(first, end)` returns those rows, as codes of that form or in 32 bits, and raises
    ModelError."""

    shape: tuple[int, ...]
    kind: str
    read: Callable[[int, int], FloatArray | Codes]

    @property
    def is_coded(self) -> bool:
        return self.kind in FORMS

    def codes(self, first: int, end: int) -> Codes:
        """Return rows as codes. Raises TypeError where there are none."""
        if not isinstance(found := self.read(first, end), Codes):
            raise TypeError(f"rows in {self.kind} have no codes")
        return found

    def values(self, first: int, end: int) -> FloatArray:
        """Return rows in 32 bits."""
        found = self.read(first, end)
        return found.widen() if isinstance(found, Codes) else found
