"""Codes of quantized weights: the values of the file, and in a prepared folder the bits of its plain weights."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.model.codes import WITH_OFFSETS, Form
from engine.model.config import ModelError
from engine.model.files.gguf_codes import codes_of
from engine.model.files.gguf_model import GGUFModel
from engine.model.prepared.cache import find_demo_model, prepare
from engine.model.prepared.codes_file import CODES_FILE, map_codes
from engine.model.prepared.loading import map_weights
from engine.model.prepared.pieces import load_index
from tests.engine.model.quantized import HIDDEN, MATRICES, Kind, random_blocks, write_model
from tests.engine.model.test_families import reference, save_hf

FORMS: dict[Kind, Form] = {
    Kind.Q4_0: "q4",
    Kind.Q4_1: "q4",
    Kind.Q4_K: "q4",
    Kind.Q5_0: "q8",
    Kind.Q8_0: "q8",
    Kind.Q5_1: "a8",
    Kind.Q5_K: "a8",
    Kind.Q6_K: "h8",
    Kind.MXFP4: "q8",
}
NAMES = {"embedding", "layers.0.qkv", "layers.0.output", "layers.0.gate_up", "layers.0.down"}


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def prepared(tmp_path: Path, kind_of: Callable[[str], Kind]) -> tuple[Path, set[str]]:
    """A model of these kinds, and the names of all its weights that have codes; each of them widens to what somebody
    else makes of the file."""
    folder = prepare(write_model(tmp_path / "model.gguf", kind_of), tmp_path / "cache")
    wide = map_weights(prepare(write_model(tmp_path / "wide.gguf", kind_of, wide=True), tmp_path / "cache"))
    found = map_weights(folder)
    assert found.keys() == wide.keys()
    for name, weight in wide.items():
        # A code of 8 in Q4_0 is a zero of its scale's sign there, and 0.0 here.
        assert torch.equal(found[name], weight), name
    codes = map_codes(folder)
    for name, weight in codes.items():
        rows = torch.tensor([len(weight.codes) - 1, 0, 3])
        assert torch.equal(weight.widen(torch.float32), found[name])
        assert torch.equal(weight.lookup(rows, torch.float16), found[name][rows].half())
        assert torch.equal(weight.part(slice(3, 9), slice(32, 96)).widen(torch.float32), found[name][3:9, 32:96])
    return folder, set(codes)


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_codes_are_the_values_of_the_file(kind: Kind) -> None:
    """Guards every bit of an unpacked block: a code, scale or offset out of place gives other values."""
    raw = random_blocks(kind, 40, 512)
    codes = codes_of(raw, kind)
    assert codes is not None
    assert codes.form == FORMS[kind]
    assert codes.codes.dtype == (np.uint8 if codes.form == "q4" else np.int8)
    assert (codes.offsets is not None) == (codes.form in WITH_OFFSETS)
    wanted, got = gguf.quants.dequantize(raw, kind), codes.widen()
    if kind == Kind.Q4_0:  # scale * (8 - 8) is a zero of the scale's sign there, and 0.0 here
        assert (bits(wanted) != bits(got)).any()
        wanted = wanted + np.float32(0)
    assert np.array_equal(bits(got), bits(wanted))
    assert len(np.unique(codes.codes)) == {"5": 32, "6": 64, "8": 256, "X": 15}.get(kind.name[1], 16)


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_a_product_of_scale_and_code_is_exact(kind: Kind) -> None:
    """Guards the claim that a fused multiply-add gives the same bits: true only if the product is not rounded."""
    codes = codes_of(random_blocks(kind, 40, 512), kind)
    assert codes is not None
    if codes.form == "h8":
        return  # 19 bits of a scale by 6 of a code: rounded, but without a sum
    scales = np.repeat(codes.scales, 32, axis=1)
    product = scales * codes.codes
    assert product.dtype == np.float32
    assert np.array_equal(product.astype(np.float64), scales.astype(np.float64) * codes.codes)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.F16, Kind.F32])
def test_other_formats_have_none(kind: Kind) -> None:
    assert codes_of(np.zeros((2, 1344), np.uint8), kind) is None


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_a_prepared_model_has_the_codes_of_all_its_matrices(kind: Kind, tmp_path: Path) -> None:
    """Guards rotary rows and stacked matrices, whose scales must move as their codes do; and the file of both."""
    folder, names = prepared(tmp_path, lambda name: kind)
    assert names == NAMES
    # Beside them there is nothing of these matrices: norms alone are numbers.
    assert set(load_index(folder / "weights.bin").pieces) == set(map_weights(folder)) - NAMES


def test_the_demo_model_has_the_codes_of_all_its_matrices(demo_model: Path) -> None:
    """Guards the same on a real file, where the embedding has 8 bits and the layers 4."""
    folder = demo_model
    weights, stored = map_weights(folder), map_codes(folder)
    assert set(stored) == {name for name in weights if len(weights.shape(name)) == 2}
    assert len(stored) == 1 + 4 * 30
    down = stored["layers.29.down"]
    assert (stored["embedding"].kind, down.kind) == ("q8", "q4")
    raw = GGUFModel(find_demo_model())._file._find("blk.29.ffn_down.weight")
    wanted = gguf.quants.dequantize(raw.data, raw.tensor_type)
    assert np.array_equal(bits(down.widen(torch.float32).numpy()), bits(wanted))


def test_only_what_has_codes_in_all_its_parts_has_codes(tmp_path: Path) -> None:
    """Guards mixed files: half a matrix in codes is none."""
    finer = {"blk.0.attn_v": Kind.F16, "blk.0.ffn_up": Kind.F16, "blk.0.ffn_down": Kind.F32}
    _, names = prepared(tmp_path, lambda name: finer.get(name, Kind.Q4_K))
    assert names == {"embedding", "layers.0.output"}


@pytest.mark.parametrize("finer", [Kind.Q8_0, Kind.Q5_K, Kind.Q6_K, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rest", [Kind.Q4_K, Kind.Q6_K, Kind.Q5_0], ids=lambda kind: kind.name)
def test_parts_of_a_matrix_may_have_codes_of_two_forms(rest: Kind, finer: Kind, tmp_path: Path) -> None:
    """Guards files where v is finer than q and k (as in Q4_K_M): all stays small, in a form that has both exactly."""
    folder, names = prepared(tmp_path, lambda name: finer if name in ("blk.0.attn_v", "blk.0.ffn_up") else rest)
    assert names == NAMES
    forms = {FORMS[rest], FORMS[finer]}
    stored = map_codes(folder)["layers.0.qkv"]
    both: Form = "x8" if forms == {"h8", "q4"} or forms == {"h8", "a8"} else "h8" if "h8" in forms else "a8"
    assert stored.kind == (forms.pop() if len(forms) == 1 else both)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """Guards answers of nothing but NaN, from a file that was damaged where no digest covers it."""
    source = Path(write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_0))
    raw = bytearray(source.read_bytes())
    place = raw.index(random_blocks(Kind.Q4_0, HIDDEN, HIDDEN, list(MATRICES).index("blk.0.ffn_down")).tobytes())
    raw[place : place + 2] = b"\xff\x7f"
    source.write_bytes(raw)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_down\.weight: a scale is not a finite number"):
        prepare(str(source), tmp_path / "cache")


def test_no_file_where_there_are_no_codes(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    plain = prepare(save_hf(reference(), tmp_path / "hf"), tmp_path / "cache")
    source = write_model(tmp_path / "model.gguf", lambda name: Kind.F16)
    short = prepare(source, tmp_path / "cache", "bfloat16")
    for folder in (plain, short):
        assert not list(folder.glob("codes*"))
        assert map_codes(folder) == {}


def test_a_folder_with_codes_cut_short_is_made_anew(tmp_path: Path) -> None:
    """Guards against a full disk or a lost machine, as for the plain weights."""
    source = write_model(tmp_path / "model.gguf", lambda name: Kind.Q4_1)
    path = prepare(source, tmp_path / "cache") / CODES_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    prepare(source, tmp_path / "cache")
    assert path.read_bytes() == whole
