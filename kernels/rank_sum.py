# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sums over ranks that have a device each, in one launch, over memory that all of their devices map:

    x = ((x of rank 0 + x of rank 1) + x of rank 2) ..     in 32 bits, rounded once

so the bits are the same on every rank, and those of parts that are added up in any other way in this order.

A rank's memory has a flag for each program and rank, and two slots for each program. A program is one tile of x, the
same elements on every rank, and has to do with no other program of any rank:

    1  x is copied to this rank's own slot, of this step's parity
    2  every rank's flag of this one is set to the step (release, system): whoever sees it sees the slot
    3  this rank's own flags are waited for until all have come to the step (acquire, system)
    4  all ranks' slots are read and added up in the order of the ranks; x is overwritten

Two slots are enough. Rank r overwrites, at step s, the slot of step s - 2. It is there because all flags have come to
s - 1 in its own step before; rank q sets that flag in its launch of step s - 1, which begins when its launch of step
s - 2 has ended, and with it all that q reads of that slot. So these launches follow each other on one stream, and none
may begin before the one before it has ended (no programmatic dependent launch). With one slot, q may still read step
s - 1 while r, which has what it needs, writes step s.

A program of one rank waits for the same program of all others, and a device may have no room for all of a launch at
once: it begins them in order, as GPUs do, so that the first that has not ended is running on every rank.

The step is counted on the device, so that a recorded launch counts on with each replay. Nobody waits for ever: a
program gives up where the host asks for it (`notes[0]`, which it looks at every 256 polls), or after `limit` polls.
Then it leaves NaN in x, for no answer may be made of parts that did not come; says in `notes[1]` which rank is missing;
and neither writes to its slot nor tells nor waits in any later launch, so that whoever waits for this rank finds it
missing, too. Warps look at the host's word one by one: one that finds it set may leave its NaN while the others still
find all parts, and nothing is noted. So whoever sets it takes nothing of what runs.

A flag is set in the memory of another device, by an exchange: the link between the two must have native atomics.
Source: one-shot all-reduce over mapped memory, as in vLLM's `custom_all_reduce.cuh`. Specification:
`engine.model.reduction.add_in_order`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.configs import KernelConfig
from kernels.launch import check_interpretable

PART_BYTES = 4096
"""The part of x that one program adds up."""
POLLS = 1 << 30
"""How often a program looks for flags before it gives up by itself: by what a look at an L2 cache takes (0.3 to 2 µs on
such devices, not measured here) five minutes to half an hour. Nobody should come to that: hosts ask before."""


@triton.jit(do_not_specialize=["count", "limit"])
def rank_sum_kernel(
    x_ptr,
    buffers_ptr,
    steps_ptr,
    notes_ptr,
    count,
    limit,
    FLAGS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PAD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    UNIT: tl.constexpr,
):
    program = tl.program_id(0)
    elements = tl.arange(0, TILE)
    inside = program * TILE + elements < count * UNIT
    before = tl.load(steps_ptr + program)
    step = before + 1
    slot = FLAGS + (step % 2 * PROGRAMS + program) * PART
    own = tl.load(buffers_ptr + RANK)
    ranks = tl.arange(0, PAD)
    there = ranks < RANKS

    x = tl.load(x_ptr + program * TILE + elements, mask=inside)
    tl.store(tl.multiple_of((own + slot).to(x_ptr.dtype), 16) + elements, x, mask=before >= 0)
    tl.debug_barrier()  # all threads have written before one tells

    flags = tl.load(buffers_ptr + ranks, mask=there, other=0).to(steps_ptr.dtype)
    tells = there & (before >= 0)
    tl.atomic_xchg(flags + program * RANKS + RANK, step, mask=tells, sem="release", scope="sys")

    awaited = own.to(steps_ptr.dtype) + program * RANKS + ranks
    seen = tl.atomic_add(awaited, 0, mask=there, sem="acquire", scope="sys")
    polls = tl.where(before < 0, limit, 0)
    while (tl.min(tl.where(there, seen, step), 0) < step) & (polls < limit):
        seen = tl.atomic_add(awaited, 0, mask=there, sem="acquire", scope="sys")
        polls += 1
        asked = tl.load(notes_ptr, mask=polls % 256 == 0, other=0, volatile=True)
        polls = tl.where(asked != 0, limit, polls)
    missing = tl.max(tl.where(there & (seen < step), ranks + 1, 0), 0)
    came = (missing == 0) & (before >= 0)
    tl.debug_barrier()  # no thread reads before one has seen all flags

    total = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(RANKS):
        buffer = tl.load(buffers_ptr + rank)
        part = tl.load(tl.multiple_of((buffer + slot).to(x_ptr.dtype), 16) + elements).to(tl.float32)
        total = part if rank == 0 else total + part
    total = tl.where(came, total, float("nan"))
    tl.store(x_ptr + program * TILE + elements, total.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(steps_ptr + program, tl.where(came, step, -1))
    tl.store(notes_ptr + 1, missing, mask=(missing > 0) & (before >= 0))


def programs_of(most_bytes: int) -> int:
    """Return the programs that add up a tensor of so many bytes, of which each has a step."""
    return triton.cdiv(most_bytes, PART_BYTES)


def flag_bytes(ranks: int, programs: int) -> int:
    """Return where the slots begin in a rank's memory, behind a flag for each program and rank: at a whole line."""
    return triton.cdiv(8 * ranks * programs, 128) * 128


def buffer_bytes(ranks: int, most_bytes: int) -> int:
    """Return the size of each rank's memory for sums of up to `most_bytes`; it is zero before the first."""
    programs = programs_of(most_bytes)
    return flag_bytes(ranks, programs) + 2 * PART_BYTES * programs


def rank_sum(
    x: Tensor, buffers: Tensor, steps: Tensor, notes: Tensor, rank: int, config: KernelConfig, limit: int = POLLS
) -> None:
    """Write the sum of all ranks' `x` `[n]`, contiguous, floating, into it. All ranks launch it for equal sizes in the
    same order, each on one stream. `buffers`: int64 `[ranks]`, where each rank's memory of `buffer_bytes` is mapped
    here; `steps`: int64 `[programs]`, of this rank, zero before the first; `notes`: int32 `[2]`, of the host, mapped by
    the device: whether to give up, and what was given up on, a rank's number and 1. Raises ValueError for an x that is
    too large, or not of one piece."""
    programs, count = len(steps), x.numel()
    unit = 1 if count % 16 else 16  # masks of whole vectors, without another kernel for every count
    launched = programs_of(x.nbytes)
    if launched > programs or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(f"{x.dtype} {tuple(x.shape)} for sums of up to {programs * PART_BYTES} bytes")
    check_interpretable(x)
    if not count:
        return
    ranks = len(buffers)
    rank_sum_kernel[(launched,)](
        x,
        buffers,
        steps,
        notes,
        count // unit,
        limit,
        FLAGS=flag_bytes(ranks, programs),
        RANK=rank,
        RANKS=ranks,
        PAD=triton.next_power_of_2(ranks),
        PROGRAMS=programs,
        TILE=PART_BYTES // x.element_size(),
        PART=PART_BYTES,
        UNIT=unit,
        num_warps=config.warps,
        num_stages=config.stages,
    )
