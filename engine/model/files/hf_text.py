"""The text side of a Hugging Face directory: tokenizer.json as it is, the templates and special ids from beside it."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.model.config import ModelError
from engine.model.files.checkpoint import check_is_file, read_json
from engine.text.files import TextFiles, TextSettings, turn_ends
from engine.text.recommended import from_generation_config

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def text_files(path: Path, config: dict[str, Any], vocab: int) -> TextFiles:
    """Read the text side; `config` is the content of config.json, `vocab` the rows of the embedding. Raises ModelError
    naming the file at fault."""
    source = path / "tokenizer.json"
    check_is_file(source)
    try:
        raw = source.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(raw)
    except OSError as error:
        raise ModelError(source, f"cannot be read: {error.strerror}") from error
    except Exception as error:  # the library raises plain Exception
        raise ModelError(source, f"not a tokenizer: {error}") from error
    settings = _optional(path / "special_tokens_map.json") | _optional(path / "tokenizer_config.json")
    named = {key: text for key in _NAMED if (text := _token_text(settings.get(key)))}
    # Added tokens may lie past the embedding, as Gemma 3's for images do: a prompt that holds one is refused.
    if (last := max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)) >= vocab:
        raise ModelError(source, f"has a token of id {last}, and the embedding {vocab} rows")
    generation = _optional(path / "generation_config.json")
    stops = _ids(path / "config.json", config, vocab) | _ids(path / "generation_config.json", generation, vocab)
    if "eos_token" in named and (eos := tokenizer.token_to_id(named["eos_token"])) is not None:
        if eos >= vocab:
            raise ModelError(path / "tokenizer_config.json", f"eos_token is {eos}, of {vocab} ids")
        stops.add(eos)
    controls = {added.content: at for at, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    stops |= {controls[end] for end in turn_ends(controls)}
    template, tool_template = _templates(path, settings)
    said = TextSettings(
        stop_ids=tuple(sorted(stops)),
        named_tokens=named,
        tool_template=tool_template,
        sampling=from_generation_config(generation),
        tokens=1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
    )
    return TextFiles(raw, template, said)


def _templates(path: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """Return the chat template, and the one for chats with tools where it is another."""
    files = [path / "chat_template.jinja", path / "additional_chat_templates" / "tool_use.jinja"]
    if any(file.exists() for file in files):
        template, tool_template = (_text(file) if file.exists() else "" for file in files)
        return template, tool_template
    said = settings.get("chat_template") or ""
    if isinstance(said, list):
        named = {str(item.get("name")): item.get("template") for item in said if isinstance(item, dict)}
    else:
        named = {"default": said}
    template, tool_template = named.get("default") or "", named.get("tool_use") or ""
    for found in (template, tool_template):
        if not isinstance(found, str):
            raise ModelError(path / "tokenizer_config.json", f"chat_template is {found!r}, not a text")
    return template, tool_template


def _text(path: Path) -> str:
    check_is_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(path, f"cannot be read: {error}") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: object) -> str:
    """Return the text of a token: either the value itself, or of an object that holds it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(path: Path, said: dict[str, Any], vocab: int) -> set[int]:
    """Return the ids that end an answer by the content of this file. Raises ModelError."""
    value = said.get("eos_token_id")
    found = value if isinstance(value, list) else [] if value is None else [value]
    for item in found:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
            raise ModelError(path, f"eos_token_id {item!r} is not an id of 0 to {vocab - 1}")
    return set(found)
