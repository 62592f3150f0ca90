"""What the doctor found of one thing, and what to do about it."""

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """`fix` is empty where nothing is to be done."""

    name: str
    level: Level
    found: str
    fix: str = ""
