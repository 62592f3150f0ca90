"""The models of `headrace doctor`: the configured one by its headers; with `--deep`, every prepared one of this host's
cache against its digests.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.check import Check
from cluster.model_hub import hub_model
from cluster.plan.held import held_bytes, kinds_at_hand
from cluster.sizes import format_size
from engine.model.config import CONFIG_FILE, ModelConfig, ModelError, read_prepared
from engine.model.prepared.checked import DIGESTS_FILE, check_folder, check_pieces, file_digest
from engine.model.prepared.shards import ShardIndex, by_reference, contents


def configured_model(model: str, name: str = "model", setting: str = "--model") -> Check:
    """Say of which family and format a configured model is, by its headers and tokenizer: no weights are read.
    `setting` names it."""
    from cluster.plan.shapes import find_shape
    from engine.model.prepared.cache import opened

    if hub_model(model) is not None:
        return Check(name, "ok", f"{model} of the Hugging Face hub: the start finds it, or says why not")
    path = Path(model).expanduser()
    if model and not path.exists():
        return Check(name, "fail", f"{path}: no such file or directory", f"name another: {setting}")
    if path.is_file() and path.suffix != ".gguf":  # the planner reads a config.json alone
        problem = f"{path}: neither a .gguf file nor a directory with config.json"
        return Check(name, "fail", problem, f"name another: {setting}")
    try:
        shape = find_shape(model)
        if shape.not_run or shape.model is None:
            return Check(name, "fail", shape.not_run, "docs/models.md says what runs")
        held = _held(model, shape.model)
        if model:
            opened(path).text()
    except ModelError as error:
        return Check(name, "fail", str(error), "docs/models.md says what runs")
    windows = [str(window) for window in shape.model.windows if window]
    parts = [
        f"{shape.name}: family {shape.model.family}, weights in {shape.stored}",
        f"{shape.layers} layers, context of {shape.context_tokens} tokens",
        *([f"windows of {', '.join(windows)}"] if windows else []),
        *([f"{shape.model.expert_count} experts"] if shape.model.experts else []),
        *held,
    ]
    return Check(name, "ok", ", ".join(parts))


def _held(named: str, model: ModelConfig) -> list[str]:
    """Say what weights take in a worker, where they are at hand."""
    if not (kinds := kinds_at_hand(named, "float32")):
        return []
    sizes = held_bytes(model, "float32", kinds, "cpu", True), held_bytes(model, "bfloat16", kinds, "cuda", False)
    return [f"weights and rotary tables take {format_size(sizes[0])} on the CPU, {format_size(sizes[1])} on a GPU"]


def model_checks(cache: Path) -> Iterator[Check]:
    """Read all prepared models in `cache`, whatever was read of them before."""
    folders = sorted(path.parent for path in cache.glob(f"*/{DIGESTS_FILE}"))
    # A folder without its list is one of an older version, or has lost it: the next start makes another.
    for folder in folders:
        yield _check(folder)
    if not folders:
        yield Check("prepared models", "ok", f"none in {cache}: the first start makes one")


def _check(folder: Path) -> Check:
    name = f"prepared model {folder.name[:8]}"
    began_s = time.monotonic()
    try:
        size = check_folder(folder) + _check_derived(folder) + _check_shards(folder)
        model = read_prepared(folder / CONFIG_FILE, ModelConfig).name
    except (ModelError, OSError) as error:
        fix = "nothing: the next start makes it again, and a worker that starts makes what it derived"
        if by_reference(folder):
            fix = "if the model's own files are right, remove this folder: the next start makes it again"
        return Check(name, "fail", str(error), fix)
    took_s = time.monotonic() - began_s
    rate = format_size(round(size / max(took_s, 1e-9)))
    return Check(name, "ok", f"{model}: every digest agrees, {format_size(size)} read in {took_s:.1f} s ({rate}/s)")


def _check_derived(folder: Path) -> int:
    """Read the files that workers have derived from the folder."""
    return sum(check_pieces(path) for kind in ("panels", "packed") for path in folder.glob(f"{kind}-*.bin"))


def _check_shards(folder: Path) -> int:
    """Read weights that were left where they are, where a load has said what they hold."""
    known = contents(folder) if by_reference(folder) else {}
    shards = ShardIndex.load(folder).shards if known else ()
    for shard in shards:
        if (found := file_digest(Path(shard.stamp.path))) != known.get(shard.name):
            raise ModelError(shard.stamp.path, f"holds other bytes than when it was first loaded: XXH3 {found}")
    return sum(shard.stamp.size_bytes for shard in shards)
