"""All decoders by name: wherever bytes that somebody else wrote become records of ours.

Not here, because they read nothing of anybody else's: the handles of `cuda_ipc`, which are one msgspec struct behind an
endpoint's details, and the answers that the command line's clients read from their own cluster.
"""

from functools import cache

from tests.fuzz.files import files
from tests.fuzz.fronts import FRONTS
from tests.fuzz.judge import Decoder
from tests.fuzz.wire import WIRE


@cache
def decoders() -> dict[str, Decoder]:
    found = {decoder.name: decoder for decoder in (*WIRE, *FRONTS, *files())}
    assert len(found) == len(WIRE) + len(FRONTS) + len(files()), "two decoders have one name"
    return found
