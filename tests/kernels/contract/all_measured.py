"""Many cases of the contract at a time, each measured in one of a pool of processes."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.kernels.contract.cases import cases
from tests.kernels.contract.check import Counts, broken_rules
from tests.kernels.contract.measure import measure


def all_measured(arches: Sequence[int], only: str) -> Iterator[tuple[int, str, Counts, list[str]]]:
    """Every case whose name contains `only`, as many at a time as there are processors: its architecture and name,
    what was counted, and what breaks a house rule."""
    wanted = [(arch, case.name) for arch in arches for case in cases(arch) if only in case.name]
    workers = max(1, min(len(os.sched_getaffinity(0)), len(wanted)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for (arch, name), found in zip(wanted, pool.map(_measure, wanted), strict=True):
            yield arch, name, *found


def _measure(wanted: tuple[int, str]) -> tuple[Counts, list[str]]:
    arch, name = wanted
    (case,) = (case for case in cases(arch) if case.name == name)
    counts = measure(case, arch)
    return counts, broken_rules(case, arch, counts)
