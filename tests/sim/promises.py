"""An independent model of what routers may do with a request: kept from what is seen outside of them, it never asks the
cores.

What a placement must say follows from the request as its client made it and from the undisturbed run; how often it may
be placed again, from the losses that were seen. Workers are held to the undisturbed run too, by every token they say.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import Load, Orphan, Place, Record, RouterRecord, Tokens
from engine.types import RequestRecord
from tests.sim.clock import Violation

if TYPE_CHECKING:
    from tests.sim.client import Client
    from tests.sim.world import World

REFILL_S = 60.0


@dataclass(slots=True)
class Story:
    """What is known of one request. `losses` are decode workers that were lost while they ran it, without a word."""

    client: "Client"
    placement: int = 0
    worker: str = ""
    losses: int = 0
    losses_at: dict[int, int] = field(default_factory=dict)
    """Losses before each placement."""
    told_by: dict[int, str] = field(default_factory=dict)
    """The worker that has reported each placement as an orphan's."""


class Promises:
    """Checks and changes nothing in the world. Mutable state: the story of each request, and of the router that lives
    the lives it has met, those of them that said they leave, and what is left of its retry budget."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._stories: dict[str, Story] = {}
        self._lives: dict[str, int] = {}
        self._leaving: dict[str, int] = {}
        self._budget = 0.0
        self._taken_at_s: float | None = None
        self.forged: set[bytes] = set()
        """Frames that nobody has said."""

    def router_begins(self) -> None:
        self._lives.clear()
        self._leaving.clear()
        self._budget, self._taken_at_s = float(self._world.plan.router.retry_reserve), None

    def met(self, worker: str, incarnation: int) -> None:
        self._lives[worker] = incarnation

    def submitted(self, client: "Client") -> None:
        self._stories[client.name] = Story(client)
        config = self._world.plan.router
        self._budget = min(self._budget + config.retry_fraction, config.retry_reserve)

    def heard(self, worker: str, record: Record) -> None:
        """Check what a worker really said to the router that lives."""
        if isinstance(record, Tokens):
            want = self._stories[record.request].client.want
            if record.ids != want[record.index : record.index + len(record.ids)]:
                what = f"{worker} says tokens {record.ids} from {record.index}"
                raise Violation(f"{record.request}: {what}, the uninterrupted run is {want}")
        elif isinstance(record, Load):
            if record.promised_blocks > record.free_blocks + record.cached_blocks:
                raise Violation(f"{worker} promises {record.promised_blocks} blocks, of which some cannot be freed")
            if record.leaving:
                self._leaving[worker] = self._lives[worker]
        elif isinstance(record, Orphan):
            name, placement = record.record.request, record.placement
            story = self._stories[name]
            self._check(story, record.record)
            story.told_by[placement] = worker
            if record.losses != story.losses_at.get(placement):
                raise Violation(f"{name}/{placement}: an orphan of {record.losses} losses, not as it was placed")

    def adopted(self, orphan: Orphan) -> None:
        """Go on from the losses that its placement was told of."""
        story = self._stories[orphan.record.request]
        placement = orphan.placement
        story.worker, story.losses = story.told_by[placement], story.losses_at[placement]

    def told(self, worker: str, record: RouterRecord) -> None:
        """Check what the router tells a worker."""
        if not isinstance(record, Place):
            return
        name, story = record.record.request, self._stories[record.record.request]
        if record.placement <= story.placement:
            raise Violation(f"{name}: placement {record.placement} after {story.placement}")
        self._check(story, record.record)
        if record.losses != story.losses:
            raise Violation(f"{name}/{record.placement}: {record.losses} losses are told, {story.losses} were seen")
        story.placement, story.worker = record.placement, worker
        story.losses_at[record.placement] = story.losses

    def _check(self, story: Story, record: RequestRecord) -> None:
        """Check that a record is the client's, with a history that the client has been given, or could be."""
        client, prompt = story.client, record.prompt_tokens
        asked, history = client.record, record.tokens[prompt:]
        if record.tokens[:prompt] != asked.tokens or history != client.want[: len(history)]:
            raise Violation(f"{client.name}: is placed with {record.tokens}, asked {asked.tokens}, then {client.want}")
        if _terms(record) != _terms(asked):
            raise Violation(f"{client.name}: is placed as {record}, asked was {asked}")

    def placed_again(self, client: "Client") -> None:
        """Count a loss after which a request goes on elsewhere. A worker that had announced its end costs nothing."""
        story, config = self._stories[client.name], self._world.plan.router
        life = self._lives.get(story.worker)
        if life is not None and self._leaving.get(story.worker) == life:
            return
        story.losses += 1
        if story.losses >= config.max_placements:
            raise Violation(f"{client.name}: goes on after {story.losses} losses, {config.max_placements} end it")
        now = self._world.clock.now
        since_s = 0.0 if self._taken_at_s is None else now - self._taken_at_s
        self._taken_at_s = now
        self._budget = min(self._budget + since_s / REFILL_S * config.retry_reserve, config.retry_reserve)
        if self._budget < 1.0 - 1e-6:
            raise Violation(f"{client.name}: goes on, and the retry budget is spent: {self._budget:.3f} are left")
        self._budget -= 1.0


def _terms(record: RequestRecord) -> tuple[object, ...]:
    """Return all of a record that never changes, however often it is placed."""
    return (
        record.prompt_tokens,
        record.max_tokens,
        record.min_tokens,
        record.seed,
        record.sample_index,
        record.sampling,
        record.stop_token_ids,
        record.ignore_eos,
        record.namespace,
        record.adapter,
        record.priority,
        record.group,
        record.beams,
        record.context,
    )
