"""Weights by reference: the tensors, each byte read once, and no shard but the one that was prepared."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.gpu.random_model import reshard
from engine.model.config import ModelConfig, ModelError
from engine.model.files.hf_model import INDEX
from engine.model.llama import load_model
from engine.model.prepared.cache import prepare
from engine.model.prepared.loading import load_weights, logged, map_weights
from engine.model.prepared.shards import CONTENTS_FILE, SHARDS_FILE, ShardIndex, contents
from engine.model.prepared.streaming import HostCopies, stream
from engine.model.prepared.weights import WEIGHTS_FILE
from engine.text.bundle import fingerprint
from tests.engine.model.test_families import qwen3_reference, reference, save_hf

CPU = torch.device("cpu")
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama_tied": (reference, {}),
    "llama_untied": (reference, {"tie_word_embeddings": False, "num_key_value_heads": 2}),
    "llama_biases": (reference, {"attention_bias": True, "mlp_bias": True}),
    "qwen3_tied": (qwen3_reference, {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_untied": (qwen3_reference, {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3_biases": (qwen3_reference, {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 8}),
}


def save(folder: Path, case: str = "llama_untied", shards: int = 5) -> Path:
    """A bfloat16 directory whose tensors are dealt out to its shards at random; 0: not sharded."""
    make, options = CASES[case]
    save_hf(make(**options).bfloat16(), folder)
    if shards:
        reshard(folder, shards, seed=3)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


def refer(source: Path, cache: str = "cache") -> Path:
    folder = prepare(str(source), source.parent / cache, "bfloat16", mapped=False)
    assert (folder / SHARDS_FILE).exists() and not (folder / WEIGHTS_FILE).exists()
    return folder


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


class CountingRead:
    """Reads as `os.preadv` does, in short counts, and remembers how often each byte of each file was read."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[int]] = {}

    def __call__(self, file: int, buffers: list[memoryview], offset: int) -> int:
        count = os.preadv(file, [buffers[0][:777]], offset)
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        self.counts.setdefault(name, Counter()).update(range(offset, offset + count))
        return count


