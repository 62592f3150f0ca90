"""Threads that help with a call: a process does without them where there are none to be had. Each case in a process of
its own, since it spoils it."""

import subprocess
import sys

import pytest

from kernels.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built here")

BEGIN = """
import os, resource, signal, time
import torch
from kernels.native import native
from kernels.panels import pack_plain

torch.set_num_threads(1)
kernels, weight, x = native(), pack_plain(torch.randn(1280, 96)), torch.randn(16, 96)

def product(threads):
    kernels.threads = lambda: threads
    return kernels.linear(x, weight)

want = product(1)
"""


def told(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_more_threads_to_be_had() -> None:
    """Guards a worker that ends where its control group allows no more threads; here there is no memory for stacks."""
    program = """
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20),) * 2)
print(torch.equal(product(8), want), len(os.listdir("/proc/self/task")) - before)
"""
    assert told('before = len(os.listdir("/proc/self/task"))' + program) == "True 0"


def test_a_forked_child_computes() -> None:
    """Guards a child that waits for helpers, asleep or at work, which only its parent has."""
    program = """
ended = []
for i in range(120):
    product(8)
    rested_s = time.perf_counter() + i % 10 * 4e-5
    while time.perf_counter() < rested_s:
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(0 if all(torch.equal(product(8), want) for _ in range(5)) else 1)
    ended.append(os.waitpid(child, 0)[1])
    if ended[-1]:
        break
print(set(ended))
"""
    assert told(program) == "{0}"


def test_more_threads_than_cores_cost_little() -> None:
    """Guards helpers that keep the caller from its core while they wait for work: processor time on one core."""
    program = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def spent_s(threads):
    product(threads)
    began_s = time.process_time()
    for _ in range(200):
        product(threads)
    return time.process_time() - began_s
print(min(spent_s(4) for _ in range(5)) / min(spent_s(1) for _ in range(5)))
"""
    assert float(told(program)) < 1.35
