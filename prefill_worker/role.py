"""A prefill worker's part of the shell (`worker.worker`). Its readers are its only links."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Never

import msgspec

from engine.handshake import Secrets
from engine.loop import Ran
from engine.messages import Load
from engine.model.config import Progress
from engine.plan import TokenSpeed
from prefill_worker.journal import PrefillJournal
from prefill_worker.scheduler.scheduler import PrefillScheduler
from transfer.handoff.commands import Unreachable
from worker.backlog import RecordsIn
from worker.config import PrefillConfig
from worker.opening import Parts
from worker.rpc import StreamEnded
from worker.streams import RouterStream
from worker.worker import Worker, open_worker


def open_prefill_worker(
    name: str, config: PrefillConfig, host: str, port: int, secrets: Secrets, progress: Progress | None = None
) -> Worker[Never]:
    return open_worker("prefill", name, config, host, port, secrets, partial(PrefillRole, config), progress)


class PrefillRole:
    """Mutable state: the speed that was measured, and what the scheduler owns."""

    def __init__(self, config: PrefillConfig, parts: Parts) -> None:
        self.growth_tokens = None
        self.journal = PrefillJournal(parts.info.name)
        self.scheduler = PrefillScheduler(
            config,
            parts.kv,
            fingerprint=parts.device.fingerprint,
            vocab=parts.device.vocab,
            context_tokens=parts.device.context_tokens,
            stop_ids=parts.device.stop_ids,
            adapters=parts.device.adapters,
            compiled=None if parts.device.matchers is None else parts.device.matchers.is_compiled,
        )
        self.source = self.scheduler.source
        self._metrics = parts.metrics
        self._speed = TokenSpeed()

    @property
    def due(self) -> float:
        return float("inf")

    def hear(self, item: object, tell: Callable[[Never], None]) -> None:
        match item:
            case RecordsIn(RouterStream()) | StreamEnded(RouterStream()):
                pass  # a router only reads reports
            case Unreachable():
                pass  # a reader, which the shell has given up
            case _:
                raise TypeError(f"not an item: {item!r}")

    def carry_out(self, commands: Sequence[object]) -> bool:
        for command in commands:
            raise TypeError(f"not a command for the shell: {command!r}")
        return False

    def turned(self, ran: Ran | None, now: float) -> None:
        hits, self.scheduler.hit_tokens = self.scheduler.hit_tokens, 0
        self._metrics.prompt_tokens(computed=0, prefix_hit=hits)
        if ran is not None:
            tokens, again = ran.plan.computed_tokens, ran.plan.recomputed_tokens
            self._metrics.prompt_tokens(computed=tokens - again, prefix_hit=0, recomputed=again)
            self._speed.measured(ran.seconds, max(1, tokens))

    def load(self, load: Load, now: float) -> Load:
        line = self.scheduler.line
        return msgspec.structs.replace(
            load,
            waiting_tokens=self.scheduler.backlog_tokens,
            s_per_token=self._speed.s_per_token,
            s_per_spared_token=line.s_per_spared_token,
        )

    def close(self) -> None:
        """Close nothing: this role has no streams."""
