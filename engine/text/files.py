"""The text side of a prepared model, as three files: tokenizer.json, chat_template.jinja and text.json."""

from collections.abc import Collection
from pathlib import Path

import msgspec

from engine.model.config import ModelConfig, ModelError
from engine.text.recommended import from_card
from engine.types import SamplingParams

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "text.json"

_TURN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"),
    *("<end_of_turn>", "<|end|>", "<|return|>", "<|call|>"),
)


def turn_ends(controls: Collection[str]) -> set[str]:
    """Return those control tokens that end an answer in the families of `engine.model.families`, whatever the file
    calls its eos. Where channels end apart from answers (gpt-oss), `<|end|>` is a channel's."""
    found = {*_TURN_ENDS} & {*controls}
    return found - {"<|end|>"} if "<|return|>" in found else found


class TextSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`named_tokens` is what a template may print: bos_token, eos_token, unk_token, pad_token. `sampling` is what the
    publisher recommends; None: the files say nothing. `tokens`: ids from there on are of no token; 0: not known.
    `tool_template` renders chats with tools; empty: the template of all others does."""

    name: str = ""
    vocab_size: int = 0
    tokens: int = 0
    context_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    named_tokens: dict[str, str] = {}
    tool_template: str = ""
    sampling: SamplingParams | None = None


class TextFiles(msgspec.Struct, frozen=True):
    """`tokenizer` is the JSON of the `tokenizers` library; `template` is empty for a model without chat."""

    tokenizer: str
    template: str
    settings: TextSettings

    def of_model(self, config: ModelConfig) -> "TextFiles":
        """Return the same, with what the model's configuration knows, and the sampling that its name stands for where
        the files recommend none."""
        settings = msgspec.structs.replace(
            self.settings,
            name=config.name,
            vocab_size=config.vocab,
            context_tokens=config.context_tokens,
            sampling=self.settings.sampling or from_card(config.name),
        )
        return msgspec.structs.replace(self, settings=settings)

    def with_templates(self, template: str, tool_template: str = "") -> "TextFiles":
        """Return the same, with other templates."""
        settings = msgspec.structs.replace(self.settings, tool_template=tool_template)
        return msgspec.structs.replace(self, template=template, settings=settings)

    def as_hugging_face(self) -> dict[str, str]:
        """Return contents by name of the files in which others keep the same."""
        template: object = self.template
        if tool_template := self.settings.tool_template:
            named = {"default": self.template, "tool_use": tool_template}
            template = [{"name": name, "template": text} for name, text in named.items() if text]
        config = {
            **self.settings.named_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.settings.context_tokens,
            **({"chat_template": template} if template else {}),
        }
        return {TOKENIZER_FILE: self.tokenizer, "tokenizer_config.json": msgspec.json.encode(config).decode()}

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(self.tokenizer, encoding="utf-8")
        (folder / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")
        (folder / SETTINGS_FILE).write_bytes(msgspec.json.encode(self.settings))

    @staticmethod
    def load(folder: Path) -> "TextFiles":
        """Read them. Raises ModelError naming the folder."""
        try:
            return TextFiles(
                (folder / TOKENIZER_FILE).read_text(encoding="utf-8"),
                (folder / TEMPLATE_FILE).read_text(encoding="utf-8"),
                msgspec.json.decode((folder / SETTINGS_FILE).read_bytes(), type=TextSettings),
            )
        except (OSError, ValueError) as error:
            raise ModelError(folder, f"not a prepared model: {error}") from error
