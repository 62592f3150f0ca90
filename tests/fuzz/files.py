"""What lies on disk: models and adapters that somebody else made, prepared models and what is noted of them, segments
of the disk tier, a log of decisions."""

import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import gguf
import msgspec
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.kv.tiers.tiers import Tiers
from engine.model.config import CONFIG_FILE, ModelConfig, ModelError, read_prepared
from engine.model.files import adapter
from engine.model.files.gguf_model import GGUFModel
from engine.model.files.hf_model import HFModel
from engine.model.files.safetensors_reader import SafetensorsFile
from engine.model.prepared.cache import _digest, _hash
from engine.model.prepared.checked import DIGESTS_FILE, CheckRecord, check_folder, check_pieces, seal
from engine.model.prepared.codes_file import coded_forms
from engine.model.prepared.pieces import Made, PieceIndex, load_index, map_pieces, write_pieces
from engine.storage.tiers.segments import SegmentFolder
from engine.text.bundle import TextModel
from engine.text.files import TextFiles, TextSettings
from engine.types import FieldError
from router.decision_log import BrokenLineError, decision_of, line_of
from tests.engine.model.quantized import random_blocks
from tests.fuzz.judge import Decoder
from tests.router.core.made_decisions import made

BLOCK_BYTES = 32
KIND = b"k" * 16
IDENTITY = b"i" * 16


@cache
def scratch() -> Path:
    """A folder in memory, where there is such a thing: a disk would be what takes the time."""
    return Path(_keeper().name)


@cache
def _keeper() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="headrace-fuzz-", dir=memory if memory.is_dir() else None)


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return what writes its input to a file of a folder of its own and has the file read."""

    def feed(data: bytes) -> object:
        path = scratch() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return feed


def _written(name: str, write: Callable[[Path], object]) -> bytes:
    path = scratch() / "seeds" / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    return path.read_bytes()


def _gguf(path: Path) -> None:
    model = GGUFModel(path)
    model.text()
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
        rows = model._file.rows(name)
        rows.values(0, rows.shape[0])


TOKENS = ["<unk>", "a", "b", "ab"]
COLUMNS = 32


def _model_file(path: Path, kind: str) -> None:
    """Write a model of no layers whose vocabulary is of this kind, with one matrix in 4 bits."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(COLUMNS)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["a b"])
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([2, 1, 1, 1])
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    quantized = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("token_embd.weight", random_blocks(quantized, len(TOKENS), COLUMNS), raw_dtype=quantized)
    writer.add_tensor("output_norm.weight", np.ones(COLUMNS, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, COLUMNS), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.tensors:
        file.read(name)


_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1],
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
}
_NO_FAMILY = (json.dumps(_CONFIG | {"model_type": ["llama"]}).encode(),)
_TOKENIZER = Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).to_str().encode()
_SETTINGS = b'{"eos_token":{"content":"a"},"chat_template":[{"name":"default","template":"x"}]}'
_TEXT = b'{"name":"tiny","vocab_size":3,"stop_ids":[1]}'
_TENSORS = save({"w": np.ones((2, 4), np.float32), "v": np.ones(3, np.float16)})


def _directory(name: str) -> Callable[[bytes], object]:
    """Return what reads a Hugging Face directory whose file `name` holds its input."""

    def feed(data: bytes) -> None:
        folder = scratch() / "hf" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps(_CONFIG).encode()
        sound = {"config.json": config, "tokenizer.json": _TOKENIZER, "model.safetensors": _TENSORS}
        for file, content in {**sound, name: data}.items():
            (folder / file).write_bytes(content)
        HFModel(folder).text()

    return feed


def _prepared(name: str) -> Callable[[bytes], object]:
    """Return what reads the text side of a prepared model whose file `name` holds its input."""

    def feed(data: bytes) -> None:
        folder = scratch() / "prepared" / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = TextSettings(name="tiny", vocab_size=3, context_tokens=64)
        TextFiles(_TOKENIZER.decode(), "{{ messages[0].content }}", settings).save(folder)
        (folder / name).write_bytes(data)
        if name == CONFIG_FILE:
            ModelConfig.load(folder).check(folder)
        text = TextModel.load(folder)
        text.decode(text.encode("abba", add_special=True))

    return feed


_ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "rank_pattern": {}}
_FACTORS = save({f"q.lora_{at}.weight": np.ones(shape, np.float32) for at, shape in (("A", (2, 4)), ("B", (4, 2)))})


def _adapter(name: str) -> Callable[[bytes], object]:
    """Return what names an adapter whose file `name` holds its input."""

    def feed(data: bytes) -> str:
        folder = scratch() / "adapter" / name
        folder.mkdir(parents=True, exist_ok=True)
        sound = {adapter.CONFIG: json.dumps(_ADAPTER).encode(), adapter.WEIGHTS: _FACTORS}
        for file, content in {**sound, name: data}.items():
            (folder / file).write_bytes(content)
        return adapter.digest(folder)

    return feed


@cache
def _sealed() -> Path:
    """A folder as one that was prepared: one file, and one of two pieces."""
    folder = scratch() / "sealed"
    folder.mkdir()
    (folder / "text.json").write_bytes(_TEXT)
    codes = Made("w.codes", (2, 16), b"q4", [memoryview(bytes(32))])
    write_pieces(folder / "codes.bin", [codes, Made("w.scales", (2, 1), b"float32", [memoryview(bytes(8))])])
    seal(folder)
    return folder


def _digests(data: bytes) -> None:
    (_sealed() / DIGESTS_FILE).write_bytes(data)
    check_folder(_sealed())


