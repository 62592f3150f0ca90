"""Decode steps with layer groups and without, in turns: python -m benchmarks.layer_groups MODEL [--rows 8 --tokens 600]

Two devices in one process, of one thread each, over the same weights; each decodes its own copy of the same sequences.
What is counted is the process's time on the processor, for a step with its leases' blocks taken and let go: other work
on the host changes it less than the time on the wall. Both must draw the same tokens.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Literal

import msgspec
import torch

from engine.backends.workspace import trial_row
from engine.config import EngineConfig
from engine.device import open_device
from engine.kv.lease import Lease
from engine.model.prepared.cache import prepare
from engine.step import Row, StepPlan
from engine.types import SamplingParams

CHUNK = 256
WARM_UP = 4
GREEDY = SamplingParams(temperature=0.0)
Groups = Literal["off", "on"]
Part = tuple[list[int], Lease, int]
"""All tokens of a sequence, its lease, and how many of them are computed."""


class _Decoding:
    """One device, and sequences that it has read."""

    def __init__(self, model_dir: Path, groups: Groups, rows: int, tokens: int, steps: int) -> None:
        config = EngineConfig(
            model_dir=str(model_dir),
            layer_groups=groups,
            deterministic="off",
            lend_cores=False,
        )
        self.device = open_device(config)
        self.kv = self.device.manager(step_tokens=CHUNK)
        chance = torch.Generator().manual_seed(1)
        self._parts = list[Part]()
        for _ in range(rows):
            text = torch.randint(self.device.vocab, (tokens,), generator=chance).tolist()
            lease = self.kv.acquire(b"", text, match_limit=0, room_tokens=tokens, grow_tokens=tokens + steps + 1)
            assert lease is not None, "the pool is too small"
            for start in range(0, tokens, CHUNK):
                end = min(start + CHUNK, tokens)
                drawn = self._step([(text[:end], lease, start)])
            self._parts.append(([*text, *drawn], lease, tokens))

    @property
    def texts(self) -> list[list[int]]:
        return [text for text, _, _ in self._parts]

    @property
    def held_bytes(self) -> int:
        return sum(self.kv.pool.held()) * self.device.layout.block_bytes

    def decode(self) -> float:
        """Decode one token of each sequence; return the processor time that it took, in seconds."""
        began_s = time.process_time()
        drawn = self._step(self._parts)
        took_s = time.process_time() - began_s
        self._parts = [
            ([*text, token], lease, len(text)) for (text, lease, _), token in zip(self._parts, drawn, strict=True)
        ]
        return took_s

    def _step(self, parts: list[Part]) -> list[int]:
        rows, leases = list[Row](), [lease for _, lease, _ in parts]
        for text, lease, start in parts:
            self.kv.extend(lease, len(text))
            self.kv.reach(lease, start, len(text))
            row = trial_row(text, start, lease.blocks)
            record = msgspec.structs.replace(row.record, sampling=GREEDY)
            rows.append(msgspec.structs.replace(row, record=record, windows=tuple(lease.windows)))
        self.kv.launched(leases)
        drawn = self.device.runner.launch(StepPlan(tuple(rows))).wait()
        self.kv.ended(leases)
        for text, lease, _ in parts:
            self.kv.slide(lease, len(text))
        return [int(token) for token in drawn]  # type: ignore[arg-type]

    def close(self) -> None:
        if self.device.matchers is not None:
            self.device.matchers.close()
        self.device.kv.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/headrace").expanduser())
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--steps", type=int, default=100)
    told = parser.parse_args()
    model_dir = prepare(str(told.model), told.cache)
    kinds: tuple[Groups, ...] = ("off", "on")
    sides = {groups: _Decoding(model_dir, groups, told.rows, told.tokens, told.steps) for groups in kinds}
    took_s: dict[Groups, list[float]] = {groups: [] for groups in sides}
    for number in range(told.steps):
        for groups in sorted(sides, reverse=number % 2 == 1):
            took_s[groups].append(sides[groups].decode())
    assert sides["off"].texts == sides["on"].texts, "other tokens with groups"
    medians = {groups: statistics.median(times[WARM_UP:]) for groups, times in took_s.items()}
    for groups, side in sides.items():
        times = took_s[groups][WARM_UP:]
        told_ms = f"median {medians[groups] * 1e3:.2f} ms, least {min(times) * 1e3:.2f} ms"
        print(f"{groups:3}  {told_ms}; {side.held_bytes} bytes held")
        side.close()
    print(f"on / off: {medians['on'] / medians['off']:.3f}")


if __name__ == "__main__":
    main()
