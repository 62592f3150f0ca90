"""Both pools in one process and one thread: the same schedulers, runners and handoff over the loopback transport.

No sockets, no processes: what remains is exactly the part whose answers must be right. Tests compare it with the real
cluster and with other implementations; a script can use it as a small engine.
"""

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_worker.scheduler import events as decode_events
from decode_worker.scheduler.events import ConnectPeer, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.device import EngineDevice
from engine.loop import Engine
from engine.messages import (
    Ended,
    NeedPrefill,
    PeerAddress,
    Place,
    Refused,
    Tokens,
    UsePrefill,
)
from engine.storage.tiers.opening import Tiering
from engine.types import Incarnation, RequestId, RequestRecord, TokenLogprobs
from prefill_worker.scheduler.scheduler import PrefillScheduler
from transfer.handoff.commands import (
    Connect,
    Emit,
    FromReader,
    MoverDied,
    ReaderDead,
    ReaderLost,
    ReaderUp,
)
from transfer.handoff.negotiation import Agreement
from transfer.handoff.receiver import KVReceiver
from transfer.host.loopback import LoopbackHub, LoopbackTransport
from transfer.mover import Mover
from worker.config import DecodeConfig, PrefillConfig

PREFILL, DECODE = Incarnation(1), Incarnation(2)
ADDRESS = PeerAddress("prefill-0", "loopback")
LINK = 1
Opening = Callable[[Callable[[object], None]], Tiering]


@dataclass(slots=True)
class ColocatedAnswer:
    """One request and what became of it so far; `ended` is the record of its end."""

    record: RequestRecord
    fork_of: RequestId | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    refused: int = 0
    ended: Ended | None = None


