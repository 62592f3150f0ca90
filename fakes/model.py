"""A runner without a model, for tests and trials: its next token depends on every KV byte of the sequence.

The KV of token t at position p is a pattern of (t, p, head, layer, K or V); the next token is a hash of all KV bytes
read back through the block table. A block that is misplaced, stale, cut short or mixed up becomes a wrong token.
`fake_next` computes the same from the tokens alone. Where the layout has several layer groups, the patterns differ by
group, and of a group with a window those of the tokens in it are read, and no others.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import xxhash

from engine.constraints.matchers import Matchers
from engine.kv.groups import GONE
from engine.kv.layout import KVLayout
from engine.runner import Done, HostMark
from engine.step import (
    Candidates,
    DeadEnd,
    Drawn,
    LatestDraws,
    Row,
    StepPlan,
    accepted,
    certain,
    draws_of,
    result_of,
)
from engine.storage.paged import PagedKV
from engine.types import BlockId, DrawnToken, TokenLogprobs


def kv_pattern(token: int, position: int, layout: KVLayout, group: int = 0) -> np.ndarray:
    """Return uint8 `[kv_heads, layers, 2, row_bytes + scale_bytes]`: the KV rows of one token in the layers of a group,
    each with its scale."""
    rows = layout.kv_heads * layout.layers * 2
    row_bytes = layout.row_bytes + layout.scale_bytes
    words = np.arange(rows * row_bytes // 2, dtype=np.uint64)
    mixed = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((token * 1_000_003 + position * 7919 + group * 104_729 + 17) % (1 << 63))
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return (
        (mixed >> np.uint64(40))
        .astype(np.uint16)
        .view(np.uint8)
        .reshape(layout.kv_heads, layout.layers, 2, row_bytes)
    )


def _seen(layout: KVLayout, tokens: int) -> list[range]:
    """Return the positions that the last of so many tokens sees, by layer group."""
    windows = [group.window for group in layout.groups] or [0]
    return [range(max(0, tokens - window) if window else 0, tokens) for window in windows]


def _rows_of(tokens: Sequence[int], layout: KVLayout) -> np.ndarray:
    seen = enumerate(_seen(layout, len(tokens)))
    return np.stack([kv_pattern(tokens[at], at, layout, group) for group, positions in seen for at in positions])


def fake_next(tokens: Sequence[int], layout: KVLayout, vocab: int) -> int:
    """Return the token after `tokens`, computed without any KV memory."""
    rows = _rows_of(tokens, layout)
    return _hash(rows, vocab)


def fake_candidates(
    tokens: Sequence[int], layout: KVLayout, vocab: int, count: int, banned: Sequence[int] = ()
) -> Candidates:
    """Return the likeliest tokens after `tokens`, computed without any KV memory."""
    rows = _rows_of(tokens, layout)
    return _candidates(rows, vocab, count, banned)


def fake_prompt_logprobs(tokens: Sequence[int], layout: KVLayout, vocab: int, count: int) -> list[TokenLogprobs]:
    """Return those of a prompt's tokens from the second on."""
    return [fake_logprobs(tokens[:at], layout, vocab, tokens[at], count) for at in range(1, len(tokens))]


def fake_logprobs(tokens: Sequence[int], layout: KVLayout, vocab: int, token: int, count: int) -> TokenLogprobs:
    """Return the log probabilities of `token` after `tokens`, and of the `count` likeliest."""
    rows = _rows_of(tokens, layout)
    return _logprobs(rows, vocab, token, count)


def _logprobs(rows: np.ndarray, vocab: int, token: int, count: int) -> TokenLogprobs:
    known = _candidates(rows, vocab, vocab, ())
    return TokenLogprobs(token, dict(known)[token], known[:count])


def _candidates(rows: np.ndarray, vocab: int, count: int, banned: Sequence[int]) -> Candidates:
    seed = xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).tobytes())
    words = (np.arange(vocab, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ np.uint64(seed)) * np.uint64(0xD6E8FEB86659FD93)
    logits = (words >> np.uint64(40)).astype(np.float64) / (1 << 22)
    log_probs = logits - np.log(np.exp(logits).sum())
    order = [int(token) for token in np.argsort(-log_probs, kind="stable") if token not in banned]
    return tuple((token, float(log_probs[token])) for token in order[:count])


def _hash(rows: np.ndarray, vocab: int) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows).tobytes()) % vocab


def _of_allowed(rows: np.ndarray, mask: bytes, vocab: int) -> int:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab, bitorder="little")
    allowed = np.flatnonzero(bits)
    return int(allowed[_hash(rows, len(allowed))])


