"""Sizes of memory as people write and read them: "80GiB", "80GB", "10%"."""

import re
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MOST_BYTES = (1 << 63) - 1
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_size(text: str) -> int:
    """Parse a size into bytes: KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB of 1000, no unit is bytes. Raises
    ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 80GiB, 512MiB or 80GB")
    # Python reads no number of thousands of digits.
    size = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if len(match[1]) < 100 else _MOST_BYTES + 1
    if size > _MOST_BYTES:
        raise ValueError(f"{text[:24]!r}{'…' * (len(text) > 24)} is larger than any memory")
    return size


def parse_share(text: str) -> Fraction:
    """Parse a share from 0 to below 1: "4%" or "0.04", exactly. Raises ValueError."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    if not re.fullmatch(r"\d+(\.\d+)?", number):
        raise ValueError(f"{text!r} is not a share such as 4% or 0.04")
    share = Fraction(number) / (100 if percent else 1)
    if share >= 1:
        raise ValueError(f"{text!r} is all or more: a share is below 1")
    return share


def format_size(count: int) -> str:
    """Write bytes in the largest unit that leaves at least one of it: "1.25 GiB"; up to two digits, none where they are
    zero."""
    power = min(max(0, (abs(count).bit_length() - 1) // 10), len(_NAMES) - 1)
    number = f"{count / (1 << 10 * power):,.2f}".rstrip("0").rstrip(".")
    return f"{number} {_NAMES[power]}"
