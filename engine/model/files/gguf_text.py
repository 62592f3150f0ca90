"""Building a tokenizer from a GGUF file's metadata.

Two kinds of vocabulary exist. "gpt2" is byte-level BPE with explicit merges; how text is first split into words is
named by `tokenizer.ggml.pre` and told by the table below. "llama" is a SentencePiece BPE model without merges: a
merge's rank is the score of the token that it makes.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from engine.model.config import ModelError
from engine.text.files import TURN_ENDS, TextFiles, TextSettings

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` that are matched in the text before anything else."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
"""Every digit alone."""


class Vocabulary(msgspec.Struct, kw_only=True):
    """The tokenizer's part of a GGUF file's metadata, under the file's own names."""

    path: Path
    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    scores: list[float]
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool
    bos: int | None
    eos: int | None
    eot: int | None
    unknown: int | None
    padding: int | None
    template: str

    def name(self, token: int | None) -> str | None:
        return self.tokens[token] if token is not None and token < len(self.tokens) else None


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _by_pattern(_LLAMA3_SPLIT)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _by_pattern(_QWEN2_SPLIT)


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


class _Splitting(msgspec.Struct, frozen=True):
    """`whole_words`: a word that is a token is taken as it is, merges or not. `bos`: the family's default. `composed`:
    letters and their accents are joined first (Unicode's NFC)."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    bos: bool = False
    composed: bool = False


SPLITTINGS: dict[str, _Splitting] = {
    "default": _Splitting(_gpt2),
    "gpt-2": _Splitting(_gpt2),
    "smollm": _Splitting(_smollm),
    "llama-bpe": _Splitting(_llama3, whole_words=True, bos=True),
    "qwen2": _Splitting(_qwen2, composed=True),
}


def text_files(vocabulary: Vocabulary) -> TextFiles:
    """Raises ModelError naming the file where its vocabulary is of a kind not known here, or not sound."""
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    builder = builders.get(vocabulary.model)
    if builder is None:
        known = ", ".join(builders)
        raise ModelError(
            vocabulary.path,
            f"tokenizer model {vocabulary.model!r} is not supported; known: {known}",
        )
    if len(set(vocabulary.tokens)) != len(vocabulary.tokens):
        raise ModelError(vocabulary.path, "tokenizer.ggml.tokens holds a token twice")
    tokenizer = builder(vocabulary)
    _add_tokens(tokenizer, vocabulary)
    named = {
        "bos_token": vocabulary.name(vocabulary.bos),
        "eos_token": vocabulary.name(vocabulary.eos),
        "unk_token": vocabulary.name(vocabulary.unknown),
        "pad_token": vocabulary.name(vocabulary.padding),
    }
    controls = {
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=False)
        if kind == CONTROL
    }
    stops = {vocabulary.eos, vocabulary.eot} | {
        vocabulary.tokens.index(token) for token in TURN_ENDS if token in controls
    }
    settings = TextSettings(
        stop_ids=tuple(sorted(stop for stop in stops if stop is not None)),
        named_tokens={key: token for key, token in named.items() if token is not None},
    )
    return TextFiles(tokenizer.to_str(), vocabulary.template, settings)


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    splitting = SPLITTINGS.get(vocabulary.pre)
    if splitting is None:
        known = ", ".join(SPLITTINGS)
        raise ModelError(
            vocabulary.path, f"tokenizer.ggml.pre {vocabulary.pre!r} is not known; known: {known}"
        )
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.merges)]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=splitting.whole_words)
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_template(tokenizer, vocabulary, splitting.bos)
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise ModelError(vocabulary.path, "tokenizer.ggml.scores does not fit the tokens")
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    ranked = [
        (-vocabulary.scores[index], index, ids[token[:cut]], token[:cut], token[cut:])
        for token, index in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort()
    tokenizer = _bpe(
        vocabulary,
        [(left, right) for *_, left, right in ranked],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.name(vocabulary.unknown),
    )
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        if vocabulary.add_space_prefix
        else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _add_template(tokenizer, vocabulary, add_bos=True)
    return tokenizer


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(vocabulary.path, f"tokenizer.ggml.merges: {error}") from error


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=False))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in pairs
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED]
    )


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary, add_bos: bool) -> None:
    bos = vocabulary.name(vocabulary.bos)
    eos = vocabulary.name(vocabulary.eos)
    with_bos = bos is not None and (add_bos if vocabulary.add_bos is None else vocabulary.add_bos)
    with_eos = eos is not None and vocabulary.add_eos
    if not with_bos and not with_eos:
        return
    single = ([bos] if with_bos else []) + ["$A"] + ([eos] if with_eos else [])
    named = [(bos, vocabulary.bos)] * with_bos + [(eos, vocabulary.eos)] * with_eos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=sorted(set(named))
    )
