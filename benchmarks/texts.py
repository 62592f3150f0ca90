"""Presets whose prompts are text, for servers that guess: random ids make a model repeat itself, and guesses right.

A prompt is a chat of one message, as the demo model's template writes it: a passage of this project's pages, each
beginning at a place of its own, and an instruction to write something new about it.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from cluster.bench.workloads import Kind, LoadSession, LoadTurn, Preset, Workload
from engine.text.bundle import TextModel
from engine.text.messages import ChatMessage, ChatPrompt

PAGES = Path(__file__).parents[1] / "docs"
LEAST = 300
"""Characters of a paragraph with which a passage may begin."""
NOT_PROSE = ("|", "#", "`", "<", "-", "1.", " ")
PASSAGE = "\N{SYMBOL FOR START OF TEXT}"
CHARACTERS = 16
"""So many of a page are read for each token that is wanted: far more than a token has."""
INSTRUCTIONS = (
    "Explain the passage to a new colleague in your own words.",
    "Write a letter to a friend about what the passage says.",
    "Name three questions that the passage leaves open, and answer each.",
    "Write a short story in which somebody needs to know this.",
    "Argue against the passage: what could go wrong, and why?",
    "Turn the passage into a dialogue between a teacher and a student.",
    "Describe a project for a weekend that begins with this idea.",
    "Write an advertisement for whatever the passage describes.",
)

TEMPERATURE = 0.7
"""The likeliest tokens alone go round in circles: with them half of an answer is what has been said before."""

TEXTS = {
    "A-text": Preset(Workload(kind=Kind.RANDOM, input_tokens=256, output_tokens=64), 32, (8,)),
    "C-text": Preset(Workload(kind=Kind.STREAM, input_tokens=128, output_tokens=128), 8, (1,)),
}
"""The shapes of A and C, but that a passage needs more than 32 tokens. Each prompt has exactly `input_tokens`."""


def text_sessions(text: TextModel, workload: Workload, count: int, seed: str) -> list[LoadSession]:
    """Return `count` requests of one turn, no two of which begin alike. Raises ValueError if the pages have fewer."""
    pages = [list(_paragraphs(path.read_text())) for path in sorted(PAGES.glob("*.md"))]
    places = [(page, at) for page in pages for at, paragraph in enumerate(page) if len(paragraph) >= LEAST]
    draw = Random(f"{seed}/text")
    draw.shuffle(places)
    made: list[LoadSession] = []
    for page, at in places:
        asked = ChatMessage("user", f"{PASSAGE}\n\n{draw.choice(INSTRUCTIONS)}")
        head, _, tail = text.render_chat(ChatPrompt(messages=(asked,))).partition(PASSAGE)
        before, behind = text.encode_chat_text(head), text.encode_chat_text(tail)
        passage = text.encode("\n\n".join(page[at:])[: workload.input_tokens * CHARACTERS], add_special=False)
        ids = before + passage[: workload.input_tokens - len(before) - len(behind)] + behind
        if len(ids) == workload.input_tokens:
            made.append(LoadSession(0.0, (LoadTurn((ids,), workload.output_tokens),)))
        if len(made) == count:
            break
    if len(made) < count:
        raise ValueError(f"the pages have {len(made)} passages of {workload.input_tokens} tokens, not {count}")
    return made


def _paragraphs(page: str) -> Iterator[str]:
    for paragraph in page.split("\n\n"):
        if not paragraph.startswith(NOT_PROSE):
            yield " ".join(paragraph.split())
