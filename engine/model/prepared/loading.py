"""A prepared model's weights on a device, wherever they lie, with word of how it goes."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.config import ModelConfig, ModelError, Progress
from engine.model.files.safetensors_reader import SafetensorsFile
from engine.model.prepared.codes_file import CODES_FILE, coded_forms, coded_weights, map_codes
from engine.model.prepared.pieces import load_index, map_pieces
from engine.model.prepared.shards import ShardIndex, agree, by_reference, contents, prepared_shards
from engine.model.prepared.streaming import stream
from engine.model.prepared.weights import WEIGHTS_FILE
from engine.storage.paged import TORCH_DTYPES
from kernels.coded_weight import CodedStack, CodedWeight

log = logging.getLogger(__name__)

SLAB_VALUES = 1 << 22
"""The number of values that are widened at once."""

Stored = Tensor | CodedWeight
"""A weight as a prepared model keeps it."""


Multiplied = Stored | CodedStack
"""A weight as a GPU gets it."""


class LoadedWeights(NamedTuple):
    """Weights by name, and the digests of their files by name: none where the files were not hashed."""

    weights: dict[str, Multiplied]
    digests: dict[str, str]


class PreparedWeights(Mapping[str, Tensor]):
    """A prepared model's weights, mapped: clean pages, never to be written. `[name]` is a weight in the model's type: a
    view of the mapping where it is kept so, and else widened into memory of its own, each time. `stored` and `rows` are
    what is kept. Raises ModelError."""

    suffix = ""
    """What names files made of these weights."""

    def __init__(self, model_dir: Path) -> None:
        config = ModelConfig.load(model_dir)
        self.dtype = TORCH_DTYPES[config.dtype]
        self._experts = config.expert_count
        kept: dict[str, Stored] = {
            name: torch.frombuffer(piece.raw, dtype=TORCH_DTYPES[piece.form.decode()]).view(piece.shape)
            for name, piece in map_pieces(model_dir / WEIGHTS_FILE).items()
        }
        self.stored: Mapping[str, Stored] = kept | dict(map_codes(model_dir))
        """Matrices of codes have the rows of experts below each other."""

    def again(self, model_dir: Path) -> "PreparedWeights":
        """Return the same, mapped anew."""
        return PreparedWeights(model_dir)

    def __getitem__(self, name: str) -> Tensor:
        found = self.stored[name]
        if isinstance(found, Tensor):
            return found.to(self.dtype)
        return widened(found, self.dtype).view(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape; `[experts, rows, columns]` where it is of all experts of a layer."""
        found = self.stored[name]
        if isinstance(found, Tensor) or not is_of_experts(name):
            return tuple(found.shape)
        rows, columns = found.shape
        return self._experts, rows // self._experts, columns

    def rows(self, name: str, first: int, end: int) -> Stored:
        """Return some rows of a matrix as they are kept, those of experts below each other: a rank, or whoever makes
        something of a large matrix, reads no others."""
        found = self.stored[name]
        return found.flatten(0, -2)[first:end] if isinstance(found, Tensor) else found.part(slice(first, end))

    def matrices(self) -> dict[str, str]:
        """Name the weights that steps multiply with, and as what each is kept: matrices, and those of all experts of a
        layer. The output matrix is always `head`."""
        found = {name: name for name in self.stored if len(self.shape(name)) > 1 and not name.endswith("_bias")}
        embedding = found.pop("embedding")
        return {"head": embedding} | found


    def others(self) -> dict[str, Stored]:
        """Return what steps do not multiply with, as it is kept: the embedding, norms, biases."""
        matrices = set(self.matrices().values()) - {"embedding"}
        return {name: self.stored[name] for name in self.stored if name not in matrices}

    def multiplied_as_stored(self) -> dict[str, Stored]:
        """Return the matrices that steps multiply with, as they are kept."""
        return {name: self.stored[key] for name, key in self.matrices().items()}

    def multiplied(self) -> dict[str, Multiplied]:
        """Return the matrices as a GPU gets them: in codes, or in the model's type."""
        found = dict[str, Multiplied]()
        for name, key in self.matrices().items():
            stored = self.stored[key]
            if not isinstance(stored, CodedWeight) or not stays_coded(key):
                found[name] = self[key]
            else:
                found[name] = CodedStack(self._experts, stored) if is_of_experts(key) else stored
        return found


def is_of_experts(name: str) -> bool:
    """Say whether a weight is that of all experts of a layer."""
    return name.rpartition(".")[2].startswith("experts_")


