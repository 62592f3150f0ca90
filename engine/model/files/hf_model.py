"""A Hugging Face directory as a checkpoint: config.json, *.safetensors and tokenizer.json. Pickles are refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from engine.model.codes import Codes
from engine.model.config import PICKLES, Activation, ModelConfig, ModelError, layer_count
from engine.model.families import Family, Source
from engine.model.files import experts
from engine.model.files.checkpoint import check_unread, find_family, flag, most_of, number, read_json, whole
from engine.model.files.hf_options import DEFAULTS, family_options, head_size
from engine.model.files.hf_quantization import Quantization
from engine.model.files.hf_rope import context_tokens
from engine.model.files.hf_text import text_files
from engine.model.files.safetensors_reader import SafetensorsFile, StoredTensor
from engine.model.files.stored import StoredRows
from engine.text.files import TextFiles

INDEX = "model.safetensors.index.json"

_WRAPPINGS = {
    "model.language_model.embed_tokens.weight": ("model.", "model.language_model."),
    "language_model.model.embed_tokens.weight": ("", "language_model."),
}
"""How names of a language model's tensors are changed where others are beside them, told by the name of one."""

_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|[._]([qkv]|kv|input|output|prob)_(scale|zero_point)$")
"""Tensors that change no answer here: rotary tables, masks, and scales of activations and of KV, which are not
quantized by what a file says."""
_NEUTRAL = re.compile(r"\.(bias|weight_zero_point)$")
"""Those that change none where they are all zeros: some quantizers write biases for all modules, and symmetric
zeros."""

_ROWS = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}


class HFModel:
    """Fulfils `Checkpoint`. The model is named after its directory."""

    rope_pairs = False
    folds_norms = False

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = read_json(path / "config.json")
        raw = text_side(whole)
        self.family = family_of(path)
        self.config = model_config(path / "config.json", self.family, raw, folder_name(path))
        self._raw = raw
        self.shards = [SafetensorsFile(shard) for shard in shards(path)]
        self._where: dict[str, SafetensorsFile] = {}
        for shard in self.shards:
            for name in shard.tensors:
                if name in self._where:
                    raise ModelError(shard.path, f"tensor {name} is in {self._where[name].path.name} too")
                self._where[name] = shard
        self._check_index()
        self._read = set[str]()
        self._wrapping = self._wrapped()
        said = raw.get("quantization_config") or whole.get("quantization_config")
        self._quantization = None if not said else Quantization(path / "config.json", said, self._where, self._read)

    def tensor_name(self, source: Source, layer: int, expert: int = 0) -> str:
        name = source.hugging_face.format(layer=layer, expert=expert)
        inner, outer = self._wrapping
        return outer + name.removeprefix(inner) if name.startswith(inner) else name

    def _wrapped(self) -> tuple[str, str]:
        """Return how names begin, and how they begin in these files."""
        return next((pair for name, pair in _WRAPPINGS.items() if name in self._where), ("", ""))

    @property
    def is_quantized(self) -> bool:
        """True where config.json says that weights are codes."""
        return self._quantization is not None

    def find(self, source: Source, layer: int, expert: int | None = None) -> StoredRows:
        name = self.tensor_name(source, layer, expert or 0)
        if self._quantization is not None and (whole := self._quantization.find(name)) is not None:
            return _of_expert(whole, expert or 0, self.config.expert_count, source) if source.of_all else whole
        if source.of_all:
            return self._holder(name).rows(name, expert, _ROWS[source.of_all])
        return self._holder(name).rows(name)

    def stored(self, name: str) -> StoredTensor:
        """Return where the tensor lies. Raises ModelError where it is missing."""
        return self._holder(name).tensors[name]

    def file_of(self, name: str) -> Path:
        return self._where[name].path if name in self._where else self.path

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise ModelError(self.path, f"tensor {name} is missing")
        self._read.add(name)
        return self._where[name]

    def _check_index(self) -> None:
        """Raise ModelError for a tensor that the index puts into a file that has it not."""
        if (self.path / INDEX).exists():
            for name, shard in weight_map(self.path).items():
                if name not in self._where or self._where[name].path.name != Path(shard).name:
                    raise ModelError(self.path / INDEX, f"names tensor {name} in {shard}, which does not have it")

    def check_all_read(self) -> None:
        _, outer = self._wrapping
        tied = self.tensor_name(Source("lm_head.weight", "", ""), 0)
        found = {name: file.path for name, file in self._where.items() if name.startswith(outer) or name == tied}
        for name in found.keys() - self._read:
            file = self._where[name]
            is_tied = name == tied and self.config.tied
            if is_tied and not self._is_the_embedding(file, name):
                raise ModelError(file.path, f"tensor {name} is not the embedding, and tie_word_embeddings says it is")
            if is_tied or (_NEUTRAL.search(name) and not file.raw(name).any()):
                del found[name]
        check_unread(self.family.name, found, self._read, _HARMLESS)

    def _is_the_embedding(self, head: SafetensorsFile, name: str) -> bool:
        embedding = self.tensor_name(Source("model.embed_tokens.weight", "", ""), 0)
        other = self._where.get(embedding)
        return other is not None and np.array_equal(head.raw(name), other.raw(embedding))

    def text(self) -> TextFiles:
        return text_files(self.path, self._raw, self.config.vocab).of_model(self.config)


