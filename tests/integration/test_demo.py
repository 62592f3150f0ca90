"""`headrace demo`, as somebody's first minute with it."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from cluster.cli.demo import MAX_TOKENS, QUESTIONS, SYSTEM_PROMPT
from tests.integration.test_verbs import Shell

pytestmark = pytest.mark.slow

WORDS = 4


def repeated(text: str) -> str:
    """Return the run of `WORDS` words that comes most often, if it comes more than twice."""
    words = re.findall(r"[\w'-]+", text.lower())
    runs = Counter(" ".join(words[at : at + WORDS]) for at in range(len(words) - WORDS + 1))
    ((run, count),) = runs.most_common(1) or [("", 0)]
    return run if count > 2 else ""


def test_a_loop_is_known_when_it_is_seen() -> None:
    assert repeated("The stone that moves is the stone that moves, and the stone that moves is the stone that moves.")
    assert not repeated("The capital of France is Paris. The capital of Italy is Rome.")


def test_the_first_minute(tmp_path: Path, demo_cache: Path) -> None:
    """The system prompt is told, answers come to their end and do not go in circles, what was cached is what the text
    says, and the last line is the next thing to type."""
    figures = tmp_path / "demo.json"
    said = Shell(tmp_path, demo_cache)("demo", "--json", str(figures)).stdout
    words = " ".join(said.split())
    assert " ".join(SYSTEM_PROMPT.split()) in words
    assert "no process and no shared-memory segment left" in words
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("Next: ") and " up " in said.strip().splitlines()[-1]
    answers = json.loads(figures.read_text())["requests"]
    assert [one["name"] for one in answers] == [question.name for question in QUESTIONS]
    for one in answers:
        assert one["text"].strip()[-1] in ".!?" and one["output_tokens"] < MAX_TOKENS, "it ends by itself"
        assert not repeated(one["text"]), f"{one['name']} goes in circles: {repeated(one['text'])!r}"
    first, second = answers[0], answers[1]
    assert second["ttft_s"] < first["ttft_s"]
    told = re.search(r"of the second prompt (\d+) of (\d+) tokens were cached", words)
    assert told and int(told[1]) > int(told[2]) / 2, said
