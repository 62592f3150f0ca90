"""The real header of DeepSeek-R1-Distill-Qwen-7B's GGUF file: Qwen2's biases, padded vocabulary, and the trap of two
beginnings (it wants a BOS before plain text, and its template writes one too)."""


import pytest

from engine.model.files.gguf_model import GGUFModel
from engine.text.bundle import TextModel
from tests.engine.text.chats import chat
from tests.parity.real_files import r1_header

pytestmark = pytest.mark.parity

BOS, EOS = 151646, 151643


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> GGUFModel:
    return GGUFModel(r1_header(tmp_path_factory.mktemp("r1")))


@pytest.fixture(scope="module")
def text(opened: GGUFModel, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("text")
    opened.text().save(folder)
    return TextModel.load(folder)


def test_the_header_is_qwen2s(opened: GGUFModel) -> None:
    config, settings = opened.config, opened.text().settings
    assert (config.family, config.qkv_bias, config.output_bias) == ("qwen2", True, False)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (28, 28, 4, 128)
    assert (config.vocab, settings.tokens, settings.stop_ids) == (152064, 151665, (EOS,))


def test_a_prompt_begins_once_whether_plain_or_a_chat(text: TextModel) -> None:
    """Guards two BOS in a row, which a model has never seen: the template's and the tokenizer's."""
    assert text.encode("Hello", add_special=True).count(BOS) == 1
    ids = text.encode_chat_text(text.render_chat(chat([("user", "What is 3 + 4?")])))
    assert ids.count(BOS) == 1 and ids[0] == BOS


def test_digits_stand_alone_and_text_comes_back(text: TextModel) -> None:
    ids = text.encode("In 2026: 12345, wörld 春眠不覚暁 🚀", add_special=True)
    assert text.decode(ids) == "In 2026: 12345, wörld 春眠不覚暁 🚀"
    strings = text.token_strings(ids)
    assert [string for string in strings if string.isdigit()] == list("202612345")
