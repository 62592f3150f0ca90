"""A decode worker's engine over the GPU kernels, whose steps are queued: planned ahead and one at a time, with a search
among them, whose step is not."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode_worker.scheduler.events import FromRouter, Tell
from decode_worker.scheduler.scheduler import DecodeScheduler
from engine.kv.manager import KVCacheManager
from engine.loop import Engine
from engine.messages import Ended, PeerAddress, Place, Tokens
from engine.types import Beam, BeamParams, Incarnation, RequestId, RequestRecord, SamplingParams
from tests.engine.backends.gpu.test_step import BLOCK, Side, folder, prompt
from transfer.handoff.receiver import KVReceiver
from worker.config import DecodeConfig

__all__ = ["folder"]


def _record(name: str, length: int, answer: int, **more: object) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        tokens=prompt(length, length),
        prompt_tokens=length,
        max_tokens=answer,
        seed=length,
        ignore_eos=True,
        **{"sampling": SamplingParams(temperature=0.0), **more},  # type: ignore[arg-type]
    )


PENALIZED = SamplingParams(temperature=0.8, presence_penalty=0.4, frequency_penalty=0.2, repetition_penalty=1.1)
RECORDS = [
    _record("plain", 5, 8),
    _record("search", 7, 3, beams=BeamParams(width=2, answers=2)),
    _record("penalized", 9, 6, sampling=PENALIZED),
]


def _answers(folder: Path, kernels: str, *, ahead: bool) -> tuple[dict[str, list[int]], list[Beam]]:
    """Run all of them, the search when the others decode; return the tokens, and what was found."""
    side = Side(folder, kernels)
    side.kv.memory.zero_()
    scheduler = DecodeScheduler(
        config=DecodeConfig(preemption="off", local_chunk_tokens=16),
        kv=KVCacheManager(40, BLOCK, "m"),
        receiver=KVReceiver(),
        name="decode-0",
        incarnation=Incarnation(1),
        fingerprint="m",
        vocab=side.model.config.vocab,
        context_tokens=side.model.config.context_tokens,
        stop_ids=frozenset(),
        block_bytes=1,
    )
    tokens: dict[str, list[int]] = {record.request: [] for record in RECORDS}
    beams: list[Beam] = []

    def publish(commands: Sequence[object]) -> None:
        for command in commands:
            match command:
                case Tell(_, Tokens(request, _, _, ids)):
                    tokens[request] += ids
                case Tell(_, Ended(beams=found)):
                    beams.extend(found)

    seconds = iter(range(1, 10_000))
    runner: Any = SimpleNamespace(kv=SimpleNamespace(advance=lambda blocks: None), launch=side.runner.launch)
    engine: Engine[Any, Any] = Engine(scheduler, runner, lambda: float(next(seconds)), publish, ahead=ahead)
    place = [FromRouter(1, Place(record=record, placement=1, prefill=PeerAddress("", ""))) for record in RECORDS]
    engine.receive([place[0], place[2]])
    for _ in range(3):
        engine.step()
    engine.receive([place[1]])
    idle = []
    while engine.is_busy or not scheduler.is_idle:
        ran = engine.step()
        idle.append(ran.idle_s if ran else None)
    assert all(one is None or one >= 0.0 for one in idle) and any(one is not None for one in idle)
    scheduler.check()
    return tokens, beams


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [False, True])
def test_searches_and_penalties_go_among_steps_that_are_queued(folder: Path, ahead: bool) -> None:
    """Guards a step whose answer is a list behind one whose tokens lie on the device, and the other way round; and
    tokens that are needed on the host before a step is drawn from."""
    tokens, beams = _answers(folder, "triton", ahead=ahead)
    wanted, found = _answers(folder, "torch", ahead=False)
    assert tokens == wanted and [len(tokens[name]) for name in ("plain", "penalized")] == [8, 6]
    assert [beam.ids for beam in beams] == [beam.ids for beam in found] and len(beams) == 2
