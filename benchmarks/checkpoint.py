"""The demo model for servers that read no GGUF file: transformers' reading of it, in float32.

Needs the `dev` extra; the product itself never imports transformers.
"""

from pathlib import Path
from typing import Any

from engine.model.prepared.cache import find_demo_model


def read() -> Any:
    """Return a `LlamaForCausalLM` for inference, on the CPU."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    gguf = find_demo_model()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM(config).float().eval()
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)
    model.load_state_dict(found["tensors"], strict=False)
    model.tie_weights()
    return model


def write(folder: Path) -> None:
    """Write a Hugging Face directory of model and tokenizer to `folder`, which must be there."""
    from transformers import AutoTokenizer

    gguf = find_demo_model()
    read().save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
