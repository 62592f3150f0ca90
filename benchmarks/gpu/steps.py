"""Decode steps of the whole engine: recorded and not, and how long the device waits between them."""

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.card import Card, Line
from engine.graphs import CudaRecorder, DecodeGraphs, Recorder
from engine.kv.device_pool import DeviceKV
from engine.kv.layout import KVLayout
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES, layer_key
from engine.model.llama import Llama
from engine.runner import ModelRunner
from engine.step import Row, StepPlan
from engine.triton_attention import TritonAttention
from engine.types import BlockId, RequestId, RequestRecord, SamplingParams

BLOCK = 64
STEPS = 32


def on_card(card: Card) -> list[Line]:
    """As a part of `benchmarks.gpu`."""
    return steps(card, CudaRecorder if card.device.type == "cuda" else None)


def steps(card: Card, recorder: Callable[[torch.device], Recorder] | None) -> list[Line]:
    """A model of an 8B's shape with random weights, greedy, one sequence and a batch, each with 2k tokens of context.

    `idle` is the share of a step's wall time in which no kernel runs. Without a GPU nothing is recorded.
    """
    model = _model(card)
    context = card.sizes.tokens(2048)
    lines: list[Line] = []
    for batch in sorted({1, card.sizes.batch}):
        for how in (None, recorder) if recorder is not None else (None,):
            lines.append(_steps(card, model, batch, context, how))
    return lines


def _steps(
    card: Card,
    model: Llama,
    batch: int,
    context: int,
    recorder: Callable[[torch.device], Recorder] | None,
) -> Line:
    shape = model.config
    layout = KVLayout(
        kv_heads=shape.kv_heads,
        layers=shape.layers,
        block_size=BLOCK,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )
    each = layout.blocks_for(context + 4 * STEPS + 2)
    kv = DeviceKV(layout, each * batch, card.device, card.arch)
    kv.tensor.uniform_(-1.0, 1.0)
    attention = TritonAttention(
        shape, layout, card.device, max_batch=batch, programs=card.sizes.programs_per_sm * card.sms
    )
    graphs = None
    if recorder is not None:
        graphs = DecodeGraphs(model, kv, attention, recorder(card.device), [batch])
        with torch.inference_mode():
            graphs.prepare()
    runner = ModelRunner(model, kv, attention, graphs)
    tokens = [[(7 * n + at) % shape.vocab for n in range(context)] for at in range(batch)]
    tables = [[BlockId(at * each + n) for n in range(each)] for at in range(batch)]

    def run(count: int) -> None:
        for _ in range(count):
            rows = [_row(at, tokens[at], tables[at]) for at in range(batch)]
            for at, token in enumerate(runner.run(StepPlan(tuple(rows)))):
                assert isinstance(token, int)
                tokens[at].append(token)

    count = max(2, STEPS // card.sizes.unit)
    run(2)
    began_s = time.perf_counter()
    run(count)
    wall_s = (time.perf_counter() - began_s) / count
    busy_s = card.timer.busy_seconds(lambda: run(count)) / count
    return {
        "what": f"batch {batch}, {'recorded' if graphs else 'not recorded'}",
        "ms": wall_s * 1e3,
        "busy_ms": busy_s * 1e3,
        "idle": 1.0 - busy_s / wall_s,
        "planned_ahead": attention.planning.ahead,
        "planned_at_once": attention.planning.at_once,
        "replayed": sum(graphs.replays.values()) if graphs else 0,
    }


def _row(name: int, tokens: list[int], table: list[BlockId]) -> Row:
    record = RequestRecord(
        request=RequestId(str(name)),
        tokens=tokens,
        prompt_tokens=1,
        max_tokens=1 << 20,
        seed=0,
        sampling=SamplingParams(temperature=0.0),
    )
    return Row(record.request, record, tokens, len(tokens) - 1, len(tokens), table, True)


def _model(card: Card) -> Llama:
    size = card.sizes
    small = size.unit > 1
    shape = ModelConfig(
        family="llama",
        layers=size.layers,
        hidden=size.heads * size.head_dim,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate=48 if small else 14336,
        vocab=300 if small else 128256,
        context_tokens=8192 // size.unit + 4 * STEPS,
        norm_eps=1e-5,
        tied=True,
        dtype=str(card.dtype).removeprefix("torch."),
    )
    family, weights = FAMILIES[shape.family], {}
    for weight in family.weights:
        if weight.present(shape):
            weights[weight.name] = card.random(*weight.shape(shape)).mul_(0.02)
    for layer in range(shape.layers):
        for weight in family.layer_weights:
            if weight.present(shape):
                made = card.random(*weight.shape(shape)).mul_(0.02)
                weights[layer_key(layer, weight.name)] = made
    return Llama(shape, weights)
