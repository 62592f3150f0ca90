"""What goes wrong, when, and the proof that it did.

A fault waits for its trigger: a moment, the n-th record of one type on its way between workers, or the n-th copy. Then
it strikes whoever was involved. `effective` counts the faults that took effect while a handoff of the struck process or
stream was open; only those make a schedule count.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from engine.messages import (
    Handoff,
    Hello,
    Offer,
    Record,
    StartPrefill,
    decode_from_prefill_frame,
    decode_to_prefill_frame,
    encode,
)
from tests.sim.clock import Process
from tests.sim.forgeries import ROUTER_KINDS, Forgeries
from tests.sim.network import Stream

if TYPE_CHECKING:
    from tests.sim.world import World

PROCESS_KINDS = (
    "crash prefill",
    "crash decode",
    "freeze prefill",
    "freeze decode",
    "crash router",
    "freeze router",
)
STREAM_KINDS = ("cut handoff", "cut router", "partition handoff", "partition router")
RECORD_KINDS = ("duplicate", "reorder", "drop", "misdirect", "misstate")
TRANSFER_KINDS = ("corrupt", "send_fails", "recv_fails", "overwrite")
SHM_KINDS = ("overwrite",)
"""Faults that only a reader of the sender's own memory can meet."""
DATA_KINDS = ("cut data", "silence data")
"""Faults over tcp only: the connection that carries blocks breaks, or swallows all, while the control stream lives."""
RANK_KINDS = ("stop rank",)
"""Faults of one rank of a worker that has two: it is stopped alone, and its worker ends if that lasts."""
KINDS = PROCESS_KINDS + STREAM_KINDS + RECORD_KINDS + TRANSFER_KINDS + DATA_KINDS + ROUTER_KINDS + RANK_KINDS
ARMED_KINDS = frozenset(RECORD_KINDS + TRANSFER_KINDS + ROUTER_KINDS)
"""Faults that strike by the next record or transfer that they fit."""


@dataclass(slots=True, eq=False)
class Fault:
    """`on` is a record's type name (of the handoff, or `Tokens`), "copy", "move" (a decode worker is asked for KV) or
    "time"; `count` says which one, `at_s` when. `delay_s` after the trigger it strikes; `lasts_s` later its damage is
    undone (a restart, a thaw, a healed partition)."""

    kind: str
    on: str
    count: int = 1
    at_s: float = 0.0
    delay_s: float = 0.0
    lasts_s: float = 0.05
    armed: bool = False
    struck: bool = False

    def __str__(self) -> str:
        when = f"at {self.at_s:.3f} s" if self.on == "time" else f"{self.on} #{self.count}"
        return f"{self.kind} ({when} + {self.delay_s * 1e3:.1f} ms, for {self.lasts_s:.3f} s)"


