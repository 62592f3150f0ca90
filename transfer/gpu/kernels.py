"""The launches by which a device moves blocks: the kernels of `kernels.block_copy` and `kernels.block_convert`, and the
way by which the host's numbers of blocks come to it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.block_convert import convert_blocks
from kernels.block_copy import copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import ConfigKey, config_for
from kernels.pool import KVPool


class DeviceKernels:
    """The kernels of one device; `arch` is its name in the table of configurations. All on the current stream; see
    `transfer.gpu.device.Device`."""

    def __init__(self, device: torch.device, arch: int) -> None:
        self._device = device
        self._arch = arch
        self._config = config_for(ConfigKey("copy_blocks", 0, 0, 0, "int64", arch))

    def numbers(self, *rows: Sequence[int]) -> Tensor:
        # Pageable memory would be copied at once, behind all that its stream has to do. Pinned memory is torch's own,
        # which it hands out again once the copy has ended.
        pinned = torch.tensor([list(row) for row in rows], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return pinned.to(self._device, non_blocking=True)

    def copy(
        self,
        source: Tensor,
        target: Tensor | None,
        source_blocks: Tensor,
        target_blocks: Tensor,
        shape: BlockShape,
        tokens: Tensor | None = None,
    ) -> Tensor | None:
        return copy_blocks(source, target, source_blocks, target_blocks, shape, self._config, tokens=tokens)

    def convert(self, source: KVPool, target: KVPool, source_blocks: Tensor, target_blocks: Tensor) -> None:
        eight = source if source.scales is not None else target
        dtype = str(eight.payload.dtype).removeprefix("torch.")
        key = ConfigKey("convert_blocks", source.head_dim, 0, source.block_size, dtype, self._arch)
        convert_blocks(source, target, source_blocks, target_blocks, config_for(key))
