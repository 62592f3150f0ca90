"""A draft model's own KV, and how much it reads at once: over the fake model, of which a stale or misplaced block
becomes another token."""

import random
from collections.abc import Sequence

import pytest

from engine.draft_model import NEAR_TOKENS, READ_TOKENS, ModelDrafter
from engine.drafts import DraftWanted
from engine.kv.layout import KVLayout
from engine.runner import Done
from engine.step import StepPlan
from engine.storage.paged import PagedKV
from engine.types import RequestId, RequestRecord
from fakes.model import FakeRunner, fake_next

VOCAB = 257
SIZE = 4
LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=SIZE, head_dim=4)


class Counting:
    """The fake model's runner, that keeps what it was given."""

    def __init__(self, blocks: int) -> None:
        self._runner = FakeRunner(PagedKV(LAYOUT, blocks), VOCAB)
        self.kv = self._runner.kv
        self.plans: list[list[tuple[int, bool]]] = []
        self.ticks = 0

    def launch(self, plan: StepPlan) -> Done:
        self.plans.append([(row.end - row.start, row.draw) for row in plan.rows])
        self.ticks += plan.computed_tokens
        return self._runner.launch(plan)

    def take(self) -> list[list[tuple[int, bool]]]:
        taken, self.plans = self.plans, []
        return taken


def _drafter(blocks: int = 64, context_tokens: int = 1000, vocab: int = VOCAB) -> tuple[ModelDrafter, Counting]:
    """Its clock shows the tokens that were computed."""
    runner = Counting(blocks)
    return ModelDrafter(runner, blocks, vocab, context_tokens, lambda: float(runner.ticks)), runner


def _asked(name: str, tokens: Sequence[int], most: int = 3) -> DraftWanted:
    record = RequestRecord(request=RequestId(name), tokens=list(tokens), prompt_tokens=1, max_tokens=99, seed=0)
    return DraftWanted(record, tokens, most)


def _right(tokens: Sequence[int], count: int) -> list[int]:
    whole = list(tokens)
    for _ in range(count):
        whole.append(fake_next(whole, LAYOUT, VOCAB))
    return whole[len(tokens) :]


def _text(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCAB) for _ in range(length)]


def test_each_depth_is_one_pass_over_all_sequences() -> None:
    """Guards a draft model that runs for each request by itself, and times that are not those of the passes."""
    drafter, runner = _drafter()
    texts = [_text(n, 5 + 3 * n) for n in range(3)]
    told = drafter.propose([_asked(str(n), text, 3 - n) for n, text in enumerate(texts)])
    assert told.drafts == [_right(text, 3 - n) for n, text in enumerate(texts)]
    reading, *depths = runner.take()
    assert reading == [(4, False), (7, False), (10, False)], "all but the last token of those that are new"
    assert depths == [[(1, True)] * 3, [(1, True)] * 2, [(1, True)]]
    assert (told.read_tokens, told.read_s) == (21, 21.0) and told.forwards == ((3, 3.0), (2, 2.0), (1, 1.0))
    assert told.seconds == 27.0


def test_it_goes_on_behind_what_was_drawn() -> None:
    """Guards a wrong guess that stays in its KV, and right ones that are read twice."""
    drafter, runner = _drafter()
    tokens = _text(1, 9)
    drafts = drafter.propose([_asked("a", tokens)]).drafts[0]
    for kept in (0, 1, 2, 3):
        runner.take()
        tokens = [*tokens, *drafts[:kept], (drafts[kept] + 1) % VOCAB if kept < 3 else 7]
        drafts = drafter.propose([_asked("a", tokens)]).drafts[0]
        assert drafts == _right(tokens, 3)
        assert runner.take()[0] == [(1 if kept < 3 else 2, True)], "behind three right ones it has read two"


def test_a_sequence_that_has_not_grown_is_read_at_its_end_again() -> None:
    """Guards a row without a token: a step may have had no block for what would have been drawn."""
    drafter, runner = _drafter()
    first = drafter.propose([_asked("a", _text(1, 9))])
    runner.take()
    assert drafter.propose([_asked("a", _text(1, 9))]).drafts == first.drafts
    assert runner.take() == [[(1, True)]] * 3


def test_what_it_reads_at_once_is_bounded() -> None:
    """Guards the other rows of a step: a long prompt is read in chunks, while those that are near have drafts."""
    drafter, runner = _drafter(blocks=200)
    near, long, longer = _text(1, 9), _text(2, 150), _text(3, 200)
    drafter.propose([_asked("near", near)])
    runner.take()
    calls, told = 0, drafter.propose([])
    while not (told.drafts and all(told.drafts)):
        near = [*near, 5]
        left = [drafter.unread(_asked(name, text)) for name, text in (("long", long), ("longer", longer))]
        told = drafter.propose([_asked("near", near), _asked("long", long), _asked("longer", longer)])
        assert told.drafts[0] == _right(near, 3)
        again = [drafter.unread(_asked(name, text)) for name, text in (("long", long), ("longer", longer))]
        read = sum(x or 0 for x in left) - sum(x or 0 for x in again)
        assert told.read_tokens <= READ_TOKENS and read <= READ_TOKENS + 2 * NEAR_TOKENS
        for plan in runner.take():
            assert sum(count for count, _ in plan) <= max(READ_TOKENS, 3 * NEAR_TOKENS)
        calls += 1
    assert told.drafts[1:] == [_right(long, 3), _right(longer, 3)]
    assert calls == 6, "349 tokens, but for the last of each, by 64"


