"""A prepared model's text side, loaded: tokenizer, chat template, detokenizers. No torch, no transformers.

Special tokens written out in a text (a user who types `<|im_end|>`) become the control tokens themselves, in plain
prompts and in chats: it is what the transformers tokenizers do, and what makes rendered templates work. A
deployment that must not let users write control tokens filters them before they get here.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.model.config import ModelConfig, ModelError
from engine.model.prepared.shards import contents, fingerprint_of
from engine.text.chat import ChatTemplate
from engine.text.detokenize import Detokenizer, DetokenizerFactory
from engine.text.files import TOKENIZER_FILE, TextFiles
from engine.types import FieldError


def fingerprint(model_dir: Path) -> str:
    """Return a digest of the files that a prepared model was made from, weights and tokenizer; without the weights'
    part before the first load of weights that were left where they are. Raises ModelError."""
    return fingerprint_of(ModelConfig.load(model_dir).fingerprint, contents(model_dir))


class TextModel:
    """Stateless after `load`, and safe to share between threads. `stop_ids` end an answer."""

    def __init__(self, files: TextFiles, tokenizer: Tokenizer) -> None:
        settings = files.settings
        self.name = settings.name
        self.vocab_size = settings.vocab_size
        self.context_tokens = settings.context_tokens
        self.stop_ids: frozenset[int] = frozenset(settings.stop_ids)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(files.template, settings.named_tokens)
        self._detokenizers = DetokenizerFactory(tokenizer)

    @staticmethod
    def load(model_dir: Path) -> "TextModel":
        """Read a prepared model directory (`engine.model.prepared.cache.prepare`). Raises ModelError."""
        files = TextFiles.load(model_dir)
        try:
            tokenizer = Tokenizer.from_str(files.tokenizer)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(model_dir / TOKENIZER_FILE, f"not a tokenizer: {error}") from error
        # A tokenizer.json may carry the settings it was trained with; a server must never cut a prompt short.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return TextModel(files, tokenizer)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return token ids of a plain prompt. `add_special` adds what the model puts around it (often a leading BOS).

        Raises FieldError("prompt", ...) for text that is not valid Unicode (lone surrogates), and for a token that the
        tokenizer has and the model has not (an added token past its embedding).
        """
        try:
            encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0]
        except (UnicodeEncodeError, TypeError) as error:
            raise FieldError("prompt", "is not valid Unicode") from error
        ids: list[int] = encoded.ids
        if ids and max(ids) >= self.vocab_size:
            token = self._tokenizer.id_to_token(max(ids))
            raise FieldError("prompt", f"holds {token!r}, which this model has no embedding for")
        return ids

    def render_chat(self, messages: Sequence[tuple[str, str]], add_generation_prompt: bool = True) -> str:
        """Return (role, content) pairs as text like the model was trained on. Raises FieldError("messages", ...)."""
        return self._template.render(messages, add_generation_prompt)

    def encode_chat_text(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered chat: the template has already written every special token."""
        return self.encode(rendered, add_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode all ids at once, special tokens skipped."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return self._detokenizers.make()
