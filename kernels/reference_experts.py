"""The specification of a mixture of experts, in plain PyTorch and 64 bits: a loop over rows and their experts."""

import torch
from torch import Tensor

from kernels.experts import ClampedGate, RoutedRows, Routing


def route(logits: Tensor, routing: Routing) -> RoutedRows:
    """Specifies `kernels.experts.route`; the weights in float64."""
    experts, weights = [], []
    for row in logits.double().tolist():
        order = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[: routing.chosen]
        values = torch.tensor(row, dtype=torch.float64)
        shares = values[order].softmax(-1) if routing.over_chosen else values.softmax(-1)[order]
        experts.append(order)
        weights.append(shares / shares.sum() if routing.normalise else shares)
    shape = (0, routing.chosen)
    return RoutedRows(
        torch.tensor(experts, dtype=torch.int64).view(-1, routing.chosen),
        torch.stack(weights) if weights else torch.empty(shape, dtype=torch.float64),
    )


def gate(gate_up: Tensor, clamp: ClampedGate | None) -> Tensor:
    """Specifies `kernels.experts.gated`: float64 `[rows, width]`."""
    gates, ups = gate_up.double().chunk(2, -1)
    if clamp is None:
        return torch.nn.functional.silu(gates) * ups
    gates, ups = gates.clamp(max=clamp.limit), ups.clamp(-clamp.limit, clamp.limit)
    return (ups + 1) * gates * torch.sigmoid(clamp.alpha * gates)


def mix(
    x: Tensor,
    choice: RoutedRows,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: ClampedGate | None = None,
) -> Tensor:
    """Specifies `kernels.experts.mix`, for plain weights: float64 `[rows, hidden]`."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for row, (experts, weights) in enumerate(zip(choice.experts.tolist(), choice.weights.double(), strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            inner = gate_up[expert].double() @ x[row].double()
            inner = inner if gate_up_bias is None else inner + gate_up_bias[expert].double()
            answer = down[expert].double() @ gate(inner, clamp)
            out[row] += weight * (answer if down_bias is None else answer + down_bias[expert].double())
    return out
