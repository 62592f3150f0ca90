"""What every test may use, and the rule that GPU tests skip themselves where there is no GPU."""

import ctypes
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.gpu.absent import stand_in
from tests.quick_interpreter import quicken

# Two processes of tests on two cores: threads of torch that wait for each other would take them for nothing.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine with a GPU may lack packages that the workers import (`tests/gpu`); before anything of ours is imported.
stand_in()

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

ALONE = tuple(
    f"tests/{name}/" for name in ("cluster", "deploy", "docs", "integration", "router", "transfer/nccl", "worker")
)
"""Folders whose tests start clusters or look at the clock."""


def has_gpu() -> bool:
    """Say whether torch sees a GPU; torch is imported only where there is a driver. Device files say less: they are
    made when somebody first asks, and a card that is there may be hidden."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


# Without a GPU, Triton kernels run in its interpreter, which must be chosen before anything imports triton (as
# transformers does, and torch does not): it replaces the language, not the launch.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"


MARKED = re.compile(r"(slow|parity|chaos|observe|rayup|clients)( and not .*)?")
"""What `make slow` and its like select, by the mark that a test must have."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what has no test with the mark that is asked for: to import five hundred files takes half a minute.
    `tests/test_marks.py` holds that these marks stand in the files of their tests."""
    wanted = MARKED.fullmatch(config.option.markexpr)
    if wanted and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return True if f"mark.{wanted[1]}" not in collection_path.read_text() else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    # A plan carries nothing out, so it may have tests of a GPU anywhere.
    if not gpu_items or config.option.setupplan:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup() -> None:
    # Nobody imports triton for this: by now, who needs it has.
    quicken()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`make test`: one process takes the tests of `ALONE`, in order, so that no two are in each other's way; the other
    takes the rest, file by file. `make slow`, most of which is theirs: no two of one folder."""
    from xdist.scheduler import LoadScopeScheduling

    is_slow = config.option.markexpr.startswith("slow")

    class InTwoLines(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ALONE):
                return nodeid.split("/")[1] if is_slow else "alone"
            return nodeid.partition("::")[0]

    return InTwoLines(config, log)


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of prepared models that holds the demo's. Nobody changes what is in it."""
    from engine.model.prepared.cache import prepare

    folder = tmp_path_factory.mktemp("models")
    prepare(None, folder)
    return folder


@pytest.fixture(scope="session")
def demo_model(demo_cache: Path) -> Path:
    """The folder of the demo's prepared model."""
    from engine.model.prepared.cache import prepare

    return prepare(None, demo_cache)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port on loopback that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
