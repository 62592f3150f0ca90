"""Builds a tokenizer from a GGUF file's metadata.

Two kinds of vocabulary exist. "gpt2" is byte-level BPE with explicit merges; how text is first split into words is
named by `tokenizer.ggml.pre` and told by the table below. "llama" is a SentencePiece BPE model without merges: a
merge's rank is the score of the token that it makes.
"""

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import field
from msgspec.structs import fields
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
from engine.text.files import TextFiles, TextSettings, turn_ends

MOST_CHARACTERS = 4096
"""The longest token that is taken: every place where one can be cut is looked at."""

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(2, 7)
"""Values of `tokenizer.ggml.token_type`: control and user-defined ones are matched in the text before anything else."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
"""Every digit alone."""

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
)
"""Words end where capitals begin; every digit alone."""

_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|{_REST}"
)


class Vocabulary(msgspec.Struct, kw_only=True):
    """The tokenizer's part of a GGUF file's metadata, and the path of the file."""

    path: Path
    model: str = field(name="tokenizer.ggml.model", default="")
    pre: str = field(name="tokenizer.ggml.pre", default="default")
    tokens: list[str] = field(name="tokenizer.ggml.tokens")
    kinds: list[int] = field(name="tokenizer.ggml.token_type", default_factory=list)
    merges: list[str] = field(name="tokenizer.ggml.merges", default_factory=list)
    scores: list[float] = field(name="tokenizer.ggml.scores", default_factory=list)
    add_bos: bool | None = field(name="tokenizer.ggml.add_bos_token", default=None)
    add_eos: bool = field(name="tokenizer.ggml.add_eos_token", default=False)
    add_space_prefix: bool = field(name="tokenizer.ggml.add_space_prefix", default=True)
    bos: int | None = field(name="tokenizer.ggml.bos_token_id", default=None)
    eos: int | None = field(name="tokenizer.ggml.eos_token_id", default=None)
    eot: int | None = field(name="tokenizer.ggml.eot_token_id", default=None)
    unknown: int | None = field(name="tokenizer.ggml.unknown_token_id", default=None)
    padding: int | None = field(name="tokenizer.ggml.padding_token_id", default=None)
    template: str = field(name="tokenizer.chat_template", default="")
    tool_template: str = field(name="tokenizer.chat_template.tool_use", default="")

    @staticmethod
    def read(path: Path, get: Callable[[str], object]) -> "Vocabulary":
        """Read it with `get`, which returns a metadata value by its name in the file, or None. Raises ModelError."""
        names = [each.encode_name for each in fields(Vocabulary)]
        found = {name: value for name in names if (value := get(name)) is not None}
        if found.get("tokenizer.ggml.model") == "llama":
            found = _SENTENCE_PIECE_IDS | found
        try:
            return msgspec.convert({**found, "path": path}, Vocabulary)
        except msgspec.ValidationError as error:
            raise ModelError(path, f"metadata: {error}") from error

    def tokens_of(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.kinds, strict=False) if its == kind]

    def name(self, token: int | None) -> str | None:
        return self.tokens[token] if token is not None and 0 <= token < len(self.tokens) else None


_SENTENCE_PIECE_IDS: dict[str, object] = {
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
"""Where SentencePiece has them, and what every reader of such a file takes that does not say it."""


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class _Splitting(msgspec.Struct, frozen=True):
    """`whole_words`: a word that is a token is taken as it is, merges or not. `bos`: the family's default. `composed`:
    letters and their accents are joined first (Unicode's NFC)."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    whole_words: bool = False
    bos: bool = False
    composed: bool = False


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

SPLITTINGS: dict[str, _Splitting] = {
    "default": _Splitting(_GPT2),
    "gpt-2": _Splitting(_GPT2),
    "smollm": _Splitting(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),
    "llama-bpe": _Splitting(_by_pattern(_LLAMA3_SPLIT), whole_words=True, bos=True),
    "qwen2": _Splitting(_by_pattern(_QWEN2_SPLIT), composed=True),
    "deepseek-r1-qwen": _Splitting(_by_pattern(_QWEN2_SPLIT)),
    "refact": _Splitting(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])),
    "dbrx": _Splitting(_by_pattern(_LLAMA3_SPLIT)),
    "tekken": _Splitting(_by_pattern(_TEKKEN_SPLIT), whole_words=True, bos=True),
    "gpt-4o": _Splitting(_by_pattern(_GPT4O_SPLIT)),
}


