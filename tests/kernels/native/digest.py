"""One number for what all native kernels compute: python -m tests.kernels.native.digest [LIBRARY | --by-words]"""

import ctypes
import hashlib
import sys

import torch

from kernels.experts import ClampedGate, ExpertWeights, Routing
from kernels.kv_write import quantize
from kernels.native import STORAGE, Native, PoolShape, Sequences, native
from kernels.panels import IntegerBits, in_integers, pack_codes, pack_plain, pack_stack, stacked
from kernels.pool import eight_bit_pool

BITS: tuple[IntegerBits, ...] = (16, 23)


def bits_of_everything(kernels: Native) -> str:
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    digest = hashlib.blake2b(digest_size=8)
    codes = torch.randint(0, 16, (150, 96), generator=generator, dtype=torch.uint8)
    for weight in (
        pack_plain(noise(150, 100)),
        pack_plain(noise(150, 100).bfloat16().float()),
        pack_codes(codes.to(torch.int8), noise(150, 3), None, "q8"),
        pack_codes(codes, noise(150, 3), noise(150, 3), "q4"),
        pack_codes(codes.to(torch.int8), noise(150, 3), noise(150, 3), "a8"),
        pack_codes(codes.to(torch.int8), noise(150, 6), None, "h8"),
        pack_codes(codes.to(torch.int8), noise(150, 6), noise(150, 6), "x8"),
        pack_codes(codes * 7, noise(150, 3), None, "f8"),
    ):
        for rows in (11, 3, 1):
            digest.update(kernels.linear(noise(rows, weight.columns), weight, noise(150)).numpy().tobytes())
        for rows in (40, 11, 5, 1):
            x = noise(rows, weight.columns) * torch.logspace(-3, 3, weight.columns)
            bias = noise(150)
            for bits in BITS:
                digest.update(kernels.linear(x, in_integers(weight, bits), bias).numpy().tobytes())
    digest.update(kernels.norm(noise(5, 77), noise(5, 77), noise(77), 1e-5).numpy().tobytes())
    for gelu in (False, True):
        digest.update(kernels.gate(noise(5, 90) * 30, gelu).numpy().tobytes())
    routing, tables = Routing(2, False, True), noise(2, 5, 64, 32)
    weights = ExpertWeights(pack_stack(tables[0]), pack_stack(tables[1, :, :32]), noise(5, 64), noise(5, 32))
    for clamp in (None, ClampedGate(1.702, 7.0)):
        choice = kernels.route(noise(33, 5), routing)
        mixed = kernels.mix(noise(33, 32), choice, weights._replace(clamp=clamp))
        digest.update(choice.weights.numpy().tobytes() + mixed.numpy().tobytes())
    experts = [pack_codes(codes[at : at + 64], noise(64, 3), noise(64, 3), "q4") for at in range(5)]
    stacks = in_integers(stacked(experts), 23), pack_stack(noise(5, 96, 32))
    mixed = kernels.mix(noise(33, 96), kernels.route(noise(33, 5), routing), ExpertWeights(*stacks))
    digest.update(mixed.numpy().tobytes())
    angles = noise(50, 24)
    for dtype in STORAGE:
        shape = PoolShape(2, 2, 8, 48)
        if dtype.itemsize > 1:
            pool = noise(9, 2, 2, 2, 8, 48).to(dtype)
            memory = pool.view(torch.uint8)
        else:
            memory, eight = eight_bit_pool(9, 2, 2, 8, 48, dtype=dtype)
            codes, scales = quantize(noise(9, 2, 2, 2, 8, 48), dtype)
            assert eight.scales is not None
            eight.scales.copy_(scales)
            pool = eight.payload.copy_(codes)
        qkv = noise(30, 10, 48)
        tables = [torch.tensor([4, 0, 7]), torch.tensor([1, 2, 3, 8, 5, 6])]
        norms, slots = (noise(48), noise(48), 1e-6), torch.arange(30) * 2
        kernels.rotate_and_write(
            qkv, 6, (angles.cos(), angles.sin()), torch.arange(30), norms, pool, shape, 1, slots
        )
        out = torch.zeros(30, 6 * 48)
        kernels.attend(qkv, 6, Sequences.of([1, 29], [20, 43], tables), pool, shape, 1, out)
        wide = noise(30, 10, 48) * torch.logspace(-9, 6, 48)  # values that 16 bits have no normal number for
        kernels.rotate_and_write(
            wide, 6, (angles.cos(), angles.sin()), torch.arange(30), None, pool, shape, 0, slots
        )
        answers, beginning = torch.zeros(2, 6 * 48), [torch.arange(9)] * 2
        kernels.attend(wide[:2], 6, Sequences.of([1, 1], [72, 70], beginning), pool, shape, 1, answers)
        scored = torch.zeros(2, 30, 6 * 48)
        for some, window, softcap, sinks in ((scored[0], 0, 1.5, noise(6)), (scored[1], 13, 0.0, None)):
            options = {"window": window, "scale": 0.2, "softcap": softcap, "sinks": sinks}
            kernels.attend(qkv, 6, Sequences.of([1, 29], [20, 43], tables), pool, shape, 1, some, **options)
        partly = noise(4, 10, 48)
        few = noise(50, 10)
        kernels.rotate_and_write(partly, 6, (few.cos(), few.sin()), torch.arange(4), None, pool, shape, 0, slots[:4])
        for tensor in (qkv, out, answers, wide, scored, partly, memory):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    asked = sys.argv[1:]
    kernels = Native(ctypes.CDLL(asked[0]), "PLAIN") if asked and asked != ["--by-words"] else native()
    if kernels is None:
        return 1
    kernels.by_words = asked == ["--by-words"]
    print(kernels.variant, bits_of_everything(kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
