"""The tokens of a model as `llguidance` knows them: which bytes each of them stands for, and which end an answer."""

import json
from pathlib import Path

from llguidance import LLTokenizer

from engine.text.files import TextFiles
from engine.types import FieldError


def load_vocabulary(model_dir: Path) -> LLTokenizer:
    """Read a prepared model's tokenizer; about half a second, and some 50 MB. Raises ModelError, and FieldError for a
    model that no constraint can be kept with."""
    files = TextFiles.load(model_dir)
    settings = files.settings
    if not settings.stop_ids:
        raise FieldError("constraint", "this model has no token that ends an answer")
    whole = json.loads(files.tokenizer)
    # Added tokens past the embedding, as Gemma 3's for images, cannot be drawn, and the library would refuse them.
    added = whole.get("added_tokens") or ()
    whole["added_tokens"] = [token for token in added if token["id"] < settings.vocab_size]
    try:
        return LLTokenizer(json.dumps(whole), n_vocab=settings.vocab_size, eos_token=sorted(settings.stop_ids))
    except ValueError as error:
        raise FieldError("constraint", f"this model's tokenizer is of no known kind: {error}") from error
