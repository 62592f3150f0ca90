"""What stands beside tokenizer.json: special tokens by their names, and a second template for chats with tools."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.model.files.gguf_text import text_files as of_gguf
from engine.model.files.hf_text import text_files
from engine.text.bundle import TextModel
from engine.text.messages import ChatMessage, ChatPrompt, Tool
from engine.types import FieldError
from tests.engine.model.checkpoints import VOCAB, save_tokenizer
from tests.engine.text.test_control import model
from tests.engine.text.test_tokenizer import sentence_piece

PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TOOLS = "{% if tools %}<tool_call>{{ tools[0].function.name }}{% endif %}" + PLAIN
NAMED = {"chat_template": [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}]}
RAIN = Tool("rain", "", '{"type": "object"}')
ASKED = ChatPrompt(messages=(ChatMessage("user", "Rain?"),))
WITH_TOOLS = msgspec.structs.replace(ASKED, tools=(RAIN,))


def directory(folder: Path, **files: Any) -> Path:
    save_tokenizer(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["<first>", "<last>"])
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(folder: Path) -> TextModel:
    made = text_files(folder, {}, VOCAB + 2)
    return model(msgspec.structs.replace(made, settings=msgspec.structs.replace(made.settings, vocab_size=VOCAB + 2)))


def test_special_tokens_of_their_own_file_are_named(tmp_path: Path) -> None:
    """Guards models that name their tokens in special_tokens_map.json alone: templates wrote none, and none ended an
    answer."""
    own = {"bos_token": {"content": "<first>"}, "eos_token": "<wrong>"}
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": PLAIN, "eos_token": "<last>"}
    text = read(directory(tmp_path, special_tokens_map=own, tokenizer_config=said))
    ids = text.encode_chat_text(text.render_chat(ASKED))
    assert text.text_of(ids) == "<first>user: Rain?<last>"
    assert text.stop_ids == {VOCAB + 1}


@pytest.mark.parametrize("form", ["in a list", "in files", "in GGUF"])
def test_chats_with_tools_have_a_template_of_their_own(form: str, tmp_path: Path) -> None:
    """Guards Hermes 2 Pro and 3, Command R: their template for tools has a name, and tools were refused."""
    if form == "in a list":
        text = read(directory(tmp_path, tokenizer_config=NAMED))
    elif form == "in files":
        folder = directory(tmp_path, tokenizer_config={"chat_template": "neither"})
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(PLAIN)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
        text = read(folder)
    else:
        text = model(of_gguf(msgspec.structs.replace(sentence_piece(), template=PLAIN, tool_template=TOOLS)))
    assert text.render_chat(WITH_TOOLS).startswith("<tool_call>rain")
    assert "tool_call" not in text.render_chat(ASKED)
    assert text.dialect.tools == "hermes"


def test_others_find_both_templates_in_what_they_are_sent(tmp_path: Path) -> None:
    """Guards who renders chats by these files as this one does, and an operator's template, which stands for both."""
    said = NAMED | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "prepared").mkdir()
    text_files(directory(tmp_path, tokenizer_config=said), {}, VOCAB + 2).save(tmp_path / "prepared")
    text = TextModel.load(tmp_path / "prepared")
    (tmp_path / "sent").mkdir()
    for name, content in text.tokenizer_files().items():
        (tmp_path / "sent" / name).write_text(content)
    oracle = AutoTokenizer.from_pretrained(tmp_path / "sent")
    tool = {"type": "function", "function": {"name": "rain", "description": "", "parameters": {"type": "object"}}}
    turns = [{"role": "user", "content": "Rain?"}]
    assert oracle.apply_chat_template(turns, tokenize=False) == text.render_chat(ASKED)
    assert oracle.apply_chat_template(turns, tools=[tool], tokenize=False) == text.render_chat(WITH_TOOLS)
    (tmp_path / "operators").write_text(PLAIN)
    with pytest.raises(FieldError, match="does not know tools"):
        TextModel.load(tmp_path / "prepared", tmp_path / "operators").render_chat(WITH_TOOLS)
