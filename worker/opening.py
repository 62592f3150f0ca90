"""Opens what a worker of either role is made of. It is closed in the reverse order, also if opening fails half way."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from access.config import check_transport
from access.internal import internal_certificates
from access.page import guard_page
from access.tls import ends_s
from engine.backends.gpu.memory import device_memory
from engine.device import EngineDevice, open_device
from engine.handshake import Party, PartyRole, Secrets
from engine.kv.manager import KVCacheManager
from engine.loop import Inbox
from engine.messages import PROTOCOL, Hello, RankUse, WorkerInfo
from engine.model.config import Progress
from engine.storage.tiers.mover import TierMover
from engine.storage.tiers.opening import open_tiers
from engine.types import Incarnation, host_port
from telemetry.gpu_metrics import GpuMetrics, Nccl
from telemetry.metrics import WorkerMetrics
from telemetry.rank_metrics import RankMetrics
from transfer.config import TransferConfig
from transfer.handoff.commands import MoverEvent
from transfer.liveness import host_id
from transfer.ranks.links import FromMover, MoveLink
from transfer.ranks.movers import RankMovers, RankTransport, Way
from transfer.registry import open_transports
from transfer.transport import Transport
from worker.config import DecodeConfig, PrefillConfig
from worker.rank import PROGRAM as RANK_PROGRAM
from worker.rank_devices import CudaDevices
from worker.rpc import RpcLoop, dialable
from worker.streams import Readers, RouterStream, methods


@dataclass(frozen=True, slots=True)
class Parts:
    """The open parts of a worker; the threads of the two movers do not run yet, and nobody empties the inbox."""

    info: WorkerInfo
    hello: Hello
    """This worker's hello to other workers; the ways to its memory are added for each of them."""
    transports: Mapping[str, Way]
    transfer: TransferConfig
    device: EngineDevice
    kv: KVCacheManager
    tier_mover: TierMover | None
    """The lower tiers; None where there are none."""
    mover: RankMovers
    metrics: WorkerMetrics
    inbox: Inbox
    rpc: RpcLoop
    readers: Readers
    routers: dict[int, RouterStream]