def _of_expert(whole: StoredRows, expert: int, experts: int, source: Source) -> StoredRows:
    """Return one expert's rows of a matrix in which those of all lie below each other: all, or each other one."""
    rows, step = whole.shape[0] // experts, 1 if source.of_all == "all" else 2
    start, shift = expert * rows, int(source.of_all == "odd")

    def read(first: int, end: int) -> Codes:
        codes = whole.codes(start + first * step, start + end * step)
        offsets = None if codes.offsets is None else codes.offsets[shift::step]
        return Codes(np.ascontiguousarray(codes.codes[shift::step]), codes.scales[shift::step], offsets, codes.form)

    return StoredRows((rows // step, whole.shape[1]), whole.kind, read)


def family_of(path: Path) -> Family:
    """Return the family of a directory's model. Raises ModelError naming those that there are."""
    file = path / "config.json"
    return find_family(file, "hugging_face", "model_type", text_side(read_json(file)).get("model_type"))


def folder_name(path: Path) -> str:
    """Return what a model in this folder is called: in the hub's cache, where folders have the names of commits, as its
    repository is."""
    folder = path.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return folder.name


def stored_dtype(path: Path) -> str:
    """Return the type of a directory's weights: what config.json says (`dtype` since transformers 4.56,
    `torch_dtype` before), else the type of most bytes of the weights."""
    if (said := said_dtype(read_json(path / "config.json"))) is not None:
        return said
    files = [SafetensorsFile(shard) for shard in shards(path)]
    return most_of((tensor.dtype, tensor.size_bytes) for file in files for tensor in file.tensors.values())


def said_dtype(raw: dict[str, Any]) -> str | None:
    """Return the type of the weights that a config.json whose content is `raw` names, if it does."""
    said = raw.get("dtype") or raw.get("torch_dtype")
    return said.removeprefix("torch.") if isinstance(said, str) else None


def shards(path: Path) -> list[Path]:
    """List the weight files of a directory. Raises ModelError where there are none, or only pickles."""
    if (path / INDEX).exists():
        found = sorted({path / Path(name).name for name in weight_map(path).values()})
    else:
        every = sorted(path.glob("*.safetensors"))
        # Mistral's publisher has the same weights once more, by the names of a format of its own.
        found = [item for item in every if not item.name.startswith("consolidated")] or every
    if found:
        return found
    if any(item.suffix in PICKLES for item in path.iterdir()):
        raise ModelError(path, "holds only pickled weights, which are never loaded: use safetensors")
    raise ModelError(path, "holds no *.safetensors file")


def weight_map(path: Path) -> dict[str, str]:
    """Return the file of each tensor by the directory's index. Raises ModelError."""
    names = read_json(path / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) and "\0" not in name for name in names.values()):
        raise ModelError(path / INDEX, "weight_map is not a table of tensor and file names")
    return names


def text_side(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that is of the language model, where it has others beside it."""
    inner = raw.get("text_config")
    if not isinstance(inner, dict) or "model_type" not in inner:
        return raw
    shared = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    outer: dict[str, Any] = {key: raw[key] for key in shared if key in raw}
    return outer | inner


_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _activation(path: Path, family: Family, raw: dict[str, Any]) -> Activation:
    """Gemma's files have a `hidden_act` too, which is not what counts."""
    if family.activation == "gelu_tanh":
        said = raw.get("hidden_activation") or "gelu_pytorch_tanh"
    else:
        said = raw.get("hidden_act", "silu")
    if not isinstance(said, str) or said not in _ACTIVATIONS:
        raise ModelError(path, f"activation {said!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]


def model_config(path: Path, family: Family, raw: dict[str, Any], name: str) -> ModelConfig:
    """Return the sizes and options of a config.json whose content is `raw`. Raises ModelError."""
    raw = DEFAULTS.get(family.name, {}) | text_side(raw)
    try:
        bias = flag(raw, "attention_bias")
        if raw.get("is_causal") is not None and not flag(raw, "is_causal"):
            raise ModelError(path, "is_causal is false: only causal attention is supported")
        heads = whole(raw, "num_attention_heads")
        return ModelConfig(
            family=family.name,
            name=name,
            layers=layer_count(path, whole(raw, "num_hidden_layers")),
            hidden=whole(raw, "hidden_size"),
            heads=heads,
            kv_heads=heads if raw.get("num_key_value_heads") is None else whole(raw, "num_key_value_heads"),
            head_dim=head_size(raw),
            intermediate=whole(raw, "intermediate_size"),
            vocab=whole(raw, "vocab_size"),
            context_tokens=context_tokens(raw),
            norm_eps=number(raw, "rms_norm_eps"),
            tied=flag(raw, "tie_word_embeddings", family.tied),
            qkv_bias=family.qkv_bias or bias,
            output_bias=bias and not family.qkv_bias,
            mlp_bias=flag(raw, "mlp_bias"),
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            activation=_activation(path, family, raw),
            experts=experts.from_config(path, family.name, raw),
            **family_options(path, family.name, raw),
        ).check(path).without_idle_windows()
    except KeyError as error:
        raise ModelError(path, f"{error.args[0]} is missing") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(path, f"a field is not of the kind that it should be: {error}") from error
