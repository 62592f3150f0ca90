"""Chooses the requests that move off a leaving decode worker, and adds up what their parts cost.

A move is no loss: the worker yields the request, and whoever goes on reads its KV there. While nobody else could hold a
request, it stays and runs on: it may well end before there is room. Pure; time is an argument.
"""

import msgspec

from engine.messages import RequestStats
from router.core.call import Call, State
from router.core.placement import Placer
from router.core.registry import WorkerEntry
from router.core.worker_views import demand


def due_moves(
    known: list[Call], leaving: list[WorkerEntry], placer: Placer, at_once: int, now: float
) -> list[Call]:
    """The calls that the decode workers `leaving` are to yield now, oldest first, `at_once` off each at a time.

    `known`, oldest first, are at least the calls that they have, those that move, and those that wait."""
    # Whoever waits and is older is placed first: a request that left its worker would stand behind it.
    waits = next((call.turn for call in known if call.state is State.WAITING), None)
    pending = [call for call in known if call.yielding or call.state is State.WAITING]
    due: list[Call] = []
    for worker in leaving:
        moving = [c for c in known if c.source == worker.life or (c.yielding and c.decode == worker.name)]
        free = at_once - len(moving)
        promised: int | None = None  # summed once, for the first who could move
        for call in known:
            if free <= 0 or (waits is not None and waits < call.turn):
                break
            if not _is_worth_moving(call, worker):
                continue
            if promised is None:
                promised = sum(demand(other.record, worker.info).blocks for other in pending)
            if placer.has_room_elsewhere(call, worker, promised, now):
                due.append(call)
                pending.append(call)
                promised += demand(call.record, worker.info).blocks
                free -= 1
    return due


def _is_worth_moving(call: Call, worker: WorkerEntry) -> bool:
    """Return True if the call runs there, has all its KV, and has more than one token left."""
    record = call.record
    came_here_with = len(record.tokens) - record.prompt_tokens
    return (
        call.decode == worker.name
        and call.state is State.RUNNING
        and not call.yielding
        and came_here_with < len(call.emitted) < record.max_tokens - 1
    )


def together(earlier: RequestStats | None, stats: RequestStats) -> RequestStats:
    """The figures of a request that has moved. What was cached is what its first worker found; stages are not added
    here (`router.front.timing`)."""
    if earlier is None:
        return stats
    return msgspec.structs.replace(
        stats,
        prefill_cached_tokens=earlier.prefill_cached_tokens,
        decode_cached_tokens=earlier.decode_cached_tokens,
        migrated_blocks=earlier.migrated_blocks + stats.migrated_blocks,
        migrated_bytes=earlier.migrated_bytes + stats.migrated_bytes,
        migration_s=earlier.migration_s + stats.migration_s,
    )