def _index(data: bytes) -> None:
    """An index of pieces, as it is; and, if it can be read, with the digest that it would have."""
    path = _sealed() / "codes.bin"
    path.with_suffix(".json").write_bytes(data)
    try:
        load_index(path)
    except ModelError:
        index = read_prepared(path.with_suffix(".json"), PieceIndex).sealed()
        path.with_suffix(".json").write_bytes(msgspec.json.encode(index))
    coded_forms(load_index(path), path)
    check_pieces(path)
    map_pieces(path)


def _noted(data: bytes) -> None:
    """What was found sound, and what a source's digest was: whatever is noted, no more than time is lost."""
    folder, cache_dir = _sealed(), scratch() / "cache"
    record = CheckRecord(folder, "boot")
    record._path.write_bytes(data)
    record.knows([folder / "text.json"])
    record.note([folder / "text.json"])
    assert record.knows([folder / "text.json"])
    source = folder / "text.json"
    seen = cache_dir / "seen" / f"{_hash(str(source.resolve()))}.json"
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.write_bytes(data)
    _digest(source, [source], cache_dir)


def _segment(data: bytes) -> None:
    """A worker that starts finds `data` in its folder as a segment."""
    folder = scratch() / "segments"
    folder.mkdir(exist_ok=True)
    path = folder / "000000000007.segment"
    path.write_bytes(data)
    segments = SegmentFolder(folder, KIND, BLOCK_BYTES)
    try:
        into = memoryview(bytearray(BLOCK_BYTES))
        segments.read(7, 0, IDENTITY, into)
        segments.read(7, 2**40, IDENTITY, into)
        found, _ = segments.scan()
        tiers = Tiers(4, BLOCK_BYTES, disk_bytes=1 << 16)
        tiers.adopt(found)
        tiers.check()
    finally:
        segments.close()


def _seed_of(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((_sealed() / name).read_bytes())


_STAMP = {"path": "text.json", "size_bytes": 1, "mtime_ns": 1, "ctime_ns": 1, "inode": 1}
_NOTED = json.dumps({"boot": {"text.json": _STAMP}, "before": {}}).encode()
_NAMES = (b'{"files":{"a\\u0000":"x"},"pieces":[]}', b'{"files":{},"pieces":["/"]}', b'{"files":{"":"x"},"pieces":[]}')
_SEEN = json.dumps({"stamp": [_STAMP], "digest": "d"}).encode()


def _segment_seed(path: Path) -> None:
    segments = SegmentFolder(path.parent / "made", KIND, BLOCK_BYTES)
    segments.write(7, [IDENTITY, b"j" * 16], [memoryview(bytes(BLOCK_BYTES))] * 2)
    segments.close()
    path.write_bytes((path.parent / "made" / "000000000007.segment").read_bytes())
    segments.drop(7)


def _decision(data: bytes) -> None:
    """A log's line, as it is and with a checksum that fits."""
    with suppress(BrokenLineError):
        decision_of(data)
    body = data.rstrip(b"\n").rpartition(b',"crc32":')[0] or data[:-1]
    decision_of(b'%b,"crc32":%d}\n' % (body, zlib.crc32(body + b"}")))


def _some_config() -> bytes:
    config = dict.fromkeys(("name", "family", "dtype", "fingerprint"), "x") | dict.fromkeys(
        ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab", "context_tokens"), 2
    )
    return json.dumps({**config, "head_dim": 4, "norm_eps": 1e-5}).encode()


@cache
def files() -> tuple[Decoder, ...]:
    """Made when first wanted: the seeds are real files."""
    models = tuple(_written(f"{kind}.gguf", partial(_model_file, kind=kind)) for kind in ("llama", "gpt2"))
    header = struct.pack("<Q", 2**63) + b"{}"
    return (
        Decoder("gguf", _in_file("model.gguf", _gguf), (ModelError,), models),
        Decoder("safetensors", _in_file("model.safetensors", _safetensors), (ModelError,), (_TENSORS,), (header, b"")),
        Decoder("hf-config", _directory("config.json"), (ModelError,), (json.dumps(_CONFIG).encode(),), _NO_FAMILY),
        Decoder("hf-tokenizer", _directory("tokenizer.json"), (ModelError,), (_TOKENIZER,)),
        Decoder("hf-settings", _directory("tokenizer_config.json"), (ModelError,), (_SETTINGS,)),
        Decoder("prepared-config", _prepared(CONFIG_FILE), (ModelError, FieldError), (_some_config(),)),
        Decoder("prepared-text", _prepared("text.json"), (ModelError, FieldError), (_TEXT,)),
        Decoder("prepared-tokenizer", _prepared("tokenizer.json"), (ModelError, FieldError), (_TOKENIZER,)),
        Decoder(
            "prepared-digests", _digests, (ModelError, OSError), (_written("digests", _seed_of(DIGESTS_FILE)),), _NAMES
        ),
        Decoder("prepared-index", _index, (ModelError, OSError), (_written("index", _seed_of("codes.json")),)),
        Decoder("prepared-noted", _noted, (), (_NOTED, _SEEN), (b'{"\xff":{}}', b"[" * 100_000, b'{"boot":' * 50_000)),
        Decoder("adapter-config", _adapter(adapter.CONFIG), (ModelError,), (json.dumps(_ADAPTER).encode(),)),
        Decoder("adapter-weights", _adapter(adapter.WEIGHTS), (ModelError,), (_FACTORS,)),
        Decoder("decision", _decision, (BrokenLineError,), tuple(map(line_of, made(times=2)))),
        Decoder("segment", _segment, (), (_written("segment", _segment_seed),)),
    )
