"""Tokenizers built from GGUF metadata, against transformers and against a plain SentencePiece merge written here."""

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from engine.model.config import ModelError
from engine.model.files.gguf_model import GGUFModel
from engine.model.files.gguf_text import Vocabulary, text_files
from engine.model.prepared.cache import find_demo_model
from engine.text.bundle import TextModel
from engine.text.control import ControlTokens
from engine.text.files import TextFiles, TextSettings
from engine.types import FieldError

WORDS = """
The quick brown fox jumps over the lazy dog . , ! ? ; : ' " ( ) [ ] { } # @ / \\ _ - + = < > it's I'LL we'Ve
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich naïve café œuvre Ελληνικά עברית العربية हिन्दी
Съешь же ещё этих мягких французских булок 你好世界 日本語のテキスト 繁體中文 ภาษาไทย 한국어
👍 😀 👩‍👩‍👧‍👦 🇫🇷 é ñ ﬁ Å ½ ² ∑ → ℝ def f(x): return x**2 for(int i=0;i<n;++i) { a[i]+=1; } <div class='x'> SELECT * t;
0 1 12 123 1234 3.14 1,000,000 0x1F 2024-05-06 ١٢٣ ४५६ １２ 1e-5 v2
<|im_start|> <|im_end|> <|endoftext|> <|im_start |> <repo_name> <file_sep>
"""
ODD = ["\u200b", "\ufeff", "\u00a0", "\x00", "\x7f", "\ufffd", "e\u0301", "\ud7ff", "\U0010ffff"]
PIECES = [*WORDS.split(), *ODD]
SPACES = [
    "",
    "",
    " ",
    " ",
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u3000",
    "\u2028",
]


