"""Numbers on the command line: a value that a flag does not take is refused while the command line is read."""

import argparse
import math
import reprlib
from collections.abc import Callable


def seconds(text: str) -> float:
    """Parse a finite time above zero. Raises what argparse shows the user."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in this range, both ends included. The parser raises what argparse shows the
    user."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            # Python takes none of thousands of digits either.
            why = f"{reprlib.repr(text)} is not a whole number in {least} to {most}"
            raise argparse.ArgumentTypeError(why) from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(value)} does not lie in {least} to {most}")
        return value

    return read


token_count = whole(1, 2**31 - 1)
seed = whole(0, 2**64 - 1)
port = whole(0, 2**16 - 1)
