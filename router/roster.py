"""Lists every worker that the router was told of: its pool, where its metrics are, and how it fares.

A worker that is lost stays listed until it is back, so that whoever scrapes it sees that it is down. One that left as
it was asked to, and is not named again, is taken off.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from engine.messages import WorkerInfo
from engine.types import Incarnation
from router.core.prefix_index import PrefixIndex
from router.core.registry import Registry
from telemetry.router_metrics import WorkerView


class ScrapeTarget(msgspec.Struct, frozen=True):
    """An entry of Prometheus' HTTP discovery."""

    targets: list[str]
    labels: dict[str, str]


@dataclass(slots=True)
class _Member:
    role: str
    state: str = "starting"
    metrics_address: str = ""
    incarnation: Incarnation | None = None
    is_gone: bool = False
    """Left; removed once no longer named."""


class Roster:
    """Mutable state: the members by name. Owner: the router's event loop."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self.routers: dict[str, int] = {}
        """The port at which each of several routers serves alone, by name; empty for the only one."""

    def __repr__(self) -> str:
        return f"Roster({', '.join(f'{n}={m.state}' for n, m in self._members.items()) or 'empty'})"

    def role(self, name: str) -> str:
        return self._members[name].role

    def named(self, name: str, role: str) -> None:
        """A worker is to be reached from now on: a new one, or a new life of one."""
        member = self._members.setdefault(name, _Member(role))
        member.state, member.is_gone = "starting", False

    def joined(self, info: WorkerInfo) -> bool:
        """A worker is connected; True if this is another life than the last."""
        member = self._members.setdefault(info.name, _Member(info.role))
        fresh = member.incarnation != info.incarnation
        member.state, member.is_gone = "ready", False
        member.metrics_address, member.incarnation = info.metrics_address, info.incarnation
        return fresh

    def expect_only(self, role: str, names: Collection[str]) -> None:
        """Forget the members of a role that are lost, and not among those that will be there again."""
        for name, member in list(self._members.items()):
            if member.role == role and member.state == "lost" and name not in names:
                del self._members[name]

    def has(self, role: str) -> bool:
        """Return True if there is a member of this role, in whatever state."""
        return any(member.role == role for member in self._members.values())

    def lost(self, name: str, *, left: bool) -> bool:
        """A worker is connected no more; False if it was not."""
        member = self._members.get(name)
        if member is None or member.state != "ready":
            return False
        member.state, member.is_gone = "lost", left
        return True

    def unnamed(self, name: str) -> None:
        """A worker is not to be reached any more."""
        member = self._members.get(name)
        if member is not None and (member.is_gone or member.incarnation is None):
            del self._members[name]
        elif member is not None:
            member.state = "lost"

    def views(self, registry: Registry, index: PrefixIndex, now: float) -> list[WorkerView]:
        """Return all members; one that is connected and silent counts as lost."""
        live = {worker.name: worker for role in ("prefill", "decode") for worker in registry.live(role, now)}
        views = []
        for name, member in self._members.items():
            state = member.state
            if state == "ready":
                worker = live.get(name)
                state = "lost" if worker is None else "draining" if worker.leaving else "ready"
            views.append(WorkerView(name, member.role, state, index.held_blocks(name)))
        return views

    def targets(self, routers: str | dict[str, str], supervisor_address: str = "") -> list[ScrapeTarget]:
        """Return what Prometheus is to scrape: the router where it was reached, or of several each by name where it
        serves alone, the supervisor if there is one, and every worker that was ever connected."""
        named = {"router": routers} if isinstance(routers, str) else routers
        found = [_target(name, "router", address) for name, address in named.items()]
        if supervisor_address:
            found.append(_target("supervisor", "supervisor", supervisor_address))
        for name, member in self._members.items():
            if member.metrics_address:
                found.append(_target(name, member.role, member.metrics_address))
        return found


def _target(name: str, pool: str, address: str) -> ScrapeTarget:
    # The slot's name as the instance: a worker that is started again continues its series.
    return ScrapeTarget([address], {"instance": name, "worker": name, "pool": pool})
