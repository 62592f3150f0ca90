"""Six shapes of work for the ablation, small enough for two cores: who shares what with whom. Made from a seed."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    prompt: list[int]
    answer: int
    sample_of: int = -1
    """The position of the request with the same prompt that it is a further sample of."""


def _words(random: Random, count: int) -> list[int]:
    return [random.randrange(100, 250) for _ in range(count)]


def unique(random: Random) -> list[AskedPrompt]:
    """Make prompts with nothing in common, and answers of all lengths."""
    return [AskedPrompt(_words(random, 96), random.choice((4, 8, 32))) for _ in range(8)]


def few_shot(random: Random) -> list[AskedPrompt]:
    """Put one set of examples before every question; three sets take turns."""
    sets = [_words(random, 128) for _ in range(3)]
    return [AskedPrompt(sets[at % 3] + _words(random, 16), 8) for at in range(9)]


def agent(random: Random) -> list[AskedPrompt]:
    """Make two agents of four turns: each turn reads all before it again; a hundred tokens in for one out."""
    pasts = [_words(random, 160) for _ in range(2)]
    turns = []
    for _ in range(4):
        for at in range(2):
            pasts[at] = pasts[at] + _words(random, 40)
            turns.append(AskedPrompt(pasts[at], 3))
    return turns


def long_document(random: Random) -> list[AskedPrompt]:
    """Ask four questions about one text."""
    text = _words(random, 400)
    return [AskedPrompt(text + _words(random, 12), 8) for _ in range(4)]


def self_consistency(random: Random) -> list[AskedPrompt]:
    """Draw four samples of each of two prompts."""
    asked: list[AskedPrompt] = []
    for _ in range(2):
        prompt = _words(random, 120)
        first = len(asked)
        asked += [AskedPrompt(prompt, 16, -1 if n == 0 else first) for n in range(4)]
    return asked


def json_shaped(random: Random) -> list[AskedPrompt]:
    """Put a schema before every short text; answers have very different lengths."""
    schema = _words(random, 80)
    return [AskedPrompt(schema + _words(random, 24), random.choice((4, 12, 40))) for _ in range(8)]


SHAPES = {
    "unique": unique,
    "few-shot": few_shot,
    "agent": agent,
    "long document": long_document,
    "self-consistency": self_consistency,
    "JSON-shaped": json_shaped,
}
