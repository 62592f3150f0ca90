"""A trace becomes requests: equal ids are equal tokens, lengths are exact, and times are scaled."""

from pathlib import Path

import pytest

from cluster.bench.traces import TraceRow, read, replay, span_s

ROWS = [
    TraceRow(5_000, 1024, 7, [1, 2]),
    TraceRow(3_000, 1100, 8, [1, 2, 3]),
    TraceRow(9_000, 600, 9, [4, 2]),
]


def test_equal_ids_are_equal_tokens() -> None:
    """Guards the reuse that a trace has: neither more nor less of it reaches the server's cache."""
    longer, whole, other = (session.turns[0].tokens() for session in replay(ROWS, 1.0, "s", 100, 32_000))
    assert [len(longer), len(whole), len(other)] == [1100, 1024, 600]
    assert longer[:1024] == whole
    assert other[512:] == whole[512:600]
    assert len({tuple(block) for block in (whole[:512], whole[512:], other[:512])}) == 3
    assert all(100 <= token < 32_000 for token in longer)


def test_times_are_scaled_and_lengths_are_not() -> None:
    played = replay(ROWS, 4.0, "s", 100, 32_000)
    assert [session.begins_s for session in played] == [0.0, 0.5, 1.5]
    assert [session.turns[0].output_tokens for session in played] == [8, 7, 9]
    assert span_s(ROWS) == 6.0


def test_another_seed_shares_nothing() -> None:
    """Guards against a second probe that finds the first one's prompts in the cache."""
    one, two = (replay(ROWS, 1.0, seed, 100, 32_000)[0].turns[0].tokens() for seed in ("0/1.0", "0/2.0"))
    assert one[:8] != two[:8]
    assert one == replay(ROWS, 1.0, "0/1.0", 100, 32_000)[0].turns[0].tokens()


def test_a_packed_file_that_is_broken_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "a.jsonl.xz"
    broken.write_bytes(b"not packed")
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz: "):
        read(broken)
