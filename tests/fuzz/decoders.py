"""All decoders by name: wherever bytes that somebody else wrote become records of ours.

Not here, because they read nothing of anybody else's: the handles of `cuda_ipc`, which are one msgspec struct behind an
endpoint's details; the answers that the command line's clients read from their own cluster; and what the ranks of one
worker tell each other in memory and over sockets that they inherit, but for their movers, whose records hold what peers
have said: a broken order ends the rank that reads it.
"""

from functools import cache

from tests.fuzz.files import files
from tests.fuzz.fronts import FRONTS
from tests.fuzz.inside import INSIDE
from tests.fuzz.judge import Decoder
from tests.fuzz.wire import WIRE


@cache
def decoders() -> dict[str, Decoder]:
    found = {decoder.name: decoder for decoder in (*WIRE, *FRONTS, *INSIDE, *files())}
    assert len(found) == len(WIRE) + len(FRONTS) + len(INSIDE) + len(files()), "two decoders have one name"
    return found