def strings(count: int) -> list[str]:
    dice = random.Random(11)
    made = ["", " ", "\n", "   x", "x   ", "a\n\n\n b", *PIECES]
    for _ in range(count):
        length = dice.randint(1, 14)
        made.append("".join(dice.choice(PIECES) + dice.choice(SPACES) for _ in range(length)))
    for _ in range(count // 4):
        points = (
            dice.choice([dice.randrange(0x20, 0x250), dice.randrange(0x250, 0xD800)])
            for _ in range(12)
        )
        made.append("".join(map(chr, points)))
    return made


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("demo")
    GGUFModel(find_demo_model()).text().save(folder)
    return TextModel.load(folder)


@pytest.mark.slow
def test_demo_tokenizer_equals_transformers(demo: TextModel) -> None:
    """Guards every part of the pipeline: digits, byte alphabet, merges, added tokens.

    The transformers conversion ignores `tokenizer.ggml.pre`, so its pre-tokenizer lacks the model's own first step
    (every digit alone, see `test_demo_digits_stand_alone`). It is put right here; where no blank stands before a
    digit, the conversion as it is agrees as well.
    """
    from transformers import AutoTokenizer

    path = find_demo_model()
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert isinstance(oracle, PreTrainedTokenizerFast)
    texts = strings(400)
    plain = [text for text in texts if not re.search(r"\s[^\W\D]|\s[½²]", text)]
    assert len(plain) > 300
    for text in plain:
        assert demo.encode(text, add_special=True) == oracle(text)["input_ids"], repr(text)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in texts:
        assert demo.encode(text, add_special=True) == oracle(text)["input_ids"], repr(text)


def test_demo_digits_stand_alone(demo: TextModel) -> None:
    """Guards the "smollm" splitting: digits are cut out first, so blanks before one are a word of their own."""
    one, two = demo.encode("1", add_special=True), demo.encode("2", add_special=True)
    blanks = demo.encode("  ", add_special=True)
    assert len(one) == len(two) == len(blanks) == 1
    assert demo.encode("12", add_special=True) == one + two
    assert demo.encode("a  12", add_special=True)[1:] == blanks + one + two


def test_demo_tokenizer_by_hand(demo: TextModel) -> None:
    """Guards control tokens, which are found in any text, and the way back of every string."""
    assert demo.encode("<|im_start|>user", add_special=False)[0] == 1
    assert demo.encode("<|im_end|>", add_special=False) == [2]
    assert demo.stop_ids >= {2}
    for text in strings(100):
        ids = demo.encode(text, add_special=False)
        plain = text
        for control in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>"):
            plain = plain.replace(control, "")
        assert demo.decode(ids) == plain


def test_lone_surrogates_are_the_callers_fault(demo: TextModel) -> None:
    """Guards the router: text from JSON may hold half a surrogate pair, and must not raise a foreign error."""
    with pytest.raises(FieldError, match="not valid Unicode"):
        demo.encode("half \ud83d of it", add_special=True)


def test_tokens_without_an_embedding_are_the_callers_fault(tmp_path: Path) -> None:
    """Guards the engine: an added token past the embedding would read somebody else's memory, or raise in a step."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    files = text_files(vocabulary(tokens=[*alphabet, "<pad>"], kinds=[1] * 256 + [3]))
    settings = msgspec.structs.replace(files.settings, vocab_size=256)
    msgspec.structs.replace(files, settings=settings).save(tmp_path)
    text = TextModel.load(tmp_path)
    assert len(text.encode("abc", add_special=True)) == 3
    with pytest.raises(FieldError, match="'<pad>', which this model has no embedding for"):
        text.encode("a<pad>", add_special=True)


def vocabulary(**change: Any) -> Vocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fields: dict[str, Any] = {
        "path": Path("model.gguf"),
        "model": "gpt2",
        "pre": "default",
        "tokens": alphabet,
        "kinds": [1] * len(alphabet),
        "merges": [],
        "scores": [],
        "add_bos": None,
        "add_eos": False,
        "add_space_prefix": True,
        "bos": None,
        "eos": None,
        "eot": None,
        "unknown": None,
        "padding": None,
        "template": "",
    }
    return Vocabulary(**{**fields, **change})


def tokenizer(files: TextFiles) -> Tokenizer:
    return Tokenizer.from_str(files.tokenizer)


def test_llama3_splitting_takes_whole_words() -> None:
    """Guards Llama 3: numbers go in threes, and a word that is a token needs no merges; BOS comes first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "123", "Ġwhole", "45", "<|begin_of_text|>", "<|eot_id|>"]
    bos = tokens.index("<|begin_of_text|>")
    kinds = [1] * (len(tokens) - 2) + [3, 3]
    files = text_files(vocabulary(pre="llama-bpe", tokens=tokens, kinds=kinds, bos=bos))
    encoded = tokenizer(files).encode("12345 whole <|eot_id|>").tokens
    assert encoded == ["<|begin_of_text|>", "123", "45", "Ġwhole", "Ġ", "<|eot_id|>"]
    assert tokenizer(files).encode("12345", add_special_tokens=False).tokens == ["123", "45"]
    assert files.settings.stop_ids == (bos + 1,)
    without = text_files(
        vocabulary(pre="llama-bpe", tokens=tokens, kinds=kinds, bos=bos, add_bos=False)
    )
    assert tokenizer(without).encode("123").tokens == ["123"]


