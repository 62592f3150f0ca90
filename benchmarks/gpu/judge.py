"""Whether tokens of a 16-bit GPU are those of the same model on the CPU.

**What counts as right.** A 16-bit computation is off by something at every logit. How much a plain one is off on these
very tokens is measured in the same run: the same weights on the CPU's backend, in 16 bits against 32. The GPU's kernels
may be off by twice that (the rule of `correct`), and a choice between two tokens goes wrong by at most the errors of
both: so a chosen token may stay four times the plain error behind the CPU's best one, and no more. Whether the rule has
teeth is measured too: with one block of KV lost, the CPU's own choices must break it.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.card import Line
from benchmarks.gpu.reference import Reference, gaps
from benchmarks.gpu.workers import Answer

TIMES_PLAIN = 4.0
SLACK = 1e-3
PLAIN_TOKENS = 600
"""Longer prompts say nothing more of a plain computation's error, and take a CPU long in 16 bits."""


class Judge:
    """`exact` and `plain` are one model, prepared in 32 bits and as the GPU computes."""

    def __init__(self, exact: Path, plain: Path, context_tokens: int) -> None:
        self._exact = Reference(exact, context_tokens)
        self._plain = Reference(plain, context_tokens)
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._error = 0.0
        """The plain computation's largest so far: what is allowed only grows with what was seen."""

    def verdict(self, answers: Sequence[Answer]) -> Line:
        """`right` is 1 if every token passes, and a lost block would not have."""
        behind, lost = [], []
        for answer in answers:
            exact, broken = self._logits(answer)
            behind.append(gaps(exact, answer.tokens))
            lost.append(gaps(exact, broken.argmax(1).tolist()))
        allowed = TIMES_PLAIN * self._error + SLACK
        gap, lost_gap = torch.cat(behind), float(torch.cat(lost).max())
        largest = float(gap.max())
        return {
            "tokens": len(gap),
            "same_tokens": int((gap == 0).sum()),
            "largest_gap": largest,
            "allowed_gap": allowed,
            "lost_block_gap": lost_gap,
            "right": int(largest <= allowed < lost_gap),
        }

    def close(self) -> None:
        self._exact.close()
        self._plain.close()

    def _logits(self, answer: Answer) -> tuple[Tensor, Tensor]:
        """Of the exact model, as it is and with a block lost."""
        key = (*answer.prompt, *answer.tokens)
        if key not in self._known:
            tokens = answer.prompt, answer.tokens
            exact = self._exact.logits(*tokens)
            self._known[key] = exact, self._exact.without_a_block(*tokens)
            if len(key) <= PLAIN_TOKENS:
                error = (self._plain.logits(*tokens) - exact).abs().max()
                self._error = max(self._error, float(error))
        return self._known[key]
