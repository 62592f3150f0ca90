"""What a router and the process that tries out its constraints say to each other, and what one trial may take."""

import struct

import msgspec

from engine.types import Constraint

LENGTH = struct.Struct("<I")
"""Stands before each message."""
MEMORY_BYTES = 256_000_000
"""Beyond what the process has when it begins to answer."""
CPU_S = 1
"""From the question to its answer."""


class ConstraintTrial(msgspec.Struct, frozen=True):
    constraint: Constraint


class TrialVerdict(msgspec.Struct, frozen=True):
    """Says of a constraint that can be kept what workers are told (EBNF has become Lark), and else what is wrong."""

    constraint: Constraint | None
    error: str = ""