@pytest.mark.parametrize("shards", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_those_of_a_conversion(case: str, shards: int, tmp_path: Path) -> None:
    """Guards fused rows in the wrong place, and tensors cut by the end of a buffer or found in another shard."""
    source = save(tmp_path / "model", case, shards)
    wanted = map_weights(prepare(str(source), tmp_path / "cache", "bfloat16"))
    folder = refer(source)
    index = ShardIndex.load(folder)
    for piece_bytes in (1009, 4096, 1 << 20):
        assert same(stream(index, CPU, piece_bytes=piece_bytes).tensors, wanted)
    assert same(load_weights(folder, CPU).weights, wanted)
    assert load_model(folder, packed=False).weights_bytes == sum(weight.nbytes for weight in wanted.values())


def test_a_model_of_them_says_what_it_is_made_of(source: Path) -> None:
    folder = refer(source)
    before = fingerprint(folder)
    assert before == ModelConfig.load(folder).fingerprint and contents(folder) == {}
    model = load_model(folder, packed=False)
    after = fingerprint(folder)
    assert model.config.fingerprint == after and after.startswith(f"{before}-")


def test_every_byte_is_read_once_and_hashed_on_the_way(source: Path) -> None:
    """Guards against a second pass, and against a digest that leaves out headers or tensors that nobody wants."""
    read = CountingRead()
    found = stream(ShardIndex.load(refer(source)), CPU, read=read, piece_bytes=5000)
    files = sorted(source.glob("*.safetensors"))
    assert len(files) == 5
    for file in files:
        data = file.read_bytes()
        assert read.counts[file.name] == Counter(range(len(data)))
        assert found.digests[file.name] == xxhash.xxh3_128(data).hexdigest()
    assert sorted(read.counts) == sorted(found.digests) == [file.name for file in files]


def test_without_a_digest_the_tensors_are_the_same(source: Path) -> None:
    index = ShardIndex.load(refer(source))
    plain = stream(index, CPU, hashed=False)
    assert plain.digests == {} and same(plain.tensors, stream(index, CPU).tensors)


def test_a_tensor_that_nobody_wants_is_hashed_all_the_same(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama_tied", shards=0)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "a.rotary_emb.inv_freq": torch.ones(33)}, str(source / "model.safetensors"))
    wanted = map_weights(prepare(str(source), tmp_path / "cache", "bfloat16"))
    weights, digests = load_weights(refer(source), CPU)
    assert same(weights, wanted)
    data = (source / "model.safetensors").read_bytes()
    assert digests == {"model.safetensors": xxhash.xxh3_128(data).hexdigest()}


class LateCopies(HostCopies):
    """A device that copies as late as it may: when somebody waits for it."""

    def __init__(self) -> None:
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._batches: list[list[tuple[Tensor, Tensor]]] = []
        self.waits = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._queued.append((target, source))

    def mark(self) -> Callable[[], None]:
        self._batches.append(self._queued)
        self._queued, upto = [], list(self._batches)

        def arrive() -> None:
            self.waits += 1
            for batch in upto:
                for target, source in batch:
                    target.copy_(source)
                batch.clear()

        return arrive


def test_a_buffer_is_filled_again_when_its_copies_have_arrived(source: Path) -> None:
    """Guards the ring: on a GPU copies run later, and must find in the buffer what they were queued for."""
    index, copies = ShardIndex.load(refer(source)), LateCopies()
    found = stream(index, CPU, copies=copies, piece_bytes=2000)
    assert copies.waits > 50
    assert same(found.tensors, stream(index, CPU).tensors)


def grown(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"more")


def cut(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def touched(shard: Path) -> None:
    os.utime(shard, ns=(1, 1))


def flipped(shard: Path) -> None:
    """Flip one bit and keep the times as they were; but for the time of that change itself, which nobody can set."""
    times = shard.stat()
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))


def copied(shard: Path) -> None:
    """The same bytes in another file."""
    twin = shard.with_suffix(".twin")
    shutil.copy(shard, twin)
    twin.replace(shard)


@pytest.mark.parametrize(
    ("change", "new", "known"),
    [
        (grown, r"has \d+ bytes, and had \d+ when", r"has \d+ bytes, and had \d+ when"),
        (cut, r"has \d+ bytes, and had \d+ when", r"has \d+ bytes, and had \d+ when"),
        (flipped, "has changed since", "holds other bytes than when it was first loaded: XXH3"),
        (touched, "has changed since", ""),
        (copied, "has changed since", ""),
        (Path.unlink, "cannot be read: No such file", "cannot be read: No such file"),
    ],
)
def test_a_changed_shard_is_refused_by_name(
    change: Callable[[Path], None], new: str, known: str, source: Path
) -> None:
    """Guards against weights that nobody prepared. Before the first load a shard is known by its stamp, afterwards by
    its bytes: then a copy of the same ones does no harm."""
    shard = source / "model-00004-of-00005.safetensors"
    folder = refer(source)
    for loaded, message in ((False, new), (True, known)):
        if loaded:
            shutil.rmtree(source)
            shutil.rmtree(folder)
            folder = refer(save(source))
            load_weights(folder, CPU)
        change(shard)
        if message:
            with pytest.raises(ModelError, match=rf"{shard.name}: {message}"):
                load_weights(folder, CPU)
        else:
            load_weights(folder, CPU)
        assert (folder / CONTENTS_FILE).exists() is loaded


def test_a_shard_that_changes_while_it_is_read_is_refused(source: Path) -> None:
    """Guards against weights of which half are new. The reader is told of the change by itself: it makes it."""
    shard = source / "model-00002-of-00005.safetensors"
    index = ShardIndex.load(refer(source))

    def touching(file: int, buffers: list[memoryview], offset: int) -> int:
        os.utime(shard, ns=(5, 5))
        return os.preadv(file, buffers, offset)

    def ending(file: int, buffers: list[memoryview], offset: int) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        return 0 if name == shard.name and offset else os.preadv(file, buffers, offset)

    def failing(file: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    for read, message in (
        (ending, rf"{shard.name}: ends at byte 3000: cut short"),
        (failing, r"model-00001.*: cannot be read: Input/output error"),
        (touching, rf"{shard.name}: was written to while it was read"),
    ):
        with pytest.raises(ModelError, match=message):
            stream(index, CPU, read=read, piece_bytes=3000)


def test_a_changed_directory_is_prepared_anew(source: Path) -> None:
    """Guards a stale folder: new weights under an old name are another model, of which all but the weights is the same;
    and going back, or copying the directory, is no third."""
    first = refer(source)
    load_weights(first, CPU)
    shard = next(source.glob("*.safetensors"))
    old, before = shard.read_bytes(), fingerprint(first)
    flipped(shard)
    second = refer(source)
    assert second != first
    load_weights(second, CPU)
    after = fingerprint(second)
    assert after != before and after.partition("-")[0] == before.partition("-")[0]
    shard.write_bytes(old)
    twin = source.parent / "elsewhere" / source.name
    shutil.copytree(source, twin)
    third = refer(twin)
    assert third not in (first, second) and fingerprint(third) == before.partition("-")[0]
    load_weights(third, CPU)
    assert fingerprint(third) == before


def test_the_first_to_load_is_whom_the_others_are_held_against(source: Path) -> None:
    """Guards the start of a host: all workers load in the same moment, and none has found a record when it began."""
    folder = refer(source)
    index = ShardIndex.load(folder)
    digests = stream(index, CPU).digests
    load_weights(folder, CPU)
    assert contents(folder) == digests
    (folder / CONTENTS_FILE).write_text(json.dumps({**digests, index.shards[2].name: "0" * 32}))
    with pytest.raises(ModelError, match=rf"{index.shards[2].name}: holds other bytes"):
        load_weights(folder, CPU)


def test_preparing_again_reads_nothing_of_the_directory(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the start time: a folder is found by what the directory's files are called and when they were made."""
    folder = refer(source)

    def refuse(path: Path) -> None:
        raise AssertionError("the model was opened again")

    monkeypatch.setattr("engine.model.files.hf_model.HFModel", refuse)
    assert refer(source) == folder


def test_nothing_as_large_as_the_weights_is_written(tmp_path: Path) -> None:
    source = save(tmp_path / "model", shards=0)
    tensors = load_file(source / "model.safetensors")
    weights = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    folder = refer(source)
    load_weights(folder, CPU)
    written = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert "weights.bin" not in written
    assert sum(written.values()) - written["tokenizer.json"] < 8000 + 200 * len(tensors) < weights / 10


@pytest.mark.parametrize("what", ["another type", "one tensor of another type", "mapped"])
def test_what_must_be_converted_is(what: str, tmp_path: Path) -> None:
    """Guards a worker that takes bytes of one type for those of another, and workers on the CPU, which map."""
    source = save(tmp_path / "model", shards=0)
    tensors = load_file(source / "model.safetensors")
    if what == "one tensor of another type":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        save_file(tensors, str(source / "model.safetensors"))
    dtype = "float16" if what == "another type" else "bfloat16"
    folder = prepare(str(source), tmp_path / "cache", dtype, mapped=what == "mapped")
    assert (folder / WEIGHTS_FILE).exists() and not (folder / SHARDS_FILE).exists()
    assert load_weights(folder, CPU).digests == {} and "-" not in fingerprint(folder)


def test_a_prepared_file_is_streamed_to_a_device_too(source: Path) -> None:
    """Guards the GPU's way to a converted model, as far as a device without memory shows it."""
    folder = prepare(str(source), source.parent / "cache", "float16")
    told: list[tuple[int, int]] = []
    weights, digests = load_weights(folder, torch.device("meta"), lambda *said: told.append(said))
    wanted = map_weights(folder)
    assert digests == {} and told[-1][0] == told[-1][1] == (folder / WEIGHTS_FILE).stat().st_size
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in wanted.items()
    }
    assert {weight.device.type for weight in weights.values()} == {"meta"}


def test_a_missing_or_misshapen_tensor_is_named(source: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            break
    save_file({**tensors, name: tensors[name][:-1].clone()}, str(shard))
    with pytest.raises(ModelError, match=rf"{name} has shape \(95, 64\), expected \(96, 64\)"):
        refer(source)
    del tensors[name]
    save_file(tensors, str(shard))
    with pytest.raises(ModelError, match=f"names tensor {name} in {shard.name}, which does not have it"):
        refer(source)
    (source / INDEX).unlink()
    with pytest.raises(ModelError, match=f"{name} is missing"):
        refer(source)
    assert not list((source.parent / "cache").glob("*.partial"))


def test_progress_grows_to_all_and_every_tenth_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[int, int]] = []
    clock = iter(range(100))
    with caplog.at_level("INFO", "engine.model.prepared.loading"):
        hear = logged("m", lambda *said: told.append(said), lambda: float(next(clock)))
        for done in range(5, 101, 5):
            hear(done * 10**8, 10**10)
    assert told == [(done * 10**8, 10**10) for done in range(5, 101, 5)]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10
    assert lines[0] == "weights of m: 10 % of 10.00 GB read, 1.00 GB/s" and lines[-1].startswith("weights of m: 100 %")


def test_a_load_says_how_far_it_is(source: Path) -> None:
    told: list[tuple[int, int]] = []
    load_weights(refer(source), CPU, lambda *said: told.append(said))
    total = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert {of for _, of in told} == {total} and told[-1][0] == total
    assert [done for done, _ in told] == sorted(done for done, _ in told)


LOAD = """
import resource, sys, torch
from pathlib import Path
from engine.model.prepared import loading
from engine.model.prepared.streaming import PIECE_BYTES, PIECES
load_weights = loading.load_weights
loading._check_numbers = lambda *_: None  # weights on this device have no numbers to look at
small, large = map(Path, sys.argv[1:])
load_weights(small, torch.device("meta"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load_weights(large, torch.device("meta"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - PIECES * PIECE_BYTES)
"""


def test_a_load_holds_the_ring_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """Guards the memory of a host: 256 MB go to a device that takes none of it, and what is left is the ring and less
    than 16 MiB."""
    large = widened(save(tmp_path / "large", shards=0), rows=1_000_000)
    reshard(large, 3, seed=1)
    assert sum(file.stat().st_size for file in large.glob("*.safetensors")) > 256e6
    command = [sys.executable, "-c", LOAD, str(refer(source)), str(refer(large))]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 16 << 20


def widened(source: Path, rows: int) -> Path:
    """Give the model another, larger vocabulary, whose rows are ones."""
    tensors = load_file(source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "vocab_size": rows}))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.ones(rows, 64, dtype=torch.bfloat16)
    save_file(tensors, str(source / "model.safetensors"))
    return source


def test_a_conversion_holds_slabs_of_rows(tmp_path: Path) -> None:
    """Guards the memory of a conversion: no tensor is whole in it, in whatever type."""
    source = widened(save(tmp_path / "model", shards=0), rows=400_000)
    largest = 400_000 * 64 * 4
    tracemalloc.start()
    try:
        prepare(str(source), tmp_path / "cache", "float16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.2 * largest, f"{peak / largest:.2f} times the largest tensor"