def text_files(vocabulary: Vocabulary) -> TextFiles:
    """Build the text side. Raises ModelError naming a file whose vocabulary is of an unknown kind, or not sound."""
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if vocabulary.model not in builders:
        problem = f"tokenizer model {vocabulary.model!r} is not supported; known: {', '.join(builders)}"
        raise ModelError(vocabulary.path, problem)
    if len(set(vocabulary.tokens)) != len(vocabulary.tokens):
        raise ModelError(vocabulary.path, "tokenizer.ggml.tokens holds a token twice")
    _check(vocabulary)
    tokenizer = builders[vocabulary.model](vocabulary)
    controls, defined = (vocabulary.tokens_of(kind) for kind in (CONTROL, USER_DEFINED))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
    named = {
        "bos_token": vocabulary.name(vocabulary.bos),
        "eos_token": vocabulary.name(vocabulary.eos),
        "unk_token": vocabulary.name(vocabulary.unknown),
        "pad_token": vocabulary.name(vocabulary.padding),
    }
    stops = {vocabulary.eos, vocabulary.eot, *map(vocabulary.tokens.index, turn_ends(controls))}
    settings = TextSettings(
        stop_ids=tuple(sorted(stop for stop in stops if stop is not None)),
        named_tokens={key: token for key, token in named.items() if token is not None},
        tool_template=vocabulary.tool_template,
        tokens=_used(vocabulary),
    )
    return TextFiles(tokenizer.to_str(), vocabulary.template, settings)


def _check(vocabulary: Vocabulary) -> None:
    """Raise ModelError for arrays of different lengths, ids of no token, and what would take for ever."""
    path, count = vocabulary.path, len(vocabulary.tokens)
    for name, items in (("token_type", vocabulary.kinds), ("scores", vocabulary.scores)):
        if items and len(items) != count:
            raise ModelError(path, f"tokenizer.ggml.{name} has {len(items)} of {count} tokens")
    if not all(map(math.isfinite, vocabulary.scores)):
        raise ModelError(path, "tokenizer.ggml.scores: a value is not a finite number")
    if (longest := max(map(len, vocabulary.tokens), default=0)) > MOST_CHARACTERS:
        raise ModelError(path, f"tokenizer.ggml.tokens has a token of {longest} characters")
    named = {"bos": vocabulary.bos, "eos": vocabulary.eos, "eot": vocabulary.eot, "unknown": vocabulary.unknown}
    for name, token in named.items():
        if token is not None and not 0 <= token < count:
            raise ModelError(path, f"tokenizer.ggml.{name}_token_id is {token}, of {count} tokens")


def _used(vocabulary: Vocabulary) -> int:
    """Return the number of tokens, without those that only fill a matrix up to its size."""
    kinds = list(vocabulary.kinds)
    end = len(vocabulary.tokens)
    while len(kinds) == len(vocabulary.tokens) and end and kinds[end - 1] == UNUSED:
        end -= 1
    return end


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    if (splitting := SPLITTINGS.get(vocabulary.pre)) is None:
        problem = f"tokenizer.ggml.pre {vocabulary.pre!r} is not known; known: {', '.join(SPLITTINGS)}"
        raise ModelError(vocabulary.path, problem)
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.merges)]
    tokenizer = _bpe(vocabulary, merges, ignore_merges=splitting.whole_words)
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_template(tokenizer, vocabulary, splitting.bos)
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise ModelError(vocabulary.path, "tokenizer.ggml.scores does not fit the tokens")
    # Merges make letters into words, never into a token that no text stands for.
    apart = {token for kind in (UNKNOWN, CONTROL, BYTE) for token in vocabulary.tokens_of(kind)}
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if token not in apart}
    ranked = [
        (-vocabulary.scores[index], index, ids[token[:cut]], token[:cut], token[cut:])
        for token, index in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort()
    merges = [(left, right) for *_, left, right in ranked]
    unknown = vocabulary.name(vocabulary.unknown)
    tokenizer = _bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
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


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary, add_bos: bool) -> None:
    bos, eos = vocabulary.name(vocabulary.bos), vocabulary.name(vocabulary.eos)
    before = [bos] if bos is not None and (add_bos if vocabulary.add_bos is None else vocabulary.add_bos) else []
    after = [eos] if eos is not None and vocabulary.add_eos else []
    if before or after:
        named = [(token, vocabulary.tokens.index(token)) for token in sorted({*before, *after})]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=named)
