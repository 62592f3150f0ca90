"""Numbers on the command line: what a flag takes, said when it is typed and not where it would have been used."""

import argparse
import math
from collections.abc import Callable


def seconds(text: str) -> float:
    """A finite time above zero. Raises what argparse tells the user."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above zero")
    return value


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number in this range, both ends included. What it returns raises what argparse tells the user."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} does not lie in {least} to {most}")
        return value

    return read


token_count = whole(1, 2**31 - 1)
seed = whole(0, 2**64 - 1)
port = whole(0, 2**16 - 1)
