"""What goes over of a sequence whose layers are kept in groups: which blocks, by which numbers, and what is left of a
failed attempt."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import identity
from engine.kv.block_pool import BlockState
from engine.kv.groups import GONE, LayerGroup, index_and_group, migrated, place
from engine.kv.layout import KVLayout
from engine.kv.manager import KVCacheManager, Lease
from engine.messages import Handoff, Hello, StartPrefill, WorkerInfo
from engine.types import BlockId, Incarnation, RequestId, RequestRecord, SamplingParams
from transfer.handoff.commands import PostSend, ReaderUp
from transfer.handoff.conversion import landed_blocks
from transfer.handoff.negotiation import NegotiationError, negotiate
from transfer.handoff.source import HandoffSource

SIZE = 4
GROUPS = (LayerGroup((2,)), LayerGroup((0,), 6), LayerGroup((1,), 3))
DECODE, PREFILL = Incarnation(22), Incarnation(11)
H = Handoff(RequestId("r"), 1, 1, DECODE, PREFILL)
windows = st.integers(1, 40)
sizes = st.integers(1, 8)
lengths = st.integers(1, 120)


@given(windows, sizes, lengths, st.integers(0, 120))
def test_the_tail_that_goes_over(window: int, size: int, tokens: int, have: int) -> None:
    """Guards a tail that is one block short, one that is longer than it need be, and blocks beyond the prompt."""
    groups = (LayerGroup((1,)), LayerGroup((0,), window))
    blocks = -(-tokens // size)
    sent = migrated(groups, range(min(have, blocks), blocks), tokens, size)
    assert [at for at, group in sent if group == 0] == list(range(min(have, blocks), blocks))
    tail = [at for at, group in sent if group == 1]
    # Whoever computes the last token, or the next one, sees window - 1 tokens before it, and itself.
    seen = {token // size for token in range(max(0, tokens - window), tokens)}
    assert tail == sorted(at for at in seen if at >= have)
    assert len(tail) <= -(-(window - 1) // size) + 1


@given(st.integers(1, 60), st.integers(0, 15), st.data())
def test_what_a_failed_attempt_leaves(tokens: int, have: int, data: st.DataObject) -> None:
    """Guards a hit that only the first group has: blocks count as far as every group has what it needs of them."""
    blocks = -(-tokens // SIZE)
    have = min(have, blocks)
    wanted = migrated(GROUPS, range(have, blocks), tokens, SIZE)
    came = data.draw(st.sets(st.sampled_from(wanted))) if wanted else set()
    landed = frozenset(place(at, group, len(GROUPS)) for at, group in came)
    assert {index_and_group(one, len(GROUPS)) for one in landed} == came
    kept = landed_blocks(landed, have, GROUPS, tokens, SIZE)
    assert all(one in came for one in wanted if one[0] < kept)
    assert kept == blocks or any(at == kept and (at, group) not in came for at, group in wanted)


class _Holder:
    def __getattr__(self, name: str) -> object:
        return lambda *args: []


def _source(tokens: int) -> tuple[HandoffSource[str], KVCacheManager, Lease]:
    """A source that serves a sequence of so many tokens, with blocks of every group for all of it."""
    kv = KVCacheManager(64, SIZE, "f", groups=GROUPS)
    source: HandoffSource[str] = HandoffSource(kv, "f", _Holder())  # type: ignore[arg-type]
    count = kv.blocks_for(tokens)
    tables = [kv.pool.allocate(count, BlockState.ACTIVE) for _ in GROUPS]
    lease = Lease(tables[0], 0, [], 0, b"", [], windows=tuple(tables[1:]))
    record = RequestRecord(
        request=RequestId("r"), tokens=list(range(tokens)), prompt_tokens=tokens, max_tokens=4,
        sampling=SamplingParams(), seed=1,
    )
    source.handle(ReaderUp(DECODE, True), 0.0)
    source.open(DECODE, StartPrefill(handoff=H, record=record, have_tokens=SIZE), "item")
    return source, kv, lease


def test_a_chunk_has_blocks_of_every_group() -> None:
    """The first group's blocks from what the other side has on, the windows' tails as soon as they are there."""
    source, kv, lease = _source(tokens=18)
    first = source.offer(H, lease, 11)
    assert [index_and_group(block.index, 3) for block in _blocks(first)] == [(1, 0)]
    rest = _blocks(source.offer(H, lease, 18))
    # The last token sees tokens 12 to 17 through a window of 6, and 15 to 17 through one of 3.
    assert [index_and_group(block.index, 3) for block in rest] == [
        (2, 0), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2)
    ]  # fmt: skip
    names = identity.blocks(identity.root(b"", "f"), range(18), SIZE)
    for block in rest:
        at, group = index_and_group(block.index, 3)
        assert block.source == lease.tables[group][at]
        assert block.identity == identity.in_group(names[at], group)
        assert block.generation == kv.pool.generation(block.source)
        assert block.tokens == (2 if at == 4 else 4)
    assert len({block.identity for block in rest}) == len(rest), "one name for two contents"


def test_a_tail_that_slid_away_is_never_offered() -> None:
    """Guards a stale tail: the number of a block that is somebody else's by now."""
    source, _, lease = _source(tokens=18)
    lease.windows[0][3] = GONE
    with pytest.raises(AssertionError, match="block 3 of group 1 has slid away"):
        source.offer(H, lease, 18)


def _blocks(commands: list[object]) -> list[object]:
    (sent,) = (command for command in commands if isinstance(command, PostSend))
    assert all(isinstance(block.source, int) and block.source != BlockId(-1) for block in sent.blocks)
    return list(sent.blocks)


def test_groups_must_be_the_same() -> None:
    """Guards workers of which one keeps all and the other its windows: the tables of one mean nothing to the other."""
    grouped = KVLayout(kv_heads=1, layers=1, block_size=SIZE, head_dim=8, groups=GROUPS)
    one = KVLayout(kv_heads=1, layers=3, block_size=SIZE, head_dim=8)
    agreement = negotiate(_hello(grouped), _hello(grouped))
    assert agreement.layout == grouped
    for mine, theirs in ((grouped, one), (one, grouped)):
        with pytest.raises(NegotiationError, match="its layer groups is") as refused:
            negotiate(_hello(mine), _hello(theirs))
        assert all(said in str(refused.value) for said in ("all: 2, 6: 0, 3: 1", "one (engine.layer_groups off"))
    other = msgspec.structs.replace(grouped, groups=(GROUPS[0], LayerGroup((0,), 7), GROUPS[2]))
    with pytest.raises(NegotiationError, match="layer groups"):
        negotiate(_hello(grouped), _hello(other))
    cut = msgspec.structs.replace(grouped, block_size=2 * SIZE)
    with pytest.raises(NegotiationError, match="block size"):
        negotiate(_hello(grouped), _hello(cut))


def _hello(layout: KVLayout) -> Hello:
    info = WorkerInfo(
        name="w", role="decode", incarnation=Incarnation(1), address="", model="m", fingerprint="f",
        block_size=layout.block_size, blocks=1, context_tokens=1, pid=1, host="h",
    )
    return Hello(info=info, layout=layout.describe(), endpoints=[])
