"""The interface of a reader of somebody else's model files, and the arithmetic both readers share."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.messages import guarded
from engine.model.codes import FloatArray
from engine.model.config import ModelConfig, ModelError
from engine.model.families import FAMILIES, REFUSED, Family, Source
from engine.model.files.stored import StoredRows
from engine.text.files import TextFiles

_Item = TypeVar("_Item", bound=np.generic)


class Checkpoint(Protocol):
    """An opened model. Everything it raises about its files is a ModelError."""

    path: Path
    family: Family
    config: ModelConfig
    rope_pairs: bool
    """True where q and k rows are stored as rotary pairs, see `Source.rope_heads`."""
    folds_norms: bool
    """True where weights of norms hold the config's `norm_offset` already, see `Source.is_norm`."""

    def tensor_name(self, source: Source, layer: int, expert: int = 0) -> str:
        """Return what this file calls a tensor."""

    def file_of(self, name: str) -> Path:
        """Return the file that has a tensor, or else the model's path."""

    def find(self, source: Source, layer: int, expert: int | None = None) -> StoredRows:
        """Find a tensor, or what one expert has of it, also where a tensor holds those of all. Nothing but scales is
        read yet. Raises ModelError naming file and tensor."""

    def check_all_read(self) -> None:
        """Raise ModelError naming a tensor that `find` was never asked for: the family has no place for it, and answers
        without it would be wrong. Called when every weight has been looked for."""

    def text(self) -> TextFiles:
        """Return tokenizer, chat template and special ids."""


STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The engine's names of the types that it computes in, by the names that both formats have for them."""


def most_of(tensors: Iterable[tuple[str, int]]) -> str:
    """Return the type of most bytes among tensors of these types and sizes: norms are kept in 32 bits beside matrices
    of any other."""
    sizes: Counter[str] = Counter()
    for kind, size_bytes in tensors:
        sizes[kind] += size_bytes
    found = max(sizes, key=sizes.__getitem__, default="F32")
    return STORED.get(found, found)


def find_family(path: Path, field: Literal["hugging_face", "gguf"], called: str, value: object) -> Family:
    """Return the family whose `field` is `value`, which the file `path` gives as `called`. Raises ModelError, with the
    reason for those that are known and not run."""
    known: dict[str, Family] = {name: family for family in FAMILIES.values() if (name := getattr(family, field))}
    if isinstance(value, str) and value in REFUSED:
        raise ModelError(path, f"{called} {value!r} is not run: {REFUSED[value]}")
    if not isinstance(value, str) or value not in known:
        raise ModelError(path, f"unknown {called} {value!r}; known: {', '.join(sorted(known))}")
    return known[value]


def check_unread(family: str, tensors: Mapping[str, Path], read: Collection[str], harmless: re.Pattern[str]) -> None:
    """Raise ModelError for the first of `tensors`, by name with the file of each, that is neither `read` nor harmless.
    """
    left = [name for name in tensors if name not in read and not harmless.search(name)]
    if left:
        more = f", nor for {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(tensors[left[0]], f"tensor {left[0]}: the family {family} has no place for it{more}")


def whole(raw: Mapping[str, Any], name: str) -> int:
    """Return a field that is a whole number. Raises KeyError where it is missing, and TypeError."""
    value = raw[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError(f"{name} is {value!r}, not a whole number")
    return int(value)


def number(raw: Mapping[str, Any], name: str) -> float:
    """Return a field that is a number, or the word for one. Raises KeyError where it is missing, and TypeError."""
    try:
        return float(raw[name])
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {raw[name]!r}, not a number") from error


def flag(raw: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false; null counts as false. Raises TypeError: a word such as "no" would count as
    true."""
    if (value := raw.get(name, default)) is not None and not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, not true or false")
    return bool(value)


def interval(raw: Mapping[str, Any], name: str, default: int) -> int:
    """Return a field that says which layers are otherwise: each so manieth. Raises TypeError."""
    if (every := default if raw.get(name) is None else whole(raw, name)) < 1:
        raise TypeError(f"{name} is {every}, must be at least 1")
    return every


def factor(raw: Mapping[str, Any], name: str, default: float) -> float:
    """Return a field that is a number above 0. Raises TypeError."""
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise TypeError(f"{name} is {value!r}, not a number above 0")
    return float(value)


def check_is_file(path: Path) -> None:
    """Raise ModelError for a pipe or a device, whose reader would wait or never end. What is not there is not told."""
    if path.exists() and not path.is_file():
        raise ModelError(path, "cannot be read: it is not a file")


_read_object = guarded(msgspec.json.Decoder(dict[str, Any]).decode)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError."""
    check_is_file(path)
    try:
        return _read_object(path.read_bytes())
    except OSError as error:
        raise ModelError(path, f"cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelError(path, f"not a JSON object: {error}") from error


def halves_from_pairs(tensor: NDArray[_Item], heads: int) -> NDArray[_Item]:
    """Turn rows of rotary pairs (0, d/2, 1, ..) back to two halves (0, 1, .., d/2, ..), head by head."""
    paired = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(tensor.shape)


def as_dtype(values: FloatArray, dtype: str, path: Path, name: str) -> NDArray[np.generic]:
    """Round 32-bit values to nearest, ties to even. bfloat16 comes back as its bits (uint16): numpy has no such type.

    Raises ModelError where a value is no finite number, or does not fit.
    """
    if not np.isfinite(values).all():
        raise ModelError(path, f"tensor {name}: a value is not a finite number")
    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise ModelError(path, f"tensor {name}: values do not fit float16, use bfloat16")
        return half
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounding = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    raise ModelError(path, f"unknown dtype {dtype}: float32, float16 or bfloat16")
