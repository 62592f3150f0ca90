"""`python -m tests.sim.explore`: the handoff alone, every interleaving: 2 senders × 2 receivers × 2 requests.

The real `KVSender` and `KVReceiver` with two requests of one chunk, over each way to lay them on two senders and two
receivers, and with one request of two chunks; each with a wire read remotely (shm) and a pushed one (tcp). `--deep`
adds a second chunk to the first of two requests (some 400,000 states for each, in a minute and a half of a core and
0.1 GB). Ordinary moves: offer, post, end of a send, delivery of the next message, end of a copy, close. Faults, up to
two in a run: the receiver aborts, the sender gives up, either process crashes, the stream breaks, a send or a copy
fails, a message comes twice, a message overtakes all before it. Every state is visited once; in each, no block may be
let go that is still touched, and where nothing can move any more nothing may be left, but what waits for the proof of
a living, unreachable reader's death.
"""

import sys
import time

from tests.sim.clock import Violation
from tests.sim.explore_moves import moves as moves_of
from tests.sim.explore_state import Layout, State
from tests.sim.visited import FIRST, Visited

LAYOUTS = (((0, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (0, 1)), ((0, 0), (1, 1)))
"""(receiver, sender) of request 0 and of request 1: all there are, up to names."""
MAX_FAULTS = 2


def explore(
    layout: Layout,
    chunks: tuple[int, ...],
    remote: bool,
    max_faults: int = MAX_FAULTS,
    ranks: tuple[int, int] = (1, 1),
) -> tuple[int, int]:
    """Visit every state once; (states, moves). Raises Violation with the moves that lead to it."""
    first, visited = State(layout, chunks, remote, ranks), Visited()
    visited.add(first.key(), FIRST, "")
    stack = [(first, 0)]
    moves = 0
    while stack:
        state, here = stack.pop()
        quiet, name = True, ""
        try:
            for name, change, cost in moves_of(state):
                quiet &= cost > 0
                if state.faults + cost > max_faults:
                    continue
                moves += 1
                new = state.clone()
                new.faults += cost
                change(new)
                new.check()
                number = visited.add(new.key(), here, name)
                if number is not None:
                    stack.append((new, number))
            name = "(rest)"
            if quiet:
                state.check_quiet()
        except Exception as error:
            path = [*visited.path(here), name]
            raise Violation(f"{error!r} after {'; '.join(path)}") from error
    return len(visited), moves


def main() -> int:
    began = time.monotonic()
    total = 0
    runs = [(((0, 0),), (2,)), *((layout, (1, 1)) for layout in LAYOUTS)]
    if "--deep" in sys.argv:
        runs += [(layout, (2, 1)) for layout in LAYOUTS]
    for layout, chunks in runs:
        for remote in (True, False):
            states, moves = explore(layout, chunks, remote)
            total += states
            pairs = ", ".join(
                f"r{at} ({chunks[at]} chunks): receiver {d} of sender {p}"
                for at, (d, p) in enumerate(layout)
            )
            kind = "read remotely" if remote else "pushed"
            print(f"{states:9} states {moves:9} moves  {kind}, {pairs}", flush=True)
    print(f"{total} states in {time.monotonic() - began:.1f} s, up to {MAX_FAULTS} faults in a run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
