"""Rank 0's side of ranks that have a device each, as its opener and its runner see them.

Every rank does the same in the same order: it opens a pool, records steps, and carries out the same ones. Rank 0 tells
which, over the channel of orders; what a step needs of the one before, tokens that may not be drawn yet, goes from
device to device. Rank 0 alone waits for steps, and no rank for the host of another: a rank that does not come is found
by the time that a step takes, or by its end, and then the link is aborted, so that nobody's device waits on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.batch import Followed
from engine.ranks.device_orders import DeviceOrder
from engine.ranks.devices import RankLink
from engine.ranks.group import RankGroup
from engine.ranks.one_shot import OneShotSums
from engine.step import StepPlan


class DeviceGroup:
    """Fulfils `engine.backends.gpu.runner.PoolRanks`. Owner: as of `group`."""

    def __init__(self, group: RankGroup, link: RankLink, ranks: int, one_shot: OneShotSums | None) -> None:
        self._group = group
        self._link = link
        self._others = range(1, ranks)
        self._one_shot = one_shot
        group.interrupted_by(self._abort)

    def _abort(self) -> None:
        if self._one_shot is not None:
            self._one_shot.abort()
        self._link.abort()

    def open(self, blocks: int) -> None:
        self._group.order(DeviceOrder("open", blocks))

    def opened(self, blocks: int) -> None:
        self._group.have_opened(blocks)

    def least(self, blocks: int) -> int:
        self._group.order(DeviceOrder("room"))
        return min(blocks, *self._group.rooms())

    @contextmanager
    def tell(self, plan: StepPlan, followed: Followed | None) -> Iterator[None]:
        self._group.order(DeviceOrder.of_step(plan, followed))
        with self._group.waited():
            if followed is not None and len(followed.tokens):
                tokens = followed.tokens.contiguous()
                self._link.exchange([(rank, tokens) for rank in self._others], [])
            with self._link.held():
                yield

    def wait(self, ended: Callable[[], None]) -> None:
        with self._group.waited():
            ended()
            if self._one_shot is not None:
                self._one_shot.check()
