"""Sampling on a GPU: some launches for all rows of a step, however many ask for what, with the CPU's random numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.backends.token_counts import CountedTokens
from engine.batch import upload
from engine.sampling import has_penalties, is_adjusted
from engine.step import Row
from engine.types import RequestId, RequestRecord
from kernels.configs import KernelConfig
from kernels.mask_logits import mask_logits
from kernels.sample import SamplingRows, sample
from kernels.sample_slices import SamplingScratch

PARAMETERS = 7
"""Rows of `parameters`."""
_MOST_TOP_K = 2**31 - 1

_Pairs = Sequence[tuple[int, Row]]
"""Draws, each with its row of the logits."""


class _Listed(NamedTuple):
    """The tokens that a record names, on the device: int64, and what is added to logits. Empty lists lie anywhere."""

    record: RequestRecord
    allowed: Tensor
    biased: Tensor
    amounts: Tensor


class ListedTokens:
    """The tokens that records allow, and those that they have biases of: brought to the device at the first step of a
    request, and kept until a step has none of it. Owner: one thread."""

    # Mutable state.

    def __init__(self) -> None:
        self._kept: dict[RequestId, _Listed] = {}

    def of(self, draws: Sequence[Row], logits: Tensor) -> list[_Listed | None]:
        """Return those of each draw, all that a step has; None: it names none."""
        kept: dict[RequestId, _Listed] = {}
        for want in draws:
            record, name = want.record, want.request
            if not (record.allowed_token_ids or record.logit_bias) or name in kept:
                continue
            known = self._kept.get(name)
            kept[name] = known if known is not None and known.record is record else _brought(record, logits)
        self._kept = kept
        return [kept.get(want.request) for want in draws]


def _brought(record: RequestRecord, logits: Tensor) -> _Listed:
    def there(numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
        some = torch.tensor(numbers, dtype=dtype)
        return upload(some, logits.device) if numbers else some

    biased, amounts = zip(*record.logit_bias, strict=True) if record.logit_bias else ((), ())
    allowed = there(record.allowed_token_ids, torch.int64)
    return _Listed(record, allowed, there(biased, torch.int64), there(amounts, logits.dtype))


class Drawing(NamedTuple):
    """What drawing has from step to step: the configurations of the kernels that draw and that apply masks, what they
    write in between, for up to so many rows, and which tokens penalized requests have, and records name."""

    config: KernelConfig
    masking: KernelConfig
    scratch: SamplingScratch
    counted: CountedTokens
    listed: ListedTokens

    @staticmethod
    def of(
        rows: int, vocab: int, device: torch.device, config: KernelConfig, masking: KernelConfig
    ) -> "Drawing":
        scratch = SamplingScratch.empty(rows, vocab, config, device)
        return Drawing(config, masking, scratch, CountedTokens(), ListedTokens())

    def draw(self, logits: Tensor, params: SamplingRows, out: Tensor | None = None) -> Tensor:
        """Draw int64 `[rows]`, into `out` if given, from float32 `[rows, vocab]`, adjusted. Can be recorded for as many
        rows as there is scratch for."""
        scratch = self.scratch if len(logits) <= len(self.scratch.ids) else None
        return sample(logits, params, self.config, scratch=scratch, out=out)


def draw_tokens(logits: Tensor, draws: Sequence[Row], drawing: Drawing) -> Tensor:
    """int64 `[draws]` on the logits' device, without waiting for it. `logits` float32 `[>= draws, vocab]`."""
    plain = logits = logits[: len(draws)]
    if any(map(is_adjusted, draws)):
        logits = adjusted_rows(logits, draws, drawing.counted, drawing.listed)
    if any(want.allowed for want in draws):
        _constrain(logits, plain, draws, drawing.masking)
    if all(want.record.sampling.temperature == 0.0 for want in draws):
        return logits.argmax(-1)
    return drawing.draw(logits.contiguous(), sampling_rows(upload(parameters(draws), logits.device)))