@pytest.mark.parametrize("blocks", [9, 14, 40])
def test_random_stories(blocks: int) -> None:
    """Every draft is what the model says, whoever was asked for before, was wrong, grew, gave way, or is gone."""
    proposed = refused = 0
    for seed in range(12):
        chosen = random.Random(seed)
        drafter, _ = _drafter(blocks)
        texts = {str(n): _text(seed * 10 + n, chosen.randrange(1, 12)) for n in range(4)}
        for turn in range(40):
            names = chosen.sample(sorted(texts), chosen.randrange(1, 5))
            asked = [_asked(name, texts[name], chosen.randrange(1, 4)) for name in names]
            told = drafter.propose(asked)
            drafter.check()
            for one, drafts in zip(asked, told.drafts, strict=True):
                assert drafts in ([], _right(one.tokens, one.most)), (seed, turn)
                proposed, refused = proposed + bool(drafts), refused + (not drafts)
                kept = chosen.randrange(len(drafts) + 1)
                more = [chosen.randrange(VOCAB) for _ in range(chosen.choice((0, 1, 1, 1, 8)))]
                texts[one.record.request] = [*one.tokens, *drafts[:kept], *more]
                if len(texts[one.record.request]) > 28:
                    drafter.forget(one.record.request)
                    texts[one.record.request] = _text(turn, 3)
        for name in texts:
            drafter.forget(RequestId(name))
        drafter.check()
        assert len(drafter._free) == blocks
    assert proposed > 300
    assert refused == 0 if blocks == 40 else refused > 0


def test_who_was_not_asked_for_gives_way_first() -> None:
    drafter, runner = _drafter(blocks=6)
    one, two, three = (_text(n, 7) for n in range(3))
    for _ in range(2):
        assert all(drafter.propose([_asked("one", one), _asked("two", two)]).drafts)
    drafter.propose([_asked("two", two)])
    assert drafter.propose([_asked("three", three), _asked("two", two)]).drafts == [_right(three, 3), _right(two, 3)]
    assert drafter.unread(_asked("one", one)) == 7 and drafter.unread(_asked("two", two)) == 1
    told = drafter.propose([_asked(*pair) for pair in (("one", one), ("two", two), ("three", three))])
    assert sorted(map(bool, told.drafts)) == [False, True, True], "nobody gives way who is asked for"
    runner.take()


def test_a_full_pool_is_not_held_by_who_cannot_go_on() -> None:
    """Guards sequences that each hold their part of a full pool, and none of which gets its next block: nobody had
    drafts until one ended."""
    drafter, _ = _drafter(blocks=8)
    texts = [_text(n, 13) for n in range(2)]
    for turn in range(8):
        told = drafter.propose([_asked(str(n), text) for n, text in enumerate(texts)])
        drafter.check()
        assert [*map(bool, told.drafts)] == [turn < 2, True], turn
        texts = [[*text, 5] for text in texts]
    drafter.forget(RequestId("1"))
    assert drafter.propose([_asked("0", texts[0])]).drafts == [_right(texts[0], 3)]


def test_who_gave_way_in_a_full_pool_is_not_read_in_turns() -> None:
    """Guards a draft model that reads, in each call, what gives way in the next one."""
    drafter, _ = _drafter(blocks=40)
    lengths = (6, 33, 34, 35, 36)
    texts, read = [_text(n, length) for n, length in enumerate(lengths)], 0
    for _ in range(60):
        told = drafter.propose([_asked(str(n), text) for n, text in enumerate(texts)])
        drafter.check()
        read += told.read_tokens
        assert any(told.drafts)
        texts = [[*text, 5] for text in texts]
    assert read < sum(lengths) + 10, "each of them once"


def test_nobody_gives_way_in_vain() -> None:
    """Guards what was read of a sequence against one for which there is no room with that either."""
    drafter, _ = _drafter(blocks=6)
    idle, held, long = _text(1, 3), _text(2, 7), _text(3, 15)
    drafter.propose([_asked("idle", idle), _asked("held", held)])
    assert drafter.propose([_asked("held", held), _asked("long", long)]).drafts == [_right(held, 3), []]
    assert drafter.unread(_asked("idle", idle)) == 1


def test_what_it_cannot_read_it_says_nothing_of() -> None:
    """Guards a table of positions that ends, an embedding that has no such row, and a draft that the model has not."""
    drafter, runner = _drafter(context_tokens=12)
    assert drafter.unread(_asked("a", _text(1, 9))) == 9
    assert drafter.unread(_asked("a", _text(1, 10))) is None
    assert drafter.propose([_asked("a", _text(1, 10))]).drafts == [[]] and not runner.take()
    drafter, runner = _drafter(blocks=2)
    assert drafter.unread(_asked("a", _text(1, 6))) is None, "it fits into no pool of two blocks"
    drafter, runner = _drafter(vocab=200)
    assert drafter.propose([_asked("a", [1, 2, 201])]).drafts == [[]] and not runner.take()
    assert drafter.unread(_asked("a", [1, 2, 201, 4])) is None
    text = next(text for n in range(99) if _right(text := _text(n, 2), 1)[0] >= 200 and max(text) < 200)
    assert drafter.propose([_asked("b", text)]).drafts == [[]] and len(runner.take()) == 1
