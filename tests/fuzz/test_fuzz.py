"""Every decoder keeps its contract: on what it is made for, on what once broke it, and on what becomes of both."""

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import decoders
from tests.fuzz.judge import ContractError, Decoder, judge
from tests.fuzz.mutation import mutated

EVERY = pytest.mark.parametrize("name", sorted(decoders()))


@EVERY
def test_what_a_decoder_is_made_for_is_taken(name: str) -> None:
    """Guards against fuzzing that is blind because its seeds stop at the first check."""
    decoder = decoders()[name]
    assert decoder.seeds
    for seed in decoder.seeds:
        assert judge(decoder, seed), seed


@EVERY
def test_what_once_broke_it_is_refused_or_taken(name: str) -> None:
    for data in decoders()[name].found:
        judge(decoders()[name], data)


@EVERY
@settings(max_examples=60)
@given(choices=st.integers(0, 2**64 - 1))
@example(choices=0)
def test_changed_inputs(name: str, choices: int) -> None:
    """Guards against a peer, a client or a file that ends a process by an error nobody expects, or by its size."""
    decoder = decoders()[name]
    judge(decoder, mutated(Random(choices), decoder.inputs))


@EVERY
@settings(max_examples=30)
@given(data=st.binary(max_size=300))
def test_any_bytes(name: str, data: bytes) -> None:
    judge(decoders()[name], data)


def test_the_judge_sees_each_kind_of_breach() -> None:
    """The tests above would pass with a judge that lets everything pass."""

    def slow(data: bytes) -> None:
        for _ in range(10**9):
            if clock.thread_time() - began_s > 2.2:
                return

    import time as clock

    began_s = clock.thread_time()
    with pytest.raises(ContractError, match="s for 1 bytes"):
        judge(Decoder("slow", slow, (), (b"x",)), b"x", count_memory=False)
    with pytest.raises(ContractError, match="MiB"):
        judge(Decoder("large", lambda data: bytes(80 << 20), (), (b"x",)), b"x")
    with pytest.raises(UnicodeDecodeError):
        judge(Decoder("strange", lambda data: data.decode(), (KeyError,), (b"x",)), b"\xff")
    assert not judge(Decoder("refuses", lambda data: {}[data], (KeyError,), (b"x",)), b"x")