def adjusted_rows(logits: Tensor, draws: Sequence[Row], counted: CountedTokens, listed: ListedTokens) -> Tensor:
    """Return a copy of `logits` `[draws, vocab]`, each row as `engine.sampling.adjusted` makes it. What is launched
    does not depend on how many rows ask for it, once what their records name is there, and their device is not
    waited for."""
    changed = logits.clone(memory_format=torch.contiguous_format)
    flat, vocab = changed.view(-1), logits.shape[1]
    named = [(at, own) for at, own in enumerate(listed.of(draws, logits)) if own is not None]
    if some := [(at, own.allowed) for at, own in named if own.record.allowed_token_ids]:
        kept, rows = _places(some, vocab)
        values = flat[kept]
        changed.index_fill_(0, rows, float("-inf"))
        flat.index_copy_(0, kept, values)
    if some := [(at, own.biased) for at, own in named if own.record.logit_bias]:
        biased, _ = _places(some, vocab)
        flat.index_add_(0, biased, torch.cat([own.amounts for _, own in named if own.record.logit_bias]))
    if penalized := [(at, want) for at, want in enumerate(draws) if has_penalties(want)]:
        _penalize(flat, counted, penalized, vocab)
    if banned := [at * vocab + token for at, want in enumerate(draws) for token in want.banned]:
        flat.index_fill_(0, upload(torch.tensor(banned, dtype=torch.int64), logits.device), float("-inf"))
    return changed


def _places(some: Sequence[tuple[int, Tensor]], vocab: int) -> tuple[Tensor, Tensor]:
    """Return where tokens that lie on the device are in logits of one dimension, one row's after the other's, and
    the rows; `some`: rows, each with its tokens."""
    lengths = [len(ids) for _, ids in some]
    rows, counts = upload(torch.tensor([[at for at, _ in some], lengths]), some[0][1].device)
    # How many there are is said, since asking the device waits for it.
    whose = torch.repeat_interleave(counts, output_size=sum(lengths))
    return (rows * vocab).index_select(0, whose) + torch.cat([ids for _, ids in some]), rows


def _penalize(flat: Tensor, counted: CountedTokens, draws: _Pairs, vocab: int) -> None:
    """Penalize in place; what the device needs of it goes there in one piece."""
    found = counted.penalties(draws, vocab)
    packed = np.stack([found.places, np.stack([found.repetition, found.less], 1).view(np.int64)[:, 0]])
    there = upload(torch.from_numpy(packed), flat.device)
    places, (repetition, less) = there[0], there[1].view(torch.float32).view(-1, 2).unbind(1)
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.index_copy_(0, places, values - less)


def _constrain(logits: Tensor, plain: Tensor, draws: Sequence[Row], config: KernelConfig) -> None:
    """Leave out, in place, what the rows' masks forbid, which go to the device as they are, a bit for each token. Where
    that leaves nothing of a row, it is left out of the `plain` logits instead, as on the CPU."""
    places = [at for at, want in enumerate(draws) if want.allowed]
    nbytes = 4 * ((logits.shape[1] + 31) // 32)
    packed = bytearray().join(draws[at].allowed.ljust(nbytes, b"\0") for at in places)
    masks = torch.frombuffer(packed, dtype=torch.int32).view(len(places), -1)
    there = upload(torch.tensor(places), logits.device)
    mask_logits(logits, plain.contiguous(), upload(masks, logits.device), there, config)


def parameters(draws: Sequence[Row]) -> Tensor:
    """Return what `sampling_rows` reads, int64 `[PARAMETERS, draws]`, on the CPU: one piece, so that one copy brings it
    over. Floats are there by their bits."""
    params = [want.record.sampling for want in draws]
    seeds, indexes, positions = zip(*[want.draw_key for want in draws], strict=True)
    counts = [min(p.top_k, _MOST_TOP_K) for p in params], [_signed(seed) for seed in seeds], indexes, positions
    filters = [p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]
    longs = torch.tensor(counts, dtype=torch.int64)
    return torch.cat([longs, torch.tensor(filters, dtype=torch.float64).view(torch.int64)])


def sampling_rows(there: Tensor) -> SamplingRows:
    """Return the parameters that lie in int64 `[PARAMETERS, rows]`, without a copy."""
    return SamplingRows(
        top_k=there[0],
        seed=there[1],
        sample_index=there[2],
        position=there[3],
        temperature=there[4].view(torch.float64),
        top_p=there[5].view(torch.float64),
        min_p=there[6].view(torch.float64),
    )


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed
