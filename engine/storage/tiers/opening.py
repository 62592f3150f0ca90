"""A worker's lower tiers, opened from their config: the index, and who moves the bytes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from engine.config import TierConfig
from engine.device import EngineDevice
from engine.kv.tiers.commands import TierEvent, TiersDied
from engine.kv.tiers.tiers import Tiers
from engine.storage.paged import PoolPart
from engine.storage.tiers.mover import HostMemory, TierMover
from engine.storage.tiers.segments import SegmentFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiering:
    """`tiers` is for the manager, `mover` for the engine; the mover's thread does not run yet."""

    tiers: Tiers
    mover: TierMover


def open_tiers(
    config: TierConfig,
    device: EngineDevice,
    name: str,
    on_event: Callable[[TierEvent | TiersDied], None],
    needed_by: str = "",
) -> Tiering | None:
    """Open the tiers that `config` asks for; None where there is to be no host tier. `name` is the worker's, for its
    folder in `disk_dir`; `needed_by`: the setting that takes a host tier, if one does.

    A folder that cannot be had leaves the disk tier out, with a warning; a rank's pool that this process
    cannot map, all tiers. Raises ValueError where these are needed, and for a disk tier without a folder, or without a
    host tier of at least four blocks.
    """
    slots = config.host_bytes // device.layout.block_bytes
    if config.disk_bytes and not config.disk_dir:
        raise ValueError("tiers.disk_dir: a disk tier needs a folder")
    if slots == 0 and not config.disk_bytes:
        return None
    try:
        parts = _parts(device)
    except ValueError as error:
        if needed_by:
            raise ValueError(f"{needed_by} takes a host tier, and this worker can have none: {error}") from error
        log.warning("no lower tiers: %s", error)
        return None
    tiers = Tiers(slots, device.layout.block_bytes, config.disk_bytes)
    folder = None
    if config.disk_bytes:
        try:
            path = Path(config.disk_dir).expanduser() / name
            folder = SegmentFolder(path, _kind(device), device.layout.block_bytes)
            found, torn = folder.scan()
        except OSError as error:
            tiers.disable_disk(str(error))
            log.warning("no disk tier: %s", error)
        else:
            tiers.counts.torn_segments = torn
            tiers.adopt(found)
            log.info("disk tier: %d segments found, %d dropped", len(found), torn)
    host = HostMemory(slots, device.layout.block_bytes, pinned=device.kv.device != "cpu")
    return Tiering(tiers, TierMover(parts, host, folder, on_event))


def _parts(device: EngineDevice) -> list[PoolPart]:
    """Return where the blocks of a worker lie: in its pool, or in those of its ranks. Raises ValueError."""
    if device.ranks is None or not device.ranks.pools:
        return [PoolPart(0, device.kv.memory)]
    pools = [device.kv.memory, *(mapped() for mapped in device.ranks.pools)]
    starts = (heads.start * device.layout.head_bytes for heads in device.ranks.heads)
    return [PoolPart(start, memory) for start, memory in zip(starts, pools, strict=True)]


def _kind(device: EngineDevice) -> bytes:
    """Return what the bytes of a block depend on, besides its tokens and all before them."""
    told = f"{device.fingerprint}|{device.layout.describe()}|{device.is_deterministic}|{device.arithmetic}"
    return blake2b(told.encode(), digest_size=16).digest()
