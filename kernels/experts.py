"""A mixture of experts: each row of a step goes through a few of a layer's feed-forward networks, and what these answer
is added up, each answer times the weight that the router gives it.

    logits = x R^T                                    the router's product, in 32 bits
    experts, weights = the k largest logits           of equal ones those with the lowest numbers
    answer = sum over slots s = 0 .. k - 1 of weights[s] * down(gate(x gate_up(experts[s])^T))

The sum is taken slot by slot and every product is one of the row alone, so a row's bits do not depend on who else chose
its experts. `kernels.reference_experts` is the specification; here are PyTorch's kernels and the native ones,
`kernels.grouped_experts` has the GPU's. Sources: Shazeer et al. 2017 (arXiv 1701.06538), Mixtral (arXiv 2401.04088).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from kernels.coded_weight import CodedStack
from kernels.panels import PanelStack


class Routing(NamedTuple):
    """How many experts a row goes to, and its weights: a softmax over all logits, or `over_chosen` over the chosen ones
    alone; with `normalise` divided by their sum."""

    chosen: int
    over_chosen: bool
    normalise: bool


class RoutedRows(NamedTuple):
    """Experts `[rows, k]`, int64 (int32 on a GPU), the best first, and weights `[rows, k]`, float32."""

    experts: Tensor
    weights: Tensor


class ClampedGate(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit` and up between its two signs (gpt-oss)."""

    alpha: float
    limit: float


Stack = Tensor | PanelStack | CodedStack
"""Weights `[experts, rows, columns]`: plain, in panels, or in codes for a GPU."""


class ExpertWeights(NamedTuple):
    """The experts of a layer: `gate_up` `[experts, 2 * width, hidden]`, the gate's rows first; `down` `[experts,
    hidden, width]`; biases `[experts, rows]`. `clamp` None: the gate is silu(gate) * up."""

    gate_up: Stack
    down: Stack
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: ClampedGate | None = None


def route(logits: Tensor, routing: Routing) -> RoutedRows:
    """Choose each row's experts by `logits` `[rows, experts]`, float32."""
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    experts = experts[:, : routing.chosen]
    over_all = not routing.over_chosen
    weights = logits.softmax(-1).gather(-1, experts) if over_all else ordered[:, : routing.chosen].softmax(-1)
    if routing.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return RoutedRows(experts, weights)


def mix(x: Tensor, choice: RoutedRows, weights: ExpertWeights, row_multiple: int = 1) -> Tensor:
    """Send `x` `[rows, hidden]` through the chosen experts; returns the like. With PyTorch's kernels, one
    expert after the other, whose rows are padded to a multiple of `row_multiple`. Raises TypeError for others than
    plain weights."""
    gate_up, down = weights.gate_up, weights.down
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        raise TypeError("experts in panels need the native kernels, and those in codes a GPU's")
    rows, chosen = choice.experts.shape
    answers = x.new_empty(rows * chosen, down.shape[1])
    pairs = choice.experts.flatten()
    for expert in pairs.unique().tolist():
        mine = (pairs == expert).nonzero().flatten()
        inner = pad(x[mine // chosen], (0, 0, 0, -len(mine) % row_multiple))
        inner = gated(linear(inner, gate_up[expert], _of(weights.gate_up_bias, expert)), weights.clamp)
        answers[mine] = linear(inner, down[expert], _of(weights.down_bias, expert))[: len(mine)]
    return combine(answers.view(rows, chosen, -1), choice.weights)


def gated(gate_up: Tensor, clamp: ClampedGate | None) -> Tensor:
    """Compute the gate of `[rows, 2 * width]`, in its type: `[rows, width]`."""
    gate, up = gate_up.chunk(2, -1)
    if clamp is None:
        return silu(gate).mul_(up)
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def combine(answers: Tensor, weights: Tensor) -> Tensor:
    """Add up `answers` `[rows, k, hidden]` by `weights` `[rows, k]`, slot by slot, in 32 bits."""
    total = answers[:, 0].float() * weights[:, :1]
    for slot in range(1, answers.shape[1]):
        total += answers[:, slot].float() * weights[:, slot : slot + 1]
    return total.to(answers.dtype)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
