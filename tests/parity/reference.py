"""The reference: transformers on the same GGUF file, in 32-bit.

Greedy decoding is checked by one pass over prompt and answer: if at every position the reference's best token, given
what comes before, is the answer's next token, then its own greedy run is that answer. Where it differs, the gap
between the reference's two best logits tells a near tie from a fault.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.model.prepared.cache import find_demo_model

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Difference:
    """A token that differs. At output token `index` the answer has `token`, the reference `best`, which leads by `gap`.
    """

    prompt: int
    index: int
    token: int
    best: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR_TIE


class Reference:
    def __init__(self, gguf: Path) -> None:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        read = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
        missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], [])
        model.tie_weights()
        self.model = model
        self._known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    @torch.inference_mode()
    def differences(self, number: int, prompt: list[int], answer: list[int]) -> list[Difference]:
        """Find where the answer leaves the reference's greedy path, prompt `number` of a set."""
        key = (*prompt, *answer)
        best = self._known.get(key)
        if best is None:
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            keep = len(answer)
            logits = self.model(ids, use_cache=False, logits_to_keep=keep).logits[0].float()
            top = logits.topk(2, dim=-1)
            gaps = (top.values[:, 0] - top.values[:, 1]).tolist()
            best = list(zip(top.indices[:, 0].tolist(), gaps, strict=True))
            self._known[key] = best
        return [
            Difference(number, index, token, want, gap)
            for index, (token, (want, gap)) in enumerate(zip(answer, best, strict=True))
            if token != want
        ]


@cache
def demo_reference() -> Reference:
    """The demo's model, read once in a process: it takes some seconds."""
    return Reference(find_demo_model())
