"""Detokenizing a stream, chat templates, and what importing the text side costs."""

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import Decoder
from tokenizers.models import BPE

from engine.model.files.gguf_model import GGUFModel
from engine.model.prepared.cache import find_demo_model
from engine.text.bundle import TextModel
from engine.text.chat import ChatTemplate
from engine.text.detokenize import DetokenizerFactory
from engine.types import FieldError
from tests.engine.text.chats import chat


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġthe", "ðŁĺĢ", "ðŁĺ", "Ã", "Ã©", "ing"]
    words = list(dict.fromkeys(words))
    made = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    made.add_tokens([AddedToken("naïve 中", normalized=False), AddedToken("<tool>")])
    return made


def sentence_piece(*steps: Decoder) -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<0xe2>"]
    words += ["▁", "▁the", "a", "ing", "é", "中", "\ufffd", "▁▁", "", "a▁b"]
    made = Tokenizer(BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    made.decoder = decoders.Sequence(list(steps))
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


SPACES, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
BUILDS = {
    "GPT-2's": byte_level,
    "Llama 2's": partial(sentence_piece, SPACES, BYTES, FUSE, decoders.Strip(" ", 1, 0)),
    "Gemma's": partial(sentence_piece, SPACES, BYTES, FUSE),
    "strips two": partial(sentence_piece, SPACES, BYTES, FUSE, decoders.Strip(" ", 2, 0)),
    "has no bytes": partial(sentence_piece, SPACES, FUSE),
    "replaces nothing": partial(sentence_piece, BYTES, FUSE),
    # What has no table goes through the library:
    "strips each token": partial(sentence_piece, SPACES, BYTES, decoders.Strip(" ", 1, 0)),
    "T5's": partial(sentence_piece, decoders.Metaspace()),
    "replaces by a pattern": partial(sentence_piece, decoders.Replace(Regex("▁+"), " "), BYTES, FUSE),
}


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_stream_equals_decoding_at_once(build: Callable[[], Tokenizer], continues: bool) -> None:
    """Guards the stream: bytes lost, doubled or replaced at the borders of pushes, for valid and for absurd output; and
    the space before its first word, where it goes on with a text."""
    made = build()
    before = [made.token_to_id("a")] if continues else []
    factory = DetokenizerFactory(made)
    dice = random.Random(4)
    size = made.get_vocab_size()
    names = ["ðŁĺ", "Ģ", "Ã©"] if build is byte_level else [f"<0x{byte:02X}>" for byte in "😀é".encode()]
    smiley = [made.get_vocab()[name] for name in names]
    for _ in range(400):
        ids: list[int] = []
        for _ in range(dice.randint(1, 12)):
            ids += smiley if dice.random() < 0.2 else [dice.randrange(size)]
        stream = factory.make(continues=continues)
        pushed, start = "", 0
        while start < len(ids):
            step = dice.randint(0, 3)
            pushed += stream.push(ids[start : start + step])
            start += step
        told = "a" * len(before) + pushed + stream.flush()
        assert told == made.decode(before + ids, skip_special_tokens=True), ids


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("demo")
    GGUFModel(find_demo_model()).text().save(folder)
    return TextModel.load(folder)


def test_never_half_a_character(demo: TextModel) -> None:
    """Guards the client: an emoji of several tokens must arrive whole, and as soon as it is whole."""
    text = "Ünïcode 👩‍👩‍👧‍👦 你好世界 ខ្មែរ 𝔘𝔫𝔦 end"
    ids = demo.encode(text, add_special=False)
    assert len(ids) > len(text), "every character a token of its own would prove nothing"
    stream = demo.detokenizer()
    pushes = [stream.push([token]) for token in ids]
    assert "".join(pushes) == text
    assert not any("\ufffd" in push for push in pushes)
    assert stream.flush() == ""


def test_unfinished_character_is_flushed_as_a_replacement(demo: TextModel) -> None:
    """Guards the end of an answer that stopped at max_tokens inside a character: nothing hangs, nothing raises."""
    ids = demo.encode("😀", add_special=False)[:-1]
    stream = demo.detokenizer()
    assert stream.push(ids) == ""
    assert stream.flush() == "\ufffd"


def test_special_and_unknown_ids_give_no_text(demo: TextModel) -> None:
    """Guards against ids past the vocabulary, which padded embeddings can produce."""
    stream = demo.detokenizer()
    assert stream.push([2, 0, 10**6, *demo.encode("ok", add_special=False), 2]) == "ok"


def test_demo_chat(demo: TextModel) -> None:
    """Guards the template: what it writes is tokenized as the text that it stands for, control tokens included."""
    asked = demo.render_chat(chat([("user", "Hi"), ("assistant", "Yes?"), ("user", "{{ 1 }}")]))
    assert demo.encode_chat_text(asked) == demo.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\n{{ 1 }}<|im_end|>\n<|im_start|>assistant\n",
        add_special=False,
    )
    asked = demo.render_chat(chat([("system", "S"), ("user", "Hi")], add_generation_prompt=False))
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert demo.encode_chat_text(asked) == demo.encode(expected, add_special=False)
    assert demo.encode_chat_text(asked)[:2] == [1, *demo.encode("system", add_special=False)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no chat template"),
        ("{% for m in %}", "cannot be parsed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages[7].content }}", "the chat template failed"),
        ("{% for i in range(10**9) %}{% endfor %}", "the chat template failed"),
    ],
)
def test_template_faults_name_the_field(source: str, message: str) -> None:
    """Guards the router: whatever a template does ends as the caller's error, and it cannot reach Python's insides."""
    with pytest.raises(FieldError, match=message) as caught:
        ChatTemplate(source, {}).render(chat([("user", "x")]))
    assert caught.value.field == "messages"


def test_template_helpers() -> None:
    """Guards templates of real models, which use these and fail without."""
    source = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}"
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(chat([("user", "<é>")]))
    assert text.startswith('<s>{"role": "user", "content": "<é>"}20')
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(loop, {}).render(chat([("user", "x"), ("assistant", "y")])) == "user"


def test_text_side_needs_no_torch() -> None:
    """Guards the router's memory and start time."""
    code = "import sys, engine.text.bundle; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"
