"""Measures what each arithmetic costs in quality: `python -m benchmarks.arithmetic`.

Every side reads the same text in windows, and at each position says what comes next. The reference is transformers'
model in float64 on the values that the codes stand for, so that nothing but a side's own rounding is told: how far its
logits are from the reference's, at how many positions its best token is the same, by how much the reference prefers its
own where it is not, and the perplexity of the text.

    engine float32, integers, 16 bits    the native kernels, by `engine.arithmetic`
    transformers float32        the same values, PyTorch's kernels
    transformers bfloat16       weights and activations rounded to bfloat16
    llama.cpp                   with `--peer llama.cpp=VENV`: activations in 8 bits; its best tokens alone

Needs the `dev` extra; the product itself never imports transformers.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import exp
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table
from torch import Tensor

from benchmarks.checkpoint import read
from benchmarks.figures import show, write_json
from cluster.processes.spec import model_cache
from engine.backends.native_attention import NativeAttention
from engine.backends.workspace import trial_row
from engine.batch import ForwardBatch
from engine.model.llama import Llama, load_model
from engine.model.prepared.cache import find_demo_model, prepare
from engine.storage.paged import PagedKV
from engine.text.bundle import TextModel
from engine.types import BlockId
from kernels.native import Native, native
from kernels.panels import IntegerBits

BLOCK_TOKENS = 16
PAGES = Path(__file__).resolve().parent.parent / "docs"
Side = Callable[[list[int]], Tensor]
"""Logits `[tokens, vocab]` of each position of a window."""


class ArithmeticLine(msgspec.Struct, frozen=True):
    """One side over all positions. `gaps` are the reference's preferences, in logits, where the side's best token is
    another; errors are of logits less their mean over the vocabulary, which no choice depends on."""

    side: str
    positions: int
    same: int
    gaps: list[float]
    same_as_float32: int
    error_rms: float
    error_worst: float
    perplexity: float
    seconds: float


class _Tally:
    """The sums of one side, window after window."""

    def __init__(self) -> None:
        self.positions = self.same = self.same_as_float32 = self.scored = 0
        self.gaps: list[float] = []
        self.squares = self.worst = self.surprise = self.seconds = 0.0

    def best(self, tokens: Tensor, reference: Tensor, plain: Tensor) -> None:
        wanted = reference.argmax(-1)
        lead = reference.gather(1, wanted[:, None]) - reference.gather(1, tokens[:, None])
        self.positions += len(tokens)
        self.same += int((tokens == wanted).sum())
        self.same_as_float32 += int((tokens == plain).sum())
        self.gaps += lead[tokens != wanted, 0].tolist()

    def errors(self, logits: Tensor, reference: Tensor, text: list[int]) -> None:
        wide = logits.double()
        error = (wide - wide.mean(-1, keepdim=True)) - (reference - reference.mean(-1, keepdim=True))
        self.squares += float(error.square().mean(-1).sum())
        self.worst = max(self.worst, float(error.abs().max()))
        following = torch.tensor(text[1:])
        self.surprise += float(torch.nn.functional.cross_entropy(wide[:-1], following, reduction="sum"))
        self.scored += len(following)

    def line(self, side: str) -> ArithmeticLine:
        return ArithmeticLine(
            side=side,
            positions=self.positions,
            same=self.same,
            gaps=sorted(self.gaps, reverse=True),
            same_as_float32=self.same_as_float32,
            error_rms=(self.squares / max(1, self.positions)) ** 0.5,
            error_worst=self.worst,
            perplexity=exp(self.surprise / self.scored) if self.scored else 0.0,
            seconds=self.seconds,
        )


def compare(
    windows: list[list[int]], reference: Side, sides: dict[str, Side], best_of: dict[str, Callable[[list[int]], Tensor]]
) -> list[ArithmeticLine]:
    """Lead every side through every window; the first side is the float32 that others are held against besides the
    reference. `best_of` are sides that tell their best tokens alone."""
    tallies = {name: _Tally() for name in (*sides, *best_of)}
    for text in windows:
        exact = reference(text).double()
        plain: Tensor | None = None
        for name, side in sides.items():
            began_s = time.process_time()
            logits = side(text)
            tallies[name].seconds += time.process_time() - began_s
            plain = logits.argmax(-1) if plain is None else plain
            tallies[name].best(logits.argmax(-1), exact, plain)
            tallies[name].errors(logits, exact, text)
        for name, ask in best_of.items():
            if plain is not None:
                tallies[name].best(ask(text), exact, plain)
    return [tally.line(name) for name, tally in tallies.items()]


def windows_of(folder: Path, texts: Sequence[Path], tokens: int, window: int) -> list[list[int]]:
    """Return the first `tokens` of the texts in windows of at least two, with the tokenizer of a prepared model."""
    text = "\n".join(path.read_text() for path in texts)
    ids = TextModel.load(folder).encode(text, add_special=False)[:tokens]
    return [ids[at : at + window] for at in range(0, len(ids) - 1, window)]


class WindowReader:
    """The native kernels on a prepared model, one window at a time in a pool of its size."""

    def __init__(self, model: Llama, kernels: Native, tokens: int) -> None:
        self._model, self._attention = model, NativeAttention(model.config.heads, kernels)
        layout = model.config.kv_layout(BLOCK_TOKENS)
        self._blocks = [BlockId(at) for at in range(layout.blocks_for(tokens))]
        self._kv = PagedKV(layout, len(self._blocks))

    def __call__(self, text: list[int]) -> Tensor:
        batch = ForwardBatch.build([trial_row(text, 0, self._blocks)], BLOCK_TOKENS, row_multiple=1)
        self._attention.begin(batch, self._kv)
        return self._model.logits(self._model.hidden(batch, self._kv, self._attention)[: len(text)])

    def close(self) -> None:
        self._kv.close()


def of_transformers(model: Any) -> Side:
    def logits(text: list[int]) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([text]), use_cache=False).logits[0]
        return found

    return logits


@contextmanager
def llama_cpp(interpreter: Path, model: Path, threads: int, tokens: int) -> Iterator[Callable[[list[int]], Tensor]]:
    """Start llama.cpp's server; give what asks it for the best token behind each position of a window."""
    script = Path(__file__).with_name("llama_server.py")
    command = [str(interpreter), str(script), str(model), "0", str(threads), "1", str(tokens + 8)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:  # type: ignore[call-overload]
        address = server.stdout.readline().strip()

        def best(text: list[int]) -> Tensor:
            found = []
            for end in range(1, len(text) + 1):
                asked = {"prompt": text[:end], "n_predict": 1, "temperature": 0, "cache_prompt": True}
                # Probabilities are not told of a token that ends within a character.
                asked |= {"return_tokens": True}
                body = json.dumps(asked).encode()
                request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=600) as answer:
                    told = json.load(answer)
                found.append(told["tokens"][0])
            return torch.tensor(found)

        try:
            yield best
        finally:
            server.stdin.close()


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    kernels = native()
    if kernels is None:
        print("the native kernels were not built: `headrace doctor` says why")
        return 1
    torch.set_num_threads(options.threads)
    folder = prepare(None, options.cache_dir)
    windows = windows_of(folder, options.text or sorted(PAGES.glob("*.md")), options.tokens, options.window)
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        ours: dict[str, IntegerBits] = {"engine float32": 0, "engine integers": 23, "engine 16 bits": 16}
        for name, bits in ours.items():
            model = load_model(folder, panels=True, integer=bits)
            sides[name] = stack.enter_context(closing(WindowReader(model, kernels, options.window)))
        sides["transformers float32"] = of_transformers(read())
        sides["transformers bfloat16"] = of_transformers(read().bfloat16())
        best_of = {}
        for peer in options.peer:
            venv = Path(peer.removeprefix("llama.cpp="))
            opened = llama_cpp(venv / "bin" / "python", find_demo_model(), options.threads, options.window)
            best_of["llama.cpp"] = stack.enter_context(opened)
        lines = compare(windows, of_transformers(read().double()), sides, best_of)
    show(_table(lines))
    for line in lines:
        gaps = ", ".join(f"{gap:.1e}" for gap in line.gaps[:8])
        print(f"{line.side}: where it differs, float64 prefers its own by {gaps or 'nothing'}")
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, "arithmetic", settings, lines)
    return 0


def _table(lines: list[ArithmeticLine]) -> Table:
    table = Table(title=f"{lines[0].positions} positions of text, beside float64", title_justify="left")
    for name in ("", "best token as float64's", "as float32's", "error of logits, rms", "worst", "perplexity"):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        shares = [f"{100 * same / line.positions:.3f} %" for same in (line.same, line.same_as_float32)]
        errors = [f"{line.error_rms:.1e}", f"{line.error_worst:.1e}", f"{line.perplexity:.4f}"]
        table.add_row(line.side, *shares, *(errors if line.perplexity else ("", "", "")))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--text", type=Path, nargs="+", metavar="FILE", help="default: the project's own pages")
    add("--tokens", type=int, default=10240)
    add("--window", type=int, default=512, help="tokens that are read at once")
    add("--threads", type=int, default=2)
    add("--peer", action="append", default=[], type=_peer, metavar="llama.cpp=VENV")
    add("--cache-dir", type=Path, default=model_cache(), help="of prepared models")
    add("--json", type=Path, metavar="FILE")
    return parser


def _peer(text: str) -> str:
    if not text.startswith("llama.cpp=") or not (Path(text.partition("=")[2]) / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(f"{text!r} is not llama.cpp=VENV with an interpreter in it")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