def fake_constrained(tokens: Sequence[int], layout: KVLayout, vocab: int, mask: bytes) -> int:
    """Return the token after `tokens` where only those of `mask` are allowed, computed without any KV memory."""
    rows = _rows_of(tokens, layout)
    return _of_allowed(rows, mask, vocab)


class FakeRunner:
    """A runner without weights. Fulfils `engine.runner.Runner`. `vocab` bounds the tokens it makes."""

    def __init__(self, kv: PagedKV, vocab: int = 257, matchers: Matchers | None = None) -> None:
        """`matchers`: for records with a constraint, without which a scheduler has none to run."""
        self.kv = kv
        self._matchers = matchers
        self._vocab = vocab
        self._latest = LatestDraws()
        planes = [kv.tensor] if kv.scales is None else [kv.tensor, kv.scales.unsqueeze(-1)]
        self._planes = [plane.view(torch.uint8).numpy() for plane in planes]

    def launch(self, plan: StepPlan) -> Done:
        began = HostMark()
        drawn = self._run(plan.copies, [self._latest.resolved(row) for row in plan.rows])
        scores = [self._scores(row) for row in plan.rows if row.scored]
        done = Done(drawn, began, HostMark(), lambda: scores)
        self._latest = LatestDraws(plan.rows, done)
        return done

    def _there(self, row: Row, end: int) -> np.ndarray:
        """Return the KV rows that the last of the first `end` tokens sees, read back through the block tables."""
        size, tables = self.kv.layout.block_size, (row.blocks, *row.windows)
        seen = [(tables[group], at) for group, places in enumerate(_seen(self.kv.layout, end)) for at in places]
        table = [blocks[at // size] for blocks, at in seen]
        if GONE in table:
            raise IndexError(f"a block that {row.record.request} sees at {end} is gone: {tables}")
        offsets = [at % size for _, at in seen]
        return np.concatenate([plane[table, :, :, :, offsets] for plane in self._planes], axis=-1)

    def _scores(self, row: Row) -> list[TokenLogprobs]:
        ends, wanted = range(row.start + 1, row.start + 1 + row.scored), row.record.prompt_logprobs or 0
        return [_logprobs(self._there(row, end), self._vocab, row.tokens[end], wanted) for end in ends]

    def _run(self, copies: Sequence[tuple[BlockId, BlockId]], rows: Sequence[Row]) -> Sequence[Drawn]:
        self.kv.copy(list(copies))
        size = self.kv.layout.block_size
        drawn: list[Drawn] = []
        for row in rows:
            for group, table in enumerate((row.blocks, *row.windows)):
                for at in range(row.start, row.end):
                    if table[at // size] == GONE:
                        raise IndexError(f"{row.record.request} has no block of group {group} to write {at} to")
                    pattern = kv_pattern(row.tokens[at], at, self.kv.layout, group)
                    pieces = np.split(pattern, [self.kv.layout.row_bytes], axis=-1)
                    for plane, piece in zip(self._planes, pieces, strict=False):
                        plane[table[at // size], :, :, :, at % size] = piece
            if row.draw:
                drawn.append(self._result(row))
        return drawn

    def _result(self, row: Row) -> Drawn:
        if row.candidates:
            return _candidates(self._there(row, row.end), self._vocab, row.candidates, row.banned)
        draws = draws_of(row)
        if row.record.constraint is not None:
            return self._constrained(row, draws)
        said: list[Drawn] = []
        for one in draws:
            there = self._there(one, one.end)
            said.append(self._told(there, one, _hash(there, self._vocab)))
        count = accepted(row, said)
        return result_of(said[:count], said[count])

    def _told(self, rows: np.ndarray, row: Row, token: int) -> DrawnToken:
        wanted = row.record.logprobs
        return token if wanted is None else _logprobs(rows, self._vocab, token, wanted)

    def _constrained(self, row: Row, draws: list[Row]) -> Drawn:
        assert self._matchers is not None
        if row.allowed:
            return _of_allowed(self._there(row, row.end), row.allowed, self._vocab)  # known, and dropped
        said: list[Drawn] = []
        for at, mask in enumerate(self._matchers.masks(draws)):
            if isinstance(mask, DeadEnd):
                said.append(mask)
                continue
            one = draws[at] = msgspec.structs.replace(draws[at], allowed=mask)
            there = self._there(one, one.end)
            said.append(self._told(there, one, _of_allowed(there, mask, self._vocab)))
        count = accepted(row, said)
        (last,) = self._matchers.continued([draws[count]], [said[count]])
        return result_of([certain(*pair) for pair in zip(draws[:count], said, strict=False)], last)