def test_qwen2_splitting_equals_transformers() -> None:
    """Guards Qwen's GGUF files: every digit alone, accents composed first. Merges join across what must be split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "Ġ 1", "Ġ a", "l l", "' l", "Ċ Ċ", "Ã ©"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    kinds = [1] * (len(tokens) - 1) + [3]
    files = text_files(vocabulary(pre="qwen2", tokens=tokens, kinds=kinds, merges=merges))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    oracle = Qwen2Tokenizer(vocab={token: at for at, token in enumerate(tokens)}, merges=pairs)
    mine = tokenizer(files)
    assert mine.encode("123 e\u0301").tokens == ["1", "2", "3", "Ġ", "Ã©"]
    for text in strings(300):
        assert mine.encode(text).ids == oracle(text)["input_ids"], repr(text)


SPM_TEXT = """
▁ a b c d e l o h r w t n i g ▁a ▁b he ll ell hell hello ▁hell ▁hello lo wo or wor ▁wor ld ▁world ▁t the ▁the th ▁th
in ing ning
"""
SPM_WORDS = SPM_TEXT.split()


def sentence_piece() -> Vocabulary:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS]
    # Later tokens score better, which is the other way round than their ids would rank them.
    scores = [0.0] * 259 + [float(index) for index in range(len(SPM_WORDS))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS)
    return vocabulary(
        model="llama", tokens=tokens, scores=scores, kinds=kinds, bos=1, eos=2, unknown=0
    )


def merge_by_score(text: str, words: Vocabulary) -> list[str]:
    """SentencePiece's BPE: join the adjacent pair whose token scores best, leftmost first, until none is left."""
    scores = dict(zip(words.tokens, words.scores, strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[pieces[i] + pieces[i + 1]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in scores
        ]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        part
        for piece in pieces
        for part in ([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


def test_sentence_piece_vocabulary() -> None:
    """Guards Llama 2: merges made from scores must give SentencePiece's own segmentation, and bytes for the rest."""
    words = sentence_piece()
    made = tokenizer(text_files(words))
    dice = random.Random(3)
    parts = [word.replace("▁", " ") for word in SPM_WORDS] + ["é", "😀", "  "]
    for _ in range(300):
        text = "".join(dice.choice(parts) for _ in range(dice.randint(1, 12)))
        encoded = made.encode(text)
        assert encoded.tokens == ["<s>", *merge_by_score(text, words)], repr(text)
        assert made.decode(encoded.ids) == text


@pytest.mark.parametrize("said", [{}, {"tokenizer.ggml.eos_token_id": 3}])
def test_special_ids_that_a_sentence_piece_file_leaves_out_are_its_own(said: dict[str, int]) -> None:
    """Guards prompts without their first token, and answers without an end."""
    words = sentence_piece()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.scores": words.scores,
        "tokenizer.ggml.token_type": words.kinds,
        **said,
    }
    found = Vocabulary.read(Path("m.gguf"), metadata.get)
    assert (found.unknown, found.bos, found.eos) == (0, 1, said.get("tokenizer.ggml.eos_token_id", 2))
    assert Vocabulary.read(Path("m.gguf"), (metadata | {"tokenizer.ggml.model": "gpt2"}).get).bos is None


def test_sentence_piece_makes_no_control_token_of_letters() -> None:
    """Guards the template's words: with `<`, `s`, `>` and `s>` among the tokens, `<s>` in a message became `<s>`."""
    words = sentence_piece()
    more = ["<", ">", "s", "s>", "/", "</"]
    words = msgspec.structs.replace(
        words,
        tokens=words.tokens + more,
        kinds=words.kinds + [1] * len(more),
        scores=words.scores + [1.0] * len(more),
    )
    files = text_files(words)
    text = TextModel(files, ControlTokens(tokenizer(files), files.settings.stop_ids))
    text.vocab_size = len(words.tokens)
    for name, parts in {"<s>": ["▁", "<", "s>"], "</s>": ["▁", "</", "s>"]}.items():
        assert text.token_strings(text.encode(name, add_special=False, is_literal=True)) == parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"pre": "nobody"}, r"tokenizer\.ggml\.pre 'nobody' is not known"),
        ({"merges": ["a zz9"]}, r"tokenizer\.ggml\.merges"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores does not fit"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
    ],
)
def test_unknown_vocabularies_are_named(change: dict[str, Any], message: str) -> None:
    """Guards against a tokenizer that silently splits another way than the model was trained with."""
    with pytest.raises(ModelError, match=message):
        text_files(vocabulary(**change))


def test_a_tokenizer_on_which_the_library_panics_is_named(tmp_path: Path) -> None:
    """Guards a process that starts: a panic is no Exception. The file is read, its copy is not."""
    vocab = {"a": 2, "b": 1, "ab": 2}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    whole = {"version": "1.0", "added_tokens": [], "model": model}
    settings = TextSettings(name="tiny", vocab_size=3, context_tokens=64)
    TextFiles(json.dumps(whole), "{{ messages[0].content }}", settings).save(tmp_path)
    Tokenizer.from_str(json.dumps(whole))
    with pytest.raises(ModelError, match="not a tokenizer"):
        TextModel.load(tmp_path)