class Faults:
    """The faults of one run. Mutable state: which faults wait, which are armed, and what has been seen and struck so
    far."""

    def __init__(self, world: "World", faults: list[Fault]) -> None:
        self._world = world
        self.faults = faults
        self.struck: Counter[str] = Counter()
        self.effective: Counter[str] = Counter()
        self.unseen = 0
        """Partitions that have held nothing up as far as has been seen: what they hide may have been lost already."""
        self.until = 0.0
        self._silent: dict[frozenset[str], tuple[float, Fault]] = {}
        self._seen: Counter[str] = Counter()
        self._held: dict[tuple[int, int], tuple[bytes, set[Handoff | None], Fault]] = {}
        self._disarmed = False
        self.forgeries = Forgeries(world, self)
        self._waiting = [fault for fault in faults if fault.on != "time"]
        for fault in faults:
            if fault.on == "time":
                world.clock.at(fault.at_s, lambda fault=fault: self._fire(fault, None, None))  # type: ignore[misc]

    @property
    def over(self) -> bool:
        """Whether nothing waits any more, and all damage is undone."""
        return not self._waiting and self._world.clock.now >= self.until

    def disarm(self) -> None:
        """Drop what has not been triggered by now."""
        self._disarmed = True
        self._waiting.clear()
        for fault in self.faults:
            fault.armed = False

    # ---- triggers

    def saw_copy(self, reader: Process, owner: Process) -> None:
        self.saw("copy", reader, owner)

    def saw(self, what: str, decode: Process | None, prefill: Process | None) -> None:
        if not self._waiting:
            return
        self._seen[what] += 1
        for fault in [f for f in self._waiting if f.on == what and f.count == self._seen[what]]:
            self._waiting.remove(fault)
            if fault.delay_s and fault.kind not in ARMED_KINDS:
                self.until = max(self.until, self._world.clock.now + fault.delay_s)
                self._world.clock.at(
                    fault.delay_s,
                    lambda fault=fault: self._fire(fault, decode, prefill),  # type: ignore[misc]
                )
            else:
                self._fire(fault, decode, prefill)

    def _fire(self, fault: Fault, decode: Process | None, prefill: Process | None) -> None:
        if fault.kind in ARMED_KINDS:
            fault.armed = True
            return
        world, rng = self._world, self._world.rng
        what, _, role = fault.kind.partition(" ")
        if what in ("crash", "freeze"):
            known = {"decode": decode, "prefill": prefill}.get(role)
            process = known if known is not None and known.alive else world.pick(role, rng)
            if process is None or process.frozen:
                return
            during = world.has_handoffs(process)
            self.strikes(fault, during)
            if what == "crash":
                world.kill(process)
                world.clock.at(fault.lasts_s, lambda: world.boot(process.name, process.role))
            else:
                world.freeze(process, fault.lasts_s)
            return
        if fault.kind in DATA_KINDS:
            self._strike_data(fault, decode, prefill)
            return
        if fault.kind in RANK_KINDS:
            known = [p for p in (decode, prefill) if p is not None and p.alive and len(world.ranks.get(p.pid, ())) > 1]
            if known:
                process = rng.choice(known)
                self.strikes(fault, world.has_handoffs(process))
                world.stop_rank(process, fault.lasts_s)
            return
        streams = [s for s in world.wire.streams if s.open and s.is_handoff == (role == "handoff")]
        near = [s for s in streams if decode in (s.client, s.server) or prefill in (s.client, s.server)]
        if not streams:
            return
        stream = rng.choice(near or streams)
        during = world.has_handoffs(stream.server) or world.has_handoffs(stream.client)
        if what == "cut":
            self.strikes(fault, during)
            stream.cut("the connection was reset")
        else:
            held = stream.under_way
            world.wire.partition(stream, fault.lasts_s)
            self.unseen += 1
            # It takes effect with the first record that has to wait.
            looks_s = min(0.02, fault.lasts_s)
            world.clock.at(looks_s, lambda: self._partitioned(fault, stream, during, held))
            self.until = max(self.until, world.clock.now + fault.lasts_s)

    def _strike_data(self, fault: Fault, decode: Process | None, prefill: Process | None) -> None:
        """Break one connection that is open, of those who were involved if they have one."""
        world, rng = self._world, self._world.rng
        known = world.data_connections()
        near = [found for found in known if decode is found[0] or prefill is found[1]]
        if not known:
            return
        reader, owner, pipe = rng.choice(near or known)
        if fault.kind == "cut data":
            self.strikes(fault, world.has_handoffs(reader))
            pipe.open, pipe.deaf = False, rng.random() < 0.3
            world.note("data connection cut, its reader not told" if pipe.deaf else "data connection cut")
            world.wake(reader.incarnation)
            world.wake(owner.incarnation)
            return
        pair = frozenset((reader.name, owner.name))
        self._silent[pair] = (world.clock.now + fault.lasts_s, fault)
        world.clock.at(fault.lasts_s, lambda: world.wake(reader.incarnation))

    def swallows(self, reader: Process, owner: Process) -> bool:
        """Say whether nothing comes through between the two, where `reader` has bytes of `owner` to read. The fault
        takes effect with the first bytes that do not."""
        until, fault = self._silent.get(frozenset((reader.name, owner.name)), (0.0, None))
        if fault is None or self._world.clock.now >= until:
            return False
        if not fault.struck:
            self.strikes(fault)
        return True

    def _partitioned(self, fault: Fault, stream: Stream, during: bool, held: int) -> None:
        if max(held, stream.under_way):
            self._seen_to_hold(fault, during)
        elif fault.lasts_s > 0.06:
            self._world.clock.at(0.04, lambda: self._partitioned_late(fault, stream, during))

    def _partitioned_late(self, fault: Fault, stream: Stream, during: bool) -> None:
        if stream.under_way:
            self._seen_to_hold(fault, during)

    def _seen_to_hold(self, fault: Fault, during: bool) -> None:
        self.unseen -= 1
        self.strikes(fault, during)

    def strikes(self, fault: Fault, during_handoff: bool = True) -> None:
        fault.struck = True
        self.struck[fault.kind] += 1
        if during_handoff:
            self.effective[fault.kind] += 1
        self.until = max(self.until, self._world.clock.now + fault.lasts_s)
        if self._world.say is not None:
            self._world.say("fault", str(fault))

    # ---- single records and transfers

    def takes(self, kind: str) -> Fault | None:
        """Return an armed fault of this kind, for the caller to carry out and then to report as `strikes`."""
        for fault in self.faults:
            if fault.armed and fault.kind == kind:
                fault.armed = False
                return fault
        return None

    def meddle(self, stream: Stream, lane: int, data: bytes) -> list[bytes]:
        """Return what really travels in place of a frame."""
        records: list[Record] = list(
            (decode_to_prefill_frame if lane == 0 else decode_from_prefill_frame)(data)
        )
        for record in records:
            self._world.witness.saw(record)
            self.forgeries.saw(record)
            self.saw(type(record).__name__, stream.client, stream.server)
            if stream.server.role == "decode":
                self._world.witness.saw_move(record)
                if isinstance(record, StartPrefill):
                    self.saw("move", stream.client, stream.server)
        held = self._held.pop((stream.number, lane), None)
        frames = [data]
        if not any(isinstance(record, Hello) for record in records):
            frames = self._change(stream, lane, data, records)
        if held is None:
            return frames
        names = {getattr(record, "handoff", None) for record in records}
        if names & held[1] or not frames:
            held[2].armed = not self._disarmed
            return [held[0], *frames]
        self.strikes(held[2])
        return [*frames, held[0]]

    def _change(
        self, stream: Stream, lane: int, data: bytes, records: list[Record]
    ) -> list[bytes]:
        for fault in self.faults:
            if not fault.armed or fault.kind not in RECORD_KINDS:
                continue
            if fault.kind in ("misdirect", "misstate"):
                change = _misdirected if fault.kind == "misdirect" else self.forgeries.misstated
                changed = [change(record) for record in records]
                if changed == records:
                    continue
                data = encode(changed)
            fault.armed = False
            if fault.kind in ("misdirect", "misstate", "drop"):
                self.strikes(fault)
            match fault.kind:
                case "duplicate":
                    again = partial(self._again, fault, stream, lane, data)
                    late = self._world.plan.strict or not any(isinstance(r, StartPrefill) for r in records)
                    self._world.clock.at(fault.delay_s if late else 0.0, again)
                case "reorder":
                    names = {getattr(record, "handoff", None) for record in records}
                    self._held[stream.number, lane] = (data, names, fault)
                    self._world.clock.at(0.01, lambda: self._let_go(stream, lane))
                    return []
                case "drop":
                    self._world.clock.at(fault.delay_s, lambda: stream.cut("a gap in the stream"))
                    return []
        return [data]

    def _again(self, fault: Fault, stream: Stream, lane: int, data: bytes) -> None:
        if stream.open:
            self.strikes(fault)
            stream.inject(lane, data)

    def _let_go(self, stream: Stream, lane: int) -> None:
        held = self._held.pop((stream.number, lane), None)
        if held is not None and stream.open:
            stream.inject(lane, held[0])
            held[2].armed = not self._disarmed  # nothing has overtaken it: the next frame is held back


def _misdirected(record: Record) -> Record:
    """The first two blocks of an offer exchange where their bytes are to be found: intact bytes, wrong place."""
    if not isinstance(record, Offer) or len(record.blocks) < 2:
        return record
    one, two, *rest = record.blocks
    if one.tokens != two.tokens:
        return record
    swapped = [
        msgspec.structs.replace(
            a, source=b.source, generation=b.generation, digest=b.digest
        )
        for a, b in ((one, two), (two, one))
    ]
    return msgspec.structs.replace(record, blocks=[*swapped, *rest])
