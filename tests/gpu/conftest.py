"""The suites of `tests/transfer` with blocks in a GPU's memory and the real libraries, two processes on one card."""

from collections.abc import Iterator

import pytest

from tests.transfer.conftest import Process, Rig, RigFactory, content, end


@pytest.fixture(scope="session")
def gpu_spares() -> Iterator[list[Process]]:
    spares: list[Process] = []
    yield spares
    for process in spares:
        end(process)


@pytest.fixture
def make_rig(gpu_spares: list[Process]) -> Iterator[RigFactory]:
    factory = RigFactory(gpu_spares, "cuda:0")
    yield factory
    for rig in factory.rigs:
        rig.close()


@pytest.fixture(params=["cuda_ipc", "nccl"])
def rig(request: pytest.FixtureRequest, make_rig: RigFactory) -> Rig:
    return make_rig(request.param, in_process=False)


@pytest.fixture
def pattern() -> object:
    return content
