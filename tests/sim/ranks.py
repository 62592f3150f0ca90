"""Workers of several ranks in the simulator, each with a mover: the product's own group drives them, over links that
are calls. Their memory is that of the worker, of which each mover reads and writes its heads."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.types import Incarnation
from tests.sim.mover import SimMover
from tests.sim.pipes import SimTransport
from tests.sim.shadow import ShadowKV
from transfer.handoff.commands import MoverCommand, MoverEvent
from transfer.ranks.links import DescribedTo, DescribeTo
from transfer.ranks.movers import RankMovers, RankTransport, Way

if TYPE_CHECKING:
    from tests.sim.world import World


class RankLink:
    """Stands in for `transfer.ranks.links.MoveLink`, and for the rank behind it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def open(self, world: "World", movers: RankMovers, ways: Mapping[str, SimTransport], memory: ShadowKV) -> None:
        self._movers, self._memory = movers, memory
        layout = memory.layout.restricted(movers._group._heads[self._rank])
        self._mover = SimMover(world, ways, memory, layout, self._report)

    def say(self, command: DescribeTo | MoverCommand) -> None:
        if isinstance(command, DescribeTo):
            details = {"pid": self._memory.process.pid, "rank": self._rank}
            self._movers._answers.put(DescribedTo(command.number, (details,) * len(command.peers)))
        else:
            self._mover.submit(command)

    def _report(self, event: MoverEvent) -> None:
        self._movers._give(self._movers._group.heard(self._rank, event))


def open_movers(
    world: "World",
    device: Any,
    transports: Mapping[str, SimTransport],
    on_event: Callable[[MoverEvent], None],
    incarnation: Incarnation,
    *rest: object,
) -> tuple[RankMovers, Mapping[str, Way]]:
    """Stands in for `worker.opening.open_movers`."""
    memory: ShadowKV = device.kv
    ranks, total = world.plan.ranks[memory.process.role], memory.layout.kv_heads
    heads = [range(total * rank // ranks, total * (rank + 1) // ranks) for rank in range(ranks)]
    links = {rank: RankLink(rank) for rank in range(1, ranks)}
    ways: Any = transports
    movers = RankMovers(ways, device.kv, device.layout, on_event, heads, links)  # type: ignore[arg-type]
    for link in links.values():
        link.open(world, movers, transports, memory)
    return movers, {name: RankTransport(way, movers, heads, 1.0) for name, way in ways.items()}
