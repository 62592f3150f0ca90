"""A GGUF file as a checkpoint: metadata to ModelConfig, tensors back to Hugging Face order."""

import re
from pathlib import Path

import msgspec

from engine.model.config import ModelConfig, ModelError, layer_count
from engine.model.families import LLAMA, MIXTRAL, Source
from engine.model.files import experts
from engine.model.files.checkpoint import find_family
from engine.model.files.gguf_options import HeaderSizes, family_options
from engine.model.files.gguf_reader import GGUFFile
from engine.model.files.gguf_text import Vocabulary, text_files
from engine.model.files.stored import StoredRows
from engine.text.files import TextFiles
from engine.text.recommended import from_gguf

_QUANT_SUFFIX = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


_HARMLESS = re.compile(r"^(v|mm)\.|\.attn_rot_embd$|^rope_freqs\.weight$")
"""Tensors that change no answer here: a vision tower's, and rotary tables, which are read where they count."""


class GGUFModel:
    """Fulfils `Checkpoint`. The model is named after its file, without suffix and quantization."""

    rope_pairs = True
    folds_norms = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        if self._file.get("split.count", 1) not in (0, 1):
            part, parts = self._file.get("split.no"), self._file.get("split.count")
            raise ModelError(path, f"has split.no {part!r}, of {parts!r} files of one model: join them first")
        architecture = self._file.need("general.architecture")
        self.family = find_family(path, "gguf", "architecture", architecture)
        if self.family is LLAMA and self._file.get(f"{architecture}.expert_count", 0):
            self.family = MIXTRAL
        self.config = self._config(architecture)

    def tensor_name(self, source: Source, layer: int, expert: int = 0) -> str:
        return source.gguf.format(layer=layer)

    def file_of(self, name: str) -> Path:
        return self.path

    def find(self, source: Source, layer: int, expert: int | None = None) -> StoredRows:
        return self._file.rows(self.tensor_name(source, layer), expert)

    def check_all_read(self) -> None:
        self._file.check_all_read(self.family.name, _HARMLESS)

    def text(self) -> TextFiles:
        files = text_files(Vocabulary.read(self.path, self._file.get))
        settings = msgspec.structs.replace(files.settings, sampling=from_gguf(self._file.get))
        tokens, rows = len(self._file.need("tokenizer.ggml.tokens")), self.config.vocab
        if tokens > rows:
            raise ModelError(self.path, f"tokenizer.ggml.tokens has {tokens} tokens, and the embedding {rows} rows")
        return msgspec.structs.replace(files, settings=settings).of_model(self.config)

    def _config(self, architecture: str) -> ModelConfig:
        file, path = self._file, self.path

        def need(key: str, default: int | None = None) -> int:
            value = file.get(f"{architecture}.{key}", default)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ModelError(path, f"metadata {architecture}.{key} is {value!r}, not a number")
            return value

        hidden, heads = need("embedding_length"), need("attention.head_count")
        if heads < 1:
            raise ModelError(path, f"metadata {architecture}.attention.head_count is {heads}")
        head_dim = need("attention.key_length", hidden // heads)
        if file.get(f"{architecture}.attention.value_length", head_dim) != head_dim:
            raise ModelError(path, f"metadata {architecture}.attention.value_length differs from {head_dim}")
        layers, vocab = layer_count(path, need("block_count")), file.shape("token_embd.weight")[0]
        epsilon = file.need(f"{architecture}.attention.layer_norm_rms_epsilon")
        if not isinstance(epsilon, float):
            raise ModelError(path, f"metadata {architecture}.attention.layer_norm_rms_epsilon is {epsilon!r}")
        return ModelConfig(
            family=self.family.name,
            name=_QUANT_SUFFIX.sub("", path.stem),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=need("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=need("feed_forward_length"),
            vocab=vocab,
            context_tokens=need("context_length"),
            norm_eps=epsilon,
            tied="output.weight" not in file,
            qkv_bias=self.family.qkv_bias or "blk.0.attn_q.bias" in file,
            output_bias="blk.0.attn_output.bias" in file,
            mlp_bias="blk.0.ffn_down.bias" in file,
            qk_norm=self.family.qk_norm,
            norm_offset=self.family.norm_offset,
            activation=self.family.activation,
            experts=experts.from_metadata(file, architecture, self.family.name),
            **family_options(file, architecture, HeaderSizes(layers, hidden, heads, head_dim, vocab)),
        ).check(path).without_idle_windows()