def stays_coded(name: str) -> bool:
    """Say whether a GPU multiplies with a matrix's codes: routers are multiplied in 32 bits."""
    return not name.endswith(".router")


def widened(weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """Return the values of codes, rounded to `dtype`, without more than some rows of them in 32 bits."""
    rows, columns = weight.shape
    found = torch.empty(rows, columns, dtype=dtype, device=weight.codes.device)
    step = max(1, SLAB_VALUES // columns)
    for first in range(0, rows, step):
        numbers = torch.arange(first, min(first + step, rows), device=found.device)
        found[first : first + step] = weight.lookup(numbers, dtype)
    return found


def map_weights(model_dir: Path) -> PreparedWeights:
    """Map every weight of a prepared model. Raises ModelError."""
    return PreparedWeights(model_dir)


def load_weights(model_dir: Path, device: torch.device, progress: Progress | None = None) -> LoadedWeights:
    """Load every weight by name to a device: in the model's type, or in codes of 16-bit models. `progress` hears of
    bytes read, as the log does at every tenth. Raises ModelError."""
    told = logged(model_dir.name, progress)
    # 1. By reference: streamed and hashed on the way, and held against what the first load has seen.
    if by_reference(model_dir):
        index = ShardIndex.load(model_dir)
        tensors, digests = stream(index, device, told, is_known=bool(contents(model_dir)))
        if not contents(model_dir):
            _check_numbers(index, tensors)
        agree(model_dir, index, digests)
        return LoadedWeights(dict(tensors), digests)
    # 2. Else streamed from the prepared files.
    config = ModelConfig.load(model_dir)
    codes, dtype = model_dir / CODES_FILE, TORCH_DTYPES[config.dtype]
    files = [model_dir / WEIGHTS_FILE, *([codes] if codes.exists() else [])]
    tensors, _ = stream(prepared_shards(files, config.dtype), device, told, hashed=False)
    forms = coded_forms(load_index(codes), codes) if codes.exists() else {}
    coded = coded_weights(tensors, forms)
    pieces = {f"{name}.{kind}" for name in forms for kind in ("codes", "scales", "offsets")}
    found: dict[str, Multiplied] = {name: tensor.to(dtype) for name, tensor in tensors.items() if name not in pieces}
    del tensors
    for name in forms:
        weight = coded.pop(name)
        of_experts, in_codes = is_of_experts(name), stays_coded(name) and dtype != torch.float32
        if in_codes:
            found[name] = CodedStack(config.expert_count, weight) if of_experts else weight
        else:
            wide = widened(weight, dtype)
            found[name] = wide.unflatten(0, (config.expert_count, -1)) if of_experts else wide
    return LoadedWeights(found, {})


def _check_numbers(index: ShardIndex, weights: Mapping[str, Tensor]) -> None:
    """Raise ModelError naming file and tensor where a value is NaN or without end: nobody has looked at these yet."""
    parts = [(shard, stretch) for shard in index.shards for stretch in shard.stretches]
    ends = list[Tensor]()
    for _, stretch in parts:
        flat = weights[stretch.weight].view(-1)
        width = flat.element_size()
        ends += torch.aminmax(flat[stretch.at_bytes // width : (stretch.at_bytes + stretch.size_bytes) // width])
    is_sound = torch.isfinite(torch.stack(ends)).view(-1, 2).all(1).tolist()  # one wait for the device
    for (shard, stretch), sound in zip(parts, is_sound, strict=True):
        if not sound:
            path = Path(shard.stamp.path)
            places = {tensor.offset_bytes: name for name, tensor in SafetensorsFile(path).tensors.items()}
            raise ModelError(path, f"tensor {places[stretch.offset_bytes]}: a value is not a finite number")


def logged(name: str, progress: Progress | None, clock_s: Callable[[], float] = time.monotonic) -> Progress:
    """Return a progress that passes on what it hears, and logs it whenever another tenth of all is there."""
    began_s, tenths = clock_s(), 0

    def hear(done: int, total: int) -> None:
        nonlocal tenths
        if (now := 10 * done // max(1, total)) > tenths:
            tenths = now
            rate = done / max(1e-9, clock_s() - began_s)
            log.info("weights of %s: %d %% of %.2f GB read, %.2f GB/s", name, 10 * tenths, total / 1e9, rate / 1e9)
        if progress is not None:
            progress(done, total)

    return hear
