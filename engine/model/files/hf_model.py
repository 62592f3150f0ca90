"""A Hugging Face directory as a checkpoint: config.json, *.safetensors and tokenizer.json. Pickles are refused."""

from pathlib import Path
from typing import Any

from engine.model.codes import Codes, FloatArray
from engine.model.config import (
    PICKLES,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    ModelError,
    RopeScaling,
    RopeTable,
)
from engine.model.families import Family, Source
from engine.model.files.checkpoint import find_family, most_of, read_json
from engine.model.files.hf_quantization import Matrix, Quantization
from engine.model.files.hf_text import text_files
from engine.model.files.safetensors_reader import SafetensorsFile, StoredTensor
from engine.text.files import TextFiles

INDEX = "model.safetensors.index.json"


class HFModel:
    """Fulfils `Checkpoint`. The model is named after its directory."""

    rope_pairs = False

    def __init__(self, path: Path) -> None:
        self.path = path
        raw = read_json(path / "config.json")
        self.family = family_of(path)
        self.config = model_config(path / "config.json", self.family, raw, folder_name(path))
        self._raw = raw
        self.shards = [SafetensorsFile(shard) for shard in shards(path)]
        self._where = {name: shard for shard in self.shards for name in shard.tensors}
        said = raw.get("quantization_config")
        self._quantization = None if not said else Quantization(path / "config.json", said, self._where)

    def tensor_name(self, source: Source, layer: int) -> str:
        return source.hugging_face.format(layer=layer)

    @property
    def is_quantized(self) -> bool:
        """True where config.json says that weights are codes."""
        return self._quantization is not None

    def read(self, name: str) -> FloatArray:
        found = self._quantized(name)
        if found is None:
            return self._holder(name).read(name)
        return found.widen() if isinstance(found, Codes) else found.rows(0, len(found.codes))

    def stored(self, name: str) -> StoredTensor:
        """Return where the tensor lies. Raises ModelError where it is missing."""
        return self._holder(name).tensors[name]

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise ModelError(self.path, f"tensor {name} is missing")
        return self._where[name]

    def codes(self, name: str) -> Codes | None:
        found = self._quantized(name)
        return found if found is None or isinstance(found, Codes) else found.as_codes()

    def _quantized(self, name: str) -> Matrix | None:
        return None if self._quantization is None else self._quantization.find(name)

    def text(self) -> TextFiles:
        return text_files(self.path, self._raw).of_model(self.config)


def family_of(path: Path) -> Family:
    """Return the family of a directory's model. Raises ModelError naming those that there are."""
    file = path / "config.json"
    return find_family(file, "hugging_face", "model_type", read_json(file).get("model_type"))


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
        names = read_json(path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
            raise ModelError(path / INDEX, "weight_map is not a table of tensor and file names")
        found = sorted({path / Path(name).name for name in names.values()})
    else:
        found = sorted(path.glob("*.safetensors"))
    if found:
        return found
    if any(item.suffix in PICKLES for item in path.iterdir()):
        raise ModelError(path, "holds only pickled weights, which are never loaded: use safetensors")
    raise ModelError(path, "holds no *.safetensors file")


def model_config(path: Path, family: Family, raw: dict[str, Any], name: str) -> ModelConfig:
    """Return the sizes and options of a config.json whose content is `raw`. Raises ModelError."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(path, f"hidden_act {raw['hidden_act']!r} is not supported, only silu")
    kinds = {"sliding_attention"} if raw.get("use_sliding_window") else raw.get("layer_types") or ()
    if not set(kinds) <= {"full_attention"}:
        raise ModelError(path, f"layer_types {sorted(set(kinds))} are not supported, only full_attention")
    bias = bool(raw.get("attention_bias", False))
    theta, scaling = _rope(path, raw)
    try:
        return ModelConfig(
            family=family.name,
            name=name,
            layers=int(raw["num_hidden_layers"]),
            hidden=int(raw["hidden_size"]),
            heads=int(raw["num_attention_heads"]),
            kv_heads=int(raw.get("num_key_value_heads") or raw["num_attention_heads"]),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // max(raw["num_attention_heads"], 1)),
            intermediate=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            context_tokens=int(raw["max_position_embeddings"]),
            norm_eps=float(raw["rms_norm_eps"]),
            ropes=(RopeTable(theta=theta, scaling=scaling),),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
        ).check(path)
    except KeyError as error:
        raise ModelError(path, f"{error.args[0]} is missing") from error
    except (TypeError, ValueError) as error:
        raise ModelError(path, f"a size is not a number: {error}") from error


def _rope(path: Path, raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """`rope_parameters` is how transformers 5 writes it, `rope_theta` with `rope_scaling` how it was before."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, LinearRope(factor=float(rope["factor"]))
        if kind == "llama3":
            return theta, Llama3Rope(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_context_tokens=int(rope["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(path, f"rope scaling {kind!r} lacks {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(path, f"rope scaling {kind!r}: {error}") from error
    raise ModelError(path, f"rope scaling {kind!r} is not supported")
