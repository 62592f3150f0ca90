"""GGUF files that are not what they should be: each is refused by a ModelError that names the file and its tensor or
key when a model is prepared, before any worker serves. Whatever one field or tensor is made, nothing else comes out but
that error, or the model as it was."""

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf import GGUFValueType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.model.config import CONFIG_FILE, ModelError
from engine.model.prepared.cache import prepare
from tests.engine.model.gguf_bytes import Parts, Tensor, string
from tests.engine.model.quantized import HIDDEN, MATRICES, VOCAB, Kind, write_model

Change = Callable[[Parts], object]

KINDS = dict(zip(MATRICES, (Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.F32, Kind.Q4_0, Kind.Q5_K, Kind.Q4_1), strict=False))
DOWN = "blk.0.ffn_down.weight"
NORM = "blk.0.attn_norm.weight"
TOKENS = "tokenizer.ggml.tokens"
UNSOUND = "not a sound GGUF file: "
STRINGS, NUMBERS, FLOATS = (Type.ARRAY, Type.STRING), (Type.ARRAY, Type.INT32), (Type.ARRAY, Type.FLOAT32)


def field(key: str, kind: Any, value: Any) -> Change:
    return lambda parts: parts.fields.update({key: (kind, value)})


def llama(key: str, kind: Any, value: Any) -> Change:
    return field(f"llama.{key}", kind, value)


def word(key: str, value: Any) -> Change:
    return field(f"tokenizer.ggml.{key}", *value)


def without(key: str) -> Change:
    return lambda parts: parts.fields.pop(key)


def tensor(name: str, **said: Any) -> Change:
    return lambda parts: [setattr(parts.tensors[name], what, value) for what, value in said.items()]


def said(**values: Any) -> Change:
    return lambda parts: [setattr(parts, what, value) for what, value in values.items()]


def values(name: str, raw: bytes, at: int = 0) -> Change:
    """Put bytes into a tensor."""

    def change(parts: Parts) -> None:
        start = parts.tensors[name].offset + at
        parts.data = parts.data[:start] + raw + parts.data[start + len(raw) :]

    return change


def named(name: str) -> Change:
    """Give this name to the tensor that the family has no use for."""
    return lambda parts: parts.tensors.update({name: parts.tensors.pop("rest")})


def both(*changes: Change) -> Change:
    return lambda parts: [change(parts) for change in changes]


def sentence_piece(**others: Any) -> Change:
    """Make the vocabulary one of SentencePiece, with these arrays."""
    scores = (FLOATS, [0.0] * VOCAB)
    return both(
        *(word(key, value) for key, value in {"model": (Type.STRING, "llama"), "scores": scores, **others}.items())
    )


