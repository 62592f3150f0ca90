"""Masks of bits against their specification: every size of a vocabulary, rows in any order, and nothing beyond them."""

import pytest
import torch

from kernels.configs import KernelConfig
from kernels.mask_logits import mask_logits
from kernels.reference_rows import mask_logits as specified
from tests.kernels.cases import DEVICE

CONFIG = KernelConfig(tile=64, warps=4, stages=1)
NOTHING = float("-inf")


def _masks(count: int, vocab: int, seed: int, share: float = 0.3) -> torch.Tensor:
    """Words of random bits; those beyond the vocabulary are set, and mean nothing."""
    words = (vocab + 31) // 32
    bits = torch.rand(count, words, 32, generator=torch.Generator().manual_seed(seed)) < share
    bits.view(count, -1)[:, vocab:] = True
    values = (bits.long() << torch.arange(32)).sum(-1)
    return torch.where(values >= 2**31, values - 2**32, values).int()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 71, 200, 257])
@pytest.mark.parametrize("is_same", [False, True])
def test_what_is_forbidden_is_left_out(vocab: int, is_same: bool) -> None:
    """Guards the last word of a vocabulary, the sign bit of every word, and rows that have no mask."""
    generator = torch.Generator().manual_seed(vocab)
    plain = torch.randn(5, vocab, generator=generator)
    logits = plain if is_same else plain.masked_fill(torch.rand(5, vocab, generator=generator) < 0.4, NOTHING)
    masks, places = _masks(3, vocab, 7), torch.tensor([4, 0, 2])
    wanted = specified(logits, plain, masks, places)
    given = logits.to(DEVICE).clone()
    original = given if is_same else plain.to(DEVICE)
    mask_logits(given, original, masks.to(DEVICE), places.to(DEVICE), CONFIG)
    assert torch.equal(given.cpu(), wanted)
    assert torch.equal(given.cpu()[[1, 3]], logits[[1, 3]])


def test_a_row_of_which_nothing_is_left_is_what_the_model_made() -> None:
    """Guards bans against constraints: where all that a mask allows is banned, the bans are left out."""
    plain = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    masks = _masks(2, 100, 3, share=0.1)
    allowed = specified(plain, plain, masks, torch.tensor([0, 1])) > NOTHING
    logits = plain.clone()
    logits[0][allowed[0]] = NOTHING
    wanted = plain.masked_fill(~allowed, NOTHING)
    given = logits.to(DEVICE)
    mask_logits(given, plain.to(DEVICE), masks.to(DEVICE), torch.tensor([0, 1], device=DEVICE), CONFIG)
    assert torch.equal(given.cpu(), wanted)
    assert torch.equal(specified(logits, plain, masks, torch.tensor([0, 1])), wanted)


def test_one_token_is_left_of_a_mask_of_one_bit() -> None:
    for token in (0, 31, 32, 95, 96, 99):
        masks = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
        masks[0, token // 32] = 1 << token % 32 if token % 32 < 31 else -(2**31)
        logits = torch.zeros(1, 100, device=DEVICE)
        mask_logits(logits, logits, masks, torch.tensor([0], device=DEVICE), CONFIG)
        assert (logits == 0.0).nonzero().tolist() == [[0, token]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits, places = torch.zeros(2, 70), torch.tensor([0])
    for masks in (torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 3), torch.zeros(3, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="masks of"):
            mask_logits(logits, logits, masks, places, CONFIG)
    with pytest.raises(ValueError, match="plain"):
        mask_logits(logits, logits[:1], torch.zeros(1, 3, dtype=torch.int32), places, CONFIG)
    with pytest.raises(ValueError, match="contiguous"):
        turned = torch.zeros(70, 2).T
        mask_logits(turned, turned, torch.zeros(1, 3, dtype=torch.int32), places, CONFIG)
