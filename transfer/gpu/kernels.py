"""The launches by which a device moves blocks: the kernels of `kernels.block_copy` and `kernels.block_convert`, with
block numbers brought over from the host."""

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

    def copy(
        self,
        source: Tensor,
        target: Tensor | None,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        shape: BlockShape,
        tokens: Sequence[int] | None = None,
    ) -> Tensor | None:
        numbers = [source_blocks, target_blocks, tokens or source_blocks]
        rows = torch.tensor(numbers, dtype=torch.int32).to(self._device)
        valid = None if tokens is None else rows[2]
        return copy_blocks(source, target, rows[0], rows[1], shape, self._config, tokens=valid)

    def convert(
        self, source: KVPool, target: KVPool, source_blocks: Sequence[int], target_blocks: Sequence[int]
    ) -> None:
        numbers = torch.tensor([source_blocks, target_blocks], dtype=torch.int32).to(self._device)
        eight = source if source.scales is not None else target
        dtype = str(eight.payload.dtype).removeprefix("torch.")
        key = ConfigKey("convert_blocks", source.head_dim, 0, source.block_size, dtype, self._arch)
        convert_blocks(source, target, numbers[0], numbers[1], config_for(key))
