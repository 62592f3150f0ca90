"""What is shown of a GPU's memory and of NCCL: what the device and the transport say, zeros where there is neither."""

import pytest
import torch

from engine.backends.gpu.memory import device_memory
from kernels.compilations import Compilations
from telemetry.gpu_metrics import COMPILED, DEVICE_MEMORY, GpuMetrics
from telemetry.metrics import WorkerMetrics
from tests.telemetry.pages import Samples, samples
from tests.transfer.nccl.ends import Ends


def none_compiled() -> dict[str, int]:
    return Compilations().counts


def bytes_by_state(seen: Samples) -> dict[str, float]:
    return {
        state: seen["headrace_device_memory_bytes", (("state", state),)] for state in DEVICE_MEMORY
    }


def test_zeros_without_a_gpu() -> None:
    """Guards against panels that say "No data" on a laptop, and against a CPU worker that asks CUDA."""
    metrics = WorkerMetrics("m", "decode-0", "decode")
    GpuMetrics(metrics.families, lambda: device_memory("cpu"), None, none_compiled)
    seen = samples(metrics.render())
    assert set(bytes_by_state(seen).values()) == {0}
    for what in ("communicator", "slots"):
        assert seen["headrace_nccl_memory_bytes", (("what", what),)] == 0
    for what in ("built", "dropped", "lost"):
        assert seen["headrace_nccl_pairs_total", (("what", what),)] == 0
    assert seen["headrace_nccl_communicators", ()] == 0
    for phase in COMPILED:
        assert seen["headrace_kernel_compilations_total", (("phase", phase),)] == 0


def test_compilations_are_shown_by_when_they_were() -> None:
    """Guards the figure that must be 0: what is compiled before the worker is ready counts apart."""
    compilations = Compilations()
    assert tuple(compilations.counts) == COMPILED
    metrics = WorkerMetrics("m", "decode-0", "decode")
    GpuMetrics(metrics.families, dict, None, lambda: compilations.counts)
    for kernel in ("decode_kernel", "merge_kernel"):
        compilations.compiled(kernel)
    compilations.serve()
    compilations.compiled("sample_kernel")
    seen = samples(metrics.render())
    assert seen["headrace_kernel_compilations_total", (("phase", "start"),)] == 2
    assert seen["headrace_kernel_compilations_total", (("phase", "serving"),)] == 1


def test_gpu_memory_is_that_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a figure kept from the start, against free memory shown as used, and against another device's."""
    free = {"cuda:1": 60}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", {"cuda:1": 7}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {"cuda:1": 9}.__getitem__)
    metrics = WorkerMetrics("m", "decode-0", "decode")
    GpuMetrics(metrics.families, lambda: device_memory("cuda:1"), None, none_compiled)
    expected = {"tensors": 7, "reserved": 9, "used": 40, "total": 100}
    assert bytes_by_state(samples(metrics.render())) == expected
    free["cuda:1"] = 25
    assert bytes_by_state(samples(metrics.render())) == expected | {"used": 75}


def test_nccl_is_told_of_as_it_is() -> None:
    """Guards against a leak of communicators that nobody sees: made, counted, lost with their peer."""
    ends = Ends()
    try:
        one, other = ends.pair(1, 2)
        metrics = WorkerMetrics("m", "prefill-0", "prefill")
        GpuMetrics(metrics.families, dict, one.transport, none_compiled)
        ends.arrives(one, other, 7)
        seen = samples(metrics.render())
        assert seen["headrace_nccl_communicators", ()] == 1
        assert seen["headrace_nccl_pairs_total", (("what", "built"),)] == 1
        assert seen["headrace_nccl_memory_bytes", (("what", "slots"),)] > 0
        other.close()
        ends.all.remove(other)
        ends.until(lambda: one.transport.report.lost == 1)
        seen = samples(metrics.render())
        assert seen["headrace_nccl_communicators", ()] == 0
        assert seen["headrace_nccl_pairs_total", (("what", "lost"),)] == 1
    finally:
        ends.close()
