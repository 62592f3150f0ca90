"""Codes of quantized weights: the values of the file, and in a prepared folder the bits of its plain weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.model.files.gguf_codes import codes_of
from engine.model.files.gguf_model import GGUFModel
from engine.model.prepared.cache import find_demo_model, prepare
from engine.model.prepared.codes_file import CODES_FILE, CodesFile
from engine.model.prepared.loading import map_weights
from tests.engine.model.quantized import MATRICES, Kind, random_blocks, write_model
from tests.engine.model.test_families import reference, save_hf

BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q5_0: 8, Kind.Q8_0: 8}
NAMES = {"embedding", "layers.0.qkv", "layers.0.output", "layers.0.gate_up", "layers.0.down"}


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def same_bits(folder: Path) -> set[str]:
    """The names of all weights that have codes; every one of them widens to the bits of its plain weight."""
    stored, found = CodesFile(folder), set()
    for name, weight in map_weights(folder).items():
        if (codes := stored.get(name)) is not None:
            assert np.array_equal(bits(codes.widen()), bits(weight.numpy())), name
            found.add(name)
    return found


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_codes_are_the_values_of_the_file(kind: Kind) -> None:
    """Guards every bit of an unpacked block: a code, scale or offset out of place gives other values."""
    raw = random_blocks(kind, 40, 512)
    codes = codes_of(raw, kind)
    assert codes is not None
    assert codes.bits == BITS[kind]
    assert codes.codes.dtype == (np.uint8 if codes.bits == 4 else np.int8)
    assert (codes.offsets is not None) == (codes.bits == 4)
    wanted, got = gguf.quants.dequantize(raw, kind), codes.widen()
    if kind == Kind.Q4_0:  # scale * (8 - 8) is a zero of the scale's sign there, and 0.0 here
        assert (bits(wanted) != bits(got)).any()
        wanted = wanted + np.float32(0)
    assert np.array_equal(bits(got), bits(wanted))
    assert len(np.unique(codes.codes)) == {Kind.Q5_0: 32, Kind.Q8_0: 256}.get(kind, 16)


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_a_product_of_scale_and_code_is_exact(kind: Kind) -> None:
    """Guards the claim that a fused multiply-add gives the same bits: true only if the product is not rounded."""
    codes = codes_of(random_blocks(kind, 40, 512), kind)
    assert codes is not None
    scales = np.repeat(codes.scales, 32, axis=1)
    product = scales * codes.codes
    assert product.dtype == np.float32
    assert np.array_equal(product.astype(np.float64), scales.astype(np.float64) * codes.codes)


@pytest.mark.parametrize("kind", [Kind.Q5_1, Kind.Q5_K, Kind.Q6_K, Kind.Q2_K, Kind.F16, Kind.F32])
def test_other_formats_have_none(kind: Kind) -> None:
    assert codes_of(np.zeros((2, 1344), np.uint8), kind) is None


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_a_prepared_model_has_the_codes_of_all_its_matrices(kind: Kind, tmp_path: Path) -> None:
    """Guards rotary rows and stacked matrices, whose scales must move as their codes do; and the file of both."""
    source = write_model(tmp_path / "model.gguf", lambda name: kind)
    folder = prepare(source, tmp_path / "cache")
    assert same_bits(folder) == NAMES
    # The plain weights are made from codes too: hold them against what somebody else makes of the file.
    raw = random_blocks(kind, MATRICES["token_embd"], 256)
    embedding = map_weights(folder)["embedding"].numpy()
    assert np.array_equal(embedding, gguf.quants.dequantize(raw, kind))


def test_the_demo_model_has_the_codes_of_all_its_matrices(demo_model: Path) -> None:
    """Guards the same on a real file, where the embedding has 8 bits and the layers 4."""
    folder = demo_model
    weights = map_weights(folder)
    assert same_bits(folder) == {name for name, weight in weights.items() if weight.dim() == 2}
    assert len(same_bits(folder)) == 1 + 4 * 30
    stored = CodesFile(folder)
    head, down = stored.get("embedding"), stored.get("layers.29.down")
    assert head is not None
    assert down is not None
    assert (head.bits, down.bits) == (8, 4)
    raw = GGUFModel(find_demo_model())._file._find("blk.29.ffn_down.weight")
    wanted = gguf.quants.dequantize(raw.data, raw.tensor_type)
    assert np.array_equal(bits(down.widen()), bits(wanted))


def test_only_what_has_codes_in_all_its_parts_has_codes(tmp_path: Path) -> None:
    """Guards mixed files, where v is often finer than q and k: half a matrix in codes is none."""
    finer = {"blk.0.attn_v": Kind.Q8_0, "blk.0.ffn_up": Kind.Q6_K, "blk.0.ffn_down": Kind.F32}
    source = write_model(tmp_path / "model.gguf", lambda name: finer.get(name, Kind.Q4_K))
    folder = prepare(source, tmp_path / "cache")
    assert same_bits(folder) == {"embedding", "layers.0.output"}


def test_no_file_where_there_are_no_codes(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    plain = prepare(save_hf(reference(), tmp_path / "hf"), tmp_path / "cache")
    source = write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_0)
    short = prepare(source, tmp_path / "cache", "bfloat16")
    for folder in (plain, short):
        assert not list(folder.glob("codes*"))
        assert CodesFile(folder).get("embedding") is None


def test_a_folder_with_codes_cut_short_is_made_anew(tmp_path: Path) -> None:
    """Guards against a full disk or a lost machine, as for the plain weights."""
    source = write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_1)
    path = prepare(source, tmp_path / "cache") / CODES_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    prepare(source, tmp_path / "cache")
    assert path.read_bytes() == whole
