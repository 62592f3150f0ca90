"""Judges whether tokens of a 16-bit GPU are those of the same model on the CPU.

**What counts as right.** A 16-bit computation is off by something at every logit. How much a plain one is off on these
very tokens is measured in the same run: the same weights on the CPU's backend, in 16 bits against 32, at the sixteen
best tokens of each position. The GPU's kernels may be off by twice that (the rule of `correct`), and a choice between
two tokens goes wrong by at most the errors of both: so a chosen token may stay four times the plain error behind the
CPU's best one, and no more. Whether the rule has teeth is measured too: with one block of KV lost, the CPU's own
choices must break it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.card import Line
from benchmarks.gpu.reference import Reference, gaps
from benchmarks.gpu.workers import Answer

TIMES_PLAIN = 4.0
SLACK = 1e-3
BEST = 16
PLAIN_TOKENS = 600
"""Longer prompts say nothing more of a plain computation's error, and take a CPU long in 16 bits."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """How far tokens stay behind the exact model's best ones, `[positions]`: those of the answer, those that the exact
    model takes with a block lost, and those that the plain one takes (of a short prompt, else none)."""

    answer: Tensor
    lost: Tensor
    plain: Tensor


class Judge:
    """Compares answers with two models. `exact` and `plain` are one model, prepared in 32 bits and as the GPU computes.
    """

    def __init__(self, exact: Path, plain: Path, context_tokens: int) -> None:
        self._exact = Reference(exact, context_tokens)
        self._plain = Reference(plain, context_tokens)
        self._known: dict[tuple[int, ...], _Seen] = {}
        self._error = 0.0
        """The plain computation's largest error so far: what is allowed only grows with what was seen."""

    def verdict(self, answers: Sequence[Answer]) -> Line:
        """`right` is 1 if every token passes, and those chosen with a block lost would not all have. Tokens that are
        `same` are the exact model's own; how many the plain one and the one with a lost block get is beside it."""
        seen = [self._see(answer) for answer in answers]
        behind, lost, plain = (
            torch.cat(s) for s in zip(*((s.answer, s.lost, s.plain) for s in seen), strict=True)
        )
        allowed = TIMES_PLAIN * self._error + SLACK
        return {
            "tokens": len(behind),
            "same": int((behind == 0).sum()),
            "plain_same": f"{int((plain == 0).sum())} of {len(plain)}",
            "lost_block_same": int((lost == 0).sum()),
            "largest_gap": float(behind.max()),
            "allowed_gap": allowed,
            "lost_block_gap": float(lost.max()),
            "right": int(float(behind.max()) <= allowed < float(lost.max())),
        }

    def close(self) -> None:
        self._exact.close()
        self._plain.close()

    def _see(self, answer: Answer) -> _Seen:
        key = (*answer.prompt, *answer.tokens)
        if key not in self._known:
            tokens = answer.prompt, answer.tokens
            exact = self._exact.logits(*tokens)
            lost = self._exact.without_a_block(*tokens).argmax(1).tolist()
            plain = torch.empty(0)
            if len(key) <= PLAIN_TOKENS:
                rounded = self._plain.logits(*tokens)
                best = exact.topk(min(BEST, exact.shape[1])).indices
                error = (rounded - exact).gather(1, best).abs().max()
                self._error = max(self._error, float(error))
                plain = gaps(exact, rounded.argmax(1).tolist())
            self._known[key] = _Seen(gaps(exact, answer.tokens), gaps(exact, lost), plain)
        return self._known[key]
