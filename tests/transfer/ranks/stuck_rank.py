"""`python -m tests.transfer.ranks.stuck_rank`: the process of a rank whose transfer thread does not come back from the
first call that a command of rank 0 costs it."""

import time
from functools import partial

from engine.ranks.follower import main
from engine.types import Incarnation
from transfer.config import TransferConfig
from transfer.ranks.follower import serve
from transfer.registry import open_transports
from transfer.transport import KVMemory, Transport

PROGRAM = "tests.transfer.ranks.stuck_rank"


def open_stuck(memory: KVMemory, me: Incarnation, config: TransferConfig, host: str) -> dict[str, Transport]:
    ways = open_transports(memory, me, config, host)
    for way in ways.values():
        way.connect = lambda *rest: time.sleep(3600)  # type: ignore[method-assign]
    return ways


if __name__ == "__main__":
    main(partial(serve, open_ways=open_stuck))
