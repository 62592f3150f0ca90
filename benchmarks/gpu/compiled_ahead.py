"""Configurations compiled by a pool of processes before they are timed: into Triton's cache on disk, where the process
that times them finds them. Compiling takes a second each, and needs no card."""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.card import Card
from benchmarks.gpu.dry import Clock, compile_for_real
from engine.ranks.follower import end_with_parent
from kernels.configs import SHARED_BYTES, ConfigKey, KernelConfig

Answers = dict[KernelConfig, Future[str]]


@dataclass(frozen=True, slots=True)
class Target:
    """What is compiled for: the shapes of `card`, whose tensors have no memory, on a GPU of this compute capability."""

    card: Card
    capability: int


def target_of(card: Card) -> Target:
    """Return the target of the card, or that of a dry run, which has none."""
    major, minor = divmod(card.arch, 10)
    if card.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(card.device)
    return Target(replace(card, device=torch.device("meta"), timer=Clock()), 10 * major + minor)


class CompilePool:
    """Compiles configurations in as many processes as there are processors. An answer is why a configuration cannot be
    launched, or nothing.

    A configuration on which the compiler itself dies takes the processes with it: those that have no answer then are
    not compiled ahead, and those asked for later are, by new ones."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pool = self._start()

    def ask(self, key: ConfigKey, configs: Sequence[KernelConfig]) -> Answers:
        """Begin to compile; does not wait."""
        try:
            return {config: self._pool.submit(refusal, self._target, key, config) for config in configs}
        except BrokenProcessPool:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._start()
            return self.ask(key, configs)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _begin, (os.getpid(),))


def _begin(owner: int) -> None:
    """Prepare a process of the pool. It ends with the one whose pool it is, however that ends: left alone, it would
    wait for work for ever."""
    end_with_parent()
    if os.getppid() != owner:
        os._exit(1)
    compile_for_real()


def refusal(target: Target, key: ConfigKey, config: KernelConfig) -> str:
    """Compile all that the step of this key launches. Returns why it cannot be launched, or nothing."""
    from benchmarks.gpu.tuned_steps import step_of
    from kernels.compile_only import compile_only

    try:
        with compile_only(target.capability, SHARED_BYTES[target.card.arch]):
            step_of(target.card, key)(config)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
