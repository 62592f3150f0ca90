"""What a model's files say of themselves before anybody prepares them, whichever reader they need."""

from pathlib import Path

from engine.model.files import hf_model
from engine.model.files.checkpoint import most_of
from engine.model.files.gguf_reader import GGUFFile


def stored_dtype(path: Path) -> str:
    """The type in which a GGUF file or a Hugging Face directory keeps its weights: float32, float16, bfloat16, or the
    file's name for a quantization or whatever else it is. Reads headers, no weights. Raises ModelError."""
    if path.is_dir():
        return hf_model.stored_dtype(path)
    return most_of(GGUFFile(path).bytes_by_type())
