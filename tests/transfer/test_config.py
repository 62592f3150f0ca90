"""Which settings of PyTorch's allocator leave a pool without a handle, and whom that concerns."""

from typing import Any

import msgspec
import pytest

from cluster.processes.hosting import Hosted
from cluster.processes.spec import ChildSpec, LaunchError
from engine.config import EngineConfig
from tests.secrets_of_tests import SECRETS
from transfer.config import NcclConfig, TransferConfig, is_exported, without_handles
from worker.config import DecodeConfig


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments"),
        ("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8,expandable_segments: True", "expandable_segments"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2],backend:cudaMallocAsync", "backend:cuda"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", ""),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native,max_split_size_mb:128", ""),
        ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True", ""),
        ("PYTORCH_CUDA_ALLOC_CONF", "", ""),
    ],
)
def test_an_allocator_without_handles_is_told_from_its_settings(variable: str, value: str, option: str) -> None:
    why = without_handles({variable: value, "OTHER": "expandable_segments:True"})
    if not option:
        assert why == ""
    else:
        assert why.startswith(f"{variable} has {option}") and "take it out" in why


@pytest.mark.parametrize(
    ("device", "transport", "exported"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cuda:1", "cuda_ipc", True), ("cuda", "nccl", False)],
)
def test_only_pools_that_others_map_are_exported(device: str, transport: str, exported: bool) -> None:
    assert is_exported(device, TransferConfig(transport=transport)) is exported


class Server:
    """A worker that would start."""

    def __init__(self, *rest: Any) -> None:
        raise AssertionError("it was opened")


@pytest.mark.parametrize(("transport", "error"), [("auto", LaunchError), ("nccl", AssertionError)])
def test_a_worker_refuses_before_it_loads_a_model(
    transport: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the reason: minutes later the library says `invalid argument`."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    config = DecodeConfig(engine=EngineConfig(device="cuda"), transfer=TransferConfig(transport=transport))
    spec = ChildSpec(
        kind="decode", name="decode-0", factory=f"{__name__}:Server", config=msgspec.to_builtins(config)
    )
    with pytest.raises(error, match="it was opened" if error is AssertionError else "no IPC handle"):
        Hosted(spec, SECRETS)


def test_transports_take_what_their_config_says() -> None:
    """Guards a pool that leaves no room for slots and communicators, which are made when workers meet."""
    mib = 1 << 20
    assert TransferConfig().device_bytes == (4 * 32 + 16 * 4 * 2) * mib
    assert TransferConfig(transport="cuda_ipc").device_bytes == 0
    ring = NcclConfig(one_sided=True, communicators=2, put_bytes=8 * mib, piece_bytes=mib)
    assert TransferConfig(transport="nccl", nccl=ring).device_bytes == (4 + 2 * (8 + 32)) * mib
