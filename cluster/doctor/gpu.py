"""The doctor's checks of GPUs: driver, PyTorch, peer access between them, NCCL and CuPy."""

from collections.abc import Iterator, Mapping
from importlib import metadata
from itertools import permutations
from pathlib import Path

from cluster.doctor.check import Check
from transfer.config import without_handles

CUPY = ("cupy-cuda13x", "cupy-cuda12x")


def gpu_checks(
    wanted: str = "", device: Path = Path("/dev/nvidiactl")
) -> Iterator[Check]:
    """Check this host's GPUs; without one there is one line. torch is imported only with one. `wanted`: the setting by
    which workers of this host want one, if any."""
    if not device.exists():
        if wanted:
            fix = "install NVIDIA's driver, give the container its GPUs, or take the device cpu"
            yield Check("gpu", "fail", f"none, and {wanted}", fix)
        else:
            yield Check("gpu", "ok", "none: workers use the CPU kernels")
        return
    import torch

    if torch.version.cuda is None:
        fix = "install the CUDA build of PyTorch (without --extra-index-url .../cpu)"
        yield Check("gpu", "fail", f"there is one, and torch {torch.__version__} has no CUDA", fix)
        return
    if not torch.cuda.is_available():
        fix = "compare nvidia-smi's driver with the CUDA of this PyTorch; update the driver"
        found = f"torch for CUDA {torch.version.cuda} cannot use the driver"
        yield Check("gpu", "fail", found, fix)
        return
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(at) for at in range(count)})
    yield Check("gpu", "ok", f"{count} × {', '.join(names)}, CUDA {torch.version.cuda}")
    yield _peers(count)
    yield _nccl()
    yield _cupy()


def allocator_checks(is_exported: bool, environ: Mapping[str, str]) -> Iterator[Check]:
    """Warn, in one line, where workers of this host are to read each other's blocks and the allocator does not allow
    it."""
    why = without_handles(environ) if is_exported else ""
    if why:
        found, _, fix = why.rpartition("; ")
        yield Check("gpu allocator", "fail", found, fix)


def _peers(count: int) -> Check:
    import torch

    pairs = list(permutations(range(count), 2))
    if not pairs:
        return Check("gpu peer access", "ok", "one GPU: nothing to reach")
    apart = [f"{a}→{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if not apart:
        return Check("gpu peer access", "ok", f"all {len(pairs)} directions")
    fix = "blocks go through host memory there; check nvidia-smi topo -p2p r, ACS and IOMMU settings"
    return Check("gpu peer access", "warn", f"not {', '.join(apart)}", fix)


def _nccl() -> Check:
    import torch

    if not torch.distributed.is_nccl_available():
        return Check("nccl", "fail", "this PyTorch has none", "install the CUDA build of PyTorch")
    version = torch.cuda.nccl.version()
    return Check("nccl", "ok", ".".join(map(str, version)))


def _cupy() -> Check:
    for package in CUPY:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            fix = "install the one for this driver's CUDA: pip install 'headrace[cuda12]' or [cuda13]"
            return Check("cupy", "fail", f"{package} {version}: {error}", fix)
        return Check("cupy", "ok", f"{package} {version}")
    fix = "pip install 'headrace[cuda12]' or 'headrace[cuda13]'"
    return Check("cupy", "warn", "not installed: no transfers over NCCL", fix)
