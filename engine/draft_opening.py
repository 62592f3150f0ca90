"""Opens a draft model beside the model that is served: its weights, a KV pool of its own, and its runner."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from engine.backends.attention import TorchAttention
from engine.backends.native_attention import NativeAttention
from engine.config import EngineConfig
from engine.cores import process_cores
from engine.draft_model import ModelDrafter
from engine.model.config import ModelConfig
from engine.model.llama import load_model
from engine.runner import ModelRunner
from engine.storage.paged import TORCH_DTYPES, PagedKV
from engine.text.alike import check_alike
from kernels.native import Native

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenDraft:
    drafter: ModelDrafter
    weights_bytes: int
    kv: PagedKV

    @property
    def nbytes(self) -> int:
        return self.weights_bytes + self.kv.nbytes


def open_draft(config: EngineConfig, served: ModelConfig, native: Native | None) -> OpenDraft | None:
    """Load the prepared draft model; None where none is asked for. It computes whole in this process, also where
    several ranks share the model that is served. Raises ModelError for a model that is not whole, ValueError where it
    was prepared in another type, for another tokenizer, a pool too small to hold one block, and another device than
    the CPU."""
    if config.speculation != "model" or not config.draft_dir:
        return None
    if config.device != "cpu" or config.kernels == "triton":
        where = f"on {config.device} with {config.kernels} kernels"
        raise ValueError(f"engine.draft_model: a draft model computes on the CPU, not {where}")
    folder = Path(config.draft_dir)
    check_alike(Path(config.model_dir), folder, config.draft_model)
    shape = ModelConfig.load(folder)
    if shape.dtype != config.dtype:
        raise ValueError(f"engine.draft_model: prepared in {shape.dtype}, the model in {config.dtype}")
    model = load_model(folder, panels=native is not None, integer=config.integer_bits)
    layout = shape.kv_layout(config.block_size, config.kv_dtype_of(config.dtype))
    blocks = config.draft_pool_bytes // layout.block_bytes
    if blocks < 1:
        raise ValueError(
            f"engine.draft_pool_bytes: {config.draft_pool_bytes} bytes hold no block of {layout.block_bytes}"
        )
    kv = PagedKV(layout, blocks)
    attention = (
        NativeAttention(shape.heads, native)
        if native is not None
        else TorchAttention(shape.heads, dtype=TORCH_DTYPES[shape.dtype])
    )
    cores = process_cores(config.threads) if native is not None and config.lend_cores else None
    runner = ModelRunner(model, kv, attention, cores=cores)
    vocab = min(shape.vocab, served.vocab)
    drafter = ModelDrafter(runner, blocks, vocab, shape.context_tokens, time.perf_counter)
    opened = OpenDraft(drafter, model.weights_bytes + model.table_bytes, kv)
    log.info("draft model %s: %d bytes of weights, %d of KV", shape.name, opened.weights_bytes, kv.nbytes)
    return opened
