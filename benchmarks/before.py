"""Decode steps of this checkout and of an earlier one, in turns: python -m benchmarks.before --before DIR [--rows 8]
[--now DIR], which is for what one commit of the past has cost

    git worktree add DIR dc04d3e7 && (cd DIR && PYTHON setup.py build_ext --inplace)

Two processes of one thread each, of which one imports from DIR with this interpreter; each decodes its own copy of the
same sequences, several steps at a time. What is counted is a process's time on the processor: other work on the host
changes it less than the time on the wall. A ratio is taken within each turn, and the median of them told, beside how
much memory each process has of its own once its engine is open. Both must draw the same tokens.

The model is the demo model, another one, or `hollow`: a Llama of many layers and next to no columns, where whatever a
layer costs besides its products is all that there is.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

ROOT = Path(__file__).parents[1]
SIDE = ROOT / "benchmarks" / "before_side.py"
WARM_UP = 2
LAYERS, HIDDEN, WIDTH, VOCAB = 30, 64, 96, 320
HOLLOW = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


class _Side:
    """A process that decodes when it is told to."""

    def __init__(self, checkout: Path, model: str, cache: Path, sizes: list[int]) -> None:
        command = ["env", f"PYTHONPATH={checkout}", "OMP_NUM_THREADS=1", sys.executable, "-P", str(SIDE)]
        subprocess.run([*command, model, str(cache)], cwd=checkout, check=True)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*command, model, str(cache), *map(str, sizes)], stdin=pipe, stdout=pipe, cwd=checkout, text=True
        )
        try:
            self.said = self._answer()
            assert Path(self.said["from"]).is_relative_to(checkout), f"{self.said['from']} is not of {checkout}"
        except BaseException:
            self.close()
            raise

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process has ended"
        return json.loads(line)

    def steps(self, count: int) -> float:
        """Return the median of so many steps, in seconds of the processor."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return statistics.median(self._answer())

    def texts(self) -> list[list[int]]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        texts: list[list[int]] = self._answer()
        self._process.wait()
        return texts

    def close(self) -> None:
        self._process.kill()
        with self._process:  # waits, and closes its pipes
            pass


def save_hollow(folder: Path) -> str:
    folder.mkdir()
    chance = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        parts = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2, "o": HIDDEN}
        shapes |= {f"{stem}self_attn.{name}_proj.weight": (rows, HIDDEN) for name, rows in parts.items()}
        shapes |= {f"{stem}mlp.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{stem}mlp.down_proj.weight": (HIDDEN, WIDTH)}
        shapes |= {f"{stem}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    weights = {name: chance.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HOLLOW))
    Tokenizer(BPE(vocab={f"t{at}": at for at in range(VOCAB)}, merges=[])).save(str(folder / "tokenizer.json"))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="another checkout, kernels built")
    parser.add_argument("--now", type=Path, default=ROOT, metavar="DIR", help="a checkout instead of this one")
    parser.add_argument("--model", default="", help="a file or directory, or `hollow`; the demo model unless given")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4, help="in a turn of each")
    told = parser.parse_args()
    if told.before.resolve() == told.now.resolve():
        parser.error("--before is this checkout itself" if told.now == ROOT else "--before is --now")
    sizes = [told.rows, told.tokens, (told.turns + WARM_UP) * told.steps + 1]
    checkouts = {"before": told.before.resolve(), "now": told.now.resolve()}
    with TemporaryDirectory(prefix="headrace-before-") as folder:
        model = save_hollow(Path(folder) / "hollow") if told.model == "hollow" else told.model
        sides = dict[str, _Side]()
        try:
            for name, checkout in checkouts.items():
                sides[name] = _Side(checkout, model, Path(folder) / name, sizes)
            took_s: dict[str, list[float]] = {name: [] for name in sides}
            for turn in range(told.turns + WARM_UP):
                for name in sorted(sides, reverse=turn % 2 == 1):
                    took_s[name].append(sides[name].steps(told.steps))
            texts = [side.texts() for side in sides.values()]
        finally:
            for side in sides.values():
                side.close()
    for name, side in sides.items():
        median_ms = statistics.median(took_s[name][WARM_UP:]) * 1e3
        print(f"{name:6}  {median_ms:.2f} ms a step, {side.said['own_bytes'] / 1e6:.1f} MB of its own after the start")
    ratios = [now / then for then, now in zip(took_s["before"], took_s["now"], strict=True)][WARM_UP:]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"now / before: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} turns)")
    print("the same tokens" if texts[0] == texts[1] else "OTHER TOKENS: what was timed is not the same work")


if __name__ == "__main__":
    main()
