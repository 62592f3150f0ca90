"""A decode worker's part of the shell (`worker.worker`): records of requests, and streams to those it reads from.

One frame per engine step and router carries every request's new tokens.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from decode_worker.journal import DecodeJournal
from decode_worker.peer import PeerEvent, Peers, PeerStream
from decode_worker.scheduler.events import ConnectPeer, FromRouter, RouterLost, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.handshake import Secrets
from engine.loop import Ran
from engine.messages import DecodeOrder, Ended, Load, Record, RouterHello
from engine.model.config import Progress
from engine.plan import mean
from engine.types import Incarnation
from telemetry.swap_metrics import SwapMetrics
from transfer.handoff.commands import Emit, Received, Unreachable
from transfer.handoff.receiver import KVReceiver
from worker.backlog import RecordsIn
from worker.config import DecodeConfig
from worker.opening import Parts
from worker.rpc import StreamEnded, StreamProven
from worker.streams import RouterStream
from worker.worker import Worker, open_worker

log = logging.getLogger(__name__)

RoleEvent = FromRouter | RouterLost | PeerEvent | Received


def open_decode_worker(
    name: str, config: DecodeConfig, host: str, port: int, secrets: Secrets, progress: Progress | None = None
) -> Worker[RoleEvent]:
    return open_worker("decode", name, config, host, port, secrets, partial(DecodeRole, config), progress)


class DecodeRole:
    """Mutable state: the running means, and what the scheduler and the peers own."""

    def __init__(self, config: DecodeConfig, parts: Parts) -> None:
        device, name = parts.device, parts.info.name
        self.journal = DecodeJournal(name)
        self.scheduler = DecodeScheduler(
            config=config,
            kv=parts.kv,
            receiver=KVReceiver(),
            name=name,
            incarnation=parts.info.incarnation,
            fingerprint=device.fingerprint,
            vocab=device.vocab,
            context_tokens=device.context_tokens,
            stop_ids=device.stop_ids,
            adapters=device.adapters,
            drafter=device.drafter,
            compiled=None if device.matchers is None else device.matchers.is_compiled,
            block_bytes=device.layout.block_bytes,
        )
        self.source = self.scheduler.departures.source
        self.growth_tokens = self.scheduler.admission.growth_tokens
        self._routers = parts.routers
        receiver = self.scheduler.receiver
        ways = tuple(parts.transports.values())
        self._peers = Peers(
            parts.rpc, parts.hello, ways, parts.inbox.put, parts.mover.submit, lambda: receiver.unfinished
        )
        self._block_bytes = device.layout.block_bytes
        self._metrics = parts.metrics
        self._swap_metrics = SwapMetrics(parts.metrics.families, self._block_bytes)
        self._s_per_step = 0.0
        self._s_per_block: dict[str, float] = {}

    @property
    def due(self) -> float:
        return 0.0 if self.scheduler.has_put_off else self.scheduler.batch.hold.due

    def hear(self, item: object, tell: Callable[[RoleEvent], None]) -> None:
        match item:
            case RecordsIn(RouterStream() as router, records):
                self._hear_router(router, records, tell)
            case StreamEnded(RouterStream(link=link)):
                tell(RouterLost(link))
            case StreamProven(PeerStream() as peer, party):
                self._peers.proven(peer, party, tell)
            case RecordsIn(PeerStream() as peer, records):
                self._peers.records(peer, records, tell)
            case StreamEnded(PeerStream() as peer, why):
                self._peers.ended(peer, why, tell)
            case Unreachable(incarnation, error):
                self._peers.drop(incarnation, f"its memory cannot be reached: {error}", tell)
            case Received():
                tell(item)
            case _:
                raise TypeError(f"not an item: {item!r}")

    def _hear_router(self, router: RouterStream, records: Sequence[Record], tell: Callable[[RoleEvent], None]) -> None:
        for record in records:
            if isinstance(record, RouterHello) and record.incarnation != router.router.incarnation:
                log.error("router %s speaks for another life than its own: dropped", router.router.name)
            elif isinstance(record, DecodeOrder):
                tell(FromRouter(router.link, record))

    def carry_out(self, commands: Sequence[object]) -> bool:
        """Send one frame per router and per peer. Where a request has ended there is room: routers should know."""
        to_routers: dict[int, list[Record]] = {}
        to_peers: dict[Incarnation, list[Record]] = {}
        ended = False
        for command in commands:
            match command:
                case Tell(link, record):
                    to_routers.setdefault(link, []).append(record)
                    ended |= isinstance(record, Ended)
                case Emit(peer, record):
                    to_peers.setdefault(peer, []).append(record)
                case ConnectPeer(address):
                    self._peers.connect(address)
                case _:
                    raise TypeError(f"not a command for the shell: {command!r}")
        for peer, records in to_peers.items():
            self._peers.send(peer, records)
        for link, records in to_routers.items():
            if link in self._routers:
                self._routers[link].say(records)
        return ended

    def turned(self, ran: Ran | None, now: float) -> None:
        """Take what the scheduler has counted in this turn."""
        if ran is not None:
            ended = self.scheduler.batch
            if rows := ended.running_rows:
                # What a stream waits for its next token: drafts that were drawn came with the one before.
                self._s_per_step = mean(self._s_per_step, ran.seconds * rows / (rows + ended.drawn_drafts))
            ended.lasted(ran.seconds)
        self._peers.redial(now)
        scheduler, metrics = self.scheduler, self._metrics
        batch, handoffs = scheduler.batch, scheduler.prefills.handoffs
        metrics.generated(batch.generated_tokens, batch.forced_tokens)
        hit_tokens = batch.hit_tokens + batch.alike.saved_tokens
        metrics.prompt_tokens(batch.prefilled_tokens, prefix_hit=hit_tokens, recomputed=batch.recomputed_tokens)
        drafting = batch.drafting
        metrics.drafts(drafting.drafted_tokens, drafting.drawn_tokens)
        metrics.draft_model(drafting.drafting_s, drafting.read_tokens)
        drafting.drafting_s, drafting.read_tokens = 0.0, 0
        for one in drafting.take_outcomes():
            metrics.drafts_of_request(one.drafted, one.drawn, one.tokens_per_step)
        drafting.drafted_tokens = drafting.drawn_tokens = 0
        batch.generated_tokens = batch.forced_tokens = batch.prefilled_tokens = batch.recomputed_tokens = 0
        hold = batch.hold
        metrics.held(hold.held_s, hold.filled, hold.expired, hold.missed_tokens)
        hold.held_s, hold.filled, hold.expired, hold.missed_tokens = 0.0, 0, 0, 0
        batch.hit_tokens = batch.alike.saved_tokens = 0
        for back in scheduler.swapping.take_resumed():
            metrics.resumed(back.way, back.lost_tokens, back.seconds)
        for moved in handoffs.take_migrated():
            nbytes = moved.blocks * (moved.block_bytes or self._block_bytes)
            metrics.migration(moved.outcome, moved.transport, moved.seconds, nbytes)
            if moved.blocks and moved.outcome == "ok":
                latest = moved.seconds / moved.blocks
                self._s_per_block[moved.peer] = mean(self._s_per_block.get(moved.peer, 0.0), latest)

    def load(self, load: Load, now: float) -> Load:
        scheduler, metrics, prefills = self.scheduler, self._metrics, self.scheduler.prefills
        metrics.inflight(len(prefills.handoffs))
        metrics.forks(prefills.forks.forked, prefills.forks.inherited)
        metrics.preempted(scheduler.preemption.preempted)
        self._swap_metrics.seen(scheduler.swapping)
        metrics.orphans_expired(scheduler.endings.orphans.expired)
        for dropped in (scheduler.receiver.dropped, prefills.handoffs.dropped):
            metrics.handoffs_dropped("receiver", dropped)
        return msgspec.structs.replace(
            load,
            waiting_tokens=scheduler.batch.backlog_tokens,
            s_per_token=self._s_per_step,
            s_per_prompt_token=scheduler.batch.s_per_prompt_token,
            s_per_spared_token=prefills.s_per_spared_token,
            s_per_block=dict(self._s_per_block),
        )

    def close(self) -> None:
        self._peers.close()