class Colocated:
    """Runs requests through both schedulers: `submit` them, then `turn` until they are done. `prefill` and `decode` are
    devices of one model; their block sizes may differ."""

    def __init__(
        self,
        prefill: EngineDevice,
        decode: EngineDevice,
        *,
        prefill_config: PrefillConfig | None = None,
        decode_config: DecodeConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: bool = False,
        digest_share: float = 1.0,
        tiering: Opening | None = None,
        decode_tiering: Opening | None = None,
    ) -> None:
        """Build both sides. `tiering` and `decode_tiering` open the lower tiers of either side, given who is told what
        became of stores, loads and spills."""
        self.hub = LoopbackHub()
        self.answers: dict[RequestId, ColocatedAnswer] = {}
        self._waiting: list[ColocatedAnswer] = []
        self._clock = clock
        self._check = check
        self._prefill_is_lost = False
        self._to_prefill: list[Any] = []
        self._to_decode: list[Any] = []
        self._from_movers: tuple[list[Any], list[Any]] = ([], [])
        tiers = [
            None if opening is None else opening(inbox.append)
            for opening, inbox in zip((tiering, decode_tiering), self._from_movers, strict=True)
        ]
        self._tier_movers = [None if one is None else one.mover for one in tiers]
        shared = {
            "fingerprint": prefill.fingerprint,
            "vocab": prefill.vocab,
            "context_tokens": prefill.context_tokens,
            "stop_ids": prefill.stop_ids,
        }
        prefill_config, decode_config = prefill_config or PrefillConfig(), decode_config or DecodeConfig()
        managers = [
            device.manager(None if one is None else one.tiers, limits.chunk_tokens)
            for device, one, limits in zip(
                (prefill, decode), tiers, (prefill_config.step_limits, decode_config.step_limits), strict=True
            )
        ]
        self.prefill = PrefillScheduler(
            prefill_config,
            managers[0],
            compiled=None if prefill.matchers is None else prefill.matchers.is_compiled,
            **shared,  # type: ignore[arg-type]
        )
        self.decode = DecodeScheduler(
            config=decode_config,
            kv=managers[1],
            receiver=KVReceiver(),
            name="decode-0",
            incarnation=DECODE,
            block_bytes=decode.layout.block_bytes,
            drafter=decode.drafter,
            compiled=None if decode.matchers is None else decode.matchers.is_compiled,
            **shared,  # type: ignore[arg-type]
        )
        self._engines = (
            Engine(self.prefill, prefill.runner, clock, self._carry_out(0), self._tier_movers[0], prefill.plans_ahead),
            Engine(self.decode, decode.runner, clock, self._carry_out(1), self._tier_movers[1], decode.plans_ahead),
        )
        self._transports = transports = (
            LoopbackTransport(prefill.kv, PREFILL, self.hub),
            LoopbackTransport(decode.kv, DECODE, self.hub),
        )
        self._movers = tuple(
            Mover({"loopback": transport}, device.kv, device.layout, inbox.append)
            for transport, device, inbox in zip(
                transports, (prefill, decode), self._from_movers, strict=True
            )
        )
        for at, me, peer, device in ((0, PREFILL, DECODE, decode), (1, DECODE, PREFILL, prefill)):
            agreement = Agreement(device.layout, digest_share)
            self._movers[at].submit(Connect(peer, transports[1 - at].describe(me), agreement))
        self._prefill_block_size = prefill.layout.block_size
        self._engines[0].receive([ReaderUp(DECODE, transports[0].reads_remotely)])

    def submit(self, record: RequestRecord, fork_of: RequestId | None = None) -> ColocatedAnswer:
        """Hand a request in; a refused one is offered again whenever something ends. `fork_of`: a request with the
        same prompt, whose blocks it shares."""
        answer = ColocatedAnswer(record, fork_of)
        self.answers[record.request] = answer
        self._waiting.append(answer)
        return answer

    def lose_prefill(self) -> None:
        """Act as if the prefill worker's process had ended: nothing that it says is heard any more, and its blocks are
        let go."""
        self._engines[1].receive([decode_events.PeerDown(ADDRESS, PREFILL, "lost")])
        self._engines[0].receive([ReaderLost(DECODE), ReaderDead(DECODE)])
        self._to_prefill.clear()
        self._to_decode = [e for e in self._to_decode if isinstance(e, decode_events.FromRouter)]
        self._prefill_is_lost = True

    def turn(self) -> bool:
        """Deliver what is under way and run one step on either side. False: nothing was left to do."""
        offered, self._waiting = self._waiting, []
        for answer in offered:
            place = Place(
                record=answer.record, placement=1, prefill=ADDRESS, fork_of=answer.fork_of
            )
            self._engines[1].receive([decode_events.FromRouter(LINK, place)])
        worked = bool(offered)
        for at, messages in enumerate((self._to_prefill, self._to_decode)):
            worked |= self._movers[at].run_once()
            tier_mover = self._tier_movers[at]
            worked |= tier_mover is not None and tier_mover.run_once()
            events = [*self._from_movers[at], *messages]
            self._from_movers[at].clear()
            messages.clear()
            for event in events:
                if isinstance(event, MoverDied):
                    raise RuntimeError(event.error)
            self._engines[at].receive(events)
            worked |= bool(events)
            worked |= self._engines[at].step() is not None or self._engines[at].is_busy
        if self._check:
            self.prefill.check()
            self.decode.check()
        under_way = self._to_prefill or self._to_decode or self._transports_due()
        return worked or bool(under_way)

    def _transports_due(self) -> bool:
        """True while some transport has more to do at once: a copy that is made in pieces tells of its end only."""
        poll = select.poll()  # select() ends at descriptor 1023
        for transport in self._transports:
            poll.register(transport.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def run(self, records: Sequence[RequestRecord]) -> list[ColocatedAnswer]:
        """Run all of them at once, to the end. Raises RuntimeError if they can never end."""
        answers = [self.submit(record) for record in records]
        while any(answer.ended is None for answer in answers):
            if not self.turn():
                raise RuntimeError(f"stuck: {self.prefill!r}, {self.decode!r}")
        while self.turn():
            pass
        return answers

    def close(self) -> None:
        for mover in self._movers:
            mover.stop()
        for tier_mover in self._tier_movers:
            if tier_mover is not None:
                tier_mover.stop()

    def _carry_out(self, at: int) -> Callable[[Sequence[object]], None]:
        def carry_out(commands: Sequence[object]) -> None:
            for command in commands:
                match command:
                    case Emit(_, record) if at == 0:
                        self._to_decode.append(decode_events.FromPeer(PREFILL, record))  # type: ignore[arg-type]
                    case Emit(_, record):
                        self._to_prefill.append(FromReader(DECODE, record))  # type: ignore[arg-type]
                    case ConnectPeer(address) if self._prefill_is_lost:
                        down = decode_events.PeerDown(address, None, "lost")
                        self._to_decode.append(down)
                    case ConnectPeer(address):
                        up = decode_events.PeerUp(
                            PREFILL, address, "loopback", self._prefill_block_size
                        )
                        self._engines[1].receive([up])
                    case Tell(_, record):
                        self._told(record)
                    case _:
                        self._movers[at].submit(command)  # type: ignore[arg-type]

        return carry_out

    def _told(self, record: object) -> None:
        match record:
            case Tokens(request, _, index, ids, logprobs, prompt_logprobs):
                answer = self.answers[request]
                if index != len(answer.tokens):
                    raise RuntimeError(f"token {index} of {request} after {len(answer.tokens)}")
                answer.tokens += ids
                answer.logprobs += logprobs
                answer.prompt_logprobs += prompt_logprobs
            case NeedPrefill(request, placement):
                # There is no other prefill worker here.
                none_left = UsePrefill(request, placement, None)
                self._to_decode.append(decode_events.FromRouter(LINK, none_left))
            case Refused(request):
                self.answers[request].refused += 1
                self._waiting.append(self.answers[request])
            case Ended(request=request):
                self.answers[request].ended = record
