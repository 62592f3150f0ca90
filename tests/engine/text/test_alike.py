"""Which draft models have the tokenizer of the model that is served."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from engine.text.alike import check_alike
from engine.text.files import TextFiles, TextSettings


def _folder(folder: Path, texts: list[str], special: tuple[str, ...] = (), stop_ids: tuple[int, ...] = ()) -> Path:
    """Write the text side of a prepared model."""
    tokenizer = Tokenizer(BPE(vocab={text: token for token, text in enumerate(texts)}, merges=[]))
    added = [text for text in texts if text.startswith("<")]
    tokenizer.add_tokens([AddedToken(text, special=text in special) for text in added])
    folder.mkdir()
    TextFiles(tokenizer.to_str(), "", TextSettings(stop_ids=stop_ids)).save(folder)
    return folder


TEXTS = ["a", "b", "c", "<s>", "<e>"]


@pytest.mark.parametrize(
    ("texts", "special", "told"),
    [
        (TEXTS[:4], ("<s>",), "it has 4 tokens, the model has 5"),
        (["a", "c", "b", "<s>", "<e>"], ("<s>",), "token 1 is 'c', in the model 'b'"),
        (TEXTS, ("<s>", "<e>"), "token 4, '<e>', is special in the draft model alone"),
        (TEXTS, (), "token 3, '<s>', is special in the model alone"),
    ],
)
def test_what_differs_is_said(texts: list[str], special: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """Guards drafts that mean another text: never drawn, and nobody would know why."""
    served = _folder(tmp_path / "served", TEXTS, ("<s>",))
    draft = _folder(tmp_path / "draft", texts, special)
    with pytest.raises(ValueError) as refused:
        check_alike(served, draft, "small.gguf")
    assert str(refused.value) == f"engine.draft_model small.gguf: another tokenizer than the model's: {told}"


def test_the_end_of_an_answer_and_a_template_may_differ(tmp_path: Path) -> None:
    """Guards a model tuned for chats, whose base model is its best draft model."""
    served = _folder(tmp_path / "served", TEXTS, ("<s>",), stop_ids=(4,))
    draft = _folder(tmp_path / "draft", TEXTS, ("<s>",))
    (served / "chat_template.jinja").write_text("{{ messages }}")
    raw = json.loads((draft / "tokenizer.json").read_text())
    (draft / "tokenizer.json").write_text(json.dumps(raw, indent=1))
    check_alike(served, draft, "small.gguf")
