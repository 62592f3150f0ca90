"""Opens one rank's part of a model on its device: the link to the other ranks, the weights that it has, and what makes
its pool of its own heads with the runner over it."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.backends.gpu.memory import GpuMemory
from engine.backends.gpu.mixed_graphs import MOST_TOKENS
from engine.backends.gpu.runner import PoolRanks, TritonOpener
from engine.config import EngineConfig, StepLimits
from engine.kv.layout import KVLayout
from engine.model.config import ModelConfig, Progress
from engine.model.llama import Llama, load_model
from engine.model.split import Share
from engine.ranks.device_sums import DeviceSums
from engine.ranks.devices import Devices, RankLink
from engine.ranks.group import RankGroup
from engine.ranks.one_shot import OneShotSums, open_one_shot
from engine.ranks.sums import RankError


@dataclass(frozen=True, slots=True)
class DevicePart:
    """What a rank computes with. `layout`: of a block of its heads; `fingerprint`: of the whole model."""

    model: Llama
    layout: KVLayout
    fingerprint: str
    weights_bytes: int
    link: RankLink
    one_shot: OneShotSums | None
    opener: TritonOpener
    memory: GpuMemory


def of_each(config: EngineConfig) -> EngineConfig:
    """Return the config of one rank: `pool_bytes` is of all of them together."""
    if config.pool_bytes == "auto":
        return config
    return msgspec.structs.replace(config, pool_bytes=config.pool_bytes // config.tensor_parallel)


def check_devices(config: EngineConfig) -> None:
    """Raise ValueError, by name, for what ranks with a device each cannot do."""
    if config.kernels != "triton":
        raise ValueError(f"engine.tensor_parallel: ranks on {config.device} have triton kernels, not {config.kernels}")
    if config.rank_pools == "shared":
        raise ValueError(f"engine.rank_pools: shared; each rank on {config.device} has a pool of its own")
    if config.speculation == "model":
        raise ValueError("engine.speculation: model; a draft model is on the CPU, and these ranks are not")
    if config.sum_slices > 1:
        raise ValueError("engine.sum_slices: is for one process, and engine.tensor_parallel asks for more")


def open_device_part(
    config: EngineConfig,
    rank: int,
    name: bytes,
    limits: StepLimits | None,
    devices: Devices,
    links: Mapping[int, socket.socket],
    group: RankGroup | None = None,
    progress: Progress | None = None,
) -> DevicePart:
    """Join the others by `name`, which waits for them; then load. `links`: a socket to each other rank. `group`: at
    rank 0, of the others. Raises ValueError, ModelError, RankError."""
    from engine.ranks.device_group import DeviceGroup

    torch.set_num_threads(config.threads)
    ranks, model_dir = config.tensor_parallel, Path(config.model_dir)
    share, shape = Share(rank, ranks), ModelConfig.load(model_dir)
    device = devices.open(config, rank)
    try:
        link = devices.join(name, rank, ranks, lambda: group is not None and group.has_lost)
        one_shot, sums_by = open_one_shot(share, config.one_shot_bytes, devices, device, links)
    except RankError as error:
        raise error if group is None else group.explained(error) from error
    if group is not None:
        group.sums_by = sums_by
    sums = DeviceSums(share, (shape.heads, shape.kv_heads), shape.vocab, link, one_shot=one_shot)
    model = load_model(model_dir, packed=False, device=device, progress=progress, ranks=sums)
    whole = shape.kv_layout(config.block_size, config.kv_dtype_of(config.dtype), config.groups_layers)
    layout = whole.restricted(share.kv_heads(shape))
    others: PoolRanks | None = None if group is None else DeviceGroup(group, link, ranks, one_shot)
    opener = TritonOpener(
        *(model, layout, limits or StepLimits(chunk_tokens=16), devices.recorder(link), config.prefill_kernel),
        mixed_tokens=MOST_TOKENS,
        ranks=others,
    )
    weights_bytes = model.weights_bytes + model.table_bytes
    return DevicePart(model, layout, shape.fingerprint, weights_bytes, link, one_shot, opener, devices.memory())