def open_parts(
    role: PartyRole,
    name: str,
    config: PrefillConfig | DecodeConfig,
    host: str,
    port: int,
    secrets: Secrets,
    closing: ExitStack,
    progress: Progress | None = None,
) -> Parts:
    """Load the model, open pool, tiers, transports and metrics, compile all that can be, and listen for those that have
    one of `secrets`; `closing` closes all of it. `progress` hears of weights that are loaded, in bytes. Raises what
    `open_device` raises, ValueError for tiers, ranks or a host that cannot be, AccessError for a page that strangers
    could read, and for TLS that cannot be, and OSError for a taken port."""
    host, transfer = dialable(host), config.transfer
    guard = guard_page(config.access, host, name)
    certificates = internal_certificates(config.access)
    check_transport(config.access, transfer.transport, f"{role}.transfer.transport")
    incarnation = Incarnation(int.from_bytes(os.urandom(8), "little"))
    inbox = Inbox()

    engine, limits, host_bytes = config.engine, config.step_limits, config.tiers.host_bytes
    device = open_device(engine, limits, host_bytes, progress, transfer.device_bytes, CudaDevices(), RANK_PROGRAM)
    closing.callback(device.kv.close)
    if device.draft_kv is not None:
        closing.callback(device.draft_kv.close)
    if device.ranks is not None:
        closing.callback(device.ranks.close)
        device.ranks.watch(inbox.put)
    if device.matchers is not None:
        closing.callback(device.matchers.close)
        device.matchers.wake = partial(inbox.put, None)
    swaps = isinstance(config, DecodeConfig) and config.preemption == "swap"
    tiering = open_tiers(config.tiers, device, name, inbox.put, "decode.preemption: swap" if swaps else "")
    if tiering is not None:
        closing.callback(tiering.mover.stop)
    transports = open_transports(device.kv, incarnation, transfer, host)
    mover, ways = open_movers(device, transports, inbox.put, incarnation, transfer, host)
    closing.callback(mover.stop)
    mover.warm_up(transfer.wire)

    weights, ranks = {os.getpid(): device.memory.weights_bytes}, list[RankUse]()
    if device.ranks is not None:
        weights = dict(zip([os.getpid(), *device.ranks.pids], device.ranks.weights_bytes, strict=True))
        ranks = [RankUse(pid, nbytes, device.ranks.sums_by) for pid, nbytes in weights.items()]
    metrics = WorkerMetrics(device.model, name, role)
    closing.callback(metrics.close)
    metrics.certificates(partial(ends_s, guard.certificates if guard else None, certificates))
    metrics.opened(
        block_size=device.layout.block_size,
        blocks=device.blocks,
        dtype=device.layout.dtype,
        transport=transfer.transport,
        memory=msgspec.structs.asdict(device.memory),
    )
    RankMetrics(metrics.families, weights, device.ranks)
    nccl = cast("Nccl | None", transports.get("nccl"))
    GpuMetrics(metrics.families, partial(device_memory, device.kv.device), nccl, lambda: device.compilations.counts)

    rpc = RpcLoop(f"{name}-rpc", Party(role, name, incarnation), secrets, certificates)
    closing.callback(rpc.stop, 0.0)
    bound = rpc.start(host, port, methods(role, inbox.put))
    info = WorkerInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        address=host_port(host, bound),
        model=device.model,
        fingerprint=device.fingerprint,
        arithmetic=device.arithmetic,
        block_size=device.layout.block_size,
        blocks=device.blocks,
        host_blocks=0 if tiering is None else tiering.tiers.host.total,
        disk_blocks=0 if tiering is None else tiering.tiers.disk_blocks,
        context_tokens=device.context_tokens,
        adapters=sorted(device.adapters),
        chunk_tokens=limits.chunk_tokens,
        pid=os.getpid(),
        host=host_id(),
        metrics_address=host_port(host, metrics.serve(host, guard=guard)),
        memory=device.memory,
        ranks=ranks,
        protocol=PROTOCOL,
    )
    hello = Hello(
        info=info,
        layout=device.layout.describe(),
        endpoints=[],
        digest=transfer.digest_on(device.kv.device),
        digest_share=transfer.digest_share,
        wire=transfer.wire,
    )
    return Parts(
        info=info,
        hello=hello,
        transports=ways,
        transfer=transfer,
        device=device,
        kv=device.manager(None if tiering is None else tiering.tiers, config.step_limits.chunk_tokens),
        tier_mover=None if tiering is None else tiering.mover,
        mover=mover,
        metrics=metrics,
        inbox=inbox,
        rpc=rpc,
        readers=Readers(hello, ways, mover.submit),
        routers={},
    )


def open_movers(
    device: EngineDevice,
    transports: Mapping[str, Transport],
    on_event: Callable[[MoverEvent], None],
    incarnation: Incarnation,
    config: TransferConfig,
    host: str,
) -> tuple[RankMovers, Mapping[str, Way]]:
    """Return the movers of a worker's pools, and the ways to them that its peers are told: those of rank 0, or of all
    ranks where each has a pool. Raises TransferError for a rank that cannot open its transports."""
    heads, links, wait_s = [device.layout.heads], dict[int, MoveLink[FromMover]](), 0.0
    if device.ranks is not None and device.ranks.moves:
        heads, wait_s = device.ranks.heads, device.ranks.wait_s
        links = {rank: MoveLink(sock, FromMover) for rank, sock in device.ranks.moves.items()}
    movers = RankMovers(transports, device.kv, device.layout, on_event, heads, links)
    movers.open(incarnation, config, host)
    return movers, {name: RankTransport(way, movers, heads, wait_s) for name, way in transports.items()}
