"""Copying, digesting and converting blocks against their references."""

import numpy as np
import pytest
import torch

from kernels import reference_blocks as reference
from kernels.block_convert import convert_blocks
from kernels.block_copy import as_words, copy_blocks
from kernels.block_shape import BlockShape
from kernels.configs import KernelConfig
from kernels.pool import KVPool, eight_bit_pool
from kernels.wp64 import wp64
from tests.kernels.cases import DEVICE, poisoned_pool

CONFIG = KernelConfig(tile=64, warps=4, stages=1, rows=4)


def _ids(*blocks: int) -> torch.Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=DEVICE)


def _random_words(blocks: int, heads: int, shape: BlockShape) -> torch.Tensor:
    words = torch.randint(-(2**63), 2**63 - 1, (blocks, heads, shape.words), dtype=torch.int64)
    return words.to(DEVICE)


@pytest.mark.parametrize(
    "shape",
    [
        BlockShape(layers=2, block_size=4, row_bytes=32),
        BlockShape(layers=3, block_size=1, row_bytes=48),
        BlockShape(layers=2, block_size=4, row_bytes=16, scaled=True),
        BlockShape(layers=1, block_size=1, row_bytes=8, scaled=True),
    ],
)
@pytest.mark.parametrize("programs", [2, 40])
def test_copies_and_digests(shape: BlockShape, programs: int) -> None:
    """Guards the cut into parts, and the valid rows of layers, keys, values and scales; other blocks stay untouched."""
    torch.manual_seed(shape.words)
    source, target = _random_words(5, 2, shape), _random_words(6, 2, shape)
    before = target.clone()
    tokens = _ids(shape.block_size, 1, shape.block_size // 2)
    digests = copy_blocks(
        source,
        target,
        _ids(4, 0, 2),
        _ids(1, 5, 3),
        shape,
        CONFIG,
        tokens=tokens,
        programs=programs,
    )
    assert digests is not None
    for number, (old, new) in enumerate([(4, 1), (0, 5), (2, 3)]):
        assert torch.equal(target[new], source[old])
        want = reference.wp64(source[old], shape, int(tokens[number]))
        assert torch.equal(digests[number], want)
        raw = source[old].cpu().numpy().view(np.uint8)
        on_cpu = wp64(raw, shape, int(tokens[number]))
        assert on_cpu == [digest % 2**64 for digest in want.tolist()]
    assert torch.equal(target[[0, 2, 4]], before[[0, 2, 4]])


def test_digest_alone_and_copy_alone() -> None:
    """Guards the two halves: a digest of landed blocks writes nothing, a copy needs no token counts."""
    shape = BlockShape(layers=2, block_size=4, row_bytes=16)
    pool = _random_words(4, 3, shape)
    before = pool.clone()
    digests = copy_blocks(pool, None, _ids(2), _ids(0), shape, CONFIG, tokens=_ids(3))
    assert torch.equal(pool, before)
    assert digests is not None and torch.equal(digests[0], reference.wp64(pool[2], shape, 3))
    assert copy_blocks(pool, pool, _ids(2), _ids(0), shape, CONFIG) is None
    assert torch.equal(pool[0], before[2]) and torch.equal(pool[1:], before[1:])


def test_a_range_of_heads_goes_to_a_range_of_heads() -> None:
    """Guards migration between different tensor-parallel degrees: heads 1 and 2 of four land as 0 and 1 of two."""
    shape = BlockShape(layers=1, block_size=2, row_bytes=16)
    source, target = _random_words(3, 4, shape), _random_words(2, 2, shape)
    copy_blocks(source[:, 1:3], target, _ids(2, 0), _ids(0, 1), shape, CONFIG)
    assert torch.equal(target, source[[2, 0], 1:3])


def test_any_changed_valid_bit_changes_the_digest_and_no_other_does() -> None:
    """Guards the promise of `wp64`: each mix is a bijection, so a single damaged word cannot hide."""
    torch.manual_seed(3)
    shape = BlockShape(layers=2, block_size=2, row_bytes=8, scaled=True)
    words = _random_words(1, 1, shape)[0].cpu()
    whole = reference.wp64(words, shape, 1)
    changed = 0
    for at in range(shape.words):
        for bit in range(64):
            damaged = words.clone()
            damaged[0, at] ^= -(2**63) if bit == 63 else 1 << bit
            row = at % 2 if at < shape.payload_words else bit // 32
            differs = not torch.equal(reference.wp64(damaged, shape, 1), whole)
            assert differs == (row == 0), (at, bit)
            changed += differs
    assert changed == shape.words * 32
    swapped = words[:, torch.tensor([2, 1, 0, *range(3, shape.words)])]
    assert not torch.equal(reference.wp64(swapped, shape, 2), reference.wp64(words, shape, 2))


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_blocks_to_eight_bits_and_back(kind: torch.dtype) -> None:
    """Guards the wire format: codes and scales of every layer, head, key and value, to the rounding of 8 bits."""
    torch.manual_seed(8)
    pool = poisoned_pool(5, 2, 4, 24, torch.float32)
    pool.payload[[1, 3]] = torch.randn(pool.payload[[1, 3]].shape, device=DEVICE)
    memory, wire = eight_bit_pool(3, 2, 2, 4, 24, dtype=kind, device=DEVICE)
    want_memory, want = eight_bit_pool(3, 2, 2, 4, 24, dtype=kind, device=DEVICE)
    convert_blocks(pool, wire, _ids(3, 1), _ids(0, 2), CONFIG)
    reference.convert_blocks(pool, want, [3, 1], [0, 2])
    assert torch.equal(memory, want_memory)
    assert memory.view(torch.uint8)[0].any() and not memory[1].any()

    back = poisoned_pool(4, 2, 4, 24, torch.float16)
    convert_blocks(wire, back, _ids(0, 2), _ids(3, 0), CONFIG)
    rows = pool.payload[[3, 1]]
    most = rows.abs().amax(-1, keepdim=True)
    error = (back.payload[[3, 0]].float() - rows).abs() / most
    assert float(error.max()) < (0.005 if kind == torch.int8 else 0.04)
    assert bool(back.payload[[1, 2]].isnan().all())

    _, again = eight_bit_pool(3, 2, 2, 4, 24, dtype=kind, device=DEVICE)
    wide = KVPool(torch.zeros(3, *pool.payload.shape[1:], device=DEVICE))
    convert_blocks(wire, wide, _ids(0, 2), _ids(0, 2), CONFIG)
    convert_blocks(wide, again, _ids(0, 2), _ids(0, 2), CONFIG)
    assert torch.equal(again.payload.float(), wire.payload.float()), "a second trip loses more"


def test_pools_of_another_order_convert() -> None:
    """Guards the strides: layers outermost on one side, the house order on the other."""
    torch.manual_seed(9)
    pool = KVPool(torch.randn(3, 2, 3, 2, 4, 8, device=DEVICE))
    other = torch.zeros(3, 3, 2, 2, 4, 8, device=DEVICE).permute(0, 2, 1, 3, 4, 5)
    convert_blocks(pool, KVPool(other), _ids(0, 2), _ids(2, 1), CONFIG)
    assert torch.equal(other[[2, 1]], pool.payload[[0, 2]])
    assert not other[0].any()


def test_a_pool_seen_as_words_is_the_same_memory() -> None:
    memory, pool = eight_bit_pool(2, 2, 2, 4, 16, dtype=torch.int8, device=DEVICE)
    shape = BlockShape(layers=2, block_size=4, row_bytes=16, scaled=True)
    words = as_words(memory)
    assert words.shape == (2, 2, shape.words) and words.data_ptr() == pool.payload.data_ptr()
    assert pool.scales is not None
    pool.scales[1, 1, 0, 0, 0] = 2.0
    assert int(words[1, 1, shape.payload_words]) == 0x40000000


def test_misfits_are_refused() -> None:
    shape = BlockShape(layers=2, block_size=4, row_bytes=16)
    pool = _random_words(2, 2, shape)
    with pytest.raises(ValueError, match="words"):
        copy_blocks(pool[..., :8], pool, _ids(0), _ids(1), shape, CONFIG)
    with pytest.raises(ValueError, match="one target"):
        copy_blocks(pool, pool, _ids(0), _ids(1, 0), shape, CONFIG)
    with pytest.raises(ValueError, match="whole"):
        BlockShape(layers=1, block_size=1, row_bytes=12)
    with pytest.raises(ValueError, match="convert"):
        small, large = (poisoned_pool(1, 1, size, 8, torch.float32) for size in (2, 4))
        convert_blocks(small, large, _ids(0), _ids(0), CONFIG)
