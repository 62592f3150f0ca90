from pathlib import Path
from torch import Tensor
from kernels.panels import Panels, pack_plain


def panel_weights(model_dir: Path, weights: dict[str, Tensor]) -> dict[str, Panels]:
    found = {name: weight for name, weight in weights.items() if weight.dim() == 2}
    embedding = found.pop("embedding")
    return {name: pack_plain(weight) for name, weight in {"head": embedding, **found}.items()}