U32, U64, F32, STR, BOOL = Type.UINT32, Type.UINT64, Type.FLOAT32, Type.STRING, Type.BOOL
SWAPPED = struct.pack(">I", 3)
CASES: dict[str, tuple[Change, str]] = {
    # the file
    "magic": (said(magic=b"GGML"), UNSOUND + "GGUF magic invalid"),
    "version 1": (said(version=1), UNSOUND + ".*version 1"),
    "version 99": (said(version=99), UNSOUND + ".*version 99"),
    "the other order of bytes": (
        said(version=struct.unpack("<I", SWAPPED)[0]),
        "machine with the other order of bytes",
    ),
    "no bytes of tensors": (said(data=b""), "ends at byte .*: truncated"),
    "cut": (lambda parts: setattr(parts, "data", parts.data[:-4000]), rf"tensor {DOWN} ends at byte \d+ of \d+: trunc"),
    "a thousand million metadata": (said(field_count=10**9), UNSOUND + "1000000000 metadata"),
    "2^63 metadata": (said(field_count=1 << 63), UNSOUND + "9223372036854775808 metadata"),
    "a thousand million tensors": (said(tensor_count=10**9), UNSOUND + "1000000000 tensors"),
    "more metadata than there are": (said(field_count=60), UNSOUND),
    "more tensors than there are": (said(tensor_count=13), UNSOUND),
    "fewer metadata than there are": (said(field_count=3), UNSOUND),
    "a key twice": (said(behind=[("llama.block_count", (U32, 9))]), UNSOUND + ".*Duplicate llama.block_count"),
    "alignment 0": (field("general.alignment", U32, 0), UNSOUND + "Invalid alignment"),
    "alignment of a word": (field("general.alignment", STR, "x"), UNSOUND + "Bad type for general.alignment"),
    # metadata
    "an unknown type": (field("a.b", 77, b"1234"), UNSOUND + r"the metadata behind tokenizer\S+: 77 is not a valid"),
    "an array of arrays": (
        field("a.b", (Type.ARRAY, Type.ARRAY), b"1" * 30),
        "behind .*: arrays of ARRAY are not supp",
    ),
    "an array without end": (
        field("a.b", (Type.ARRAY, Type.UINT8), struct.pack("<Q", 1 << 60)),
        "behind .*: an array ru",
    ),
    "strings without end": (
        field("a.b", STRINGS, struct.pack("<Q", 1 << 60)),
        "an array of 1152921504606846976 strings",
    ),
    "a string without end": (field("a.b", STR, struct.pack("<Q", 1 << 62) + b"x"), UNSOUND),
    "a string of no text": (
        field("general.architecture", STR, string(b"\xff\xfe")),
        "metadata general.architecture: 'utf",
    ),
    "no architecture": (without("general.architecture"), "metadata general.architecture is missing"),
    "architecture of numbers": (field("general.architecture", NUMBERS, [1]), r"unknown architecture \[1\]"),
    "another architecture": (field("general.architecture", STR, "mamba"), "architecture 'mamba' is not run: it keeps"),
    "one file of several": (
        both(field("split.count", Type.UINT16, 3), field("split.no", Type.UINT16, 1)),
        "has split.no 1, of 3 files of one model: join them first",
    ),
    "no block_count": (without("llama.block_count"), "metadata llama.block_count is None, not a number"),
    "a block_count of words": (llama("block_count", STR, "1"), "metadata llama.block_count is '1', not a number"),
    "a block_count of true": (llama("block_count", BOOL, True), "metadata llama.block_count is True, not a number"),
    "a thousand million layers": (llama("block_count", U32, 10**9), "layers is 1000000000, must be 1 to 10000"),
    "two layers, of one": (llama("block_count", U32, 2), "tensor blk.1.attn_norm.weight is missing"),
    "no embedding_length": (without("llama.embedding_length"), "metadata llama.embedding_length is None"),
    "another embedding_length": (
        llama("embedding_length", U32, 128),
        r"tensor token_embd.weight has shape \(64, 256\), exp",
    ),
    "no heads": (llama("attention.head_count", U32, 0), "metadata llama.attention.head_count is 0"),
    "heads for each layer": (llama("attention.head_count", NUMBERS, [4]), r"head_count is \[4\], not a number"),
    "odd KV heads": (llama("attention.head_count_kv", U32, 3), "4 heads do not divide by 3 KV heads"),
    "no KV heads": (llama("attention.head_count_kv", U32, 0), "kv_heads is 0, must be at least 1"),
    "other values than keys": (llama("attention.value_length", U32, 32), "value_length differs from 64"),
    "a long key": (llama("attention.key_length", U64, 1 << 40), "value_length|has shape .* expected"),
    "no epsilon": (without("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
    "an epsilon of words": (llama("attention.layer_norm_rms_epsilon", STR, "1e-5"), "layer_norm_rms_epsilon is '1e-5'"),
    "an epsilon of 0": (llama("attention.layer_norm_rms_epsilon", F32, 0.0), "norm_eps is 0.0, must be above 0"),
    "an epsilon of NaN": (
        llama("attention.layer_norm_rms_epsilon", F32, float("nan")),
        "norm_eps is nan, not a finite",
    ),
    "no context": (llama("context_length", U32, 0), "context_tokens is 0, must be at least 1"),
    "a context without end": (
        llama("context_length", U64, 1 << 62),
        "context_tokens is 4611686018427387904, must be at",
    ),
    "theta of 0": (llama("rope.freq_base", F32, 0.0), "a rotary table has theta 0.0"),
    "theta without end": (llama("rope.freq_base", F32, float("inf")), "llama.rope.freq_base is inf, not a finite"),
    "theta of words": (llama("rope.freq_base", STR, "10000"), "llama.rope.freq_base is '10000', not a number"),
    "odd rotary dimensions": (llama("rope.dimension_count", U32, 7), "7 dimensions of a head of 64 are rotated"),
    "half a rotary dimension": (llama("rope.dimension_count", F32, 8.5), "dimension_count is 8.5, not a whole number"),
    "an unknown rope": (llama("rope.scaling.type", STR, "ntk"), "rope scaling 'ntk' is not supported"),
    "a rope without its factor": (
        llama("rope.scaling.type", STR, "linear"),
        "llama.rope.scaling.factor is None, not a n",
    ),
    "a rope of factor 0": (
        both(llama("rope.scaling.type", STR, "linear"), llama("rope.scaling.factor", F32, 0.0)),
        "a rope scaling makes no frequencies",
    ),
    "a window below 0": (llama("attention.sliding_window", Type.INT32, -8), "llama.attention.sliding_window is -8"),
    "a temperature": (llama("attention.temperature_scale", F32, 0.1), "temperature_scale is 0.1.*, which is not"),
    "experts without theirs": (llama("expert_count", U32, 4), "metadata llama.expert_used_count is None, not a number"),
    "a thousand million experts": (
        both(llama("expert_count", U32, 10**9), llama("expert_used_count", U32, 1)),
        "1 of 1000000000 experts of width 256",
    ),
    # the tokenizer
    "no tokens": (without(TOKENS), f"metadata: .*missing required field `{TOKENS}`|{TOKENS} is missing"),
    "tokens of numbers": (word("tokens", (NUMBERS, [1, 2])), rf"Expected `str`, got `int` - at .*{TOKENS}"),
    "a token twice": (
        lambda parts: parts.fields[TOKENS][1].__setitem__(3, parts.fields[TOKENS][1][4]),
        "a token twice",
    ),
    "more tokens than rows": (
        both(
            lambda parts: parts.fields[TOKENS][1].append("zz"),
            lambda parts: parts.fields["tokenizer.ggml.token_type"][1].append(1),
        ),
        f"{TOKENS} has 65 tokens, and the embedding 64 rows",
    ),
    "fewer types than tokens": (
        lambda parts: parts.fields["tokenizer.ggml.token_type"][1].pop(),
        "tokenizer.ggml.token_type has 63 of 64 tokens",
    ),
    "a token of a megabyte": (
        lambda parts: parts.fields[TOKENS][1].__setitem__(0, "a" * (1 << 20)),
        f"{TOKENS} has a token of 1048576 characters",
    ),
    "a token of no text": (
        word("tokens", (STRINGS, struct.pack("<Q", 1) + string(b"\xff"))),
        f"metadata {TOKENS}: 'utf",
    ),
    "an unknown vocabulary": (word("model", (STR, "bert")), "tokenizer model 'bert' is not supported"),
    "no vocabulary": (without("tokenizer.ggml.model"), "tokenizer model '' is not supported"),
    "an unknown splitting": (word("pre", (STR, "viking")), "tokenizer.ggml.pre 'viking' is not known"),
    "merges of no tokens": (word("merges", (STRINGS, ["not there"])), "tokenizer.ggml.merges: "),
    "merges of one part": (word("merges", (STRINGS, ["a"])), "tokenizer.ggml.merges: "),
    "an end past the tokens": (word("eos_token_id", (U32, 64)), "tokenizer.ggml.eos_token_id is 64, of 64 tokens"),
    "a beginning below 0": (word("bos_token_id", (Type.INT32, -1)), "tokenizer.ggml.bos_token_id is -1, of 64 tokens"),
    "an end of words": (word("eos_token_id", (STR, "</s>")), "Expected `int | null`, got `str` - at .*eos_token_id"),
    "a template of numbers": (
        field("tokenizer.chat_template", U32, 1),
        "Expected `str`, got `int` - at .*chat_template",
    ),
    "no scores": (both(sentence_piece(), without("tokenizer.ggml.scores")), "tokenizer.ggml.scores does not fit"),
    "fewer scores than tokens": (sentence_piece(scores=(FLOATS, [0.0])), "tokenizer.ggml.scores has 1 of 64 tokens"),
    "scores of NaN": (
        sentence_piece(scores=(FLOATS, [float("nan")] * VOCAB)),
        "scores: a value is not a finite number",
    ),
    "scores of words": (sentence_piece(scores=(STRINGS, ["0"] * VOCAB)), "Expected `float`, got `str` - at .*scores"),
    # tensors
    "missing": (lambda parts: parts.tensors.pop(DOWN), f"tensor {DOWN} is missing"),
    "no embedding": (lambda parts: parts.tensors.pop("token_embd.weight"), "tensor token_embd.weight is missing"),
    "one more": (
        named("blk.0.attn_q_norm.weight"),
        "tensor blk.0.attn_q_norm.weight: the family llama has no place for it",
    ),
    "a layer more": (
        named("blk.1.attn_norm.weight"),
        "tensor blk.1.attn_norm.weight: the family llama has no place for it",
    ),
    "a bias of one": (
        named("blk.0.attn_q.bias"),
        "tensor blk.0.attn_k.bias is missing",
    ),
    "a bias of another": (
        named("blk.0.attn_k.bias"),
        "tensor blk.0.attn_k.bias: the family llama has no place for it",
    ),
    "a scale that is not said": (
        named("blk.0.attn_q.scale"),
        "tensor blk.0.attn_q.scale: the family llama has no place for it",
    ),
    "outside": (tensor(DOWN, offset=1 << 40), rf"tensor {DOWN} ends at byte \d+ of \d+: truncated"),
    "outside by 2^64": (tensor(DOWN, offset=(1 << 64) - 32), rf"tensor {DOWN} ends at byte \d+ of \d+: truncated"),
    "within another": (tensor(NORM, offset=32), f"tensor {NORM} begins within tensor|begins within tensor {NORM}"),
    "between": (tensor(DOWN, offset=40), f"tensor {DOWN} begins at 40, no multiple of 32"),
    "a shape": (tensor(DOWN, dims=[HIDDEN, 128]), rf"tensor {DOWN} has shape \(128, 256\), expected \(256, 256\)"),
    "a vector": (tensor(NORM, dims=[128]), rf"tensor {NORM} has shape \(128,\), expected \(256,\)"),
    "a matrix of vectors": (tensor(NORM, dims=[16, 16]), rf"tensor {NORM} has shape \(16, 16\), expected \(256,\)"),
    "no dimensions": (tensor(NORM, dims=[]), rf"tensor {NORM} has shape \[\]"),
    "a dimension of 0": (tensor(NORM, dims=[256, 0]), rf"tensor {NORM} has shape \[256, 0\]"),
    "nine dimensions": (tensor(NORM, dims=[256, *[1] * 8]), rf"tensor {NORM} has shape \[256, 1"),
    "a shape without end": (tensor(NORM, dims=[1 << 62, 1 << 62]), rf"tensor {NORM} ends at byte \d+"),
    "a shape that comes round to 0": (tensor(NORM, dims=[1 << 32, 1 << 32]), rf"tensor {NORM} ends at byte \d+"),
    "columns that fill no block": (
        tensor(DOWN, dims=[HIDDEN + 1, HIDDEN]),
        rf"{DOWN} \(\S+\) has 257 columns, no multiple",
    ),
    "an unknown format": (tensor(DOWN, kind=999), f"tensor {DOWN}: 999 is not a valid GGMLQuantizationType"),
    "integers": (tensor(NORM, kind=int(Kind.I32)), rf"tensor {NORM} \(I32\): "),
    "64-bit integers": (tensor(NORM, kind=int(Kind.I64), dims=[128]), rf"tensor {NORM} .*"),
    "a name of no text": (
        named(b"\xff\xfe"),  # type: ignore[arg-type]
        UNSOUND + "'utf-8' codec",
    ),
    "NaN": (values(NORM, struct.pack("<f", float("nan"))), f"tensor {NORM}: a value is not a finite number"),
    "an infinite value": (
        values("blk.0.attn_v.weight", struct.pack("<f", float("inf")), 64),
        "attn_v.weight: a value is not",
    ),
    "an infinite scale": (
        values("blk.0.attn_q.weight", b"\x00\x7c"),
        "blk.0.attn_q.weight: a scale is not a finite numb",
    ),
    "a scale of NaN": (values("token_embd.weight", b"\xff\x7f"), "tensor token_embd.weight: a scale is not a finite"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """A model of seven formats, with room for one more tensor, called `rest` until a case takes it."""
    folder = tmp_path_factory.mktemp("sound")
    write_model(folder / "model.gguf", lambda name: KINDS.get(name, Kind.Q5_1))
    prepare(str(folder / "model.gguf"), folder / "cache")  # sound before it is changed
    parts = Parts.read(folder / "model.gguf")
    parts.tensors["rest"] = Tensor([HIDDEN], int(Kind.F32), len(parts.data) + -len(parts.data) % 32)
    parts.data += bytes(-len(parts.data) % 32) + struct.pack("<f", 1.0) * HIDDEN
    return parts


def changed(sound: Parts, change: Change) -> bytes:
    parts = sound.copy()
    change(parts)
    parts.tensors.pop("rest", None)
    return parts.bytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("dtype", "mapped"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", CASES)
def test_is_refused_by_name(name: str, dtype: str, mapped: bool, sound: Parts, tmp_path: Path) -> None:
    """Guards a traceback, or a model that runs and is wrong, in place of a word about the file."""
    change, message = CASES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(changed(sound, change))
    with pytest.raises(ModelError, match=message) as caught:
        prepare(str(path), tmp_path / "cache", dtype, mapped=mapped)
    assert str(caught.value).startswith(str(path))


HARMLESS: dict[str, Change] = {
    "a rotary table": named("blk.0.attn_rot_embd"),
    "a vision tower": named("v.blk.0.ln1.weight"),
    "wider numbers": llama("context_length", U64, 64),
    "an array that nobody reads": field("general.tags", STRINGS, ["a", "b"]),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_answer_is_taken(name: str, sound: Parts, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(changed(sound, HARMLESS[name]))
    prepare(str(path), tmp_path / "cache")


MEANT = (
    "general.name", "general.architecture", "general.sampling.", "llama.context_length",
    "llama.attention.layer_norm_rms_epsilon", "llama.attention.head_count", "llama.attention.head_count_kv",
    "tokenizer.",
)  # fmt: skip
"""Keys whose values a sound file may have otherwise, with other answers: of these only the error is looked at."""

NUMBER = st.sampled_from([0, 1, 2, 3, 64, 255, 256, 257, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, -1, -(1 << 31)])
REAL = st.sampled_from([0.0, -1.0, 1e-5, 0.5, 1e30, float("nan"), float("inf"), -float("inf")])
TEXT = st.sampled_from(["", "llama", "gpt2", "smollm", "linear", "yarn", "x" * 5000, "{{ x", "\x00", "gemma3"])
WIDTHS = {Type.UINT32: (0, 1 << 32), Type.INT32: (-(1 << 31), 1 << 31), Type.UINT64: (0, 1 << 64)}


@st.composite
def fields(draw: st.DrawFn) -> tuple[Any, Any]:
    """A type and a value of it, or of an array of it."""
    kind = draw(st.sampled_from([*WIDTHS, Type.FLOAT32, Type.FLOAT64, Type.BOOL, Type.STRING]))
    if kind in WIDTHS:
        low, high = WIDTHS[kind]
        one: st.SearchStrategy[Any] = NUMBER.map(lambda value: low + (value - low) % (high - low))
    else:
        one = {Type.BOOL: st.booleans(), Type.STRING: TEXT}.get(kind, REAL)
    if draw(st.booleans()):
        return kind, draw(one)
    return (Type.ARRAY, kind), draw(st.lists(one, max_size=3))


@st.composite
def mutations(draw: st.DrawFn, parts: Parts) -> tuple[str, Parts]:
    """One field or tensor of a file made another; what it is called, "" where it is the file's frame."""
    parts = parts.copy()
    parts.tensors.pop("rest")
    what = draw(st.sampled_from(["field", "field", "field", "no field", "tensor", "tensor", "frame", "added"]))
    key = draw(st.sampled_from([*parts.fields, "llama.expert_count", "llama.rope.scaling.type", "llama.vocab_size"]))
    name = draw(st.sampled_from(sorted(parts.tensors)))
    if what == "field":
        parts.fields[key] = draw(fields())
        return key, parts
    if what == "no field":
        parts.fields.pop(key, None)
        return key, parts
    if what == "added":
        key = draw(st.sampled_from(["llama.x", "general.alignment", "split.count", "general.quantization_version"]))
        parts.fields[key] = draw(fields())
        return key, parts
    if what == "frame":
        part = draw(st.sampled_from(["version", "field_count", "tensor_count"]))
        setattr(parts, part, draw(NUMBER) % (1 << (32 if part == "version" else 64)))
        return "", parts
    tensor = parts.tensors[name]
    match draw(st.sampled_from(["kind", "dims", "offset", "name"])):
        case "kind":
            tensor.kind = draw(st.integers(0, 45))
            return "a format", parts
        case "dims":
            tensor.dims = draw(st.lists(NUMBER.map(lambda size: size % (1 << 64)), max_size=5))
        case "offset":
            tensor.offset = draw(NUMBER) % (1 << 64) * draw(st.sampled_from([1, 32])) % (1 << 64)
        case "name":
            parts.tensors[draw(st.sampled_from(["blk.1.ffn_down.weight", "", "output.weight", "x"]))] = (
                parts.tensors.pop(name)
            )
    return name, parts


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("examples", [20, pytest.param(1500, marks=pytest.mark.slow)])
def test_one_part_made_another_is_refused_or_changes_nothing(
    examples: int, sound: Parts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Guards a traceback, a start that does not end or takes all memory, and a model that is not the file's."""
    folder = tmp_path_factory.mktemp("mutated")
    path, seen = folder / "model.gguf", {"taken": 0, "refused": 0}
    path.write_bytes(changed(sound, lambda parts: None))
    whole = contents(prepare(str(path), folder / "sound"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(mutations(sound))
    def roam(mutation: tuple[str, Parts]) -> None:
        what, parts = mutation
        path.write_bytes(parts.bytes())
        began_s = time.thread_time()
        try:
            made = prepare(str(path), folder / "cache")
        except ModelError as error:
            assert str(error).startswith(str(path))
            seen["refused"] += 1
        else:
            seen["taken"] += 1
            if what != "a format" and not what.startswith(MEANT):
                assert contents(made) == whole, what
        assert time.thread_time() - began_s < 5

    roam()
    assert min(seen.values()) > 0, seen
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def contents(folder: Path) -> dict[str, Any]:
    """Return what a prepared model is, without what its source was."""
    config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes()) | {"fingerprint": ""}
    files = ("weights.bin", "codes.bin", "codes.json", "tokenizer.json", "text.json")
    return {"config": config} | {name: (folder / name).read_bytes() for name in files}
