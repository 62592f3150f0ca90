"""Request traces of prompts as blocks: reading them, and the requests that they stand for.

One JSON object a line: `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids`, one per 512-token
block of the prompt, the last of which may be partly filled; equal ids mean equal content after equal content. This is
the form in which Mooncake (Qin et al. 2025) published its traces. Files that end in `.xz` are compressed.
"""

import lzma
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from cluster.bench.workloads import LoadSession, LoadTurn

BLOCK_TOKENS = 512


class TraceRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> list[TraceRow]:
    """Read all rows of a file; empty lines are passed over.

    Raises OSError, and ValueError that names the line which has another form, or is at odds with itself.
    """
    packed = path.read_bytes()
    try:
        text = lzma.decompress(packed) if path.suffix == ".xz" else packed
    except lzma.LZMAError as error:
        raise ValueError(f"{path}: {error}") from error
    decode = msgspec.json.Decoder(TraceRow).decode
    rows = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: values are nested too deeply") from error
        if wrong := _fault(row):
            raise ValueError(f"{path}, line {number}: {wrong}")
        rows.append(row)
    return rows


def span_s(rows: Sequence[TraceRow]) -> float:
    """Return the seconds from the first arrival to the last."""
    times = [row.timestamp for row in rows]
    return (max(times) - min(times)) / 1000


def replay(
    rows: Sequence[TraceRow], speed: float, seed: str, token_low: int, token_high: int
) -> list[LoadSession]:
    """Return a session of one request for each row, in order of time, the first one at zero. Equal block ids are equal
    tokens from [`token_low`, `token_high`) for the same seed."""
    blocks: dict[int, array[int]] = {}
    ordered = sorted(rows, key=lambda row: row.timestamp)
    made = []
    for row in ordered:
        for block in row.hash_ids:
            if block not in blocks:
                ids = Random(f"{seed}/{block}").choices(range(token_low, token_high), k=BLOCK_TOKENS)
                blocks[block] = array("I", ids)
        whole, rest = divmod(row.input_length, BLOCK_TOKENS)
        pieces = [blocks[block] for block in row.hash_ids[:whole]]
        if rest:
            pieces.append(blocks[row.hash_ids[whole]][:rest])
        begins_s = (row.timestamp - ordered[0].timestamp) / 1000 / speed
        made.append(LoadSession(begins_s, (LoadTurn(tuple(pieces), row.output_length),)))
    return made


def _fault(row: TraceRow) -> str:
    if not 0 <= row.timestamp < math.inf or min(row.input_length, row.output_length) < 0:
        return "a time or a length below zero"
    needed = -(-row.input_length // BLOCK_TOKENS)
    if len(row.hash_ids) != needed:
        return f"{len(row.hash_ids)} hash_ids, and {row.input_length} tokens are {needed} blocks of {BLOCK_TOKENS}"
    return ""
