"""Recording while the worker's other threads use the device."""

import threading

import pytest
import torch

from engine.backends.gpu.graphs import CudaRecorder

pytestmark = pytest.mark.gpu


def test_a_recording_is_not_spoilt_by_another_threads_looks() -> None:
    """Guards a recording while another thread looks at its events, allocates and copies: by default CUDA refuses both
    it and the recording."""
    device = torch.device("cuda", 0)
    x = torch.zeros(64, device=device)
    looks, failures, stopping = [0], list[Exception](), threading.Event()

    def look() -> None:
        stream = torch.cuda.Stream(device)
        try:
            while not stopping.is_set():
                with torch.cuda.stream(stream):
                    event = torch.cuda.Event()
                    torch.tensor([1, 2, 3]).to(device)
                    event.record(stream)
                    while not event.query():
                        pass
                looks[0] += 1
        except Exception as error:
            failures.append(error)

    def work() -> torch.Tensor:
        y = x
        for _ in range(200):
            y = y + 1
        return y

    other = threading.Thread(target=look)
    other.start()
    try:
        recorder = CudaRecorder(device)
        for number in range(20):
            recording = recorder.record(work)
            x.fill_(float(number))
            recording.replay()
            assert recording.result.tolist() == [200.0 + number] * 64
    finally:
        stopping.set()
        other.join()
    assert not failures and looks[0] > 20
