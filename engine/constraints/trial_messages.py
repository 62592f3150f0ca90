"""What a router and the process that tries out its constraints say to each other, and what one trial may take."""

import struct

import msgspec

from engine.types import Constraint

LENGTH = struct.Struct("<I")
"""Stands before each message."""
MEMORY_BYTES = 256 * 1024 * 1024
"""Beyond what the process has when it begins to answer."""
CPU_S = 1


class Question(msgspec.Struct, frozen=True):
    constraint: Constraint


class Verdict(msgspec.Struct, frozen=True):
    """Of a constraint that can be kept, the one that workers are told: EBNF has become Lark. Else what is wrong."""

    constraint: Constraint | None
    error: str = ""
