"""Log probabilities that are kept: exactly as they were given, and in little memory."""

import tracemalloc
from random import Random

import pytest

from engine.packed_logprobs import PackedLogprobs
from engine.types import RequestId, RequestRecord, TokenLogprobs
from router.core.call import Call


def _given(count: int, alternatives: int) -> list[TokenLogprobs]:
    chosen = Random(1)
    return [
        TokenLogprobs(at, -chosen.random(), tuple((200_000 + i, -chosen.random()) for i in range(alternatives)))
        for at in range(count)
    ]


def test_they_come_back_as_they_were() -> None:
    """Guards values that lose their last bits, and forced tokens, which have no alternatives, between others."""
    packed, given = PackedLogprobs(), [*_given(3, 20), TokenLogprobs(7, 0.0), *_given(2, 1)]
    packed.extend(given[:2])
    packed.extend(given[2:])
    assert list(packed.part(0)) == given and len(packed) == 6 and packed.values == 3 * 21 + 1 + 2 * 2
    assert list(packed.part(2, 4)) == given[2:4] and packed.part(5, 99) == (given[5],) and packed.part(6) == ()


@pytest.mark.parametrize("alternatives", [0, 20])
def test_what_a_request_keeps_of_them_is_bounded(alternatives: int) -> None:
    """Guards thousands of long answers with twenty alternatives a token: unpacked, a token took two to three kB."""
    count = 2000
    record = RequestRecord(
        request=RequestId("r"), tokens=[1], prompt_tokens=1, max_tokens=count, seed=1, logprobs=alternatives,
        context=b"x",
    )  # fmt: skip
    call, given = Call(record, 0, None), _given(count, alternatives)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for one in given:
            call.emit([one.token], [one])
        call.rewrite()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / count < 1.3 * (12 * (alternatives + 1) + 8) + 60
    assert call.record.emitted_logprobs == () and list(call.logprobs.part(0)) == given
