"""Text of an answer: stop strings at every cut, and characters that are never halved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.front.output import Output
from tests.router.fake_cluster import ByteDetokenizer


class Pieces:
    """Token i is the i-th piece of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, ids: tuple[int, ...]) -> str:
        return "".join(self._pieces[i] for i in ids)

    def flush(self) -> str:
        return ""


TEXT = "ab STOP cd"


@pytest.mark.parametrize("first", range(len(TEXT) + 1))
@pytest.mark.parametrize("second", range(len(TEXT) + 1))
@pytest.mark.parametrize("together", [True, False])
def test_stop_string_split_at_every_position(first: int, second: int, together: bool) -> None:
    """Guards against a stop string missed because tokens cut it, and against text behind it."""
    cuts = sorted((first, second))
    pieces = [TEXT[: cuts[0]], TEXT[cuts[0] : cuts[1]], TEXT[cuts[1] :]]
    output = Output(Pieces(pieces), ["STOP", "unrelated"])
    batches = [[0, 1, 2]] if together else [[0], [1], [2]]
    shown, ids = "", []
    for batch in batches:
        text, kept = output.push(batch)
        assert "S" not in text
        shown += text
        ids += kept
    shown += output.flush()
    assert shown == "ab "
    ends = TEXT.index("STOP") + 4
    needed = next(n for n in range(1, 4) if len("".join(pieces[:n])) >= ends)
    assert output.stopped is not None
    assert (output.stopped.tokens_kept, output.stopped.matched) == (needed, "STOP")
    assert ids == list(range(needed))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abc", max_size=3), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_shown_text_is_final_and_complete(pieces: list[str], stops: list[str]) -> None:
    """Guards against text shown too early (part of a match) or kept for ever (no match)."""
    output = Output(Pieces(pieces), stops)
    shown = "".join(output.push([i])[0] for i in range(len(pieces))) + output.flush()
    whole = "".join(pieces)
    if not any(stop in whole for stop in stops):
        assert shown == whole and output.stopped is None
    else:
        assert output.stopped is not None
        matched = output.stopped.matched
        assert whole.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)


def test_characters_are_whole_and_an_unfinished_one_is_told() -> None:
    """Guards against half characters in the stream, and against bytes lost at its end."""
    data = "é🙂".encode()
    output = Output(ByteDetokenizer(), [])
    assert [output.push([byte])[0] for byte in data] == ["", "é", "", "", "", "🙂"]
    assert output.push([data[2]]) == ("", [data[2]])
    assert output.flush() == "�"


def test_held_text_comes_at_the_end() -> None:
    """Guards against an answer whose last words look like the beginning of a stop string."""
    output = Output(ByteDetokenizer(), ["STOP"])
    assert output.push(b"a ST")[0] == "a "
    assert output.flush() == "ST"


@pytest.mark.parametrize("together", [True, False])
def test_no_stop_string_ends_an_answer_before_its_least_length(together: bool) -> None:
    """Guards `min_tokens`, which stop strings cut short; one that begins in that text is none either."""
    ids = list(b"aSTOPbST" + b"OPcSTOPd")
    output = Output(ByteDetokenizer(), ["STOP"], min_tokens=8)
    batches = [ids] if together else [[one] for one in ids]
    shown = "".join(output.push(batch)[0] for batch in batches)
    assert shown == "aSTOPbSTOPc"
    assert output.stopped is not None and output.stopped.tokens_kept == 15
