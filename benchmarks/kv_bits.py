"""Measures what fewer bits of KV cost in quality: `python -m benchmarks.kv_bits [--model FILE] [--tokens 2048]`.

A text is read once for each way of keeping keys and values, in chunks of one block, so that what was kept is what is
read, and each token's logits are held against those with KV in 32 bits: perplexity of the text, the error of logits
(root mean square, of their spread), share of positions whose best token stays the best, and the divergence (KL) of what
would be drawn. Nothing here is faster or smaller: numbers are rounded to what the bits can say and kept in 32.

    int8, fp8     as shipped: a scale per token and head
    int4          4 bits, a scale per token and head                          (4.5 bits a number at 64 a head)
    int4-32       4 bits, a scale and an offset of 16 bits per 32 numbers     (5 bits)
    int4-channel  keys: 4 bits, a scale and an offset of 16 bits per channel over a block of 16 tokens, when it is full
                  (6 bits, 4.5 with blocks of 64); values as int4-32 (after KIVI, arXiv 2402.02750)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import exp, sqrt
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import output
from cluster.processes.spec import model_cache
from engine.backends.attention import TorchAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import prepare
from engine.storage.paged import PagedKV
from engine.text.bundle import TextModel
from engine.types import BlockId
from kernels.kv_write import quantize, write_kv

BLOCK = 16
KINDS = ("int8", "fp8", "int4", "int4-32", "int4-channel")
TEXTS = ("LICENSE", "CONTRIBUTING.md", "docs/kv-memory.md")


def scaled(rows: Tensor) -> Tensor:
    """Round `[.., n]` to whole multiples, -7 to 7, of a scale for each row."""
    scale = rows.abs().amax(-1, keepdim=True) / 7
    return (rows / torch.where(scale > 0, scale, 1.0)).round().clamp(-7, 7) * scale


def affine(rows: Tensor) -> Tensor:
    """Round `[.., n]` to 16 steps between each row's least and most, which are of 16 bits."""
    least = rows.amin(-1, keepdim=True).half().float()
    step = ((rows.amax(-1, keepdim=True) - least) / 15).half().float()
    return ((rows - least) / torch.where(step > 0, step, 1.0)).round().clamp(0, 15) * step + least


def in_groups(rows: Tensor) -> Tensor:
    return affine(rows.unflatten(-1, (-1, 32))).flatten(-2)


def by_channel(keys: Tensor) -> Tensor:
    """Round keys `[16 tokens, heads, size]`, each channel over the tokens."""
    return affine(keys.permute(1, 2, 0)).permute(2, 0, 1)


def eight_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = quantize(rows, dtype)
    return codes.float() * scales[..., None]


def rounded(kind: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of one block `[16, heads, size]` as they would be read again."""
    match kind:
        case "int8":
            return eight_bits(k, torch.int8), eight_bits(v, torch.int8)
        case "fp8":
            return eight_bits(k, torch.float8_e4m3fn), eight_bits(v, torch.float8_e4m3fn)
        case "int4":
            return scaled(k), scaled(v)
        case "int4-32":
            return in_groups(k), in_groups(v)
        case "int4-channel":
            return (by_channel(k) if len(k) == BLOCK else k), in_groups(v)
    return k, v


@contextmanager
def kept_as(kind: str) -> Iterator[None]:
    """Round what the CPU's kernels write to the pool, which is of 32 bits."""

    def write(k: Tensor, v: Tensor, pool: Tensor, layer: int, rows: Tensor, scales: Tensor | None = None) -> None:
        write_kv(*rounded(kind, k[: len(rows)], v[: len(rows)]), pool, layer, rows, scales)

    with patch("engine.backends.attention.write_kv", write):
        yield


class Read:
    """A text that is read block by block over a pool of its own."""

    def __init__(self, model: Llama, ids: list[int]) -> None:
        self._model, self._ids = model, ids
        self._kv = PagedKV(model.config.kv_layout(BLOCK), -(-len(ids) // BLOCK))
        self._attention = TorchAttention(model.config.heads)
        self._blocks = [BlockId(at) for at in range(self._kv.blocks)]

    @torch.inference_mode()
    def logits(self, start: int) -> Tensor:
        """Return the logits of a block's tokens."""
        end = min(start + BLOCK, len(self._ids))
        batch = ForwardBatch.build([trial_row(self._ids[:end], start, self._blocks)], BLOCK)
        self._attention.begin(batch, self._kv)
        hidden = self._model.hidden(batch, self._kv, self._attention)[: batch.rows]
        return self._model.logits(hidden)

    def close(self) -> None:
        self._kv.close()


def measure(model: Llama, ids: list[int]) -> list[dict[str, str | int | float]]:
    """Read the text in all ways at once, block by block: logits of none are kept."""
    reads = {kind: Read(model, ids) for kind in ("float32", *KINDS)}
    loss = dict.fromkeys(reads, 0.0)
    error, same, apart = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    spread = 0.0
    for start in range(0, len(ids), BLOCK):
        targets = torch.tensor(ids[start + 1 : start + BLOCK + 1])
        wanted = torch.empty(0)
        for kind, read in reads.items():
            with kept_as(kind):
                found = read.logits(start)
            shares = found[: len(targets)].log_softmax(-1)
            loss[kind] -= float(shares.gather(1, targets[:, None]).double().sum())
            if kind == "float32":
                wanted = found
                spread += float((found - found.mean(-1, keepdim=True)).double().square().mean(-1).sum())
                continue
            off = found - wanted
            error[kind] += float(off.double().square().mean(-1).sum())
            same[kind] += int((found.argmax(-1) == wanted.argmax(-1)).sum())
            wide, short = wanted.log_softmax(-1), found.log_softmax(-1)
            apart[kind] += float((wide.exp() * (wide - short)).double().sum())
    for read in reads.values():
        read.close()
    count, told = len(ids), len(ids) - 1

    def line(kind: str) -> dict[str, str | int | float]:
        more = (loss[kind] - loss["float32"]) / told
        return {
            "kv": kind,
            "perplexity": exp(loss[kind] / told),
            "more %": 100 * (exp(more) - 1),
            "same best %": 100 * same.get(kind, count) / count,
            "error of logits %": 100 * sqrt(error.get(kind, 0.0) / spread),
            "KL, millinats": 1000 * apart.get(kind, 0.0) / count,
        }

    return [line(kind) for kind in reads]


def main() -> None:
    parser = output.parser(__doc__)
    parser.add_argument("--model", default=None, help="a GGUF file or a directory (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    folder = prepare(options.model, model_cache())
    model, text = load_model(folder), TextModel.load(folder)
    root = Path(__file__).parent.parent
    said = "\n".join((root / name).read_text(encoding="utf-8") for name in TEXTS)
    ids = text.encode(said, add_special=True)[: options.tokens]
    title = f"{model.config.name}: {len(ids)} tokens in one context, heads of {model.config.head_dim}"
    output.tell(options, "kv_bits", {title: measure(model, ids)})


if __name__ == "__main__":
    main()
