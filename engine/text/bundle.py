"""A prepared model's text side, loaded: tokenizer, chat template, detokenizers. No torch, no transformers.

Control tokens written out in a text (a user who types `<|im_end|>`) stay text in a chat's messages, where the template
alone writes them. In a plain prompt they become the control tokens themselves, as with the transformers tokenizers: its
writer has no template but this. Either can be asked for otherwise (`engine/text/control.py`).
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.model.config import ModelConfig, ModelError
from engine.model.prepared.shards import contents, fingerprint_of
from engine.text.chat import ChatTemplate
from engine.text.control import ControlTokens
from engine.text.detokenize import Detokenizer, DetokenizerFactory
from engine.text.dialect import dialect_of
from engine.text.files import TOKENIZER_FILE, TextFiles
from engine.text.messages import ChatPrompt
from engine.types import FieldError, SamplingParams


def fingerprint(model_dir: Path) -> str:
    """Return a digest of the files that a prepared model was made from, weights and tokenizer; without the weights'
    part before the first load of weights that were left where they are. Raises ModelError."""
    return fingerprint_of(ModelConfig.load(model_dir).fingerprint, contents(model_dir))


class TextModel:
    """Stateless after `load`, and safe to share between threads. `stop_ids` end an answer."""

    def __init__(self, files: TextFiles, control: ControlTokens, model_dir: Path | None = None) -> None:
        settings = files.settings
        self.name = settings.name
        self.vocab_size = settings.vocab_size
        self.drawable_tokens = min(settings.tokens or settings.vocab_size, settings.vocab_size)
        self.context_tokens = settings.context_tokens
        self.stop_ids: frozenset[int] = frozenset(settings.stop_ids)
        self.model_dir = model_dir
        self.sampling = settings.sampling or SamplingParams()
        """What its publisher recommends."""
        self._control = control
        self._template = self._tool_template = ChatTemplate(files.template, settings.named_tokens)
        if settings.tool_template:
            self._tool_template = ChatTemplate(settings.tool_template, settings.named_tokens)
        self._detokenizers = DetokenizerFactory(self._control.tokenizer, self._control.marks)
        self.added_ids = self._detokenizers.added
        self.dialect = dialect_of(files.template + settings.tool_template, self._detokenizers.added)

    @staticmethod
    def load(model_dir: Path, template_file: Path | None = None) -> "TextModel":
        """Read a prepared model directory (`engine.model.prepared.cache.prepare`), and the chat template that stands in
        for its own, if there is one. Raises ModelError."""
        files = TextFiles.load(model_dir)
        if template_file is not None:
            try:
                template = template_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(template_file, f"not a chat template (router.chat_template): {error}") from error
            files = files.with_templates(template)
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer)
            # A tokenizer.json may carry the settings it was trained with; a server must never cut a prompt short.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            control = ControlTokens(tokenizer, files.settings.stop_ids)
        except BaseException as error:
            # The library raises plain Exception, and where it has panicked what is none.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise ModelError(model_dir / TOKENIZER_FILE, f"not a tokenizer: {error}") from error
            raise
        return TextModel(files, control, model_dir)

    def encode(self, text: str, *, add_special: bool, is_literal: bool = False) -> list[int]:
        """Return token ids of a plain prompt. `add_special` adds what the model puts around it (often a leading BOS);
        `is_literal` takes the names of control tokens as text.

        Raises FieldError("prompt", ...) for text that is not valid Unicode (lone surrogates), and for a token that the
        tokenizer has and the model has not (an added token past its embedding).
        """
        try:
            ids = self._control.encode(text if is_literal else self._control.mark(text), add_special=add_special)
        except (UnicodeEncodeError, TypeError) as error:
            raise FieldError("prompt", "is not valid Unicode") from error
        if ids and max(ids) >= self.vocab_size:
            token = self._control.tokenizer.id_to_token(max(ids))
            raise FieldError("prompt", f"holds {token!r}, which this model has no embedding for")
        return ids

    def render_chat(self, chat: ChatPrompt) -> str:
        """Return a chat as text like the model was trained on, for `encode_chat_text`: the template's control tokens
        are marked in it, and where the chat is literal no others. Raises FieldError("messages", ...), and what else
        the template refuses."""
        control = self._control
        template = self._tool_template if chat.tools else self._template
        try:
            text = template.render(chat, control.hide if chat.is_literal else str)
        except FieldError as error:
            raise FieldError(error.field, control.told(error.message)) from error
        return control.show(control.mark(text))

    def encode_chat_text(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat: the template has already written every special token."""
        return self.encode(rendered, add_special=False, is_literal=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode all ids at once, special tokens skipped."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary writes them; empty for ids that it has no token for."""
        control = self._control
        return ["" if token in control.marks else control.tokenizer.id_to_token(token) or "" for token in ids]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode all ids at once, special tokens by their names."""
        known = [token for token in ids if token not in self._control.marks]
        return str(self._control.tokenizer.decode(known, skip_special_tokens=False))

    def token_bytes(self, token: int) -> tuple[bytes, bool]:
        """Return the bytes that a token stands for, and whether answers show them; of one that they skip, those of its
        name."""
        return self._detokenizers.token_bytes(token)

    def tokenizer_files(self) -> dict[str, str]:
        """Return what another program needs to tokenize and to render chats as this one does: file contents by name, as
        they lie in a Hugging Face directory. Raises ModelError where the files are gone."""
        if self.model_dir is None:
            raise ModelError(Path(TOKENIZER_FILE), "was not read from a folder")
        tool_template = "" if self._tool_template is self._template else self._tool_template.source
        return TextFiles.load(self.model_dir).with_templates(self._template.source, tool_template).as_hugging_face()

    def detokenizer(self, shown: frozenset[str] = frozenset(), *, continues: bool = False) -> Detokenizer:
        """Return a detokenizer for one answer. Control tokens are skipped, but for those whose names are in `shown`.
        `continues`: the answer's text goes on with one, and keeps the space before its first word."""
        return self._detokenizers.make(shown, continues=continues)
