"""What one check of the doctor found, and what to do about it."""

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """The result of one check. `fix` is empty where nothing is to be done."""

    name: str
    level: Level
    found: str
    fix: str = ""
