"""The sampling that a model's publisher recommends: from its files, and for a few that say nothing from a table.

Without it a server would sample at temperature 1.0 from the whole vocabulary, which small models answer with gibberish.
A value that is out of range, or no number, is left out with a warning: a wrong recommendation must not stop a model
from being served.
"""

import logging
import re
from collections.abc import Callable, Mapping

import msgspec

from engine.plan import SAMPLING_RANGES
from engine.types import SamplingParams

log = logging.getLogger(__name__)

MAX_TOP_K = 2**31 - 1

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""What a GGUF file's metadata call the values that both it and this engine have."""

CARDS: tuple[tuple[str, SamplingParams], ...] = (
    (r"smollm2-.*instruct", SamplingParams(temperature=0.2, top_p=0.9)),
    (r"(meta-)?llama-3.*instruct", SamplingParams(temperature=0.6, top_p=0.9)),
    (r"qwen3-(?!.*base).*", SamplingParams(temperature=0.6, top_p=0.95, top_k=20)),
)
"""What the model cards and published settings of these families say, by a pattern of the model's name in small letters:
for files that have lost it, as GGUF files of before 2025 have, or never had it."""


def from_generation_config(raw: Mapping[str, object]) -> SamplingParams | None:
    """Read the content of a generation_config.json; None where it says nothing of sampling. `do_sample: false` stands
    for temperature 0."""
    found = _sound({name: raw.get(name) for name in msgspec.structs.asdict(SamplingParams())}, "generation_config.json")
    if raw.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingParams(**found) if found else None  # type: ignore[arg-type]


def from_gguf(get: Callable[[str], object]) -> SamplingParams | None:
    """Read metadata of a GGUF file with `get`, which returns None for what is not there; None where it says nothing of
    sampling."""
    found = _sound({name: get(key) for name, key in GGUF_KEYS.items()}, "the metadata")
    return SamplingParams(**found) if found else None  # type: ignore[arg-type]


def from_card(name: str) -> SamplingParams:
    """Return what the table says of the model of this name; what is not in it is sampled as it is."""
    for pattern, said in CARDS:
        if re.fullmatch(pattern, name.lower()):
            return said
    return SamplingParams()


def _sound(said: Mapping[str, object], where: str) -> dict[str, float | int]:
    """Return the values that can be used."""
    found: dict[str, float | int] = {}
    for name, value in said.items():
        if value is None:
            continue
        low, high = SAMPLING_RANGES.get(name, (0, MAX_TOP_K))
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            found[name] = int(value) if name == "top_k" else float(value)
        else:
            log.warning("%s: %s is %r, which is not used: it must be %g to %g", where, name, value, low, high)
    return found
