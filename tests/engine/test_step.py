"""What a step's rows show of a scheduler's lists, and how a sequence that goes on is known."""

import random

import pytest
from msgspec.structs import replace

from engine.step import COMPARED, DrawnRun, History, LatestDraws, Row, TokenView, draws_of
from engine.types import RequestId, RequestRecord, SamplingParams
from tests.engine.watched import WatchedList


def _row(tokens: list[int] | TokenView, drafts: int = 0, **more: object) -> Row:
    record = RequestRecord(
        request=RequestId("r"), tokens=[1], prompt_tokens=1, max_tokens=99, seed=1, sampling=SamplingParams()
    )
    return Row(record.request, record, tokens, 0, len(tokens), [], draw=True, drafts=drafts, **more)  # type: ignore[arg-type]


def test_a_view_reads_as_a_list_of_the_same_tokens() -> None:
    chosen = random.Random(3)
    for _ in range(300):
        own = [chosen.randrange(9) for _ in range(chosen.randrange(6))]
        more = [chosen.randrange(9) for _ in range(chosen.randrange(4))]
        whole, view = own + more, TokenView.of(own, *more)
        own.append(77)
        assert len(view) == len(whole) and [*view] == whole and [*TokenView.of(view, 5)] == [*whole, 5]
        for _ in range(5):
            some = slice(*(chosen.choice([None, *range(-12, 12)]) for _ in range(2)))
            assert view[some] == whole[some], some
        for at in range(-12, 12):
            if -len(whole) <= at < len(whole):
                assert view[at] == whole[at]
            else:
                with pytest.raises(IndexError):
                    view[at]


class _Drawn:
    def __init__(self, *drawn: int | DrawnRun) -> None:
        self.drawn = drawn

    def wait(self) -> tuple[int | DrawnRun, ...]:
        return self.drawn


def test_rows_of_long_sequences_are_made_without_reading_them() -> None:
    """Guards the time of a step: a row of each draft, and one that follows, copied all tokens."""
    own = WatchedList(range(5000))
    rows = draws_of(_row(TokenView.of(own, 1, 2, 3), drafts=3))
    assert [[*row.tokens[4999:]] for row in rows] == [[4999], [4999, 1], [4999, 1, 2], [4999, 1, 2, 3]]
    assert [row.draw_key[2] for row in rows] == [5000, 5001, 5002, 5003]
    following = _row(own, follows=True)
    after = LatestDraws([following], _Drawn(8)).resolved(following)
    assert len(after.tokens) == 5001 and after.tokens[4999:] == [4999, 8]
    assert own.read == 5


def test_drafts_are_told_from_a_rows_own_tokens_however_they_came() -> None:
    """Guards drafts that count as sure: in a list of their own, behind a view, behind a token that was followed."""
    for tokens in ([5, 6, 7, 8], TokenView.of([5, 6], 7, 8), TokenView.of([5], 6, 7, 8)):
        rows = draws_of(_row(tokens, drafts=2))
        assert [[*row.tokens] for row in rows] == [[5, 6], [5, 6, 7], [5, 6, 7, 8]]
        for row in rows:
            assert isinstance(row.tokens, TokenView) and row.tokens.sure <= 2


def test_a_sequence_that_goes_on_is_known_by_its_list() -> None:
    own = WatchedList(range(1000))
    history = History()
    assert history.known(own) == 0
    history.see(TokenView.of(own, 7, 8))
    own.read = 0
    own += [7, 9]
    assert history.known(own) == 1000, "what was behind it is not sure"
    assert own.read <= COMPARED


def test_a_sequence_that_was_rewritten_is_not_taken_for_the_one_that_was_seen() -> None:
    """Guards counts and grammars behind tokens that nobody has: another placement, a fork, another hypothesis, and a
    list that came back shorter, or was changed at its end."""
    own = list(range(100))
    history = History()
    history.see(own)
    assert history.known(own) == 100 and history.known(TokenView.of(own, 3)) == 100
    assert history.known([*own]) == history.known([*own, 5]) == history.known(own[:50]) == 0
    assert history.known(TokenView(own, 99, (99,))) == 0, "the last one is not sure any more"
    own[-1] = 7
    assert history.known(own) == 0
    own[-1:] = [99]
    assert history.known(own) == 100
    del own[60:]
    assert history.known(own) == 0
    own += range(61, 101)
    assert history.known(own) == 0


def test_a_row_behind_a_run_draws_the_next_of_its_tokens() -> None:
    following = _row([4, 5], follows=True)
    after = LatestDraws([following], _Drawn(DrawnRun((6, 7)))).resolved(replace(following))
    assert [*after.tokens] == [4, 5, 6] and after.allowed == (1 << 7).to_bytes(4, "little")
